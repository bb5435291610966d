"""The config of `asyncrl sft`: supervised training of a model on given answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count, NonNegative, Positive, Seed, Share
from asyncrl.config import load, rules


class SftModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: Annotated[str, Meta(description="Hugging Face directory of the model to train.")]
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(
            description="Data type of the weights. bfloat16 halves the memory and is less precise."
        ),
    ] = "float32"
    device: Annotated[str, Meta(description="Device: auto, cpu, cuda or cuda:N.")] = "auto"


class SftData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    train: Annotated[
        str,
        Meta(
            description="Training data, JSONL or parquet: prompt and answer, or messages, one "
            "sample a line."
        ),
    ]
    heldout: Annotated[
        str,
        Meta(
            description="Held-out data in the same format, never trained on. Empty: no "
            "held-out loss."
        ),
    ] = ""
    context: Annotated[
        Positive, Meta(description="Maximum length of a prompt with its answer, in tokens.")
    ] = 2048
    too_long: Annotated[
        Literal["stop", "skip"],
        Meta(
            description="Treatment of longer samples. stop: an error; skip: leave them out and "
            "report their number."
        ),
    ] = "stop"


class SftTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    steps: Annotated[Positive, Meta(description="Optimizer steps.")] = 100
    batch: Annotated[Positive, Meta(description="Samples of an optimizer step.")] = 64
    micro_batch_tokens: Annotated[
        Positive,
        Meta(
            description="Tokens (prompts and answers, padded) in one forward pass. Lower it "
            "when memory runs out; the result stays the same."
        ),
    ] = 16384
    lr: Annotated[NonNegative, Meta(description="Learning rate at the end of the warm-up.")] = 1e-4
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Meta(
            description="Course of the learning rate after the warm-up: constant, or falling to "
            "lr_end of it at the end of the training."
        ),
    ] = "linear"
    warmup_steps: Annotated[
        Count,
        Meta(
            description="Steps over which the learning rate rises linearly from 0 to training.lr; "
            "step 0 is made at 0. 0: none."
        ),
    ] = 20
    lr_end: Annotated[Share, Meta(description="Share of lr at which linear and cosine end.")] = 0.05
    beta1: Annotated[
        Share, Meta(description="AdamW: decay of the running mean of the gradient.")
    ] = 0.9
    beta2: Annotated[
        Share, Meta(description="AdamW: decay of the running mean of the squared gradient.")
    ] = 0.99
    weight_decay: Annotated[NonNegative, Meta(description="Decoupled weight decay. 0: none.")] = 0.0
    clip_norm: Annotated[
        float,
        Meta(
            ge=0,
            description="Largest norm of the gradient; a larger gradient is scaled down. 0: no "
            "clipping.",
        ),
    ] = 1.0
    heldout_every: Annotated[
        Count, Meta(description="Steps between held-out losses. 0: only at the start and the end.")
    ] = 0
    checkpoint_every: Annotated[Positive, Meta(description="Steps between checkpoints.")] = 100
    keep_checkpoints: Annotated[
        Positive, Meta(description="Newest checkpoints to keep. Older ones are deleted.")
    ] = 2
    threads: Annotated[Positive, Meta(description="OpenMP threads.")] = 1


class SftConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The config of supervised training.  `model.path` and `data.train` have no default."""

    name: Annotated[
        str,
        Meta(description="Name of the run directory. Empty: the config file's name and the time."),
    ] = ""
    runs: Annotated[str, Meta(description="Directory that holds the run directories.")] = "runs"
    seed: Annotated[Seed, Meta(description="Seed of the order of samples.")] = 0
    model: SftModel
    data: SftData
    training: SftTraining = SftTraining()


def check(config: SftConfig) -> list[str]:
    """Return the violations of rules that a key's type does not express."""
    if config.name in (".", "..") or set(config.name) & {"/", "\\", "\0"}:
        return [
            f"name: {config.name!r} must be the name of one directory, without a path; `runs` "
            "sets the folder of all runs"
        ]
    return rules.check_device(config.model.device)


def read(path: str, sets: tuple[str, ...] = ()) -> SftConfig:
    """Load the config in `path` with `sets` applied.  Raises ConfigError like `load.load`."""
    return load.load_as(load.ConfigSchema(SftConfig, check), path, sets)


def build_schema() -> dict[str, Any]:
    """Return the JSON schema of the config for editors."""
    return msgspec.json.schema(SftConfig)
