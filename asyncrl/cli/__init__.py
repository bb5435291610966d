"""The `asyncrl` command, with one file per family of commands.

To add a command, decorate it with `base.command` in one of these files, add its table to base.toml,
and list it in FAMILIES.
The files import little more than click at the top.  A command imports its other modules when it
runs, so that `asyncrl --help` stays instant and the supervisor needs no torch.
"""

import os

import click

from asyncrl import __version__
from asyncrl.cli.base import CommandGroup
from asyncrl.contract.errors import EXIT_CODES

# Let waiting OpenMP threads sleep; set before OpenMP is loaded.  By default they spin for
# milliseconds: on shared cores a warm start of half a minute then took seven minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# file in this folder -> the commands in it
FAMILIES = {
    "new": ("new",),
    "run": ("run", "report", "export", "ls"),
    "processes": ("buffer", "generator", "gateway", "learner", "keys"),
    "fleet": ("join", "scale"),
    "inspect.doctor": ("doctor", "engines"),
    "inspect.watch": ("watch", "samples"),
    "compare": ("compare", "sweep", "figure"),
    "replay": ("replay", "diff"),
    "simulate": ("simulate", "diagnose"),
    "lab": ("lab",),
    "config": ("config", "task", "methods"),
    "model": ("model", "sft", "tinker", "eval", "serve"),
}

# the groups in `asyncrl --help`
SECTIONS = {
    "Train": ("new", "run", "sft", "tinker", "model"),
    "Look at runs": ("diagnose", "doctor", "ls", "report", "samples", "watch"),
    "Use the trained model": ("eval", "export", "serve"),
    "Configs, tasks and this machine": ("config", "engines", "methods", "task"),
    "Start and scale processes": (
        *("buffer", "learner", "generator", "gateway"),
        *("join", "keys", "scale"),
    ),
    "Experiments": ("compare", "sweep", "figure", "simulate", "replay", "diff", "lab"),
}


@click.version_option(__version__, prog_name="asyncrl", message="%(prog)s %(version)s")
@click.group(
    cls=CommandGroup,
    sections=SECTIONS,
    places={name: f"asyncrl.cli.{file}" for file, names in FAMILIES.items() for name in names},
    examples=(
        "asyncrl run demo",
        "asyncrl run demo --set staleness.max_lag=4 --set seed=1",
        "asyncrl doctor runs/R",
        "asyncrl config explain staleness.max_lag",
    ),
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()),
)
def main() -> None:
    """Train language models by asynchronous reinforcement learning."""
