"""The results of a run in one process: curve, lags, evaluations and ledger.

`SerialRecord` collects them while `asyncrl.experiments.serial` runs. `RunRecord` is the JSON that
`compare` and `sweep` read.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from asyncrl.contract.messages import EVAL_BASE, Batch, Numbers, Trajectory
from asyncrl.contract.toml_writer import read_table
from asyncrl.records.jsonl import JsonObject
from buffer import training_log
from buffer.evaluation import SET_TICKETS
from buffer.numbers import compute_task_metrics
from buffer.store import Store

KEPT: list[str] = read_table(__file__)["kept"]
RunRecord = dict[str, Any]  # the results of one run (`make_run_record`)


def describe_evaluations(finished: Mapping[str, Mapping[int, float]]) -> JsonObject:
    """Return what a record has of evaluations. finished: eval/... -> version -> value."""
    metrics = {name: dict(sorted(values.items())) for name, values in sorted(finished.items())}
    heldout, ood = (metrics.get(f"eval/{split}", {}) for split in ("heldout", "ood"))
    return {
        "evaluation_metrics": {
            name: {str(number): value for number, value in values.items()}
            for name, values in metrics.items()
        },
        # steps, mean rewards
        "accuracy": [[float(number) for number in heldout], [*heldout.values()]],
        "ood": [[float(number) for number in ood], [*ood.values()]],
    }


class SerialRecord:
    """The numbers of a run, collected while it runs."""

    def __init__(self) -> None:
        self.began = 0.0  # CLOCK_MONOTONIC seconds
        self.tokens = 0
        self.abandoned = ""
        self.curve: list[Numbers] = []
        self.optimizer_steps: list[Numbers] = []
        self.batches: list[JsonObject] = []
        self.lags: Counter[int] = Counter()
        self.batch_lags: dict[int, int] = {}  # of the batch in training
        # split -> version -> prompt -> reward
        self.evals: dict[str, dict[int, dict[int, float]]] = {"heldout": {}, "ood": {}}
        self.finished: dict[str, dict[int, float]] = {}  # metric -> version -> value

    def record_answer(self, answer: Trajectory) -> None:
        """Record the reward of an evaluation's completion."""
        if answer.ticket >= EVAL_BASE:
            number, index = divmod(answer.ticket - EVAL_BASE, SET_TICKETS)
            if number > 1:  # only the metrics of further sets are recorded
                return
            evals = self.evals["ood" if number else "heldout"]
            rewards = evals.setdefault(answer.spans[0].label.number, {})
            rewards[index] = answer.reward

    def record_lease(self, batch: Batch, limit: float) -> None:
        """Record the samples and lags of a batch that goes to the learner.

        limit: tokens of a larger lag are not trained."""
        tickets = training_log.find_runs(sample.ticket for sample in batch.samples)
        self.batches.append({"ids": training_log.digest(batch.samples), "tickets": tickets})
        self.batch_lags = training_log.count_trained_lags(batch, limit)
        self.lags.update(self.batch_lags)

    def record_training(
        self, batch: Batch, metrics: Mapping[str, float], updates: Sequence[Numbers]
    ) -> None:
        """Add a row to the curve, and the rows of the batch's optimizer steps (`updates`)."""
        self.optimizer_steps += updates
        row = {
            "version": batch.number + 1,
            "t": time.monotonic() - self.began,
            "lag/mean": training_log.mean(self.batch_lags),
            "answer/length": sum(s.length for s in batch.samples) / len(batch.samples),
        }
        values = {
            name: x for name, x in metrics.items() if name in KEPT or name.startswith("task/")
        }
        self.curve.append(row | values | compute_task_metrics(batch))

    def make_run_record(
        self, seed: int, store: Store, weights_digest: str, clock: int, wall_s: float
    ) -> RunRecord:
        """Return the results: steps count versions, times are seconds."""
        return {
            "seed": seed,
            "steps": store.committed,
            "tokens": self.tokens,  # generated
            "wall_s": wall_s,  # 0: the run failed
            "clock": clock,  # decode steps
            "weights_digest": weights_digest,
            "batches": self.batches,  # hash of the samples' ids, tickets as runs (first, last)
            "trained_ids": xxhash.xxh3_64_hexdigest(
                "".join(batch["ids"] for batch in self.batches).encode()
            ),
            # lag -> trained tokens
            "lag_histogram": {str(lag): tokens for lag, tokens in sorted(self.lags.items())},
            "curve": self.curve,  # one row a batch
            "optimizer_steps": self.optimizer_steps,  # as in a run's optimizer_steps.jsonl
            # split -> version -> reward of each prompt
            "evals": {
                split: {
                    str(number): [rewards[index] for index in sorted(rewards)]
                    for number, rewards in sorted(by_version.items())
                }
                for split, by_version in self.evals.items()
            },
            **describe_evaluations(self.finished),
            "abandoned": self.abandoned,  # reason for which `watch` stopped the run; "" otherwise
            "ledger_lines": store.sum_ledger(),
        }
