"""Runs whose samples are sessions of a program of its own, over HTTP with OpenAI's client: each is
leased, sampled, scored and trained once, also when the gateway is killed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_run_kit import command, model_dir  # noqa: F401
from openai import OpenAI
from process_kit import ENV, ROOT, RUN_SEED
from warm_python import FORKED

from asyncrl.cli import main
from asyncrl.contract.messages import EVAL_BASE
from asyncrl.models.policy import build_model
from asyncrl.tasks.calc import CalcTask

# The run, with as much patience as a busy machine may need with a harness that ends.
PATIENT = (
    f"{FORKED}import sys; from asyncrl.supervise import run; "
    "run.LATE_S = run.END_S = 600.0; from asyncrl.cli import main; main(sys.argv[1:])"
)

SETS = tuple(
    f"""
seed={RUN_SEED} agent.env="" agent.serve=true model.warm_start=false learner.steps=2
learner.groups=2 learner.group_size=4 generator.slots=32 evaluation.every=0 evaluation.prompts=2
evaluation.final_prompts=2 evaluation.ood_prompts=2 wires.lease_s=600.0 agent.idle_s=600.0
agent.deadline_s=1800.0
""".split()
)

PATIENCE_S = 600.0  # for what a busy machine takes long for


def wait_until(is_done: Callable[[], Any], started: subprocess.Popen[bytes], log: Path) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (done := is_done()):
        assert started.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.02)
    return done


@contextlib.contextmanager
def supervised(path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run and its directory; its processes end with it."""
    build_model(path / "m", CalcTask.symbols, hidden=32, layers=1)
    sets = [*SETS, "model.path=m", "name=restart", "durability.mode='process'"]
    sets += ["record.samples_every=1", "record.samples=0"]
    words = [word for each in sets for word in ("--set", each)]
    argv = [sys.executable, "-c", PATIENT, "run", str(ROOT / "configs" / "calc.toml"), *words]
    with open(path / "out.txt", "wb") as out:
        started = subprocess.Popen(argv, cwd=path, env=ENV, stdout=out, stderr=out)
    try:
        yield started, path / "runs" / "restart"
    finally:
        if started.poll() is None:
            started.terminate()
            started.wait()


def is_evaluation(session: dict[str, Any]) -> bool:
    return int(session["session"].split(".")[0]) >= EVAL_BASE


