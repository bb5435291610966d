"""The config of `asyncrl sft`: supervised training of a model on answers that are given."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count, NonNegative, Positive, Seed, Share
from asyncrl.config import load, rules


class SftModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: Annotated[str, Meta(description="Hugging Face directory of the model to begin with")]
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N")] = "auto"


class SftData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    train: Annotated[
        str, Meta(description="JSONL or parquet: prompt and answer, or messages, a sample a line")
    ]
    heldout: Annotated[
        str, Meta(description="the same, never trained on; empty: no held-out loss")
    ] = ""
    context: Annotated[
        Positive, Meta(description="tokens of a prompt with its answer that a row may have")
    ] = 2048
    too_long: Annotated[
        Literal["stop", "skip"], Meta(description="a longer row: an error, or left out and counted")
    ] = "stop"


class SftTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    steps: Annotated[Positive, Meta(description="optimizer steps")] = 100
    batch: Annotated[Positive, Meta(description="rows of an optimizer step")] = 64
    micro_batch_tokens: Annotated[
        Positive, Meta(description="tokens (prompt and answer, padded) in one forward")
    ] = 16384
    lr: NonNegative = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: Count = 20
    lr_end: Annotated[
        Share, Meta(description="share of lr that linear and cosine never fall below")
    ] = 0.05
    beta1: Share = 0.9
    beta2: Share = 0.99
    weight_decay: NonNegative = 0.0
    clip_norm: Annotated[float, Meta(ge=0, description="gradient norm; 0: no clipping")] = 1.0
    heldout_every: Annotated[
        Count, Meta(description="steps between held-out losses; 0: at the start and the end only")
    ] = 0
    checkpoint_every: Annotated[Positive, Meta(description="steps")] = 100
    keep_checkpoints: Positive = 2
    threads: Annotated[Positive, Meta(description="OMP threads")] = 1


class SftConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole tree.  `model.path` and `data.train` have no default."""

    name: Annotated[
        str, Meta(description="of the directory; empty: the file's name and the time")
    ] = ""
    runs: Annotated[str, Meta(description="directory of run directories")] = "runs"
    seed: Seed = 0
    model: SftModel
    data: SftData
    training: SftTraining = SftTraining()


def check(config: SftConfig) -> list[str]:
    """Rules beyond one key."""
    if config.name in (".", "..") or set(config.name) & {"/", "\\", "\0"}:
        return [f"name: {config.name!r} is no name of one directory; see `runs`"]
    return rules.device_problems(config.model.device)


def read(path: str, sets: tuple[str, ...] = ()) -> SftConfig:
    """The config in `path` with `sets` applied.  Raises ConfigError as `load.load` does."""
    return load.load_as(load.ConfigSchema(SftConfig, check), path, sets)


def schema() -> dict[str, Any]:
    """JSON schema of the config, for editors."""
    return msgspec.json.schema(SftConfig)
