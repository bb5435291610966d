"""A run on a Ray cluster of three raylets, one of which is lost; placements and refusals."""

import functools
import importlib.util
import json
import os
import pickle
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from process_kit import ENV, ROOT, as_options

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import RunStatus
from asyncrl.models.policy import build_model
from asyncrl.records import process_log
from asyncrl.supervise import live
from asyncrl.supervise.hosts import ProcessSpec, on_ray
from asyncrl.supervise.hosts.on_ray import (
    ProcessState,
    RayHost,
    RayHostHandle,
    RayLauncher,
    RayProcess,
)
from asyncrl.tasks.calc import CalcTask

pytestmark = pytest.mark.slow

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)
# Ray reads these when it is imported, which nothing does before this
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # A raylet that only stands still is no lost host; one that is gone refuses at once.
    "RAY_health_check_timeout_ms": "1800000",
    "RAY_agent_register_timeout_ms": "1800000",
    "RAY_worker_register_timeout_seconds": "1800",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1800",
    "RAY_gcs_server_request_timeout_seconds": "1800",
}
WAIT_S = 1800.0
DEMO = ROOT / "configs" / "demo.toml"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    from ray._private import services
    from ray.cluster_utils import Cluster

    get_node = services.get_node

    def patient(*words: Any, **more: Any) -> Any:
        """A node gets more than Ray's thirty seconds until it is known."""
        until = time.monotonic() + WAIT_S
        while True:
            try:
                return get_node(*words, **more)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(services, "get_node", patient)
    waited = functools.partialmethod(Cluster._wait_for_node, timeout=WAIT_S)
    monkeypatch.setattr(Cluster, "_wait_for_node", waited)
    small = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args=small)
    complete(made)
    yield made
    made.shutdown()
    monkeypatch.undo()
    del os.environ["XDG_CACHE_HOME"]


def wait_for(what: Callable[[], bool], run: subprocess.Popen[str], log: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < until and run.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)


def complete(cluster: Any) -> None:
    """Add nodes until there are three: a test may have removed one."""
    while len(cluster.list_all_nodes()) < 3:
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)


def start(cluster: Any, log: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *argv],
        cwd=ROOT,
        env=os.environ | ENV | {"RAY_ADDRESS": cluster.address},
        stdout=subprocess.DEVNULL,
        stderr=log.open("w"),
        text=True,
    )


SETS_TEXT = """
name='r' learner.steps=100000 learner.groups=2 learner.group_size=4 generator.max_new_tokens=12
generator.slots=8 evaluation.every=0 evaluation.final_prompts=4 evaluation.ood_prompts=0
wires.lease_s=3 wires.connect_s=600 watchdog.floor_s=3600.0 watchdog.startup_s=3600.0
placement.deadline_s=1800 placement.generator.count=2 placement.strategy='STRICT_SPREAD'
"""
SETS = SETS_TEXT.split()


def test_a_run_on_three_hosts_outlives_one(cluster: Any, tmp_path: Path, small_model: Path) -> None:
    run_dir, log = tmp_path / "runs" / "r", tmp_path / "log"
    sets = [*SETS, f"model.path={str(small_model)!r}", f"runs={str(tmp_path / 'runs')!r}"]
    words = as_options(sets)
    run = start(cluster, log, "-m", "asyncrl.cli", "run", str(DEMO), "--on", "ray", *words)
    try:
        wait_for(lambda: (run_dir / "hosts.json").exists(), run, log)
        hosts = json.loads((run_dir / "hosts.json").read_text())

        def status() -> RunStatus:
            until = time.monotonic() + WAIT_S
            while (
                found := live.request_status(hosts["wires"][0], str(run_dir / "keys"), 5.0)
            ) is None:
                assert time.monotonic() < until and run.poll() is None, log.read_text()[-3000:]
            return found

        both = {"generator-0", "generator-1"}
        wait_for(lambda: both <= status().peers.keys() and status().committed > 0, run, log)
        # neither the head nor the learner's
        workers = {node.node_id: node for node in cluster.worker_nodes}
        lost = next(n for n in (0, 1) if hosts["nodes"][str(n + 1)] in workers)
        cluster.remove_node(workers[hosts["nodes"][str(lost + 1)]], allow_graceful=False)
        wait_for(lambda: f"generator-{lost} exited: SIGKILL" in log.read_text(), run, log)
        before = status().committed
        # more than it can have delivered before: the other generator goes on, with its tickets too
        wait_for(lambda: status().committed >= before + 8, run, log)
        run.send_signal(signal.SIGINT)
        assert run.wait(WAIT_S) == 130, log.read_text()[-3000:]
    finally:
        run.kill()
        run.wait()
    assert f"the host of generator-{lost} was lost" in log.read_text()
    assert f"starting generator-{lost} again (1 of 3)" in log.read_text()
    logs = {path.name for path in (run_dir / "logs" / "attempt_1").iterdir()}
    assert logs == {"buffer.log", "learner.log", "generator-0.log", "generator-1.log"}
    assert (
        "joining run" in (run_dir / "logs" / "attempt_1" / f"generator-{1 - lost}.log").read_text()
    )
    ledger = json.loads((run_dir / "summary.json").read_text())["ledger"]
    assert ledger["generated"] == sum(ledger.values()) - ledger["generated"] > 0
    pids = [
        row["pid"]
        for row in process_log.read_events(run_dir)
        if row["name"] in ("buffer", "learner")
    ]
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)


