"""Measure what all diagnostics add to a learner's step, with the split at its default interval.

    OMP_NUM_THREADS=1 python benchmarks/diagnostics.py [--quick] [--json]

Proves: at most 3 %.  The demo's step (84k parameters, 32 x 8 answers of 4 to 56 tokens, lags 0 to
2) as in a run, with the split and the KL to the reference every `record.split_every` and
`record.reference_kl_every` batches, and the weights of the versions available, is compared with
the same learner without entropy, sums by lag, split and reference.  A round is one interval of
batches of each, by turns, on one core; each part is also measured alone."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from lib import rounds
from lib.learner_batch import batch as plain_batch
from lib.learner_batch import config

from asyncrl.algorithms import diagnostics
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Batch, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from learner.step import LearnerCore

VERSIONS = 3
SUMS = diagnostics.sum_statistics


def batch() -> Batch:
    """The learner's benchmark batch; each answer by two versions, of which the second is newer."""
    base = plain_batch()
    samples = []
    lags = []
    for i, sample in enumerate(base.samples):
        n, half = sample.length, sample.length // 2
        old, new = Label(1, i % VERSIONS), Label(1, min(VERSIONS - 1, i % VERSIONS + 1))
        spans = [VersionSpan(old, "", 0, half, old), VersionSpan(new, "", half, n, old)]
        samples.append(msgspec.structs.replace(sample, spans=spans))
        least = VERSIONS - 1
        lags.append([(0, half, least - old.number), (half, n, least - new.number)])
    return msgspec.structs.replace(base, samples=samples, token_lags=lags)


class Bare(LearnerCore):
    """The learner without entropy."""

    def _run(self, *args: Any, **how: Any) -> Any:
        return super()._run(*args, **how | {"entropy": False})


def with_record(settings: Config, **record: int) -> Config:
    return msgspec.structs.replace(
        settings, record=msgspec.structs.replace(settings.record, **record)
    )


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=7)
    args = p.parse_args()
    torch.set_num_threads(1)
    rounds.one_core()
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "m"
        model = policy.build_model(path, "0123456789abcdefghij")
        settings = config(path)
        every = settings.record.split_every
        weights = bytearray(policy.count_flat_bytes(policy.build_manifest(model)))
        policy.write_flat(model, memoryview(weights))
        off = {"split_every": 0, "reference_kl_every": 0}
        cores = {
            "all": LearnerCore(settings, path),
            "no split": LearnerCore(with_record(settings, split_every=0), path),
            "no split, no reference": LearnerCore(with_record(settings, **off), path),
            "without": Bare(with_record(settings, **off), path),
        }
        answers = batch()
        for core in cores.values():
            core.measure.read_weights = lambda _, __: bytes(weights)

        def interval(name: str) -> Callable[[], None]:
            core = cores[name]

            def run() -> None:
                nothing = name == "without"
                diagnostics.sum_statistics = (lambda _: {}) if nothing else SUMS  # type: ignore[assignment]
                for number in range(every):
                    core.state.number = number
                    found = core.train(msgspec.structs.replace(answers, number=number))
                    if name == "all" and number == 0:
                        assert "split/total" in found and "kl/target_ref_k3" in found
                        assert "by_lag/ess_2" in found and "policy/entropy" in found

            return run

        times = rounds.interleave(
            {name: interval(name) for name in cores}, 2 if args.quick else args.rounds
        )
    added = {
        name: [x - 1 for x in rounds.speedups(times, "without", name)] for name in list(cores)[:-1]
    }
    cpu = [x - 1 for x in rounds.speedups(times, "without", "all", 1)]
    parts = {name: round(sorted(x)[len(x) // 2], 4) for name, x in added.items()}
    goals = [
        rounds.figure(
            f"all diagnostics, split every {every}, add to a step",
            added["all"],
            0.03,
            at_least=False,
            by_cpu=round(sorted(cpu)[len(cpu) // 2], 4),
            parts=parts,
        )
    ]
    what = "an interval of learner steps with every diagnostic over the same without, one core"
    rounds.report("diagnostics", goals, {"what": what, "added": added, "times": times}, args)


if __name__ == "__main__":
    main()
