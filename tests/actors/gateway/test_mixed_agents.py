"""Environments, agents over HTTP, completions mixed: shares, limits, rewards, failures."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from agent_run_kit import rows
from click.testing import CliRunner, Result
from models_kit import model_fixture
from process_kit import ENV, PATIENT, ROOT, RUN_SEED

from actors.gateway.environment_sessions import make_source
from actors.gateway.service import Gateway, WaitCause
from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.experiments.process_run import needs_own_process
from asyncrl.records.rundir import get_buffer_address
from asyncrl.supervise import live
from asyncrl.tasks.calc import CalcTask

WAIT_S = 1800.0
PLAY = "asyncrl.tasks.calc:Calculator"
PARTS = f"""task.mixture=[
  {{name='calc', label='play', weight=2, agent={{env='{PLAY}', max_calls=3, max_tokens=40}}}},
  {{name='calc', label='ask', agent={{function='mixed_agent:ask', at_once=4}}}},
  {{name='sort', max_new_tokens=5}},
]""".replace("\n", "")
SETS = ("task.name='mixture'", PARTS, "generator.max_new_tokens=12", "generator.context=96")


model = model_fixture(CalcTask.symbols + "abcdefgh=", layers=1)


SORT = "{name='sort'}"
REFUSED = {
    "{name='seeds'}": "seeds: name: seeds needs an environment",
    "{name='env', agent={env='a.py:B'}}": "verifiers:NAME brings its own prompts",
    "{name='calc', agent={env='gem:x'}}": "gem:x gives its own prompts",
    "{name='calc', agent={max_calls=3}}": "calc: agent: has no source",
    "{name='calc', agent={env='a.py:B', tools=['a:b']}}": "calc: agent.env: an environment has",
    "{name='calc', agent={env='a.py:B', max_tokens=3}}": "calc: agent.max_tokens: 3 are fewer",
    "{name='calc', reward='a:b', agent={env='a.py:B'}}": "gives the rewards; remove",
    "{name='calc', agent={env='a.py:B', port=3}}": "port",
}


@pytest.mark.parametrize("part", REFUSED)
def test_what_cannot_be_played_is_refused_in_one_line(part: str) -> None:
    sets = ("model.warm_start=false", "task.name='mixture'", f"task.mixture=[{SORT}, {part}]")
    with pytest.raises(ConfigError) as refused:
        load.load("configs/demo.toml", sets)
    assert REFUSED[part] in str(refused.value) and "\n" not in str(refused.value)


def test_each_part_has_its_own_agent_or_that_of_the_run() -> None:
    config = load.load("configs/demo.toml", (*SETS, "agent.sessions=7"))
    assert list(config.agents) == ["", "play", "ask"] and config.uses_sessions
    assert config.agents["play"].max_calls == 3 and config.agents["play"].sessions == 7
    assert not config.agents[""].uses_sessions  # `sort` has single completions
    assert "sessions need a gateway" in needs_own_process(config)
    assert load.load("configs/demo.toml", (*SETS, f"agent.env='{PLAY}'")).agents[""].env == PLAY


def test_the_pages_mixture_loads_and_each_part_is_tried(model: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "prompts.md").read_text().partition("# Environments and agents")[2]
    (block,) = re.findall(r"(?ms)^```toml\n(.*?)^```", page.partition("\n##")[0])
    file = tmp_path / "mixed.toml"
    file.write_text(f"model.path = {str(model)!r}\n{block}")
    assert list(load.load(file).agents) == ["", "calculator", "guessing"]

    def tried(*words: str) -> Result:
        return CliRunner().invoke(main, ["task", "try", str(file), *words], input="#1\n")

    shown = tried("--part", "calculator", "--json")
    turns = [json.loads(line) for line in shown.stdout.splitlines()]
    assert (turns[0]["kind"], turns[-1]["kind"]) == ("asked", "ended"), shown.output
    (row,) = [json.loads(line) for line in tried("--part", "sort", "-n", "1").stdout.splitlines()]
    assert (row["reward_of_answer"], row["reward_of_nothing"]) == (1.0, 0.0)
    refused = tried()
    assert refused.exit_code == 2
    assert "--part LABEL: name a part of the mixture: calculator, guessing, sort" in refused.output


@pytest.fixture
def gateway(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tests" / "support")
    (tmp_path / "run_id").write_text("run")
    config = load.load("configs/demo.toml", (*SETS, f"model.path='{model}'"))
    gateway = Gateway(config, tmp_path, source=make_source)
    yield gateway
    gateway.close()


def accept(gateway: Gateway, number: int, task: str) -> None:
    prompt = m.Prompt(number, "12*3+4=" if task != "sort" else "ba=", "40", task=task)
    sampling = m.SamplingSettings(max_new_tokens=12)
    at = Label(1, 3)
    ticket = m.Ticket(number, number, "train", prompt, [0, 1], sampling, at, None, 3)
    gateway.accept_tickets([ticket])


def test_each_source_begins_the_sessions_of_its_part(gateway: Any) -> None:
    for number, task in enumerate(("play", "ask", "sort"), start=1):
        accept(gateway, number, task)
    free, http = gateway.config.agent.sessions, gateway.sources["ask"]
    assert len(gateway.list_sources()) == len(gateway.sources) == 3
    # no agent has asked for a sample of `ask`, which does not take room from the others
    assert gateway.count_wanted() == free - 4
    http.asks = 5  # of which two samples wait already
    assert gateway.count_wanted() == free - 4 + 3
    http.asks = 0
    gateway.open_sessions()
    begun = {x.ticket.prompt.task for x in gateway.sessions.values()}
    assert begun == {"play", "sort"} and len(gateway.held[2, 2].waiting) == 2
    assert http.begin_session({"ask"}).ticket.prompt.task == "ask"
    assert http.lease_session("two") is None
    limits = {e.ticket.prompt.task: e.limits for e in gateway.sessions.values()}
    assert [limits[x].max_calls for x in ("play", "ask", "sort")] == [3, 32, 1]
    assert limits["play"].max_tokens == 40
    calls = gateway.router.open.values()
    call = next(c for c in calls if c.session.ticket.prompt.task == "sort")
    assert call.node.stream_key == 0  # that of a run without sessions
    starting = "a process that imports task.mixture: ask: agent.function = mixed_agent:ask to be"
    assert http.explain_queue("ask") == WaitCause("place", f"{starting} ready")
    pool = gateway.sources["play"].pool
    assert (
        pool.named == gateway.get_source_name("play") == f"task.mixture: play: agent.env = {PLAY}"
    )
    room = f"a place: agent.sessions = {gateway.config.agent.sessions}"
    assert gateway.sources["play"].explain_queue("play") == WaitCause("place", room)
    assert {one.task.split("'")[0]: one for one in gateway.list_oldest_sessions(time.monotonic())}


def test_failures_are_counted_and_named_by_task(gateway: Any) -> None:
    played = SimpleNamespace(name="1.0.1", part="play", opened=0.0)
    asked = SimpleNamespace(name="2.0.2", part="ask", opened=0.0)
    why = m.RewardFailure("data", "no service")
    lines = gateway.log_change = Mock()
    for _ in range(7):
        gateway.count(played, "")
        gateway.count(asked, why)
    with pytest.raises(ConfigError) as ended:
        gateway.count(asked, why)
    text = str(ended.value)
    assert text.startswith("task.mixture: ask: agent.function = mixed_agent:ask: 8 sessions failed")
    assert "agent-ask-0.log" in text
    lines.assert_called_with("session 2.0.2 of task ask: data: no service")


@pytest.mark.slow
def test_a_run_keeps_its_shares_when_its_gateway_is_killed(model: Path, tmp_path: Path) -> None:
    steps = 8
    sets = (
        *PATIENT,
        *SETS,
        *(f"model.path={str(model)!r}", "model.warm_start=false", f"runs={str(tmp_path)!r}"),
        *("name='r'", f"seed={RUN_SEED}", f"learner.steps={steps}", "learner.groups=4"),
        *("learner.group_size=2", "generator.slots=32", "evaluation.every=0"),
        *("evaluation.final_prompts=6", "evaluation.ood_prompts=0", "record.samples_every=1"),
        *("record.samples=0", "agent.deadline_s=7200.0", "wires.lease_s=3600.0"),
    )
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "configs/demo.toml", "--json"]
    argv += [word for item in sets for word in ("--set", item)]
    log, run = tmp_path / "log", tmp_path / "r"
    env = ENV | {"MIXED_GATE": str(tmp_path / "gate")}  # so that it does not end before the kill
    process = subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=log.open("w"), text=True
    )
    try:
        until = time.monotonic() + WAIT_S
        while (status := heard(run)) is None or not status.committed:
            assert time.monotonic() < until and process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.02)
        os.kill(int((run / ".gateway-0.alive").read_text()), signal.SIGKILL)
        (tmp_path / "gate").touch()
        process.wait(WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, log.read_text()[-3000:]
    assert "gateway-0 exited: SIGKILL" in log.read_text()
    check_run(run, steps)


def heard(run: Path) -> Any:
    if not (run / "config.toml").exists():
        return None
    return live.request_status(get_buffer_address(load.load(run / "config.toml"), run), "", 5.0)


def check_run(run: Path, steps: int) -> None:
    """Two of four groups of `play`, and one of each other, in every batch."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ledger"]["generated"] == sum(
        value for name, value in summary["ledger"].items() if name != "generated"
    )
    trained = {k: x["trained"]["samples"] for k, x in summary["ledger_by_task"].items()}
    assert trained == {"play": 4 * steps, "ask": 2 * steps, "sort": 2 * steps}
    metrics = [row for row in rows(run / "metrics.jsonl") if "reward/mean" in row]
    assert len(metrics) == steps
    for row in metrics:
        shares = [row[f"task/{task}_share"] for task in ("play", "ask", "sort")]
        assert shares == [0.5, 0.25, 0.25]
        assert row["task/sort_length"] <= 5 and row["task/play_length"] <= 40
        assert all(0 < row[f"task/{task}_ess"] <= 1 + 1e-6 for task in ("play", "ask", "sort"))
        assert all(row[f"task/{task}_lag"] <= 2 for task in ("play", "ask", "sort"))
    last = [row for row in rows(run / "metrics.jsonl") if "eval/heldout" in row][-1]
    assert [last[f"eval/{task}_n"] for task in ("play", "ask", "sort")] == [2, 2, 2]
    samples = rows(run / "samples.jsonl")
    calls = {task: {x["calls"] for x in samples if x["task"] == task} for task in trained}
    assert calls["ask"] == calls["sort"] == {1} and calls["play"] <= {1, 2, 3}
    assert all(x["parts"]["asked"] == 1 for x in samples if x["task"] == "ask")
    assert {x["reward"] for x in samples if x["task"] == "sort"} <= {0.0, 1.0}
