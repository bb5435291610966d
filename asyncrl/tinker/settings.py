"""The config of `asyncrl tinker`: a server of the Tinker API for one base model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count, Positive, Seed
from asyncrl.config import load, rules
from asyncrl.config.tree import Config, LoraConfig


class TinkerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: Annotated[
        str,
        Meta(
            description="Hugging Face directory of the base model and its tokenizer. Clients name "
            "it by this path, or by its last one or two parts."
        ),
    ]
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(
            description="Data type of the weights. bfloat16 halves the memory and is less precise."
        ),
    ] = "float32"
    device: Annotated[str, Meta(description="Device: auto, cpu, cuda or cuda:N.")] = "auto"
    warm_start: Annotated[
        bool,
        Meta(
            description="If `path` does not exist, build a tiny model there and train it on "
            "additions in the cookbook's format role_colon."
        ),
    ] = False


class ServerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on. 0: any free one.")
    ] = 8931
    body_mib: Annotated[
        Positive, Meta(description="Largest request body, in MiB. Clients send at most 5 MB.")
    ] = 64
    client_transport: Annotated[
        Literal["rust", "python"],
        Meta(
            description="HTTP implementation that the server asks clients to use. rust: faster "
            "with many requests at once, but a client that exits during requests may abort; "
            "python: slower, but exits cleanly."
        ),
    ] = "python"


class TinkerSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    slots: Annotated[Positive, Meta(description="Sequences that are sampled at the same time.")] = (
        64
    )
    context: Annotated[
        Positive, Meta(description="Maximum length of prompt and sequence together, in tokens.")
    ] = 2048
    max_new_tokens: Annotated[
        Positive, Meta(description="Length of a sequence whose request sets no max_tokens.")
    ] = 256
    threads: Annotated[Positive, Meta(description="OpenMP threads of the sampling process.")] = 1


class TinkerTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    micro_batch_tokens: Annotated[
        Positive,
        Meta(
            description="Tokens of one forward pass, padded. Lower it when memory runs out; the "
            "result stays the same."
        ),
    ] = 16384
    checkpoint_every: Annotated[
        Positive,
        Meta(
            description="Optimizer steps between checkpoints. A restarted server repeats the steps "
            "since the last one."
        ),
    ] = 10
    threads: Annotated[Positive, Meta(description="OpenMP threads of the training process.")] = 1


class TinkerStaleness(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_lag: Annotated[
        float,
        Meta(
            ge=0,
            description="Largest lag of a trained token, in optimizer steps of its model: a whole "
            "number or inf.",
        ),
    ] = float("inf")
    on_exceed: Annotated[
        Literal["refuse", "pace", "mask"],
        Meta(
            description="Treatment of a token above max_lag. refuse: the request fails and names "
            "the sequence; pace: also hold sampling requests while a client is too far ahead; "
            "mask: exclude the token from the loss."
        ),
    ] = "refuse"
    unknown: Annotated[
        Literal["train", "refuse"],
        Meta(
            description="Treatment of sampled tokens whose sequence the server cannot identify. "
            "train: train on them and report them as unknown; refuse: the request fails."
        ),
    ] = "train"
    supervised: Annotated[
        Literal["train", "refuse"],
        Meta(
            description="Treatment of tokens that cross_entropy trains, unless a provenance span "
            "names their sequence. train: train on them and count them as supervised; refuse: the "
            "request fails."
        ),
    ] = "train"


class TinkerWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    slots: Annotated[
        int,
        Meta(
            ge=1,
            description="Versions of each model that samplers without a name can use. Older ones "
            "are deleted.",
        ),
    ] = 8


class TinkerLora(LoraConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section [lora] of a run with other defaults."""

    rank: Annotated[
        Count,
        Meta(
            description="Largest rank that a client may ask for. 0: every training client trains a "
            "full copy of the weights."
        ),
    ] = 32
    alpha: Annotated[
        float,
        Meta(
            gt=0, description="Scale of the adapters: their product is multiplied by alpha / rank."
        ),
    ] = 32.0


class TinkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The complete config of a server.  `model.path` has no default."""

    name: Annotated[
        str,
        Meta(description="Name of the server's directory. Empty: the config file's name."),
    ] = ""
    runs: Annotated[str, Meta(description="Directory that holds the server's directory.")] = "runs"
    seed: Annotated[
        Seed, Meta(description="Seed of sampling, and of adapters whose client sets no seed.")
    ] = 0
    model: TinkerModel
    server: ServerAddress = ServerAddress()
    sampling: TinkerSampling = TinkerSampling()
    training: TinkerTraining = TinkerTraining()
    lora: TinkerLora = TinkerLora()
    staleness: TinkerStaleness = TinkerStaleness()
    weights: TinkerWeights = TinkerWeights()
    restarts: Annotated[
        Count, Meta(description="Restarts of a process that exits during one request.")
    ] = 3


def check(config: TinkerConfig) -> list[str]:
    """Return the violations of rules that a key's type does not express."""
    problems = rules.check_device(config.model.device)
    if config.name in (".", "..") or set(config.name) & {"/", "\\", "\0"}:
        problems.append(
            f"name: {config.name!r} must be the name of one directory, without a path; `runs` "
            "sets the folder of all runs"
        )
    limit = config.staleness.max_lag
    if limit != float("inf") and limit != int(limit):
        problems.append(f"staleness.max_lag: {limit:g} must be a whole number or inf")
    return problems


def read(path: str, sets: tuple[str, ...] = ()) -> TinkerConfig:
    """Load the config in `path` with `sets` applied.  Raises ConfigError as `load.load` does."""
    return load.load_as(load.ConfigSchema(TinkerConfig, check), path, sets)


def build_schema() -> dict[str, Any]:
    """Return the JSON schema of the config for editors."""
    return msgspec.json.schema(TinkerConfig)


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
