"""Check a model directory before a run: a complete, finite causal LM that fits the settings.

Does not import torch for a model that the packed forward covers. Any other is loaded once by
transformers in a separate process (`python -m asyncrl.supervise.start asyncrl.models.model_check
PATH DTYPE`), because only transformers' classes define which weights they need.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.models import layout
from asyncrl.models.tokenizer import (
    check_weights,
    collect_stop_tokens,
    describe_missing_weights,
    load_tokenizer,
)

OTHER_HEADS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForPreTraining",
    "ForNextSentencePrediction",
)
POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
# safetensors dtype -> numpy's unsigned type of that size, and the bits of the exponent, which are
# all set only in infinities and NaN
EXPONENT = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
CHUNK = 1 << 20  # numbers checked at a time, which fit into the core's cache


def check(config: Config) -> Any:
    """Check the model, its references and the settings that depend on them.

    Returns the tokenizer. Raises ConfigError with the first problem.
    """
    path = Path(config.model.path)
    raw = read_settings(path, "model.path")
    check_kind(raw, path, "model.path")
    check_weights(path)
    tokenizer = load_tokenizer(path)
    check_vocabulary(raw, path, tokenizer)
    max_positions = find_max_positions(raw)
    if max_positions is not None and config.generator.context > max_positions:
        raise ConfigError(
            f"generator.context: {config.generator.context} tokens; the model in {path} has "
            f"{max_positions} positions (config.json)"
        )
    if not collect_stop_tokens(tokenizer, config):
        raise ConfigError(
            "model.path: no token ends a completion: neither the tokenizer nor "
            f"generation_config.json in {path} has an end-of-sequence token; list the texts of "
            "such tokens in generator.stop"
        )
    check_complete(raw, path, config.model.dtype, "model.path")
    check_finite(path, "model.path")
    check_adapters(config, raw)
    vocabulary = get_language_config(raw).get("vocab_size")
    for key, reference in list_references(config):
        reference_config = read_settings(reference, key)
        check_kind(reference_config, reference, key)
        check_weights(reference)
        reference_vocabulary = get_language_config(reference_config).get("vocab_size")
        if reference_vocabulary != vocabulary:
            raise ConfigError(
                f"{key}: {reference} has a vocabulary of {reference_vocabulary}, model.path of "
                f"{vocabulary}"
            )
        check_complete(reference_config, reference, config.model.dtype, key)
        check_finite(reference, key)
    return tokenizer


def list_references(config: Config) -> list[tuple[str, Path]]:
    """Return the reference policies and teachers that the config names, with their keys."""
    kl = config.kl
    candidates = (
        ("model.reference", config.model.reference),
        ("kl.loss.reference", kl.loss.reference if kl.loss.coefficient > 0 else ""),
        ("kl.reward.reference", kl.reward.reference if kl.reward.coefficient > 0 else ""),
    )
    return [(key, Path(path)) for key, path in candidates if path]


def check_adapters(config: Config, raw: dict[str, Any]) -> None:
    """Check that adapters can be attached to the configured modules. Raises ConfigError."""
    if not config.lora.rank:
        return
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("lora.rank: needs peft: pip install 'asyncrl[lora]'")
    if layout.is_plain_config(raw):  # for any other model the learner checks it
        layout.select_targets(layout.list_linears(raw), config.lora.target_modules)


def read_settings(path: Path, key: str) -> dict[str, Any]:
    """Read config.json. Raises ConfigError, with `key` in the message."""
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{key}: {path} is not a model directory (it has no config.json)"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path / 'config.json'} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{key}: {path / 'config.json'} is not a JSON object")
    return raw


def get_language_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config."""
    part = raw.get("text_config")
    return part if isinstance(part, dict) else raw


def check_kind(raw: dict[str, Any], path: Path, key: str) -> None:
    """Raise ConfigError for encoders and models with another head."""
    for name in raw.get("architectures") or []:
        if str(name).endswith(OTHER_HEADS):
            raise ConfigError(f"{key}: {path} is a {name} (config.json), not a causal LM")
    if raw.get("is_encoder_decoder"):
        raise ConfigError(
            f"{key}: {path} is an encoder-decoder model (config.json), not a causal LM"
        )


def check_vocabulary(raw: dict[str, Any], path: Path, tokenizer: Any) -> None:
    """Raise ConfigError for a tokenizer with tokens that the model has no embedding for."""
    size = get_language_config(raw).get("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if isinstance(size, int) and largest >= size:
        raise ConfigError(
            f"model.path: the tokenizer in {path} has tokens up to number {largest}, the model's "
            f"vocabulary ends at {size - 1} (vocab_size): they do not belong together, or the "
            "embeddings were not resized"
        )


def find_max_positions(raw: dict[str, Any]) -> int | None:
    """Return the model's longest context in tokens; None if its config does not give it."""
    raw = get_language_config(raw)
    longest = next((raw[k] for k in POSITIONS if isinstance(raw.get(k), int)), None)
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if (
        longest is not None
        and isinstance(rope, dict)
        and isinstance(factor := rope.get("factor"), int | float)
    ):
        longest = max(
            longest, int(factor * (rope.get("original_max_position_embeddings") or longest))
        )
    return longest


def read_headers(path: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Yield each safetensors file with the offset of its data and its header.

    The header maps names to dtype, shape and data_offsets. `check_weights` has validated it.
    """
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(size))
        entries.pop("__metadata__", None)
        yield file, 8 + size, entries


def check_finite(path: Path, key: str) -> None:
    """Raise ConfigError for weights with NaN or infinities."""
    for file, begin, entries in read_headers(path):
        with file.open("rb") as opened:
            for name, entry in entries.items():
                if entry["dtype"] not in EXPONENT:
                    continue
                kind, mask = EXPONENT[entry["dtype"]]
                opened.seek(begin + entry["data_offsets"][0])
                size = entry["data_offsets"][1] - entry["data_offsets"][0]
                remaining = size // np.dtype(kind).itemsize
                while remaining > 0:
                    bits = np.fromfile(opened, kind, min(remaining, CHUNK))
                    remaining -= max(len(bits), 1)
                    if ((bits & mask) == mask).any():
                        raise ConfigError(
                            f"{key}: {name} in {file} has NaN or infinities: copy the weights "
                            "again, or train from an earlier checkpoint"
                        )


def check_complete(raw: dict[str, Any], path: Path, dtype: str, key: str) -> None:
    """Raise ConfigError for missing weights, and for models that attend to later tokens."""
    if layout.is_plain_config(raw):
        present = {
            name: tuple(entry["shape"])
            for _, _, entries in read_headers(path)
            for name, entry in entries.items()
        }
        needed = layout.list_shapes(raw)
        if present == needed:
            return
        if present.items() < needed.items():
            raise ConfigError(
                f"{key}: {describe_missing_weights(path, sorted(set(needed) - set(present)))}"
            )
    argv = importing.make_command("asyncrl.models.model_check", str(path), dtype, key)
    process = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if process.returncode:
        lines = [x for x in process.stderr.splitlines() if x.strip()] or [
            f"exit code {process.returncode}"
        ]
        errors = [x.removeprefix("error: ") for x in lines if x.startswith("error: ")]
        raise ConfigError(errors[-1] if errors else f"{key}: {path} cannot be loaded: {lines[-1]}")


def main(path: str, dtype: str, key: str) -> None:
    """Load the model on the CPU, in a separate process; print an error and exit if it fails."""
    from asyncrl.models import policy

    try:
        policy.load_policy(path, dtype, "cpu")
    except AsyncrlError as error:
        print(f"error: {str(error).replace('model.path', key, 1)}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:4])
