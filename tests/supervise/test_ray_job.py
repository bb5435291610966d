"""`ray job submit` of a run: on a cluster of one node with its dashboard, as a user types it."""

import importlib.util
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_kit import ENV, ROOT, wait_for

from asyncrl.records import metrics, process_log

pytestmark = pytest.mark.slow

# ray[default]: the dashboard's agent is what takes a job
NEEDED = ("ray", "aiohttp_cors", "opencensus", "smart_open")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
WAIT_S = 600.0
TRIES = 4
RAY = str(Path(sys.executable).with_name("ray"))
ASYNCRL = [sys.executable, "-m", "asyncrl.cli"]
SECRETS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # one of this process, which test_ray.py may have set
    "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
    # its dashboard is up when it is up, on a busy machine too
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "600",
    # nor is a node lost because it stood still
    "RAY_health_check_initial_delay_ms": "600000",
    "RAY_health_check_timeout_ms": "1800000",
}


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if missing:
        pytest.skip(f"ray[default] is not installed: there is no {', '.join(missing)}")
    os.environ |= SECRETS | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    from ray.cluster_utils import Cluster

    node = {
        "num_cpus": 2,
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": free_port(),
        "object_store_memory": 80 << 20,
    }
    for tries_left in reversed(range(TRIES)):
        try:
            made = Cluster(initialize_head=True, head_node_args=node)
            break
        except Exception as error:  # Ray gives a node 30 s to start, whatever else runs
            if not tries_left or "timed out during startup" not in str(error):
                raise
            node["dashboard_port"] = free_port()
    yield f"http://127.0.0.1:{node['dashboard_port']}"
    made.shutdown()
    del os.environ["XDG_CACHE_HOME"]


def job(dashboard: str, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`ray job`, again where the node's agent, which takes a job, is not there yet (10 s)."""
    until = time.monotonic() + WAIT_S
    while True:
        done = job_once(dashboard, verb, *words)
        if "No available agent" not in done.stdout + done.stderr or time.monotonic() > until:
            return done


def job_once(dashboard: str, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [RAY, "job", verb, "--address", dashboard, *words]
    # not from this checkout, nor with its path: as somebody elsewhere types it
    env = {k: v for k, v in ENV.items() if k != "RAY_ADDRESS"} | SECRETS
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=WAIT_S)


def info(dashboard: str, name: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(dashboard).get_job_info(name)


SETS_TEXT = (
    "name='r' learner.steps=100000 learner.groups=2 learner.group_size=4 "
    "generator.max_new_tokens=12 generator.slots=8 evaluation.every=0 evaluation.final_prompts=4 "
    "evaluation.ood_prompts=0"
)
SETS = [*SETS_TEXT.split()]


def test_a_run_is_submitted_and_stopped(dashboard: str, tmp_path: Path, small_model: Path) -> None:
    run_dir = tmp_path / "runs" / "r"
    sets = [*SETS, f"model.path={str(small_model)!r}", f"runs={str(tmp_path / 'runs')!r}"]
    words = [word for each in sets for word in ("--set", each)]
    entry = [*ASYNCRL, "run", "demo.toml", "--on", "ray", *words]
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "demo.toml").write_text((ROOT / "configs" / "demo.toml").read_text())
    env = {"PYTHONPATH": ENV["PYTHONPATH"], "RAY_JOB_STOP_WAIT_TIME_S": "600"}
    where = ["--working-dir", str(tmp_path / "work")]
    where += ["--runtime-env-json", json.dumps({"env_vars": env})]
    sent = job(dashboard, "submit", "--no-wait", "--submission-id", "r", *where, "--", *entry)
    assert sent.returncode == 0, sent.stderr[-3000:]

    def said() -> str:
        return job(dashboard, "logs", "r").stdout[-3000:]

    def goes_on() -> bool:
        assert str(info(dashboard, "r").status) in ("PENDING", "RUNNING"), said()
        return sum("reward/mean" in row for row in metrics.read(run_dir)) >= 2

    wait_for(goes_on, said)
    shown = said()
    assert "ray: buffer and learner on" in shown and f"run {run_dir}: 1 generator(s)" in shown
    pids = [row["pid"] for row in process_log.read_events(run_dir) if row["event"] == "began"]
    assert len(pids) >= 3 and all(psutil.pid_exists(pid) for pid in pids)
    ended = job(dashboard, "stop", "r")
    assert ended.returncode == 0, ended.stderr[-3000:]
    wait_for(lambda: str(info(dashboard, "r").status) == "STOPPED", said)
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), said)
    # gently: the learner had the time for its checkpoint, and the books are closed
    summary = json.loads((run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["steps"] >= 2
    assert ledger["generated"] == sum(ledger.values()) - ledger["generated"] > 0
    assert f"continue with: asyncrl run --resume {run_dir}" in said()


def test_the_exit_code_is_the_jobs_end(dashboard: str) -> None:
    entry = [*ASYNCRL, "run", str(ROOT / "configs" / "demo.toml"), "--on", "ray"]
    environment = json.dumps({"env_vars": {"PYTHONPATH": ENV["PYTHONPATH"]}})
    words = ["--runtime-env-json", environment, "--", *entry, "--set", "learner.stepz=1"]
    sent = job(dashboard, "submit", "--submission-id", "wrong", *words)
    assert sent.returncode == 1, "`ray job submit` fails, too"
    found = info(dashboard, "wrong")
    assert str(found.status) == "FAILED" and found.driver_exit_code == 2
    assert "error: --set learner.stepz=1" in sent.stdout + sent.stderr
