"""`asyncrl join`: this machine becomes a generator of a running run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from asyncrl.cli import result
from asyncrl.cli.base import PATH, print_progress
from asyncrl.contract import refusal
from asyncrl.records import process_log


@click.command()
@click.argument("address", metavar="tcp://HOST:PORT")
@click.option("--keys", type=PATH, help="this generator's keys; none for tcp://127.0.0.1 alone")
@click.option("--index", type=click.IntRange(0), help="its number; else what the key says")
@click.option("--cache", type=PATH, help="where fetched files stay  [default: ~/.cache/asyncrl]")
@click.option("--wait", default=120.0, help="seconds to wait for the run")
@click.option(
    "--env",
    multiple=True,
    metavar="NAME",
    help="a variable of this environment that the run may use (reward.judge.key_env); repeatable",
)
@click.option("--trust-code", is_flag=True, help="run the run's reward function (reward.share)")
@click.option("--json", "as_json", is_flag=True)
def join(
    address: str,
    keys: Path | None,
    index: int | None,
    cache: Path | None,
    wait: float,
    env: tuple[str, ...],
    trust_code: bool,
    as_json: bool,
) -> None:
    """Become a generator of the run whose buffer listens at the address.

    Config, model and prompts come from the run, so you trust it with this machine's processor and
    network; with a variable of the environment, or with code, only as --env and --trust-code say.
    Ctrl-C leaves it, and gives back what was not finished.
    """
    from asyncrl.cli.processes import run_recorded
    from asyncrl.records import rundir
    from asyncrl.supervise import join as joining

    refusal.listen()
    place = joining.prepare(
        address,
        str(keys.resolve()) if keys else "",
        index=index,
        cache=(cache or joining.cache_dir()).resolve(),
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
    if as_json:
        result.print_result({"address": address, "generator": place.number})
    sys.exit(code)