def test_sessions_are_sampled_on_other_hosts(cluster: Any, tmp_path: Path) -> None:
    """A gateway beside buffer and learner; the calls go to generators that joined over the net."""
    complete(cluster)
    model, run_dir, log = tmp_path / "m", tmp_path / "runs" / "r", tmp_path / "log"
    build_model(model, CalcTask.symbols, hidden=32, layers=1)
    sets = [*SETS, f"model.path={str(model)!r}", f"runs={str(tmp_path / 'runs')!r}"]
    words = as_options((*sets, "agent.step_s=3600.0"))
    run = start(cluster, log, "-m", "asyncrl.cli", "run", "calc", "--on", "ray", *words)
    logs = run_dir / "logs" / "attempt_1"
    try:
        wait_for(lambda: (run_dir / "hosts.json").exists(), run, log)
        address, _, gateway = json.loads((run_dir / "hosts.json").read_text())["wires"]
        assert gateway.startswith("tcp://") and gateway != address

        def status() -> RunStatus | None:
            return live.request_status(address, str(run_dir / "keys"), 5.0)

        both = {"generator-0", "generator-1"}
        wait_for(lambda: (s := status()) is not None and both <= s.peers.keys(), run, log)
        known = status()
        assert known is not None
        enough = known.committed + 4
        wait_for(lambda: (s := status()) is not None and s.committed >= enough, run, log)
        run.send_signal(signal.SIGINT)
        assert run.wait(WAIT_S) == 130, log.read_text()[-3000:]
    finally:
        run.kill()
        run.wait()
    assert (logs / "gateway-0.log").exists()
    for name in both:
        written = re.search(r"ended after (\d+) tokens", (logs / f"{name}.log").read_text())
        assert written and int(written[1]) > 0, name
    ledger = json.loads((run_dir / "summary.json").read_text())["ledger"]
    assert ledger["generated"] == sum(ledger.values()) - ledger["generated"] > 0


DRIVER = (Path(__file__).parents[1] / "data" / "programs" / "ray_driver.txt").read_text()


