"""The `asyncrl` command, with one file per family of commands.

To add a command, decorate it with `base.command` in one of these files, add its table to base.toml,
and list it in the tables `families` and `sections` there.
The files import little more than click at the top.  A command imports its other modules when it
runs, so that `asyncrl --help` stays instant and the supervisor needs no torch.
"""

import os

import click

from asyncrl import __version__
from asyncrl.cli.base import TABLES, CommandGroup
from asyncrl.contract.errors import EXIT_CODES

# Let waiting OpenMP threads sleep; set before OpenMP is loaded.  By default they spin for
# milliseconds: on shared cores a warm start of half a minute then took seven minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# file in this folder -> the commands in it
FAMILIES: dict[str, list[str]] = TABLES["families"]
# heading of a group in `asyncrl --help` -> its commands
SECTIONS: dict[str, list[str]] = TABLES["sections"]


@click.version_option(__version__, prog_name="asyncrl", message="%(prog)s %(version)s")
@click.group(
    cls=CommandGroup,
    sections=SECTIONS,
    places={name: f"asyncrl.cli.{file}" for file, names in FAMILIES.items() for name in names},
    examples=TABLES["main"]["examples"],
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()),
)
def main() -> None:
    """Train language models by asynchronous reinforcement learning."""
