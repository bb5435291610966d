"""Print the JSON object of a command, its result or its error, as the last line of stdout."""

import json
from typing import Any

as_json = False  # whether the running command has --json
printed: list[bool] = []


def put_result(value: dict[str, Any]) -> None:
    """Print the result with --json."""
    if as_json:
        printed.append(True)
        print(json.dumps(value))


def put_error(reason: str, exit_code: int) -> None:
    """Print the error with --json, unless a result was printed already."""
    if as_json and not printed:
        print(json.dumps({"error": reason, "exit_code": exit_code}))
