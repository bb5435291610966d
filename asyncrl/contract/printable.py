"""Escape text from outside for a terminal, a log or an event."""

from __future__ import annotations

import signal

LINE_LENGTH = 300  # characters
LONGEST_LINE = 8000  # characters of a line that mixes our text with text from outside


def escape_line(text: str, most: int = LINE_LENGTH) -> str:
    r"""Show text from outside on one line: escape unprintable characters, cut the end.

    A newline could forge a line of the log, an escape code could control the terminal, and a mark
    of writing direction could reorder the text beside it.

    >>> escape_line("no\x1b[2J\r\nok: \u202eall\ud800")
    'no\\x1b[2J\\r\\nok: \\u202eall\\ud800'
    >>> escape_line("naïve 漢字 ✓"), escape_line("x" * 9, 4)
    ('naïve 漢字 ✓', 'xxxx...')
    """
    shown = text[:most]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    # an escape takes up to ten characters
    return shown if len(text) <= most and len(shown) <= most else shown[:most] + "..."


def describe_exit(code: int) -> str:
    """Name how a process ended: `exit code 3` or `SIGKILL`.

    >>> describe_exit(3), describe_exit(-9)
    ('exit code 3', 'SIGKILL')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
