import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import click.testing
import pytest
from process_kit import run_command

from asyncrl.cli import FAMILIES, SECTIONS, main
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


HEAVY = {"torch", "transformers", "numpy", "scipy", "jinja2", "rich", "zmq", "asyncrl.experiments"}
SHOW = (
    "import sys; from asyncrl.cli import main\n"
    "try: main(sys.argv[1:])\n"
    "except SystemExit as ended: assert not ended.code\n"
    "print(' '.join(sys.modules))"
)

SHOW_ALL = SHOW.replace("as ended: assert not ended.code", ": pass")


def imported(*argv: str) -> set[str]:
    done = run_command([sys.executable, "-c", SHOW, *argv]).check()
    return set(done.out.splitlines()[-1].split())


def test_help_imports_every_family_and_nothing_heavy() -> None:
    found = imported("--help")
    assert {f"asyncrl.cli.{family}" for family in FAMILIES} <= found and not found & HEAVY


@pytest.mark.parametrize("family", FAMILIES)
def test_a_command_imports_its_own_family_alone(family: str) -> None:
    found = imported(FAMILIES[family][0], "--help")
    others = {f"asyncrl.cli.{other}" for other in FAMILIES if other != family}
    assert f"asyncrl.cli.{family}" in found and not found & others and not found & HEAVY


def test_every_command_is_found_under_its_name_and_no_other() -> None:
    names = [name for commands in FAMILIES.values() for name in commands]
    with click.Context(main) as context:
        assert main.list_commands(context) == sorted(names)
        for name in names:
            command = main.get_command(context, name)
            assert command is not None and command.name == name
        assert main.get_command(context, "no-such-command") is None
    assert sorted(names) == sorted(name for commands in SECTIONS.values() for name in commands)
    text = click.testing.CliRunner().invoke(main, ["--help"]).output
    assert all(f"\n{heading}:\n" in text for heading in SECTIONS)
    assert all(f"\n  {name} " in text for name in names)


@pytest.mark.parametrize("group", ["config", "lab", "model", "task"])
def test_a_group_alone_prints_its_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([group])
    text = capsys.readouterr().err
    assert ended.value.code == 2 and "\nCommands:\n" in text and "error:" not in text


@pytest.mark.cold
@pytest.mark.parametrize(
    "command",
    """report nowhere; export nowhere x; eval nowhere demo; eval MODEL nowhere; serve nowhere
    replay nowhere; diff nowhere x; sft nowhere; tinker nowhere; simulate demo --from nowhere
    simulate nowhere; doctor --exact nowhere; run nowhere; figure nowhere -o x.svg; samples nowhere
    """.strip()
    .replace("\n", ";")
    .split(";"),
)
def test_a_wrong_path_is_told_before_torch(command: str, small_model: Path, tmp_path: Path) -> None:
    words = command.replace("MODEL", str(small_model)).split()
    done = run_command([sys.executable, "-c", SHOW_ALL, *words], cwd=tmp_path)
    assert "error: " in done.err and "nowhere" in done.err, done.err
    assert "torch" not in done.out.splitlines()[-1].split()
