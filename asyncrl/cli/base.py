"""Parts shared by all commands: help with examples, one-line errors, common options, output."""

import difflib
import errno
import io
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click
from click import Command, Context
from click.shell_completion import CompletionItem

from asyncrl.cli import result
from asyncrl.contract import refusal
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.importing import append_working_directory
from asyncrl.contract.printable import LONGEST_LINE, escape_line
from asyncrl.contract.toml_writer import read_table

TABLES: dict[str, dict[str, Any]] = read_table(__file__)
KINDS: dict[str, Any] = {
    "path": click.Path(path_type=Path),
    "config": click.Path(),
    "file": click.Path(exists=True, dir_okay=False, path_type=Path),
    "integer": click.INT,
    "number": click.FLOAT,
}

# a write can fail with these errors without naming a file
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class ExampleCommand(Command):
    """A command whose `--help` ends with examples to copy, one per line."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example" if len(self.examples) == 1 else "Examples"):
            for example in self.examples:  # not wrapped: a line must stay copyable
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")
        super().format_epilog(ctx, formatter)


class ExampleGroup(ExampleCommand, click.Group):
    """A group of commands whose `--help` ends with examples, as that of each command does."""

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        """Resolve a command; the error for an unknown one names the nearest command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            matches = difflib.get_close_matches(args[0], self.list_commands(ctx), 1, 0.5)
            hint = f" Did you mean {matches[0]}?" if matches else ""
            raise click.UsageError(
                f"{error.message}{hint} --help lists all commands.", ctx
            ) from None


class CommandGroup(ExampleGroup):
    """Print usage errors and expected errors as one line on stderr, and exit with their code.

    Programming errors keep their traceback.

    places: command -> the module that defines it, under its own name.  The module is imported only
    when the command is used, so that a process imports the file of its own command only.

    sections: heading -> its commands, for the help."""

    def __init__(
        self,
        *args: Any,
        places: Mapping[str, str],
        sections: Mapping[str, Sequence[str]],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.places = dict(places)
        self.sections = sections

    def format_commands(self, ctx: Context, formatter: click.HelpFormatter) -> None:
        for heading, names in self.sections.items():
            commands = ((name, self.get_command(ctx, name)) for name in names)
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, found.get_short_help_str(80)) for name, found in commands if found]
                )

    def list_commands(self, ctx: Context) -> list[str]:
        return sorted({*self.commands, *self.places})

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name in self.places:
            loaded: Command = getattr(import_module(self.places[cmd_name]), cmd_name)
            return loaded
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        # With LC_ALL=C and PYTHONUTF8=0 Python encodes paths as ASCII, so a file with another
        # character in its name cannot be opened.  Printed text keeps the terminal's encoding.
        called = bool(args) or "args" in kwargs  # by another program
        if not (
            called or sys.getfilesystemencoding() == "utf-8" or os.environ.get("PYTHONUTF8") == "1"
        ):
            os.environ["PYTHONUTF8"] = "1"
            os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        append_working_directory()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # an ASCII terminal shows escapes
                stream.reconfigure(errors="backslashreplace")
        result.printed.clear()  # of earlier commands of this process
        arguments = kwargs.get("args") or (args[0] if args else None) or sys.argv[1:]
        result.as_json = "--json" in arguments
        try:
            return super().main(*args, **(kwargs | {"standalone_mode": False}))
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            fail("interrupted", 130)
        except click.exceptions.NoArgsIsHelpError as error:  # a group without a command
            print(error.format_message(), file=sys.stderr)
            result.put_error("a command is missing", 2)
            sys.exit(2)
        except click.ClickException as error:
            fail(error.format_message(), 2)
        except AsyncrlError as error:
            refusal.send_refusal(error)
            fail(str(error), error.exit_code)
        except OSError as error:
            # without a file it is a programming error, which keeps its traceback
            if error.filename is None and error.errno not in DISK:
                raise
            question = "is the disk full, or was the file removed or made read-only?"
            if error.errno == errno.ENOENT:
                question = "is its folder missing, or was it removed?"
            fail(f"{error.filename or 'writing failed'}: {error.strerror}; {question}", 1)


