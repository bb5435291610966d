"""Measure the embedded engine's prefix cache on sessions of six turns.

    OMP_NUM_THREADS=1 python benchmarks/prefixes.py [--quick] [--json]

Every session begins with the same text; each turn adds a completion and an observation, so that
the last prompt is about thirty times as long as the new part of the last turn.  With and without
the cache run by turns and are compared by the CPU time of the process; encoded tokens are counted
too.  The opposite case is calls that share nothing and never return, for which the cache is only
overhead."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from lib import rounds

from actors.engine import CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.versions import Label
from asyncrl.models import memory, policy

TURNS = 6
SESSIONS = 16
SYSTEM = 256  # tokens that every session begins with
OBSERVATION = 64
ANSWER = 16
CONTEXT = SYSTEM + TURNS * (OBSERVATION + ANSWER)
KEPT = SYSTEM + SESSIONS * TURNS * (OBSERVATION + ANSWER)  # all of it
WAYS = {"kept": KEPT, "whole": 0}


def sessions(model: policy.PolicyModel, kept: int, encoded: dict[int, int]) -> Callable[[], None]:
    """All sessions, a turn of each at once, with weights that are new at the start; notes in
    `encoded` how many tokens of prompts the engine encodes."""
    engine = EmbeddedEngine(
        model, slots=SESSIONS, context=CONTEXT, max_new_tokens=ANSWER, kept_tokens=kept
    )
    weights = dict(policy.list_named_weights(model))
    random = np.random.default_rng(5)
    system = random.integers(3, 20, SYSTEM)
    observed = random.integers(3, 20, (TURNS, SESSIONS, OBSERVATION))

    def run() -> None:
        engine.load(weights, Label(1, 0), "d")
        before = engine.encoded
        told = [system] * SESSIONS
        for turn in range(TURNS):
            told = [np.concatenate([x, observed[turn, at]]) for at, x in enumerate(told)]
            for (_, at, _), tokens in drawn(engine, turn, told).items():
                told[at] = np.concatenate([told[at], tokens])
        encoded[kept] = engine.encoded - before

    return run


def singles(model: policy.PolicyModel, kept: int) -> Callable[[], None]:
    """As many calls as the sessions have, no two with the same beginning."""
    engine = EmbeddedEngine(
        model, slots=SESSIONS, context=CONTEXT, max_new_tokens=ANSWER, kept_tokens=kept
    )
    weights = dict(policy.list_named_weights(model))
    prompts = np.random.default_rng(6).integers(3, 20, (TURNS, SESSIONS, SYSTEM))

    def run() -> None:
        engine.load(weights, Label(1, 0), "d")
        for turn in range(TURNS):
            drawn(engine, turn, list(prompts[turn]))

    return run


def drawn(
    engine: EmbeddedEngine, turn: int, prompts: list[np.ndarray]
) -> dict[tuple[int, int, int], np.ndarray]:
    """The answers to prompts, by (turn, number, 1)."""
    engine.add(
        CompletionRequest(
            (turn, at, 1), prompt.astype(np.int32), (turn, at), ANSWER, 1.0, 1.0, 0, stop=(), seed=7
        )
        for at, prompt in enumerate(prompts)
    )
    out = {}
    while engine.active:
        out |= {answer.key: answer.tokens for answer in engine.step()}
    return out


def main() -> None:
    args = rounds.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    memory.keep_freed()
    many = 2 if args.quick else 5
    encoded: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as path:
        symbols = "abcdefghijklmnopqrst"
        model = policy.build_model(Path(path), symbols, hidden=128, layers=4, heads=4)
        of_sessions = rounds.interleave(
            {name: sessions(model, kept, encoded) for name, kept in WAYS.items()}, many
        )
        of_singles = rounds.interleave(
            {name: singles(model, kept) for name, kept in WAYS.items()}, many
        )
    count = encoded[0] / encoded[KEPT]
    goals = [
        rounds.goal("tokens encoded, whole to kept", count, 3.0, at_least=True),
        rounds.figure(
            "CPU time of six turns, whole to kept",
            rounds.speedups(of_sessions, "kept", "whole", 1),
            1.5,
            at_least=True,
        ),
        rounds.figure(
            "CPU time of single calls, kept to whole",
            rounds.speedups(of_singles, "whole", "kept", 1),
            1.1,
            at_least=False,
        ),
    ]
    details = {"encoded": encoded, "sessions": of_sessions, "singles": of_singles}
    rounds.report("prefixes", goals, details, args)


if __name__ == "__main__":
    main()
