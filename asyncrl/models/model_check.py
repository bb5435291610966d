"""Check a model directory before a run: a complete, finite causal LM that fits the settings.

Does not import torch for a model that the packed forward covers. Any other is loaded once by
transformers in a separate process (`python -m asyncrl.supervise.start asyncrl.models.model_check
PATH DTYPE KEY DEVICE`), because only transformers' classes define which weights they need. That
process also compares our log-probabilities with those of the model's own eager forward.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.presets import read_headers
from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.models import fetch, layout
from asyncrl.models.tokenizer import (
    check_weights,
    collect_stop_tokens,
    describe_missing_weights,
    load_tokenizer,
)
from asyncrl.records.jsonl import JsonObject

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
# a larger model is compared with its eager forward in its own dtype and on its own device
FLOAT32_BYTES = 16 << 30
# largest mean |difference| of log-probabilities between two correct forward passes, nats
NOISE_NATS = {"float32": 1e-3, "bfloat16": 0.25}
# (prompt, response) tokens of the compared samples, of two groups: their rows need padding
COMPARED = ((3, 5), (3, 9), (24, 32), (24, 8))
WIDEST_WINDOW = 1024  # of sliding attention that the compared samples reach beyond


def check(
    config: Config, report: Callable[[str], None] = lambda note: None, *, compares: bool = False
) -> Any:
    """Check the model, its references and the settings that depend on them.

    report: gets what the user should know of a model that can be trained.
    compares: also compare the packed forward, which transformers does not load, with transformers.
    Returns the tokenizer. Raises ConfigError with the first problem.
    """
    path = Path(config.model.path)
    raw, note = check_directory(path, "model.path", config, compares=compares)
    if (path / fetch.GENERATION_CONFIG).exists():  # it is exported as it is
        read_settings(path, "model.path", fetch.GENERATION_CONFIG)
    tokenizer = load_tokenizer(path)
    language = get_language_config(raw)
    size = language.get("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if isinstance(size, int) and largest >= size:
        raise ConfigError(
            f"model.path: the tokenizer in {path} has tokens up to number {largest}, the model's "
            f"vocabulary ends at {size - 1} (vocab_size): they do not belong together, or the "
            "embeddings were not resized"
        )
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
    replaced = getattr(tokenizer, "replaced_class", "")
    if note:
        report(note)
    coefficient = language.get("router_aux_loss_coef")
    if coefficient and language.get("output_router_logits"):
        report(
            f"router_aux_loss_coef = {coefficient} of config.json is not applied: the loss of RL "
            "has no term for the balance of experts"
        )
    if replaced:
        report(
            f"tokenizer.json is used as it is, because {replaced} of transformers reads otherwise"
        )
    if config.lora.rank and layout.is_plain_config(raw):  # the learner checks any other model
        names = (name.removesuffix(".weight") for name in layout.list_shapes(raw))
        linears = [name for name in names if name.endswith("_proj")]
        layout.select_targets(linears, config.lora.target_modules)
    for key, reference in list_references(config):
        reference_config, _ = check_directory(reference, key, config)
        reference_size = get_language_config(reference_config).get("vocab_size")
        if reference_size != size:
            raise ConfigError(
                f"{key}: {reference} has a vocabulary of {reference_size}, model.path of {size}"
            )
    return tokenizer


def check_directory(
    path: Path, key: str, config: Config, *, compares: bool = False
) -> tuple[JsonObject, str]:
    """Check the files of a model by themselves.

    Returns its config.json, and what `check_complete` does. Raises ConfigError.
    """
    raw = read_settings(path, key)
    check_kind(raw, path, key)
    check_weights(path)
    check_finite(path, key)
    model = config.model
    return raw, check_complete(raw, path, model.dtype, key, model.device, compares=compares)


def list_references(config: Config) -> list[tuple[str, Path]]:
    """Return the reference policies and teachers that the config names, with their keys."""
    kl = config.kl
    candidates = (
        ("model.reference", config.model.reference),
        ("kl.loss.reference", kl.loss.reference if kl.loss.coefficient > 0 else ""),
        ("kl.reward.reference", kl.reward.reference if kl.reward.coefficient > 0 else ""),
    )
    return [(key, Path(path)) for key, path in candidates if path]


def read_settings(path: Path, key: str, name: str = "config.json") -> JsonObject:
    """Read a JSON file of a model. Raises ConfigError, with `key` in the message."""
    try:
        raw = json.loads((path / name).read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: {path} is not a model directory (it has no {name})") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path / name} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{key}: {path / name} is not a JSON object")
    return raw


def get_language_config(raw: JsonObject) -> JsonObject:
    """Return the language model's part of a config."""
    part = raw.get("text_config")
    return part if isinstance(part, dict) else raw


def check_kind(raw: JsonObject, path: Path, key: str) -> None:
    """Raise ConfigError for encoders and models with another head."""
    for name in raw.get("architectures") or []:
        if str(name).endswith(OTHER_HEADS):
            raise ConfigError(f"{key}: {path} is a {name} (config.json), not a causal LM")
    if raw.get("is_encoder_decoder"):
        raise ConfigError(
            f"{key}: {path} is an encoder-decoder model (config.json), not a causal LM"
        )


def find_max_positions(raw: JsonObject) -> int | None:
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


