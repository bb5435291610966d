"""The config of `asyncrl tinker`: a server of the Tinker API for one base model."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncrl.algorithms.settings import (
    Count,
    NonNegative,
    Port,
    Positive,
    PositiveFloat,
    Section,
    Seed,
)
from asyncrl.config import load, rules
from asyncrl.config.tree import Config, LoraConfig


class TinkerModel(Section):
    path: str
    """Hugging Face directory of the base model and its tokenizer. Clients name it by this path, or
    by its last one or two parts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights. bfloat16 halves the memory and is less precise."""
    device: str = "auto"
    """Device: auto, cpu, cuda or cuda:N."""
    warm_start: bool = False
    """If `path` does not exist, build a tiny model there and train it on additions in the
    cookbook's format role_colon."""


class ServerAddress(Section):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8931
    """Port to listen on. 0: any free one."""
    body_mib: Positive = 64
    """Largest request body, in MiB. Clients send at most 5 MB."""
    client_transport: Literal["rust", "python"] = "python"
    """HTTP implementation that the server asks clients to use. rust: faster with many requests at
    once, but a client that exits during requests may abort; python: slower, but exits cleanly."""


class TinkerSampling(Section):
    slots: Positive = 64
    """Sequences that are sampled at the same time."""
    context: Positive = 2048
    """Maximum length of prompt and sequence together, in tokens."""
    max_new_tokens: Positive = 256
    """Length of a sequence whose request sets no max_tokens."""
    threads: Positive = 1
    """OpenMP threads of the sampling process."""


class TinkerTraining(Section):
    micro_batch_tokens: Positive = 16384
    """Tokens of one forward pass, padded. Lower it when memory runs out; the result stays the
    same."""
    checkpoint_every: Positive = 10
    """Optimizer steps between checkpoints. A restarted server repeats the steps since the last
    one."""
    threads: Positive = 1
    """OpenMP threads of the training process."""


class TinkerStaleness(Section):
    max_lag: NonNegative = float("inf")
    """Largest lag of a trained token, in optimizer steps of its model: a whole number or inf."""
    on_exceed: Literal["refuse", "pace", "mask"] = "refuse"
    """Treatment of a token above max_lag. refuse: the request fails and names the sequence; pace:
    also hold sampling requests while a client is too far ahead; mask: exclude the token from the
    loss."""
    unknown: Literal["train", "refuse"] = "train"
    """Treatment of sampled tokens whose sequence the server cannot identify. train: train on them
    and report them as unknown; refuse: the request fails."""
    supervised: Literal["train", "refuse"] = "train"
    """Treatment of tokens that cross_entropy trains, unless a provenance span names their sequence.
    train: train on them and count them as supervised; refuse: the request fails."""


UNPUBLISHED = "stable_reinforce"  # a loss of the API, the default of the cookbook since 0.6.1
REFUSAL = (
    f"loss_fn = {UNPUBLISHED} is not served, because its definition is not published: choose "
    f"another loss, such as loss_fn=ppo, or name a loss that takes its place by [losses] "
    f'{UNPUBLISHED} = "ppo" in the config of the server'
)


class TinkerLosses(Section):
    stable_reinforce: Literal["", "importance_sampling", "ppo", "cispo", "dro", "gspo"] = ""
    """Loss that takes the place of stable_reinforce, whose definition is not published. Empty:
    stable_reinforce is refused."""


class TinkerWeights(Section):
    slots: Positive = 8
    """Versions of each model that samplers without a name can use. Older ones are deleted."""


class TinkerLora(LoraConfig):
    """The section [lora] of a run with other defaults."""

    rank: Count = 32
    """Largest rank that a client may ask for. 0: every training client trains a full copy of the
    weights."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""


class TinkerConfig(Section, kw_only=True):
    """The complete config of a server.  `model.path` has no default."""

    name: str = ""
    """Name of the server's directory. Empty: the config file's name."""
    runs: str = "runs"
    """Directory that holds the server's directory."""
    seed: Seed = 0
    """Seed of sampling, and of adapters whose client sets no seed."""
    model: TinkerModel
    server: ServerAddress = ServerAddress()
    sampling: TinkerSampling = TinkerSampling()
    training: TinkerTraining = TinkerTraining()
    lora: TinkerLora = TinkerLora()
    losses: TinkerLosses = TinkerLosses()
    staleness: TinkerStaleness = TinkerStaleness()
    weights: TinkerWeights = TinkerWeights()
    restarts: Count = 3
    """Restarts of a process that exits during one request."""


def check(config: TinkerConfig) -> list[str]:
    """Return the violations of rules that a key's type does not express."""
    problems = rules.check_name_and_device(config)
    limit = config.staleness.max_lag
    if limit != float("inf") and limit != int(limit):
        problems.append(f"staleness.max_lag: {limit:g} must be a whole number or inf")
    return problems


def read(path: str, sets: tuple[str, ...] = ()) -> TinkerConfig:
    """Load the config in `path` with `sets` applied.  Raises ConfigError as `load.load` does."""
    return load.load_as(TinkerConfig, check, path, sets)


def build_run_config(config: TinkerConfig, rank: int) -> Config:
    """Build the config of a run that represents one model of the server.

    Engine and learner read it, as do `asyncrl report` and `asyncrl watch`.

    rank: of the model's adapter; 0: all weights are trained."""
    lora = {"alpha": config.lora.alpha, "target_modules": config.lora.target_modules}
    longest = config.sampling.context - 1  # a run needs one position for a prompt
    generator = msgspec.to_builtins(config.sampling)
    generator["max_new_tokens"] = min(config.sampling.max_new_tokens, longest)
    return load.build(
        {
            "seed": config.seed,
            "model": {"path": config.model.path, "dtype": config.model.dtype}
            | {"device": config.model.device},
            "task": {"name": "client"},
            "generator": generator,
            "learner": msgspec.to_builtins(config.training),
            "lora": {"rank": rank} | (lora if rank else {}),
            "staleness": {
                "max_lag": config.staleness.max_lag,
                "on_exceed": "mask" if config.staleness.on_exceed == "mask" else "pace",
            },
        },
        "asyncrl tinker",
    )
