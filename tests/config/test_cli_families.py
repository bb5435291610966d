"""The command line is a file a family of commands, and a process imports no other than its own."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from process_kit import ENV, ROOT

from asyncrl.cli import FAMILIES, main

HEAVY = {"torch", "transformers", "numpy", "scipy", "jinja2", "rich", "zmq", "asyncrl.experiments"}
SHOW = (
    "import sys; from asyncrl.cli import main\n"
    "try: main(sys.argv[1:])\n"
    "except SystemExit as ended: assert not ended.code\n"
    "print(' '.join(sys.modules))"
)


def imported(*argv: str) -> set[str]:
    """Modules in a process that ran the command."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW, *argv], cwd=ROOT, env=ENV, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_every_family_and_nothing_heavy() -> None:
    found = imported("--help")
    assert {f"asyncrl.cli.{family}" for family in FAMILIES} <= found
    assert not found & HEAVY


@pytest.mark.parametrize("family", FAMILIES)
def test_a_command_imports_its_own_family_alone(family: str) -> None:
    found = imported(FAMILIES[family][0], "--help")
    others = {f"asyncrl.cli.{other}" for other in FAMILIES if other != family}
    assert f"asyncrl.cli.{family}" in found and not found & others
    assert not found & HEAVY


def test_every_command_is_found_under_its_name_and_no_other() -> None:
    names = [name for commands in FAMILIES.values() for name in commands]
    with click.Context(main) as context:
        assert main.list_commands(context) == sorted(names)
        for name in names:
            command = main.get_command(context, name)
            assert command is not None and command.name == name
        assert main.get_command(context, "no-such-command") is None
