import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncrl.config.load import load
from asyncrl.config.tree import Config
from asyncrl.experiments.simulate.simulation import Simulation
from asyncrl.experiments.simulate.times import TimeModel, change
from asyncrl.experiments.simulate.what_if import SimulateSeeds, simulate_seeds

ROOT = Path(__file__).resolve().parents[2]


BATCH = ("learner.groups=4", "learner.group_size=4")


# Nothing takes time but what a test names: an answer has 64 tokens, its decode steps take 10 ms
# each, whatever is beside it.
NOTHING = "row admit finish look batch ready commit publish swap checkpoint wire buffer"
BARE = change(
    TimeModel(),
    **dict.fromkeys(NOTHING.split(), 0),
    step=0.01,
    lengths=64,
    train=0.4,
    train_tokens=None,
)


def config(*sets: str) -> Config:
    small = "generator.max_new_tokens=64 generator.context=96 learner.steps=20 staleness.wait=0"
    return load(ROOT / "configs" / "demo.toml", [*small.split(), *BATCH, *sets])


def simulate(config: Config, known: TimeModel, seed: int = 0, **how: Any) -> Any:
    return SimpleNamespace(**Simulation(config, known, seed, **{"evaluate": False} | how).run())


def run(known: TimeModel, *sets: str, seed: int = 0, threads: int = 0) -> Any:
    return simulate(config(*sets), known, seed, threads=threads)


def with_seeds(known: TimeModel, seeds: int) -> SimulateSeeds:
    """What simulates a config with these times, once per seed."""
    return functools.partial(simulate_seeds, times=known, seeds=seeds, evaluate=False)
