"""Presets: names that each set several keys of a section.  Defaults by the model's size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.config.layers import FlatTable, key_of
from asyncrl.contract.toml_writer import RawTable, read_table

PRESET_TABLES: dict[str, dict[str, RawTable]] = read_table(__file__)
PRESETS = PRESET_TABLES["correction"]
# key of a preset -> the keys that each of its values sets
BUNDLES: dict[str, dict[str, FlatTable]] = {
    f"{section}.preset": {
        name: {f"{section}.{key}": value for key, value in keys.items()}
        for name, keys in table.items()
    }
    for section, table in PRESET_TABLES.items()
}

# most parameters of a model -> its learning rate with AdamW; smaller ones have the default
RATES = ((10_000_000, None), (1_000_000_000, 1e-5), (math.inf, 1e-6))
LORA_FACTOR = 10  # of the learning rate of adapters to that of all weights


def forget(flat: FlatTable, sets: Sequence[str]) -> None:
    """Remove the file's keys that a preset on the command line replaces.

    A resolved file has all of them, so that the preset would otherwise change nothing."""
    set_keys = {*map(key_of, sets)}
    for chooser in BUNDLES.keys() & set_keys:
        for key in {key for keys in BUNDLES[chooser].values() for key in keys} - set_keys:
            flat.pop(key, None)


def read_headers(path: Path) -> Iterator[tuple[Path, int, RawTable]]:
    """Yield each safetensors file of a directory with the offset of its data and its header.

    The header maps names to dtype, shape and data_offsets."""
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(size))
        entries.pop("__metadata__", None)
        yield file, 8 + size, entries


def count_parameters(path: Path) -> int:
    """Return the number of parameters in the weight files of a directory; 0: unknown."""
    try:
        headers = [entries for _, _, entries in read_headers(path)]
        return sum(math.prod(entry["shape"]) for entries in headers for entry in entries.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return 0  # damaged: the checks before a run say how


def choose_learning_rate(path: str, *, lora: bool) -> tuple[float | None, str]:
    """Return the learning rate for the model at `path` with AdamW, and the reason.

    The rate is None for a small model and for a model of unknown size, which have the default. The
    size of a model of the hub is not known before its download: its rate is that of a large one."""
    count = math.inf if path.startswith("hf://") else count_parameters(Path(path))
    rate = next(rate for most, rate in RATES if count <= most)
    size = "a model of the hub" if count == math.inf else f"{count:,} parameters"
    if rate is not None and lora:
        return LORA_FACTOR * rate, f"default for adapters on {size}"
    return rate, f"default for {size}"
