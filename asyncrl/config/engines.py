"""Table of the engines, with their abilities.

To add an engine, write a module in `actors/` with `make_engine(config)`, which returns an
`actors.engine.Engine`, add its row to engines.toml, and add its test.  The row defines the values
of `generator.engine`, the rules on other settings, `asyncrl engines`, the check before a run and
the module that a generator process imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from asyncrl.algorithms.settings import Section
from asyncrl.contract.toml_writer import read_table


class EngineInfo(Section, kw_only=True):
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


ENGINES: dict[str, EngineInfo] = read_table(__file__, dict[str, EngineInfo])

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
