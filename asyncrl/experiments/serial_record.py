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
        self.evals: dict[tuple[str, int], dict[int, float]] = {}  # (split, version) -> rewards
        self.finished: dict[str, dict[int, float]] = {}  # metric -> version -> value

    def record_answer(self, answer: Trajectory) -> None:
        """Record the reward of an evaluation's completion."""
        if answer.ticket >= EVAL_BASE:
            number, index = divmod(answer.ticket - EVAL_BASE, SET_TICKETS)
            if number > 1:  # only the metrics of further sets are recorded
                return
            split = "ood" if number else "heldout"
            rewards = self.evals.setdefault((split, answer.spans[0].label.number), {})
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

    def list_mean_rewards(self, split: str) -> tuple[list[float], list[float]]:
        """Return steps and mean rewards of the finished `heldout` or `ood` evaluations."""
        by_step = self.finished.get(f"eval/{split}", {})
        return [float(number) for number in sorted(by_step)], [by_step[n] for n in sorted(by_step)]

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
                    for (name, number), rewards in sorted(self.evals.items())
                    if name == split
                }
                for split in ("heldout", "ood")
            },
            # eval/... -> version -> value
            "evaluation_metrics": {
                name: {str(number): x for number, x in sorted(by_version.items())}
                for name, by_version in sorted(self.finished.items())
            },
            # steps, mean rewards on held-out prompts
            "accuracy": list(self.list_mean_rewards("heldout")),
            "ood": list(self.list_mean_rewards("ood")),
            "abandoned": self.abandoned,  # reason for which `watch` stopped the run; "" otherwise
            "ledger_lines": store.sum_ledger(),
        }
