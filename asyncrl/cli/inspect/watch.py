"""`asyncrl watch`: a page of runs in the browser; `asyncrl samples`: samples in the terminal."""

import os
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.cli import result
from asyncrl.cli.base import command, print_progress
from asyncrl.contract.errors import ConfigError


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
    from asyncrl.records import rundir
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
    print(
        f"{len(numbers)} of {len(store.heads)} logged samples; color: {SHADES[color_by]}",
        file=sys.stderr,
    )
