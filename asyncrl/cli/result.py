"""Print the JSON object of a command, its result or its error, as the last line of stdout."""

from __future__ import annotations

import json
from typing import Any

_printed: list[bool] = []


def start_result() -> None:
    """Forget the results of earlier commands of this process."""
    _printed.clear()


def print_result(value: dict[str, Any]) -> None:
    """Print the result."""
    _printed.append(True)
    print(json.dumps(value))


def put_error(reason: str, exit_code: int) -> None:
    """Print the error, unless a result was printed already."""
    if not _printed:
        print(json.dumps({"error": reason, "exit_code": exit_code}))