class Harness:
    """Leases, asks and scores by the endpoint's URL and key of before the kill."""

    def __init__(self, run_dir: Path) -> None:
        self.url = (run_dir / "agent.url").read_text().strip()
        self.key = (run_dir / "agent.key").read_text().strip()
        self.client = httpx.Client(timeout=PATIENCE_S)
        self.tokens = 0  # that the clients were given

    def post(
        self, path: str, key: str, body: dict[str, Any], *, retries: int = 0
    ) -> httpx.Response:
        """Post until a gateway answers."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                head = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(retries)}
                return self.client.post(f"{self.url}{path}", json=body, headers=head)
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def lease(self) -> dict[str, Any] | None:
        """The next session; None: the run is over."""
        lease = {"lease": uuid.uuid4().hex, "wait_s": 10}
        while (answer := self.post("/asyncrl/v1/sessions", self.key, lease)).status_code == 204:
            pass
        return None if answer.status_code == 410 else dict(answer.raise_for_status().json())

    def play(self, session: dict[str, Any]) -> None:
        tokens = self.tokens
        self.ask(session, session["task"]["text"])
        self.score(session, 0.0)
        if is_evaluation(session):
            self.tokens = tokens

    def lease_to_train(self) -> dict[str, Any]:
        """Lease the next training session, and play the evaluations that come before it."""
        while (session := self.lease()) is not None and is_evaluation(session):
            self.play(session)
        assert session is not None
        return session

    def ask(self, session: dict[str, Any], prompt: str) -> str:
        """One call by the real client, which tries again while no gateway listens."""
        policy = OpenAI(
            base_url=session["base_url"], api_key=session["api_key"], max_retries=200, timeout=600
        )
        answer = policy.completions.create(model="policy", prompt=prompt)
        assert answer.usage is not None
        self.tokens += answer.usage.completion_tokens
        return answer.choices[0].text

    def score(self, session: dict[str, Any], reward: float) -> None:
        body = {"reward": reward}
        answer = self.post(f"/s/{session['session']}/reward", session["api_key"], body)
        assert answer.status_code == 200, answer.text


def test_sessions_outlive_a_killed_gateway(tmp_path: Path) -> None:
    log = tmp_path / "out.txt"
    with supervised(tmp_path) as (started, run_dir):
        wait_until((run_dir / "agent.url").exists, started, log)
        harness = Harness(run_dir)
        # one session is scored, one is between two calls, one has not called yet
        scored, open_one, fresh = (harness.lease_to_train() for _ in range(3))
        harness.ask(scored, scored["task"]["text"])
        harness.score(scored, 1.0)
        text = open_one["task"]["text"]
        body = {"model": "policy", "prompt": text}
        path = f"/s/{open_one['session']}/v1/completions"
        first = harness.post(path, open_one["api_key"], body)
        harness.tokens += first.json()["usage"]["completion_tokens"]
        files = list((run_dir / "sessions-0").iterdir())
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
        alive = run_dir / ".gateway-0.alive"
        killed = int(alive.read_text())
        os.kill(killed, signal.SIGKILL)
        # the client's retry is answered with the same bytes, by the gateway that comes
        assert harness.post(path, open_one["api_key"], body, retries=1).content == first.content
        assert int(alive.read_text()) != killed
        harness.ask(open_one, text + first.json()["choices"][0]["text"] + "1")
        view = harness.client.get(
            "{}/s/{}".format(harness.url, open_one["session"]),
            headers={"authorization": f"Bearer {open_one['api_key']}"},
        ).json()
        assert (view["calls"], view["rows"]) == (2, 1)  # it went on behind the first call
        harness.score(open_one, 0.5)
        harness.ask(fresh, fresh["task"]["text"])
        harness.score(fresh, 0.0)
        while (session := harness.lease()) is not None:
            harness.play(session)
        assert started.wait(PATIENCE_S) == 0, log.read_text()[-3000:]
    out = log.read_text()
    assert "gateway-0 exited: SIGKILL" in out and "2 steps, 16 trajectories" in out, out
    assert not list((run_dir / "sessions-0").iterdir())
    lines = (run_dir / "samples.jsonl").read_text().splitlines()
    assert Counter(json.loads(line)["reward"] for line in lines) == {1.0: 1, 0.5: 1, 0.0: 14}
    # no token doubled, none lost: the ledger has what the clients were given
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["ledger"]["trained"] == harness.tokens == summary["tokens"]
    assert summary["ledger"]["duplicate"] == summary["ledger"]["orphaned"] == 0


@pytest.mark.slow
def test_a_harness_is_trained_over_http(tmp_path: Path) -> None:
    """A run whose samples are sessions of a program of its own, over HTTP with OpenAI's client."""
    log = tmp_path / "out.txt"
    with supervised(tmp_path) as (started, run_dir):
        wait_until((run_dir / "agent.url").exists, started, log)
        assert (run_dir / "agent.key").stat().st_mode & 0o777 == 0o600
        agent = [sys.executable, str(ROOT / "configs/examples/calc_harness.py"), str(run_dir)]
        harness = subprocess.Popen(agent, cwd=tmp_path, env=ENV)
        try:
            assert started.wait(1800) == 0, log.read_text()[-3000:]
            assert harness.wait(600) == 0
        finally:
            harness.kill()
            harness.wait()
    out = log.read_text()
    assert "2 steps, 16 trajectories" in out and "trained 100.0%" in out, out[-3000:]
    assert "was still" not in out


ENVS = ROOT / "tests" / "support" / "agent_envs.py"


def evaluate(model: Path, folder: Path, env: str, *words: str) -> None:
    """Run the command with the small settings that the tests of agent runs have."""
    small = command(model, folder, "unused")[3:]
    sets = [x for x in small[small.index("--set") :] if not x.startswith("--json")]
    main(["eval", str(model), "calc", *sets, "--set", f"agent.env='{ENVS}:{env}'", *words])


def test_a_model_is_scored_in_sessions(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    sets = "evaluation.sets=[{name='twice', samples=2, prompts=3}, {name='not', prompts=2}]"
    only = ("--only", "heldout", "--only", "twice", "--prompts", "3", "--json")
    evaluate(model_dir, tmp_path, "Talks", "--set", sets, *only)
    found = json.loads(capfd.readouterr().out.splitlines()[-1])  # libraries may print above
    assert found["model"] == str(model_dir) and set(found["sets"]) == {"heldout", "twice"}
    for values in found["sets"].values():
        assert values["n"] == 3 and values["reward"] > 0 and values["length"] > 0
    assert "pass_at_2" in found["sets"]["twice"]
    assert not list((tmp_path / "made").glob("asyncrl-eval-*"))  # its directory is gone


def test_an_environment_that_fails_is_named_and_its_logs_stay(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        evaluate(model_dir, tmp_path, "Nowhere")
    last = capfd.readouterr().err.strip().split("\n")[-1]
    assert ended.value.code and last.startswith("error: ") and "Nowhere" in last, last
    assert Path(re.search(r"log: (\S+)\)", last)[1]).exists()