def test_what_it_started_ends_with_the_driver(cluster: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    driver = start(cluster, log, "-c", DRIVER, str(DEMO), str(tmp_path))
    try:
        wait_for(lambda: (tmp_path / "done").exists(), driver, log)
        said = tmp_path / "buffer.log"
        wait_for(lambda: said.exists() and said.read_text().endswith("\n"), driver, log)
        child = psutil.Process(int((tmp_path / "buffer.log").read_text()))
        assert (tmp_path / "done").read_text() == "1 True ['KeyError: 3'] True"
    finally:
        driver.kill()
        driver.wait()
    child.wait(WAIT_S)


def test_no_room_is_said_with_both_numbers(cluster: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    sets = ["placement.generator.gpus=1", "placement.deadline_s=1", "generators=2"]
    sets += [f"runs={str(tmp_path / 'runs')!r}"]
    words = as_options(sets)
    run = start(cluster, log, "-m", "asyncrl.cli", "run", str(DEMO), "--on", "ray", *words)
    assert run.wait(WAIT_S) == 4
    said = log.read_text().strip().splitlines()[-1]
    assert said.startswith("error: --on ray: not placed within 1 s (placement.deadline_s), PACK;")
    assert "wanted: 1 CPU; 1 CPU 1 GPU; 1 CPU 1 GPU; hosts: 1 CPU; 1 CPU" in said
    assert "free in all: " in said and not (tmp_path / "runs").exists()
    sets = ["placement.learner={cpus=4, gpus=2}", "placement.generator={count=3, cpus=2, gpus=0.5}"]
    config = on_ray.adapt_config(load.load(DEMO, sets))
    assert config.generators == 3
    assert on_ray.list_bundles(config) == [{"CPU": 4, "GPU": 2}] + 3 * [{"CPU": 2, "GPU": 0.5}]
    assert on_ray.adapt_config(load.load(DEMO, ["generators=5"])).generators == 5
    with pytest.raises(ConfigError, match="only works on one machine"):
        on_ray.adapt_config(load.load(DEMO, ["weights.transport='shared_memory'"]))


def test_results_are_not_left_in_the_copy_that_a_job_runs_in(tmp_path: Path) -> None:
    copy = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    config = load.load(DEMO)
    with (
        pytest.raises(ConfigError, match=r"runs: .*_ray_pkg_1/runs/r is in a copy"),
        on_ray.place_on_cluster(config, copy / "runs" / "r", "ray", print),
    ):
        raise AssertionError("nothing is asked of a cluster")


def test_the_cluster_of_a_job_is_the_one_that_ray_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    asked: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: asked.append(address))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    on_ray.connect("ray")
    on_ray.connect("ray://10.0.0.8:6379")
    monkeypatch.delenv("RAY_ADDRESS")
    on_ray.connect("ray")
    assert asked == ["10.0.0.7:6379", "10.0.0.8:6379", "auto"]


def test_a_host_tells_of_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        on_ray.importing, "make_command", lambda module, *words: [sys.executable, "-c", *words]
    )
    monkeypatch.chdir(tmp_path)
    host = RayHost(str(tmp_path))
    code = (
        "import sys; from asyncrl.contract import refusal; from asyncrl.contract.errors import "
        "ConfigError; refusal.take_pipe(); e = ConfigError('no'); refusal.send_refusal(e); "
        "print('x' * 24);"
        "print(sys.argv[1:], open(sys.argv[2] + '/client.key_secret').read()); sys.exit(2)"
    )
    order = ProcessSpec("generator-0", [code], 1, tmp_path / "there.log")
    host.start(7, order, {"client.key_secret": b"secret"})
    said: list[ProcessState] = []
    while not said or said[-1].code is None:
        said.append(host.poll(7))
        time.sleep(0.01)
    text = b"".join(each.log for each in said).decode()
    assert text == "x" * 24 + f"\n['--keys', '{host.folder / 'generator-0'}'] secret\n"
    refused = pickle.loads(pickle.dumps(said[-1].refusal))  # as Ray sends it
    assert (said[-1].code, refused.exit_code, str(refused)) == (2, 2, "no")
    assert not host.running
    assert (host.folder / "generator-0" / "client.key_secret").stat().st_mode & 0o777 == 0o600
    process = RayProcess(RayHostHandle(None), 7, order)
    for each in said:
        process.update_state(each)
    assert process.poll() == 2 and str(process.read_refusal()) == "no" and process.tail(1)[0] != ""
    assert process.spec.log.read_text() == text
    host.clean(str(tmp_path))
    assert not host.folder.exists()


class Asked:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def remote(self, *words: Any) -> None:
        self.calls.append(words)


class Actor:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.signal = Asked(self.calls)


def test_a_process_that_waits_for_a_host_ends_at_once_and_a_deaf_host_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ProcessSpec("generator-0", [], 1, tmp_path / "log")
    waiting = RayHostHandle(Actor())
    process = RayProcess(waiting, 1, order)
    process.signal(signal.SIGTERM)
    assert waiting.gone
    assert process.code == -signal.SIGTERM and "before its start" in process.tail(1)[0]
    up = RayHostHandle(actor := Actor(), up=True)
    process = RayProcess(up, 1, order)
    process.signal(signal.SIGTERM)
    process.kill()
    process.kill()
    assert actor.calls == [(1, signal.SIGTERM), (1, signal.SIGKILL)] and not up.gone
    monkeypatch.setattr(on_ray, "CLOSE_S", -1.0)
    process.kill()
    assert up.gone and process.code == -signal.SIGKILL


def test_a_joiner_has_its_key_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [
        "generators=2",
        "wires.address='tcp://10.0.0.1:1'",
        f"wires.curve_dir={str(tmp_path)!r}",
    ]
    config = load.load(DEMO, sets)
    maker = RayLauncher(
        config, tmp_path, type("Group", (), {"bundle_specs": on_ray.list_bundles(config)})
    )
    assert maker.count_slots() == 2
    started: list[Any] = []
    actor = type("Started", (), {"start": Asked(started)})
    taken: list[int] = []
    monkeypatch.setattr(maker, "ensure_host", lambda n: taken.append(n) or RayHostHandle(actor))
    (tmp_path / "generator-1").mkdir()
    for name in on_ray.KEY_FILES:
        (tmp_path / "generator-1" / name).write_bytes(name.encode())
    maker.start(ProcessSpec("generator-1", ["as here"], 3, tmp_path / "log"))
    maker.start(ProcessSpec("learner", ["as here"], 3, tmp_path / "log"))
    joins = ["join", "tcp://10.0.0.1:1", "--index", "1", "--wait", "300"]
    assert taken == [2, 0]
    assert started[0][1].argv == joins and started[0][2]["server.key"] == b"server.key"
    assert started[1][1].argv == ["as here"] and started[1][2] is None
    with pytest.raises(ConfigError, match="generator-2: placement only has room for 2"):
        maker.start(ProcessSpec("generator-2", [], 1, tmp_path / "log"))
    assert msgspec.to_builtins(config)["placement"]["strategy"] == "PACK"
