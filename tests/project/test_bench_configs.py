"""Every config that a program in benchmarks/ builds of its arms loads: none names a key that
nothing reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_rivals_kit import program

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
Built = Iterator[tuple[str, str, list[str]]]  # the arm, its config's name, its --set items


def arms_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Built:
    bench = program(name, monkeypatch)
    if name == "kl_placement":
        for place in (*bench.PLACES, *bench.LATE, "distillation", "distillation alone"):
            for source in ("demo", "rle"):
                yield place, source, bench.sets(place, "0.1")
    elif name == "mismatch":
        for engine, items in bench.ENGINES.items():
            for arm, more in bench.ARMS.items():
                yield f"{engine}, {arm}", "rle", [*items, *more]
    elif name == "natural_lag":
        for part, arms in bench.PARTS.items():
            for source, _ in bench.tasks_of(part).values():
                for arm, items in arms.items():
                    yield arm, source, items
    elif name == "high_lag":
        for source, _ in bench.TASKS.values():
            for arm, items in bench.ARMS.items():
                yield arm, source, items
    elif name == "losses":
        for method in bench.methods.FOR_OLD_SAMPLES:
            yield method, "rle", [f"method={method}"]
        for arm, items in bench.MORE.items():
            yield arm, "rle", ["method=ppo", *items]
    elif name == "lag_grid":
        for source, rate in bench.TASKS.values():
            for arm, items in bench.corrections(rate).items():
                yield arm, source, items
    elif name == "trust_regions":
        for arm, (_, items) in bench.ARMS.items():
            yield arm, "rle", ["learner.minibatches=4", *items]
    else:
        for arm, (_, items) in bench.ARMS.items():
            yield arm, "demo", items


@pytest.mark.parametrize(
    "name",
    [
        "high_lag",
        "kl_placement",
        "lag_grid",
        "losses",
        "mismatch",
        "natural_lag",
        "orders",
        "trust_regions",
    ],
)
def test_every_arm_is_a_config(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, loaded = [], set()
    for arm, source, items in arms_of(name, monkeypatch):
        try:
            made = load.load(ROOT / "configs" / f"{source}.toml", items)
            loaded.add((source, load.dump(made)))
        except ConfigError as e:
            refused.append(f"{source}, {arm}: {e}")
    assert not refused, "\n".join(refused)
    assert len(loaded) > 2, "the arms are the same config"
