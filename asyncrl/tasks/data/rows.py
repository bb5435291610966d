"""Read rows of JSONL, CSV, parquet and Arrow files, and of directories of data sets.

A source is PATH or PATH#SPLIT. A directory was written by `save_to_disk` of `datasets`, or holds
files whose names or folders name their split, as in a repository of the hub."""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import TEMPLATE_COLUMNS
from asyncrl.records.jsonl import JsonObject

LocatedRow = tuple[str, Any]  # FILE:LINE or the like, and the row
# JSON's escape of a lone surrogate, which UTF-8 text cannot contain otherwise
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
SUFFIXES = (".parquet", ".jsonl", ".csv", ".arrow")
# word in a path -> the split that it names
SPLITS = {"train": "train", "test": "test", "validation": "validation"} | {
    "valid": "validation",
    "dev": "validation",
    "val": "validation",
    "eval": "validation",
}


def _read_jsonl(path: Path) -> Iterator[LocatedRow]:
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode())
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{path}:{number}: not JSON: {error.msg} at column {error.colno}; one object a "
                    "line"
                ) from error
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{path}:{number}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8"
                ) from error
            if SURROGATE_ESCAPE.search(line):
                require_encodable(where, row)
            yield where, row


def require_encodable(where: str, row: Any) -> None:
    r"""Raise ConfigError, starting with `where`, for a row that UTF-8 cannot encode.

    JSON allows \ud83d without its second half, but a message with such a text cannot be sent."""
    for key, value in row.items() if isinstance(row, dict) else ():
        try:
            json.dumps([key, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise ConfigError(
                f"{where}: `{ascii(key)[1:-1]}` has {half}, half of a character, which UTF-8 "
                "cannot encode; write the whole character, or leave it out"
            ) from error


def _read_arrow(path: Path) -> Iterator[LocatedRow]:
    """Read a parquet file, or a stream of Arrow."""
    kind = "a parquet" if path.suffix == ".parquet" else "an Arrow"
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            f"{path}: {kind} file needs pyarrow: pip install 'asyncrl[parquet]'"
        ) from error
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not {kind} file: {str(error).splitlines()[0]}") from error
    try:
        rows = table.to_pylist()
    except UnicodeDecodeError:
        rows = _decode_rows(path, table)
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", drop_added_fields(row)


def drop_added_fields(row: Mapping[str, Any]) -> JsonObject:
    """Drop the null fields of chat turns and tools: Arrow adds those that other rows have."""
    return {
        name: _drop_nulls(value)
        if name in TEMPLATE_COLUMNS
        or (isinstance(value, list) and all(isinstance(x, dict) and "role" in x for x in value))
        else value
        for name, value in row.items()
    }


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return {"content": None, **fields} if "role" in value else fields


def _decode_rows(path: Path, table: Any) -> list[Any]:
    """Read the rows of a table one by one.

    Raises ConfigError for the first row whose text is not UTF-8."""
    rows = []
    for number in range(table.num_rows):
        try:
            rows += table.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: row {number + 1}: not UTF-8 ({error.reason}); write its text as UTF-8"
            ) from error
    return rows


def _read_csv(path: Path) -> Iterator[LocatedRow]:
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8"
        ) from error
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if None in row or None in row.values():
                raise ConfigError(
                    f"{where}: has another number of fields than the header "
                    f"({len(rows.fieldnames or ())}); quote a field that contains a comma"
                )
            yield where, row
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error


READERS = {".parquet": _read_arrow, ".csv": _read_csv, ".arrow": _read_arrow}


def read_rows(file: Path) -> Iterator[LocatedRow]:
    """Yield (location, row) for each row of a file.  Raises ConfigError."""
    return READERS.get(file.suffix, _read_jsonl)(file)


def find_splits(directory: Path) -> dict[str, list[Path]]:
    """Return the files of each split of a directory, or {} if it has no data files.

    Files whose path names no split belong to `train`."""
    saved = directory / "dataset_dict.json"
    if saved.is_file():
        names = json.loads(saved.read_bytes())["splits"]
        return {name: _list_saved_files(directory / name) for name in names}
    if (directory / "state.json").is_file():
        return {"train": _list_saved_files(directory)}
    splits: dict[str, list[Path]] = {}
    for path in sorted(directory.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            words = re.split("[^a-z]+", str(path.relative_to(directory)).lower())
            split = next((SPLITS[word] for word in words if word in SPLITS), "train")
            splits.setdefault(split, []).append(path)
    return splits


def _list_saved_files(directory: Path) -> list[Path]:
    """List the files of a data set that `save_to_disk` wrote, in their order."""
    state = json.loads((directory / "state.json").read_bytes())
    return [directory / file["filename"] for file in state["_data_files"]]


def find_files(source: str) -> list[Path] | None:
    """Return the files of PATH or PATH#SPLIT, or None if the path does not exist.

    For a directory with several splits and a source without a split, these are the files of
    `train`. Raises ConfigError."""
    path, split = Path(source), ""
    if not path.exists() and "#" in source:
        name, _, split = source.rpartition("#")
        path = Path(name)
    if path.is_file():
        return [path]
    if not path.is_dir():
        return None
    try:
        splits = find_splits(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a saved data set: {error}") from error
    if not splits:
        raise ConfigError(f"{path}: has no data files ({', '.join(SUFFIXES)})")
    if not split:
        split = "train" if "train" in splits or len(splits) > 1 else next(iter(splits))
    if split not in splits:
        raise ConfigError(
            f"{path}: has no split {split}; write {path}#SPLIT with one of {', '.join(splits)}"
        )
    return splits[split]
