"""Environments of verifiers 0.4 by name, with the real package in an environment of its own: their
tasks as prompts, their episodes at the endpoint, their rewards, what is refused, and runs."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_run_kit import rows
from clients_kit import python_of, tool_call
from process_kit import ENV, PATIENT, ROOT, RUN_SEED, run_command
from verifiers_kit import KINDS, Bench, config

from asyncrl.contract import importing
from asyncrl.models.policy import build_model
from asyncrl.supervise import preflight

pytestmark = pytest.mark.slow

KIND = "verifiers:tasksets_kinds"
NULL = {"harness": {"id": "null"}}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(KINDS)
        patch.setenv("PYTHONPATH", str(KINDS))  # as if it were installed, for its tools' process
        runs = tmp_path_factory.mktemp("runs")
        located = preflight.localize(config(runs, KIND, python_of("verifiers")))
        made = Bench(tmp_path_factory.mktemp("agent"), located)
        yield made
        made.close()


def test_the_prompts_are_the_tasks(bench: Bench) -> None:
    brief = {"role": "system", "content": "Be brief."}
    for number, text in enumerate(("3+4=", "4+3=", "guess")):
        prompt = bench.prompt(text)
        assert prompt.id == number and prompt.meta == {"dataset": "train"}
        assert prompt.messages == [brief, {"role": "user", "content": text}]
    assert (bench.rows, bench.heldout) == (7, 1)  # a tenth, or one


def test_its_rewards_pay_and_each_is_a_part(bench: Bench) -> None:
    for text, answer, reward in (("3+4=", "7", 1.5), ("4+3=", "7", 1.5), ("3+4=", "seven", 0.0)):
        result, opened = bench.play(bench.prompt(text), answer)
        assert (result.kind, result.reward, result.truncated) == ("scored", reward, False), result
        paid = float(reward > 0)
        parts = {"exact": paid, "short": paid, "turns": 1.0, "reward": reward}
        assert result.parts == parts
        assert "Be brief." in bench.texts(opened)[0] and text in bench.texts(opened)[0]
        assert (opened.session.calls, len(opened.session.build_training_rows())) == (1, 1)


def test_an_exchange_of_several_turns_is_one_training_sequence(bench: Bench) -> None:
    result, opened = bench.play(bench.prompt("guess"), "3", "7")
    assert (result.kind, result.reward, result.parts["turns"]) == ("scored", 1.5, 2.0), result
    assert "no" in bench.texts(opened)[1]
    assert (opened.session.calls, len(opened.session.build_training_rows())) == (2, 1)


def test_tools_of_the_taskset_are_called(bench: Bench) -> None:
    calls = [
        tool_call("calculator_multiply", a=7, b=1),
        tool_call("calculator_divide", a=7, b=1),
        "7",
    ]
    result, opened = bench.play(bench.prompt("What is 7 times 1?"), *calls)
    assert (result.kind, result.reward, result.truncated) == ("scored", 1.5, False), result
    _, second, third = bench.texts(opened)
    assert second.rpartition("</tool_call>")[2].count("7") == 1
    assert "error: unknown tool 'calculator_divide'" in third
    assert len(opened.session.build_training_rows()) == 1


def test_an_empty_answer_is_scored(bench: Bench) -> None:
    result, opened = bench.play(bench.prompt("3+4="), "")
    assert (result.kind, result.reward, opened.session.calls) == ("scored", 0.5, 1), result


def test_what_raises_fails_the_session(bench: Bench) -> None:
    for text, answers, why in (
        ("a number, please", ["none"], "invalid literal"),
        ("an error, please", ["7"], "the environment is broken"),
        ("two answers, please", ["7", "7"], "ran the agent agent 2 times, not once"),
    ):
        result, opened = bench.play(bench.prompt(text), *answers)
        assert result.kind == "failed" and why in result.why and not result.scored, result
        assert opened.session.calls == len(answers), "nothing is tried again"
    result, _ = bench.play(bench.prompt("a number, please"), "4")
    assert (result.kind, result.reward) == ("scored", 0.125)


def test_a_limit_cuts_the_session_and_its_task_scores_it(bench: Bench) -> None:
    result, opened = bench.play(bench.prompt("guess"), "1", "2", "3")
    assert (result.kind, result.truncated, result.reward) == ("scored", True, 0.5), result
    assert opened.session.calls == 3 and not opened.session.limit  # max_turns of its agent
    # after two long answers the next prompt is longer than the context
    result, opened = bench.play(bench.prompt("guess"), "x" * 190, "y" * 190)
    assert (result.kind, result.truncated, result.reward) == ("scored", True, 0.0), result
    assert opened.session.shortened and opened.session.calls == 2
    result, opened = bench.play_limited(bench.prompt("guess"), "3")
    assert (result.kind, result.scored, result.reward) == ("failed", True, 0.5), result
    assert opened.session.limit == "max_calls" and "agent.max_calls" in result.why


def test_tasks_that_change_between_processes_fail_the_session(bench: Bench) -> None:
    prompt = bench.prompt("3+4=")
    other = msgspec.structs.replace(prompt, messages=[{"role": "user", "content": "8+9="}])
    result, _ = bench.play(other)
    assert result.kind == "failed" and "give the taskset a fixed seed" in result.why


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("verifiers:no-such", {}, "'no_such'; install its package into agent.python"),
    (KIND, {"taskset": {"kinds": 1}}, "[agent.args]: taskset.kinds: Extra inputs"),
    (KIND, {"taskset": {"endless": True}}, "never ends: say how many tasks are read"),
    (KIND, {"taskset": {"picture": True}}, "row 0: its prompt has content that is not text"),
    (KIND, {"agent": {"harness": {"id": "bash"}}}, 'agent.args.agent.harness.id = "null"'),
    (KIND, {"id": "user-sim", "assistant": NULL}, "assistant, user would be played by 2 policies"),
    ("verifiers:verifiers_kinds", {}, "agent.python has verifiers 0.4.0"),
]


def test_an_environment_that_cannot_be_played_is_refused_in_one_line() -> None:
    """All in one process, as each import of verifiers takes seconds."""
    accepted = (KIND, {"taskset": {"endless": True}, "select": {"limit": 3}})
    cases = [(env, args) for env, args, _ in REFUSED] + [accepted]
    argv = [*importing.make_command("verifiers_refused", python=python_of("verifiers"))]
    ended = subprocess.run(
        [*argv, json.dumps(cases)], cwd=KINDS, env=ENV, capture_output=True, check=True
    )
    *refused, found = json.loads(ended.stdout)
    for (env, _, why), answer in zip(REFUSED, refused, strict=True):
        assert answer["error"].startswith(f"agent.env = {env}: "), answer
        assert why in answer["error"] and "\n" not in answer["error"], answer
    assert found == {"train": 3, "eval": 0}


PAGE = ROOT / "docs" / "agents.md"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


# an environment of version 0.1 and its config
OLD_MODULE = """
import verifiers as vf
from datasets import Dataset