def check_complete(
    raw: JsonObject, path: Path, dtype: str, key: str, device: str, *, compares: bool = False
) -> str:
    """Raise ConfigError for missing weights, wrong log-probabilities and encoders.

    Returns how the log-probabilities were compared; "" where only the headers were read.
    """
    if layout.is_plain_config(raw):
        present = {
            name: tuple(entry["shape"])
            for _, _, entries in read_headers(path)
            for name, entry in entries.items()
        }
        needed = layout.list_shapes(raw)
        if present == needed and not compares:
            return ""
        if present.items() < needed.items():
            raise ConfigError(
                f"{key}: {describe_missing_weights(path, sorted(set(needed) - set(present)))}"
            )
    argv = importing.make_command("asyncrl.models.model_check", str(path), dtype, key, device)
    process = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if process.returncode:
        lines = [x for x in process.stderr.splitlines() if x.strip()] or [
            f"exit code {process.returncode}"
        ]
        errors = [x.removeprefix("error: ") for x in lines if x.startswith("error: ")]
        raise ConfigError(errors[-1] if errors else f"{key}: {path} cannot be loaded: {lines[-1]}")
    return process.stdout.strip().rpartition("\n")[2]


def compare_with_eager(path: Path, dtype: str, device: str) -> str:
    """Compare our log-probabilities with those of transformers' eager attention, row by row.

    A fused kernel may leave out what a model asks for, and padding may change its results. Engine
    and learner would still agree with each other. Returns what was compared. Raises ConfigError
    for a difference beyond rounding, and like `load_policy`.
    """
    import psutil
    import torch

    from asyncrl.models import packed_forward, policy

    raw = get_language_config(read_settings(path, "model.path"))
    size = 4 * sum(
        math.prod(entry["shape"]) for *_, rows in read_headers(path) for entry in rows.values()
    )
    device = policy.resolve_device(device)
    if device != "cpu" and size > torch.cuda.mem_get_info()[0]:  # a run may shard it
        device = "cpu"
    place = f"{dtype} on {device}, as its weights take {size / (1 << 30):.0f} GiB in float32"
    if size <= min(FLOAT32_BYTES, psutil.virtual_memory().available // 2):
        dtype, device, place = "float32", "cpu", "float32"
    model = policy.load_policy(path, dtype, device)
    mark = model.vision.shape.token if model.vision is not None else None  # no text has it
    window = raw.get("sliding_window") or 0
    beyond = window if window <= WIDEST_WINDOW else 0
    longest = find_max_positions(raw) or WIDEST_WINDOW * 2
    vocabulary = int(model.hf.config.get_text_config().vocab_size)
    random = np.random.default_rng(0)

    def sample(length: int) -> np.ndarray:
        ids = random.integers(0, vocabulary, length, np.int32)
        if mark is not None:
            ids[ids == mark] = (mark + 1) % vocabulary
        return ids

    texts = {length: sample(length) for length, _ in COMPARED}
    samples = [
        (texts[length], sample(min(response + beyond, longest - length)))
        for length, response in COMPARED
    ]

    prompts, responses = zip(*samples, strict=True)
    ones = torch.ones(len(samples))
    rows = packed_forward.ForwardInput(prompts, responses, ones)

    def compute(model: policy.PolicyModel) -> Any:
        alone = policy.compute_plain_logprobs(model.hf, rows, 1, vision=model.vision)
        return alone.logprobs.cpu()

    with torch.no_grad():
        groups = [len(prompt) for prompt in prompts]
        output = model.logprobs(prompts, responses, ones.to(model.device), groups=groups)
        ours = output.logprobs.float().cpu()
        is_packed = model.fast is not None
        alone = ours if is_packed else compute(model)
        own = "packed forward" if is_packed else f"{model.hf.config._attn_implementation} attention"
        if own == "eager attention":
            capped = policy.caps_scores(model.hf.config)
            own += " (sdpa ignores the cap of its scores)" if capped else " (it has no sdpa)"
        name = type(model.hf).__name__
        del model
        # in transformers 5.19, Falcon's eager attention adds its ALiBi bias twice
        kind = "sdpa" if raw.get("model_type") == "falcon" and raw.get("alibi") else "eager"
        expected = compute(
            policy.load_policy(path, dtype, device, with_modules=True, attention=kind)
        )
    difference = float((ours - expected).abs().mean())
    described = f"those of transformers' {kind} attention in {place}"
    if difference <= NOISE_NATS[dtype]:
        return f"{own}; log-probabilities equal {described} to {difference:.0e} nats a token"
    is_padding = float((alone - expected).abs().mean()) <= NOISE_NATS[dtype]
    cause = "padded rows change its results" if is_padding else f"the {own} leaves something out"
    raise ConfigError(
        f"model.path: {path} would be trained as another model: its log-probabilities differ by "
        f"{difference:.2g} nats a token from {described}: {cause} ({name}); choose another model"
    )


def main(path: str, dtype: str, key: str, device: str) -> None:
    """Load and compare the model, in a separate process; print an error and exit if it fails."""
    try:
        print(compare_with_eager(Path(path), dtype, device))
    except AsyncrlError as error:
        print(f"error: {str(error).replace('model.path', key, 1)}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:5])