def fail(reason: str, code: int) -> NoReturn:
    """Exit with one line on stderr; with --json also as the last line of stdout.

    After a printed result it prints no JSON, so that the result stays the last line."""
    with suppress(OSError):  # stderr may be a file on the disk that is full
        print(f"error: {escape_line(reason, LONGEST_LINE)}", file=sys.stderr)
    result.put_error(reason, code)
    sys.exit(code)


def make_command(key: str, function: Callable[..., Any]) -> Command:
    """Make the command that a table of base.toml, which explains its fields, describes."""
    return ExampleCommand(
        **describe(key, function.__doc__),
        callback=function,
        params=[
            make_parameter(row)
            for option in TABLES[key].get("options", ())
            for row in [TABLES["common"][name] for name in option.get("use", ())] or [option]
        ],
    )


def command(function: Callable[..., Any]) -> Command:
    """Make a command of a function, by the table of its name."""
    return make_command(function.__name__, function)


def make_group(key: str, members: Sequence[Command]) -> click.Group:
    """Make a group of commands, by its table."""
    return ExampleGroup(**describe(key), commands=members)


def describe(key: str, help_text: str | None = None) -> dict[str, Any]:
    """Return name, help and examples of a command."""
    table = TABLES[key]
    return {
        "name": table.get("name", key),
        "help": table.get("help", help_text),
        "examples": table["examples"],
    }


class NumberRange(click.FloatRange):
    """A range of numbers, without NaN."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


def make_parameter(row: Mapping[str, Any]) -> click.Parameter:
    """Make an argument or option."""
    fields = dict(row)
    least, most, above = (fields.pop(key, None) for key in ("least", "most", "above"))
    kind = KINDS.get(fields.pop("type", ""))
    if "choices" in fields:
        kind = click.Choice(fields.pop("choices"))
    elif least is not None:
        range_of = NumberRange if kind is click.FLOAT else click.IntRange
        kind = range_of(least, most, min_open=bool(above))
    if completed := fields.pop("complete", ""):
        fields["shell_complete"] = COMPLETERS[completed]
    flags = fields.pop("flags").split()
    kind_of = click.Option if flags[0].startswith("-") else click.Argument
    return kind_of(flags, type=kind, **fields)


def complete_config(ctx: Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a bundled config, or a file."""
    from asyncrl.config import bundled_configs

    names = [name for name in bundled_configs.list_names() if name.startswith(incomplete)]
    files = CompletionItem(incomplete, type="file")
    return [*(CompletionItem(name) for name in names), files]


def complete_key(ctx: Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a config key."""
    from asyncrl.config import load

    keys = ["method", *load.list_keys()]
    return [CompletionItem(key) for key in keys if key.startswith(incomplete)]


def complete_setting(ctx: Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete KEY of KEY=VALUE, and after `=` the choices of the key."""
    from asyncrl.config import load

    key, separator, value = incomplete.partition("=")
    if not separator:
        return [CompletionItem(f"{item.value}=") for item in complete_key(ctx, param, incomplete)]
    choices = [choice for choice in load.list_choices(key) if choice.startswith(value)]
    return [CompletionItem(f"{key}={choice}") for choice in choices]


COMPLETERS = {"config": complete_config, "key": complete_key, "setting": complete_setting}


def emit(values: dict[str, Any], text: str = "") -> None:
    """Print a result to stdout, as one JSON object, as `text` or as readable lines.

    The lines leave out missing values and long tables, and round numbers.
    """
    if result.as_json:
        return result.put_result(values)
    if text:
        return print(text)
    for key, value in values.items():
        if value is not None and (not isinstance(value, dict) or len(value) < 12):
            print(f"{key:16} {value:.5g}" if isinstance(value, float) else f"{key:16} {value}")


def print_progress(text: str) -> None:
    """Print a line of progress to stderr, unbuffered."""
    print(text, file=sys.stderr)
