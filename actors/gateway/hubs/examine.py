"""Write prompts of a hub: `python -m actors.gateway.hubs.examine ENV ARGS DIR`.

ENV is agent.env and ARGS agent.args as JSON. The rows go to DIR/train.jsonl and DIR/eval.jsonl.
Standard output is one JSON object: the number of rows of each, or `error`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from actors.gateway.hubs import SPLITS, self_playing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import describe_exception
from asyncrl.records.jsonl import JsonObject


def write_rows(env: str, rows: Iterator[JsonObject], file: TextIO) -> int:
    """Write the rows of a data set and return their number.

    Raises ConfigError for any error in building the data set.
    """
    count = 0
    try:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    except Exception as error:
        reason = str(error) if isinstance(error, ConfigError) else describe_exception(error)
        raise ConfigError(f"agent.env = {env}: its data set: {reason}") from error
    return count


def examine(env: str, args: JsonObject, folder: Path) -> JsonObject:
    """Write the environment's prompts into `folder`.

    Returns split -> number of rows, or "error" -> the environment's error.
    """
    counts: JsonObject = {}
    try:
        environment = self_playing.load(env, args)
        for split in SPLITS:
            with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                counts[split] = write_rows(env, environment.iterate_rows(split), file)
    except ConfigError as error:
        return {"error": str(error)}
    return counts


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as result:
        os.dup2(2, 1)  # what an environment prints must not mix with the result
        env, args, folder = sys.argv[1:]
        json.dump(examine(env, json.loads(args), Path(folder)), result)
