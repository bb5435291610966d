"""`asyncrl join` and `asyncrl scale`: the generators of a run on several machines."""

import os
import shutil
import sys
from pathlib import Path

from asyncrl.cli import result
from asyncrl.cli.base import command, emit, print_progress
from asyncrl.contract import refusal
from asyncrl.records import process_log


@command
def join(
    address: str,
    keys: Path | None,
    index: int | None,
    cache: Path | None,
    wait: float,
    env: tuple[str, ...],
    trust_code: bool,
) -> None:
    """Make this machine a generator of a running run.

    The address is that of the run's buffer.  Config, model and prompts come from the run, so it
    uses this machine's processor and network.  It gets environment variables only with --env and
    runs its own code only with --trust-code.  Ctrl-C leaves the run and returns unfinished work.
    """
    from asyncrl.cli.processes import run_recorded
    from asyncrl.records import rundir
    from asyncrl.supervise import join as joining

    refusal.take_pipe()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    place = joining.prepare(
        address,
        str(keys.resolve()) if keys else "",
        index=index,
        cache=(cache or Path(base) / "asyncrl").resolve(),
        patience_s=wait,
        say=print_progress,
        trust=joining.Trust(env, trust_code),
    )
    try:
        code = run_recorded("generator", place.config, place.run_dir, place.number)
    finally:
        rundir.clean(place.run_dir)
    if code in (0, process_log.INTERRUPTED):
        shutil.rmtree(place.run_dir, ignore_errors=True)
    result.put_result({"address": address, "generator": place.number})
    sys.exit(code)


@command
def scale(run_dir: Path, generators: int, wait: float) -> None:
    """Change the number of generators of the run in RUN_DIR.

    Generators that joined are not counted.  A generator that is removed returns its unfinished
    work.
    """
    from asyncrl.supervise import scaling

    emit({"generators": scaling.request_scale(run_dir, generators, wait)})
