"""The batch script of `--on slurm` in a real Slurm: a controller and two nodes of this machine."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from process_kit import ENV, ROOT, wait_for

from asyncrl.supervise import live

pytestmark = pytest.mark.slow

WAIT_S = 600.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo")
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NODES = 2
CONFIG = (Path(__file__).parents[1] / "data" / "slurm.conf").read_text()


def ports() -> list[int]:
    """Three free ones, two of them neighbours."""
    while True:
        with ExitStack() as taken:

            def take(port: int) -> int:
                made = taken.enter_context(socket.create_server(("127.0.0.1", port)))
                return int(made.getsockname()[1])

            with suppress(OSError):
                first, second = take(0), take(0)
                return [first, second, take(second + 1)]


class Cluster(NamedTuple):
    where: Path
    env: dict[str, str]

    def call(self, *argv: str) -> str:
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in self.where.glob("*.log"))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if absent := [name for name in PROGRAMS if shutil.which(name, path=SBIN) is None]:
        pytest.skip(f"Slurm is not installed: there is no {', '.join(absent)} (Debian: slurm-wlm)")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as root alone")
    where = Path(tempfile.mkdtemp(prefix="asyncrl-slurm-"))  # short: munge's socket is in it
    env = ENV | {"SLURM_CONF": str(where / "slurm.conf"), "PATH": SBIN}
    made = Cluster(where, env)
    where.chmod(0o755)  # munge trusts no other
    for each in ("state", *(f"spool-one{n + 1}" for n in range(NODES))):
        (where / each).mkdir()
    (where / "key").write_bytes(os.urandom(128))
    (where / "key").chmod(0o600)
    host = socket.gethostname()
    (where / "slurm.conf").write_text(CONFIG.format(where=where, host=host, ports=ports()))
    munge = [f"--{part}-file={where}/munge.{part}" for part in ("pid", "log", "seed")]
    programs = [
        ["munged", "-F", f"--key-file={where}/key", f"--socket={where}/munge.socket", *munge],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", f"one{n + 1}"] for n in range(NODES)),
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for argv in programs:
            out = (where / f"{argv[0]}-{len(running)}.log").open("wb")
            running.append(subprocess.Popen(argv, env=env, stdout=out, stderr=out))
            if argv[0] == "munged":
                wait_for((where / "munge.socket").exists, made.logs)

        def up() -> bool:
            states = ["sinfo", "--noheader", "--Node", "--format=%T"]
            done = subprocess.run(states, env=env, capture_output=True, text=True)
            return done.stdout.split() == NODES * ["idle"]

        wait_for(up, made.logs)
        yield made
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        for process in reversed(running):
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
        shutil.rmtree(where, ignore_errors=True)


SETS_TEXT = (
    "name='r' learner.steps=100000 learner.groups=2 learner.group_size=4 "
    "generator.max_new_tokens=12 generator.slots=8 evaluation.every=0 evaluation.final_prompts=4 "
    "evaluation.ood_prompts=0 placement.generator.count=2"
)
SETS = [*SETS_TEXT.split()]


def test_slurm_ends_with_a_checkpoint(cluster: Cluster, tmp_path: Path, small_model: Path) -> None:
    sets = [*SETS, f"model.path={str(small_model)!r}", "runs='runs'"]
    words = [word for each in sets for word in ("--set", each)]
    # as after `source .../bin/activate`, which the script leaves to the site
    (tmp_path / "bin").mkdir()
    command = f'#!/bin/sh\nexec {sys.executable} -m asyncrl.cli "$@"\n'
    (tmp_path / "bin" / "asyncrl").write_text(command)
    (tmp_path / "bin" / "asyncrl").chmod(0o755)
    cluster.env["PATH"] = f"{tmp_path / 'bin'}:{SBIN}"
    cluster.env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    argv = ["asyncrl", "run", str(ROOT / "configs" / "demo.toml"), "--on", "slurm", *words]
    subprocess.run(argv, env=cluster.env, cwd=tmp_path, check=True, timeout=WAIT_S)
    (tmp_path / "runs").mkdir()
    sent = subprocess.run(
        ["sbatch", "--parsable", "r.sbatch"],
        env=cluster.env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.strip()
    run_dir, out = tmp_path / "runs" / "r", tmp_path / "runs" / f"r-{job}.out"

    def said() -> str:
        return f"{out.read_text()[-3000:] if out.exists() else ''}\n{cluster.logs()}"

    def shown(word: str) -> str:
        text = cluster.call("scontrol", "show", "job", job, "--oneliner").splitlines()[0]
        found = re.search(rf"\b{word}=(\S+)", text)
        return found[1] if found else ""

    def both_write() -> bool:
        assert shown("JobState") in ("PENDING", "RUNNING"), said()
        joined = re.search(r"at (tcp:\S+) as generator-1", out.read_text() if out.exists() else "")
        found = None
        if joined:
            found = live.request_status(joined[1], str(tmp_path / "runs" / "r.keys"), 60.0)
        return found is not None and "generator-1" in found.peers and found.committed >= 3

    try:
        wait_for(both_write, said)
        # what Slurm sends two minutes before the job's time is over (--signal=B:TERM@120)
        cluster.call("scancel", "--signal=TERM", "--batch", job)
        wait_for(lambda: shown("JobState") not in ("RUNNING", "COMPLETING"), said)
    finally:
        subprocess.run(["scancel", "--signal=KILL", "--full", job], env=cluster.env)
    assert shown("ExitCode") == "130:0", said()
    assert shown("NodeList") in ("one1", "one2")
    summary = json.loads((run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    assert ledger["generated"] == sum(ledger.values()) - ledger["generated"] > 0
    assert f"continue with: asyncrl run --resume {run_dir}" in out.read_text()
    assert list((run_dir / "checkpoints").glob(f"epoch_*/number_{summary['steps']}"))
