from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest

from asyncrl.cli import main
from asyncrl.cli.base import ExampleCommand


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(path) or "asyncrl", group
    with click.Context(group) as context:
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            assert found is not None
            if isinstance(found, click.Group):
                yield from commands(found, (*path, name))
            else:
                yield " ".join((*path, name)), found


COMMANDS = dict(commands(main))


@pytest.mark.parametrize("words", COMMANDS)
def test_help_explains_every_option_and_ends_with_examples(words: str) -> None:
    command = COMMANDS[words]
    assert isinstance(command, ExampleCommand) and command.examples, "it shows no example"
    for option in command.params:
        assert not isinstance(option, click.Option) or option.help, f"{option.opts} has no help"
    shown = command.get_help(click.Context(command, info_name=words))
    assert all(f"\n  {example}\n" in f"{shown}\n" for example in command.examples)
    first = command.get_short_help_str(10_000)
    assert 0 < len(first) <= 62, f"the list of commands would cut it: {first}"


@pytest.mark.parametrize(
    "example", sorted({example for c in COMMANDS.values() for example in c.examples})
)
def test_an_example_is_accepted(example: str) -> None:
    """Its command exists, and takes these arguments and options; nothing is run."""
    program, *words = shlex.split(example.partition(" > ")[0])
    assert program == "asyncrl"
    command: click.Command = main
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, example
        command, words = found, words[1:]
    command.make_context(command.name, words)
