"""`asyncrl scale`: change the number of generators of a running run."""

from __future__ import annotations

from pathlib import Path

from asyncrl.cli.base import command, emit, json_option, option_table


@command("asyncrl scale runs/R 4")
@option_table("scale")
@json_option
def scale(run_dir: Path, generators: int, wait: float, as_json: bool) -> None:
    """Change the number of generators of the run in RUN_DIR.

    Generators that joined are not counted.  A generator that is removed returns its unfinished
    work.
    """
    from asyncrl.supervise import scaling

    emit({"generators": scaling.request_scale(run_dir, generators, wait)}, as_json)
