"""Write prompts from Python objects, such as a data set of the package `datasets`, to files."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks.data.rows import drop_added_fields

FOLDER = ".prompts"  # name of the folder of these files, in the folder of all runs
KEYS = ("prompts", "heldout", "ood")


def write_content(content: str, folder: Path, suffix: str = ".jsonl") -> str:
    """Write a file named by the hash of its content unless it exists; return its path."""
    path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}{suffix}"
    if not path.exists():
        atomic_write.create_directory(folder, 0o700)
        with atomic_write.replace(path, part=path.with_suffix(f".{os.getpid()}")) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return str(path)


def dump_rows(key: str, rows: Any) -> str:
    """Return the rows of an object as JSON lines.

    rows: any iterable of mappings, such as a `datasets.Dataset` or a list of dicts. Raises
    ConfigError that starts with `key`."""
    if isinstance(rows, Mapping):  # a DatasetDict
        raise ConfigError(
            f"{key}: has several splits; give one of them, as data[{next(iter(rows), '')!r}]"
        )
    lines: list[str] = []
    try:
        for row in rows:
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"{key}: row {len(lines)} is a {type(row).__name__}; each must be a mapping "
                    "from columns to values"
                )
            columns = drop_added_fields(row) if hasattr(rows, "features") else dict(row)
            lines.append(json.dumps(columns, default=str) + "\n")
    except TypeError as error:
        type_name = type(rows).__name__
        raise ConfigError(
            f"{key}: a {type_name} has no rows of text and numbers ({error}); give a path, a data "
            "set or a list of dicts"
        ) from error
    return "".join(lines)


def write_objects(table: JsonObject, folder: Path) -> None:
    """Replace the objects in a config's table by the paths of files with their rows.

    The files are named by their content, so that a resumed run reads the same rows. Raises
    ConfigError."""
    task = table.get("task")
    mixture = task.get("mixture", []) if isinstance(task, dict) else []
    sections = {"task": task} | {f"task.mixture[{n}]": part for n, part in enumerate(mixture)}
    sets = enumerate((table.get("evaluation") or {}).get("sets", []))
    sections |= {f"evaluation.sets[{n}]": part for n, part in sets}
    for name, section in sections.items():
        for key in ("file",) if name.startswith("evaluation") else KEYS:
            if isinstance(section, dict) and not isinstance(section.get(key, ""), str):
                section[key] = write_content(dump_rows(f"{name}.{key}", section[key]), folder)
