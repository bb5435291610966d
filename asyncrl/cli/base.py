"""What every command shares: the group that turns errors into one line, the common options, how a
result is printed.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from asyncrl.cli import result
from asyncrl.contract import refusal
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.importing import append_working_directory
from asyncrl.contract.printable import LONGEST_LINE, escape_line

PATH = click.Path(path_type=Path)

# a write fails with these, and with no file's name
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class CommandGroup(click.Group):
    """Usage and expected errors are one line on stderr with their exit code; programming errors
    keep their traceback.

    places: command -> the module that defines it, under its own name; imported when it is asked
    for, so that a process imports its own command's file and no other."""

    def __init__(self, *args: Any, places: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places = dict(places or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self.places})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.places:
            found: click.Command = getattr(import_module(self.places[cmd_name]), cmd_name)
            return found
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        append_working_directory()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal of ASCII shows \xe9 for the rest
                stream.reconfigure(errors="backslashreplace")
        result.start_result()
        words = kwargs.get("args") or (args[0] if args else None) or sys.argv[1:]
        as_json = "--json" in words
        try:
            return super().main(*args, **(kwargs | {"standalone_mode": False}))
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            fail("interrupted", 130, as_json)
        except click.ClickException as error:
            fail(error.format_message(), 2, as_json)
        except AsyncrlError as error:
            refusal.send_refusal(error)
            fail(str(error), error.exit_code, as_json)
        except OSError as error:
            # of no file: a programming error, with its traceback
            if error.filename is None and error.errno not in DISK:
                raise
            fail(
                f"{error.filename or 'writing failed'}: {error.strerror}; is the disk full, or was "
                "the file removed or made read-only?",
                1,
                as_json,
            )


def fail(why: str, code: int, as_json: bool) -> NoReturn:
    """End with one line on stderr; with --json also as the last line of stdout, unless that was a
    result already.
    """
    with suppress(OSError):  # stderr may be a file on the disk that is full
        print(f"error: {escape_line(why, LONGEST_LINE)}", file=sys.stderr, flush=True)
    if as_json:
        result.put_error(why, code)
    sys.exit(code)


def options(*, source: bool = True) -> Callable[[Any], Any]:
    """CONFIG, --set and --json, of every command that takes a config; `source`: CONFIG must be
    given.
    """

    def add(command: Any) -> Any:
        command = click.option(
            "--json", "as_json", is_flag=True, help="the last line of stdout is one JSON object"
        )(command)
        command = click.option(
            "--set",
            "sets",
            multiple=True,
            metavar="KEY=VALUE",
            help="override a config key (a TOML value; text needs no quotes); repeatable",
        )(command)
        return click.argument("source", metavar="CONFIG", required=source, type=click.Path())(
            command
        )

    return add


def emit(value: dict[str, Any], as_json: bool) -> None:
    """Results go to stdout: one JSON object, or readable lines."""
    if as_json:
        result.print_result(value)
        return
    for key, shown in value.items():
        if not isinstance(shown, dict) or len(shown) < 12:
            print(f"{key:16} {shown}")


def print_progress(text: str) -> None:
    """What a reader follows while a command works: stderr, at once."""
    print(text, file=sys.stderr, flush=True)
