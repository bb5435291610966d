"""The config of `asyncrl sft`: supervised training of a model on given answers."""

from __future__ import annotations

from typing import Literal

from asyncrl.algorithms.settings import Count, Decay, NonNegative, Positive, Section, Seed, Share
from asyncrl.config import load, rules


class SftModel(Section):
    path: str
    """Hugging Face directory of the model to train."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights. bfloat16 halves the memory and is less precise."""
    device: str = "auto"
    """Device: auto, cpu, cuda or cuda:N."""


class SftData(Section):
    train: str
    """Training data, JSONL or parquet: prompt and answer, or messages, one sample a line."""
    heldout: str = ""
    """Held-out data in the same format, never trained on. Empty: no held-out loss."""
    context: Positive = 2048
    """Maximum length of a prompt with its answer, in tokens."""
    too_long: Literal["stop", "skip"] = "stop"
    """Treatment of longer samples. stop: an error; skip: leave them out and report their number."""


class SftTraining(Section):
    steps: Positive = 100
    """Optimizer steps."""
    batch: Positive = 64
    """Samples of an optimizer step."""
    micro_batch_tokens: Positive = 16384
    """Tokens (prompts and answers, padded) in one forward pass. Lower it when memory runs out; the
    result stays the same."""
    lr: NonNegative = 1e-4
    """Learning rate at the end of the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after the warm-up: constant, or falling to lr_end of it at the
    end of the training."""
    warmup_steps: Count = 20
    """Steps over which the learning rate rises linearly from 0 to training.lr; step 0 is made at 0.
    0: none."""
    lr_end: Share = 0.05
    """Share of lr at which linear and cosine end."""
    beta1: Decay = 0.9
    """AdamW: decay of the running mean of the gradient."""
    beta2: Decay = 0.99
    """AdamW: decay of the running mean of the squared gradient."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay. 0: none."""
    clip_norm: NonNegative = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down. 0: no clipping."""
    heldout_every: Count = 0
    """Steps between held-out losses. 0: only at the start and the end."""
    checkpoint_every: Positive = 100
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints to keep. Older ones are deleted."""
    threads: Positive = 1
    """OpenMP threads."""


class SftConfig(Section, kw_only=True):
    """The config of supervised training.  `model.path` and `data.train` have no default."""

    name: str = ""
    """Name of the run directory. Empty: the config file's name and the time."""
    runs: str = "runs"
    """Directory that holds the run directories."""
    seed: Seed = 0
    """Seed of the order of samples."""
    model: SftModel
    data: SftData
    training: SftTraining = SftTraining()


def read(path: str, sets: tuple[str, ...] = ()) -> SftConfig:
    """Load the config in `path` with `sets` applied.  Raises ConfigError like `load.load`."""
    return load.load_as(SftConfig, rules.check_name_and_device, path, sets)
