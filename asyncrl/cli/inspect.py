"""Commands that look at runs and this machine: doctor, engines, watch and samples."""

import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.cli import result
from asyncrl.cli.base import command, emit, print_progress
from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.contract.toml_writer import fill
from asyncrl.records import process_log, rundir


@command
def doctor(run_dir: Path | None, exact: bool) -> None:
    """Show the state of the run in RUN_DIR.

    For a running run, it lists the waits between its processes with their durations.  For a run
    that has ended, it gives the cause and the remedy.
    """
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
        print_progress(
            f"error: the run in {run_dir} is not running; it has made "
            f"{examination['committed']} of {examination['steps']} steps"
        )
        sys.exit(PeerUnreachable.exit_code)  # not raised: the JSON object was printed above


def check_exact_mode(source: Path | None) -> None:
    """Print the table of operators of `doctor --exact`; exit with code 1 if any differs."""
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


@command
def watch(places: tuple[Path, ...], host: str, port: int | None, no_token: bool) -> None:
    """Show runs in the browser while they run, or after.

    RUN is a run directory, or a directory with runs in it (a comparison, a sweep). The command only
    reads their files, so it also works on a copied directory.
    """
    from asyncrl.transport.sockets import is_loopback
    from asyncrl.viewer import server

    def announce(url: str, runs: int) -> None:
        print_progress(f"watching {runs} run{'s' if runs != 1 else ''}:")
        print(url, flush=True)
        forwarding = ""
        if is_loopback(host):
            number = urlsplit(url).port
            ssh = f"ssh -L {number}:localhost:{number} {socket.gethostname()}"
            forwarding = f"; from another machine: {ssh}"
        print_progress(f"stop with Ctrl-C{forwarding}")

    server.serve(list(places), host, port, announce, token=not no_token)


@command
def samples(run_dir: Path, color_by: str, **choice: Any) -> None:
    """Print trained samples, each token colored by lag or weight.

    The learner logs some samples of every record.samples_every-th batch with all their tokens.
    """
    from asyncrl.supervise import tinker_status
    from asyncrl.supervise.report.token_samples import (
        FILE,
        SHADES,
        SampleFilter,
        SampleStore,
        format_terminal,
    )

    if tinker_status.is_server(run_dir):
        raise ConfigError(f"{run_dir}: has several models; give the directory of one of them")
    rundir.require_run(run_dir)
    if color_by not in SHADES:
        raise ConfigError(f"--color {color_by}: choose one of {', '.join(SHADES)}")
    store = SampleStore(run_dir / FILE)
    store.refresh()
    if not store.heads:
        raise ConfigError(
            f"{run_dir / FILE}: no samples yet; a run logs some of every record.samples_every-th "
            "batch (record.token_samples)"
        )
    numbers = store.find(SampleFilter(**choice))
    if result.as_json:
        return result.put_result({"samples": [*map(store.read_row, numbers)]})
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for number in numbers:
        print(format_terminal(store.read_row(number), color_by, color) + "\n")
    print_progress(
        f"{len(numbers)} of {len(store.heads)} logged samples; color: {SHADES[color_by]}"
    )
