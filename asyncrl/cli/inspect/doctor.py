"""`asyncrl doctor`: the state of a run; `asyncrl engines`: the engines that work here."""

import sys
from pathlib import Path

from asyncrl.cli import result
from asyncrl.cli.base import command, emit
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.contract.toml_writer import fill
from asyncrl.records import process_log


@command
def doctor(run_dir: Path | None, exact: bool) -> None:
    """Show the state of the run in RUN_DIR.

    For a running run, it lists the waits between its processes with their durations.  For a run
    that has ended, it gives the cause and the remedy.
    """
    from asyncrl.config import load
    from asyncrl.records import rundir
    from asyncrl.supervise import doctor as doctors
    from asyncrl.supervise import live, tinker_status

    if exact:
        return check_exact_mode(run_dir)
    if run_dir is None:
        raise ConfigError("give a RUN_DIR (or --exact for the self-test of exact mode)")
    if tinker_status.is_server(run_dir) or tinker_status.is_model(run_dir):
        state = tinker_status.examine(run_dir)
        return emit(state, fill(tinker_status.STATE, **state).rstrip("\n"))
    rundir.require_run(run_dir)
    config = load.load(run_dir / "config.toml")
    can_answer = bool(config.wires.address) or process_log.is_alive(run_dir, "buffer")
    status = None
    if can_answer:
        status = live.request_status(
            rundir.get_current_buffer_address(config, run_dir), config.wires.curve_dir, 3.0
        )
    examination = doctors.examine_run(config, run_dir, status)
    emit(examination, doctors.format_state(config, run_dir, status, examination))
    if not examination["running"] and not examination["ended"]:
        print(
            f"error: the run in {run_dir} is not running; it has made "
            f"{examination['committed']} of {examination['steps']} steps",
            file=sys.stderr,
        )
        sys.exit(PeerUnreachable.exit_code)  # not raised: the JSON object was printed above


def check_exact_mode(source: Path | None) -> None:
    """Print the table of operators of `doctor --exact`; exit with code 1 if any differs."""
    from dataclasses import asdict

    from asyncrl.config import load

    config = load.load(source / "config.toml" if source.is_dir() else source) if source else None
    from asyncrl.supervise import exact_check  # imports torch

    rows = exact_check.check_small_models() if config is None else exact_check.check(config)
    failure = exact_check.describe_failure(rows)
    print(exact_check.format_table(rows), file=sys.stderr if result.as_json else sys.stdout)
    result.put_result({"equal": not failure, "operators": [asdict(row) for row in rows]})
    if failure:
        raise AsyncrlError(f"exact mode does not hold on this machine: {failure}")


@command
def engines() -> None:
    """Show which engines and learner backends work on this machine.

    For the others, it gives the reason and the package to install.
    """
    from asyncrl.models import installed

    rows = installed.check_installed()
    device = installed.describe_device()
    lines = [f"device: {device}"]
    if untested := installed.list_untested_versions():
        lines.append(f"warning: untested versions: {untested}")
    lines += [
        f"{row['setting']:32} {row['version'] or '-':10} "
        f"{'works' if row['works'] else 'no: ' + row['why']}"
        for row in rows
    ]
    emit({"device": device, "engines": rows}, "\n".join(lines))
