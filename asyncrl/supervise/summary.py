"""The summary of a run: what `asyncrl run --json` prints of one that has ended, and what there is
to say of one that has not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, health_checks, metrics, rundir
from asyncrl.supervise.run_page import certainty

PARTIAL = (
    "the buffer could not write its summary: numbers are those of metrics.jsonl and "
    "trained.jsonl, the ledger knows only what was trained"
)


# k3 between engine and learner at equal weights, dense models and mixtures of experts
HEALTHY = 1e-3
HEALTHY_EXPERTS = 0.1


def run_facts(config: Config) -> health_checks.RunFacts:
    """What the rules know of a run: its settings, and how far engine and learner of such a model
    may be apart.
    """
    try:
        keys = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        keys = {}
    experts = {"num_experts", "num_local_experts", "n_routed_experts"} & set(keys)
    return health_checks.RunFacts(config, HEALTHY_EXPERTS if experts else HEALTHY)


def task_signs(config: Config) -> list[health_checks.HealthFinding]:
    """What the task's own files say: prompts without the answers that their reward compares
    with.
    """
    from asyncrl.tasks import get_task
    from asyncrl.tasks.file import FileTask

    try:
        task = get_task(config.task)
    except ConfigError:  # of a run that is over, whose file has gone since
        return []
    if not isinstance(task, FileTask) or config.reward.uses_reward_processes or not task.unanswered:
        return []
    return [
        health_checks.answers_missing(config.task.prompts, task.unanswered, len(task.sets["train"]))
    ]


def left_behind(run_dir: Path) -> dict[str, Any]:
    """What the run's last buffer wrote at its end; where it could not, the same from what it wrote
    on the way, with "partial".
    """
    try:
        return dict(json.loads((run_dir / "buffer_summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return partial_summary(run_dir)


def partial_summary(run_dir: Path) -> dict[str, Any]:
    """The buffer's part of the summary from trained.jsonl and metrics.jsonl; its ledger has one
    line, as no other is in these files.
    """
    from buffer import training_log

    batches = training_log.read(run_dir / "trained.jsonl")
    rows = metrics.read(run_dir)
    lags = dict[int, int]()
    for batch in batches.values():
        for lag, count in batch.lags.items():
            lags[lag] = lags.get(lag, 0) + count
    tokens = sum(lags.values())
    samples = sum(b.samples for b in batches.values())

    def evaluated(split: str, *, start: bool) -> float | None:
        found = [r for r in rows if f"eval/{split}" in r and (not start or not r["step"])]
        return float(found[0 if start else -1][f"eval/{split}"]) if found else None

    line = {
        "tokens": tokens,
        "samples": samples,
        "mean_length": tokens / max(samples, 1),
        "mean_reward": _mean(rows, "reward/mean"),
    }
    mismatch = [
        float(r[name])
        for r in rows
        for name in ("mismatch/k3_at_lag_0", "mismatch/k3_one_version")
        if name in r
    ]
    return {
        "partial": True,
        "wall_s": max((float(r.get("t", 0.0)) for r in rows), default=0.0),
        "steps": max(batches, default=-1) + 1,
        "trajectories": samples,
        "tokens": tokens,
        "heldout_start": evaluated("heldout", start=True),
        "heldout_end": evaluated("heldout", start=False),
        "ood_start": evaluated("ood", start=True),
        "ood_end": evaluated("ood", start=False),
        "lag": {
            "mean": training_log.mean(lags),
            "p95": training_log.quantile(lags, 0.95),
            "max": max(lags, default=0),
        },
        "ledger": {"generated": tokens, "trained": tokens},
        "ledger_lines": {"trained": line},
        "trained_ids": None,
        "failures": {},
        "mismatch_k3_max": max(mismatch, default=0.0),
        "lag_histogram": {str(k): v for k, v in sorted(lags.items())},
        "finished": False,
    }


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    found = [r[name] for r in rows if name in r]
    return sum(found) / len(found) if found else 0.0


def _limit(limit: float) -> int | str:
    return int(limit) if limit != float("inf") else "inf"


def compose(config: Config, run_dir: Path) -> dict[str, Any]:
    """The contract's object, from what buffer and learner left behind; "partial" is in it only when
    the buffer was killed.
    """
    left = left_behind(run_dir)
    read = metrics.read(run_dir)
    rows = [r for r in read if "reward/mean" in r]
    digest = run_dir / "weights_digest"
    now = config.staleness.limit
    limit = max([now, *rundir.limits(run_dir)])  # the one that all its tokens kept to
    first = {
        split: next(
            (r[f"eval/{split}"] for r in read if f"eval/{split}" in r and not r["step"]), None
        )
        for split in ("heldout", "ood")
    }
    return {
        "run_dir": str(run_dir),
        "wall_s": left["wall_s"],
        "steps": left["steps"],
        "trajectories": left["trajectories"],
        "tokens": left["tokens"],
        "heldout_start": left["heldout_start"]
        if left["heldout_start"] is not None
        else first["heldout"],
        "heldout_end": left["heldout_end"],
        "ood_start": left["ood_start"] if left["ood_start"] is not None else first["ood"],
        "ood_end": left["ood_end"],
        "lag": left["lag"]
        | {"limit": _limit(limit)}
        | ({"limit_now": _limit(now)} if now != limit else {}),
        "speed": {
            "generator_tokens_per_s": _mean(rows, "throughput/generator_tokens_per_s"),
            "learner_tokens_per_s": _mean(rows, "throughput/learner_tokens_per_s"),
            "idle_share": {
                "generator": _mean(rows, "time/generator_idle_share"),
                "learner": _mean(rows, "time/learner_idle_share"),
            },
        },
        "weights_digest": digest.read_text(encoding="utf-8") if digest.exists() else None,
        "mismatch_k3_max": left["mismatch_k3_max"],
        "ledger": left["ledger"],
        "ledger_lines": left["ledger_lines"],
        "lag_histogram": left["lag_histogram"],
        "trained_ids": left["trained_ids"],
        "failures": left["failures"],
        "seed": config.seed,
        "certainty": {
            split: {"n": n, "half": half}
            for split in ("heldout", "ood")
            for n, half in certainty(read, split)[-1:]
        },
        "signs": [
            s._asdict()
            for s in (
                *task_signs(config),
                *health_checks.signs(
                    read, run_facts(config), ended=left["steps"] >= config.learner.steps
                ),
            )
        ],
    } | {
        name: found
        for name, found in (
            ("judge", judge_totals(read)),
            ("partial", PARTIAL if left.get("partial") else ""),
        )
        if found
    }


def judge_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a judge was asked in the whole run; {}: nothing.

    >>> judge_totals([{"judge/requests": 1.0}, {"judge/requests": 3.0, "step": 2}, {"step": 3}])
    {'requests': 3.0}
    """
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "judge/requests" in row), {})
    return {
        name.removeprefix("judge/"): float(value)
        for name, value in last.items()
        if name.startswith("judge/")
    }


def write(config: Config, run_dir: Path) -> dict[str, Any]:
    """Compose it and keep it as RUN/summary.json."""
    summary = compose(config, run_dir)
    atomic_write.write(run_dir / "summary.json", json.dumps(summary, indent=1))
    return summary