def load_environment(count=100):
    rows = [{"question": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(count)]

    async def exact(completion, answer):
        return float(completion[-1]["content"].strip() == answer)

    async def brief(completion):
        return float(len(completion[-1]["content"]) < 8)

    rubric = vf.Rubric(funcs=[exact, brief], weights=[1.0, 0.1])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
"""
OLD_CONFIG = """
task.name = "env"
[agent]
env = "verifiers:my_sums"
args = { count = 200 }
"""


def write_environment(folder: Path, name: str) -> None:
    """The environment of the page and its config, as a reader would save them, or the old one."""
    text = PAGE.read_text(encoding="utf-8")
    (module,) = re.findall(r"(?ms)^```python\n(import verifiers.*?)^```", text)
    (config,) = re.findall(r'(?ms)^```toml\n(task.name = "env".*?)^```', text)
    if name == "my_sums":
        module, config = OLD_MODULE, OLD_CONFIG
    (folder / f"{name}.py").write_text(module, encoding="utf-8")
    (folder / "sums.toml").write_text(config, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "python", "metrics"),
    [("my_tasks", "verifiers", []), ("my_sums", "clients", ["num_turns"])],
)
def test_an_environment_of_verifiers_is_trained_on_by_its_name(
    name: str, python: str, metrics: Sequence[str], tmp_path: Path
) -> None:
    """One call a session; the environment pays, and each of its rewards is a part."""
    build_model(tmp_path / "m", "0123456789+= ", hidden=32, layers=1)
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE)
    write_environment(tmp_path, name)
    sets = (
        *PATIENT,
        f"seed={RUN_SEED}",
        "name=sums",
        "model.path=m",
        f"agent.python={python_of(python)!r}",
        "agent.workers=1",  # each imports the package for itself
        "agent.step_s=3600.0",
        "agent.idle_s=3600.0",
        "agent.deadline_s=7200.0",
        "wires.lease_s=3600.0",
        "learner.steps=2",
        "learner.groups=2",
        "learner.group_size=4",
        "generator.max_new_tokens=8",
        "generator.context=64",
        "evaluation.every=0",
        "evaluation.final_prompts=4",
        "record.samples_every=1",
        "record.samples=0",
    )
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "sums.toml", "--json"]
    argv += [word for item in sets for word in ("--set", item)]
    run_command(argv, cwd=tmp_path).check()
    run = tmp_path / "runs" / "sums"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories"], summary["ledger"]["failed"]) == (2, 16, 0)
    samples = rows(run / "samples.jsonl")
    assert len(samples) == 16
    for sample in samples:
        parts = sample["parts"]
        assert {"exact", "brief", *metrics} <= parts.keys()
        assert sample["reward"] == pytest.approx(parts["exact"] + 0.1 * parts["brief"])
        # an empty answer is no turn to version 0.1, and is trained on all the same
        assert sample["calls"] == 1 and all(parts[metric] <= 1 for metric in metrics)
    assert len({sample["prompt"] for sample in samples}) > 1
    assert summary["heldout_end"] is not None
