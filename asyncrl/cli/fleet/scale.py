"""`asyncrl scale`: more or fewer generators, while the run goes on."""

from __future__ import annotations

from pathlib import Path

import click

from asyncrl.cli.base import PATH, emit


@click.command()
@click.argument("run_dir", type=PATH)
@click.argument("generators", type=click.IntRange(1))
@click.option("--wait", default=60.0, help="seconds to wait for the supervisor's answer")
@click.option("--json", "as_json", is_flag=True)
def scale(run_dir: Path, generators: int, wait: float, as_json: bool) -> None:
    """Let the run in RUN_DIR go on with so many generators of its own; those that joined stay.

    Who is one too many gives back what it has not finished.
    """
    from asyncrl.supervise import scaling

    emit({"generators": scaling.ask(run_dir, generators, wait)}, as_json)
