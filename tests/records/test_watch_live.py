"""`asyncrl run --watch`: the page of a run while its processes work."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner
from process_kit import SMALL
from run_kit import finish, let_go, start, wait_until

from asyncrl.cli import main

pytestmark = pytest.mark.slow


def test_the_page_lives_beside_the_run_and_ends_with_it(tmp_path: Path, small_model: Path) -> None:
    process = start(tmp_path, small_model, *SMALL, "name=R", "--watch", hold=4)
    stderr = tmp_path / "stderr"
    (url,) = wait_until(
        lambda: re.findall(r"^watch it at (http://127\S+token=\S+)$", stderr.read_text(), re.M),
        process,
    )
    client = httpx2.Client(base_url=url.partition("/?")[0], timeout=600)
    assert client.get("/api/runs").status_code == 403
    assert client.get(url, follow_redirects=True).status_code == 200
    seen = wait_until(
        lambda: [run for run in client.get("/api/runs").json() if run["rows"] >= 3], process
    )
    assert (seen[0]["id"], seen[0]["state"], seen[0]["steps"]) == ("R", "running", 6)
    alive = client.get("/api/processes").json()["R"]
    assert {"learner", "buffer"} <= {row["name"] for row in alive if row["alive"]}
    let_go(tmp_path)
    summary = finish(process, tmp_path)
    assert summary["steps"] == 6
    assert f"asyncrl watch {summary['run_dir']}" in stderr.read_text()
    with pytest.raises(httpx2.ConnectError):
        client.get("/api/runs")


def test_slurm_and_watch_are_refused_together() -> None:
    done = CliRunner().invoke(main, ["run", "demo", "--on", "slurm", "--watch"])
    assert done.exit_code == 2 and "asyncrl watch RUN_DIR" in done.stderr
