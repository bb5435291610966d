"""The `asyncrl` command: one file a family of commands.

A command is a `click.command` in one of these files and a word in FAMILIES.  The files import click
and little else at their top; what a command works with, it imports when it runs, so that `asyncrl
--help` stays instant and the supervisor needs no torch.
"""

from __future__ import annotations

import os

import click

from asyncrl import __version__
from asyncrl.cli.base import CommandGroup
from asyncrl.contract.errors import EXIT_CODES

# Before anything loads OpenMP: threads that wait for each other sleep.  As they come, they spin for
# milliseconds, and on cores shared with other work a warm start of half a minute took seven.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# file in this folder -> the commands in it
FAMILIES = {
    "new": ("new",),
    "run": ("run", "report", "export", "ls"),
    "processes": ("buffer", "generator", "gateway", "learner", "keys"),
    "fleet.join": ("join",),
    "fleet.scale": ("scale",),
    "doctor": ("doctor", "engines"),
    "compare": ("compare", "sweep", "figure"),
    "replay": ("replay", "diff"),
    "simulate": ("simulate",),
    "lab": ("lab",),
    "config": ("config", "task", "methods"),
    "model": ("model", "sft"),
}


@click.version_option(__version__, prog_name="asyncrl", message="%(prog)s %(version)s")
@click.group(
    cls=CommandGroup,
    places={name: f"asyncrl.cli.{file}" for file, names in FAMILIES.items() for name in names},
    epilog="Exit codes: " + "; ".join(f"{code} {said}" for code, said in EXIT_CODES.items()),
)
def main() -> None:
    """Asynchronous reinforcement learning of language models: run, tune, compare."""
