"""Parts shared by all commands: help with examples, one-line errors, common options, output."""

import difflib
import errno
import io
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

Decorator = Callable[[Any], Any]  # of a command
PATH = click.Path(path_type=Path)
KINDS = {
    "path": PATH,
    "file": click.Path(exists=True, dir_okay=False, path_type=Path),
    "integer": click.INT,
    "number": click.FLOAT,
}
OPTIONS: dict[str, list[dict[str, Any]]] = read_table(__file__)

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

    command_class = ExampleCommand

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


def command(*examples: str, name: str | None = None) -> Callable[[Any], Command]:
    """Make a command whose help shows `examples`."""
    return click.command(name, cls=ExampleCommand, examples=examples)


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
        as_json = "--json" in arguments
        try:
            return super().main(*args, **(kwargs | {"standalone_mode": False}))
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            fail("interrupted", 130, as_json)
        except click.exceptions.NoArgsIsHelpError as error:  # a group without a command
            print(error.format_message(), file=sys.stderr)
            if as_json:
                result.put_error("a command is missing", 2)
            sys.exit(2)
        except click.ClickException as error:
            fail(error.format_message(), 2, as_json)
        except AsyncrlError as error:
            refusal.send_refusal(error)
            fail(str(error), error.exit_code, as_json)
        except OSError as error:
            # without a file it is a programming error, which keeps its traceback
            if error.filename is None and error.errno not in DISK:
                raise
            fail(
                f"{error.filename or 'writing failed'}: {error.strerror}; is the disk full, or was "
                "the file removed or made read-only?",
                1,
                as_json,
            )


def fail(reason: str, code: int, as_json: bool) -> NoReturn:
    """Exit with one line on stderr; with --json also as the last line of stdout.

    After a printed result it prints no JSON, so that the result stays the last line."""
    with suppress(OSError):  # stderr may be a file on the disk that is full
        print(f"error: {escape_line(reason, LONGEST_LINE)}", file=sys.stderr)
    if as_json:
        result.put_error(reason, code)
    sys.exit(code)


def json_option(command: Any) -> Any:
    """Add --json."""
    return click.option(
        "--json", "as_json", is_flag=True, help="print one JSON object as the last line of stdout"
    )(command)


def option_table(name: str) -> Decorator:
    """Add the arguments and options of a table of base.toml, which explains their fields."""

    def add_all(command: Any) -> Any:
        for row in reversed(OPTIONS[name]):
            fields = dict(row)
            least, most, above = (fields.pop(key, None) for key in ("least", "most", "above"))
            kind = KINDS.get(fields.pop("type", ""))
            if "choices" in fields:
                kind = click.Choice(fields.pop("choices"))
            elif least is not None:
                range_of = click.FloatRange if kind is click.FLOAT else click.IntRange
                kind = range_of(least, most, min_open=bool(above))
            flags = fields.pop("flags").split()
            add = click.option if flags[0].startswith("-") else click.argument
            command = add(*flags, type=kind, **fields)(command)
        return command

    return add_all


def set_option(help_text: str) -> Decorator:
    """Add --set KEY=VALUE, which completes config keys."""
    return click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=complete_setting,
        help=help_text,
    )


def config_argument(*, required: bool = True) -> Decorator:
    """Add CONFIG, a file or the name of a bundled config."""
    return click.argument(
        "source",
        metavar="CONFIG",
        required=required,
        type=click.Path(),
        shell_complete=complete_config,
    )


def options(*, source: bool = True) -> Decorator:
    """Add CONFIG, --set and --json.  source: CONFIG is required."""

    def add(command: Any) -> Any:
        overrides = set_option(
            "override a config key; a TOML value, but text needs no quotes; repeatable"
        )
        return config_argument(required=source)(overrides(json_option(command)))

    return add


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


def emit(values: dict[str, Any], as_json: bool) -> None:
    """Print a result to stdout, as one JSON object or as readable lines.

    The lines leave out missing values and long tables, and round numbers.
    """
    if as_json:
        result.print_result(values)
        return
    for key, value in values.items():
        if value is not None and (not isinstance(value, dict) or len(value) < 12):
            print(f"{key:16} {value:.5g}" if isinstance(value, float) else f"{key:16} {value}")


def print_progress(text: str) -> None:
    """Print a line of progress to stderr, unbuffered."""
    print(text, file=sys.stderr)
