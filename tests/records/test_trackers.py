"""`record.trackers`, offline or local; `make trackers` runs this file with all three packages."""

import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_kit import ENV, SMALL, demo_command, run_command

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.models import installed
from asyncrl.records import rundir, trackers
from asyncrl.records.trackers import TrackerFeeds
from asyncrl.supervise import doctor

pytestmark = pytest.mark.slow

PATIENCE_S = 600


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = begin(tmp_path / "runs" / "R")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return path


def begin(run_dir: Path) -> Path:
    config = load.build({"model": {"path": "m"}, "task": {"name": "sort"}})
    rundir.prepare(load.dump(config), run_dir)
    add_rows(run_dir, 0)
    return run_dir


def add_rows(run_dir: Path, *steps: int) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "t": 0.5 * step, "reward/mean": 0.25 * step, "lag/samples": {}}
            file.write(json.dumps(row) + "\n")


def feed(run_dir: Path, name: str, *steps: int) -> None:
    feeds = TrackerFeeds(run_dir, [name])
    add_rows(run_dir, *steps)
    (process,) = feeds.processes.values()
    feeds.close()
    log = feeds.logs[name]
    assert process.wait(timeout=PATIENCE_S) == 0, log.read_text()[-3000:]


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, with wandb's head of 7 bytes."""
    block, at, whole = 2**15, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of one, or its last part
            yield whole
            whole = b""


def kept_by_wandb(run_dir: Path) -> dict[float, float]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[float, float] = {}
    for file in sorted(run_dir.glob("trackers/wandb/offline-run-*/run-*.wandb")):
        for content in leveldb_records(file.read_bytes()):
            record = Record.FromString(content)
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "reward/mean" in items:
                found[items["step"]] = items["reward/mean"]
    return found


def kept_by_trackio(run_dir: Path) -> dict[float, float]:
    """In a process of its own: trackio reads TRACKIO_DIR when it is imported."""
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage; "
        "print(json.dumps(SQLiteStorage.get_logs('asyncrl', sys.argv[1])))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, known_id(run_dir, "trackio")], capture_output=True, check=True
    ).stdout
    rows: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    found = {row["step"]: row["reward/mean"] for row in rows}
    assert len(found) == len(rows), "a step twice"
    return found


def kept_by_mlflow(run_dir: Path) -> dict[float, float]:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient((run_dir.parent / "mlruns").as_uri())
    known = json.loads((run_dir / "trackers" / "mlflow.json").read_text())
    assert client.get_run(known["id"]).data.params["task.name"] == "sort"
    return {m.step: m.value for m in client.get_metric_history(known["id"], "reward/mean")}


READERS = {"wandb": kept_by_wandb, "trackio": kept_by_trackio, "mlflow": kept_by_mlflow}
INSTALLED = [name for name in READERS if importlib.util.find_spec(name) is not None]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_tracker_gets_every_row_once_also_after_a_resume(name: str, run_dir: Path) -> None:
    feed(run_dir, name, 1, 2)
    feed(run_dir, name, 3)
    assert READERS[name](run_dir) == {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75}
    known = json.loads((run_dir / "trackers" / f"{name}.json").read_text())
    assert known["offset"] == (run_dir / "metrics.jsonl").stat().st_size


@pytest.mark.parametrize("name", INSTALLED)
def test_a_run_has_its_own_curve_whatever_its_directory_is_called(
    name: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two projects, of a run made again under its name, and of one whose record is lost."""
    other = begin(tmp_path / "other" / "runs" / "R")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (run_dir.parent / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    feed(run_dir, name, 1)
    feed(other, name, 2)
    ids = {known_id(run_dir, name), known_id(other, name)}
    assert len(ids) == 2
    state = {"offset": (run_dir / "metrics.jsonl").stat().st_size}
    (run_dir / "trackers" / f"{name}.json").write_text(json.dumps(state))
    feed(run_dir, name, 3)
    assert known_id(run_dir, name) in ids, "it continues its own curve"
    assert READERS[name](run_dir) == {0: 0.0, 1: 0.25, 3: 0.75}
    shutil.rmtree(run_dir)
    begin(run_dir)
    feed(run_dir, name, 4)
    assert known_id(run_dir, name) not in ids and READERS[name](run_dir) == {0: 0.0, 4: 1.0}


def known_id(run_dir: Path, name: str) -> str:
    return str(json.loads((run_dir / "trackers" / f"{name}.json").read_text())["id"])


def test_a_tracker_that_hangs_holds_nobody_up(run_dir: Path) -> None:
    feeds = TrackerFeeds(run_dir, ["wandb"])
    (process,) = feeds.processes.values()
    os.kill(process.pid, signal.SIGSTOP)
    feeds.close()
    assert process.poll() is None, "still stopped; nothing waited for it"
    process.kill()  # it may have been stopped before it had a group of its own
    process.wait()


def test_a_run_whose_tracker_fails_ends_as_without_it(tmp_path: Path, small_model: Path) -> None:
    """wandb without a login and without a terminal to ask for one."""
    login = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    words = (*SMALL, "name=R", "record.trackers=['wandb']")
    done = run_command(demo_command("run", tmp_path, small_model, *words), env=ENV | login)
    assert done.code == 0 and done.json["steps"] == 6, done.err[-3000:]
    path = tmp_path / "runs" / "R"
    deadline = time.monotonic() + PATIENCE_S
    while not trackers.read_failures(path) and time.monotonic() < deadline:
        time.sleep(0.1)  # it may fail after the run has ended
    line = doctor.examine_run(load.load(path / "config.toml"), path, None)["advice"][-1]
    assert line.startswith("the tracker wandb failed, and the run goes on without it: UsageError")
    assert "API key" in (path / "logs" / "tracker_wandb.log").read_text()


def test_a_missing_tracker_is_refused_with_its_install_command() -> None:
    least = {"model": {"path": "m"}, "task": {"name": "sort"}}
    config = load.build({**least, "record": {"trackers": ["mlflow"]}})
    found = installed.find_missing_package(config)
    if "mlflow" in INSTALLED:
        assert found == ""
    else:
        assert found.startswith("record.trackers: mlflow: needs mlflow, which is not installed")
    with pytest.raises(ConfigError, match=r"record\.trackers"):
        load.build({**least, "record": {"trackers": ["neptune"]}})
