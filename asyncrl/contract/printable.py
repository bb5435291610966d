"""Escape text from outside for a terminal, a log or an event."""

from __future__ import annotations

import signal
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

Say = Callable[[str], None]  # prints a line for the user
LINE_LENGTH = 300  # characters
# modules that call functions of the user
OURS = ("reward_worker.py", "user_function.py", "own_functions.py")
LONGEST_LINE = 8000  # characters of a line that mixes our text with text from outside


def escape_line(text: str, most: int = LINE_LENGTH) -> str:
    r"""Escape the unprintable characters of a text from outside and cut it to one line.

    A newline could forge a line of the log, an escape code could control the terminal, and a mark
    of writing direction could reorder the text beside it.

    >>> escape_line("no\x1b[2J\r\nok: \u202eall\ud800")
    'no\\x1b[2J\\r\\nok: \\u202eall\\ud800'
    >>> escape_line("naïve 漢字 ✓"), escape_line("x" * 9, 4)
    ('naïve 漢字 ✓', 'xxxx...')
    """
    line = text[:most]
    if not line.isprintable():
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    # an escape takes up to ten characters
    return line if len(text) <= most and len(line) <= most else line[:most] + "..."


def get_first_line(text: str) -> str:
    """Return the first line of an exception's text, escaped by `escape_line`."""
    lines = (line.strip() for line in text.splitlines())
    return escape_line(next((line for line in lines if line), ""))


def describe_exception(error: BaseException) -> str:
    """Describe an exception or exit on one line: `raised KeyError: 'x'`."""
    return get_first_line(
        f"called sys.exit({error.code!r})"
        if isinstance(error, SystemExit)
        else f"raised {type(error).__name__}: {error}"
    )


def list_user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an exception, from the user's function on."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [index for index, frame in enumerate(frames) if Path(frame.filename).name in OURS]
    return frames[ours[-1] + 1 :] if ours else list(frames)


def format_last_frame(error: BaseException) -> str:
    """Format the last frame outside libraries: ` at reward.py:12 in reward`, or ""."""
    frames = list_user_frames(error)
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    user_frames = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    if not user_frames:
        return ""
    last = user_frames[-1]
    return f" at {Path(last.filename).name}:{last.lineno} in {last.name}"


def describe_exit(code: int) -> str:
    """Name how a process ended: `exit code 3` or `SIGKILL`.

    >>> describe_exit(3), describe_exit(-9)
    ('exit code 3', 'SIGKILL')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
