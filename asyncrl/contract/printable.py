"""How text that comes from outside is shown on a terminal, in a log and in an event."""

from __future__ import annotations

LINE_LENGTH = 300  # characters
LONGEST_LINE = 8000  # characters of a line that holds words of ours and of others


def escape_line(text: str, most: int = LINE_LENGTH) -> str:
    r"""Show text from outside on one line: what is not printable is escaped, the end is cut.

    A newline would forge a line of the log, an escape code would act on the terminal, and a mark
    of writing direction would reorder what stands beside it.

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
