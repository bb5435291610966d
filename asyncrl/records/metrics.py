"""Table of all metrics with units and meanings, and the writer of metrics.jsonl and TensorBoard."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.algorithms.metric_names import BY_LAG, METRIC_NAMES
from asyncrl.contract.errors import REFUSALS, AsyncrlError
from asyncrl.contract.messages import DISPOSITIONS
from asyncrl.records import health_checks, jsonl
from asyncrl.records.event_file import EventFile


class MetricInfo(NamedTuple):
    unit: str
    meaning: str


METRICS: dict[str, MetricInfo] = {
    "reward/mean": MetricInfo("reward", "mean reward of the batch's samples"),
    "reward/std": MetricInfo("reward", "standard deviation of the batch's rewards"),
    "reward/no_spread_share": MetricInfo(
        "share", "samples in zero-variance groups, whose rewards are all equal: no learning signal"
    ),
    "advantage/std": MetricInfo("-", "standard deviation of the advantages"),
    "answer/length": MetricInfo("tokens", "mean length of the batch's completions"),
    "answer/truncated_share": MetricInfo("share", "completions cut at max_new_tokens"),
    "lag/mean": MetricInfo("versions", "mean lag over trained tokens"),
    "lag/max": MetricInfo("versions", "largest lag of a trained token"),
    "lag/p95": MetricInfo("versions", "95th percentile of the lag over trained tokens"),
    "lag/unknown_share": MetricInfo(
        "share",
        "trained sampled tokens whose sequence `asyncrl tinker` could not identify; the other "
        "metrics of lag leave them out",
    ),
    "lag/in_flight": MetricInfo(
        "versions", "part of the samples' mean lag that arose before delivery"
    ),
    "lag/in_queue": MetricInfo(
        "versions", "part of the samples' mean lag that arose in the buffer"
    ),
    "lag/samples": MetricInfo("versions", "histogram of the samples' lag"),
    "limit/now": MetricInfo(
        "versions", "adaptive staleness limit of the tickets granted from this step on"
    ),
    "limit/before": MetricInfo("versions", "the previous limit, at a step that changed it"),
    "limit/ess": MetricInfo("share", "mean is/ess that changed the limit, at such a step"),
    "limit/idle": MetricInfo(
        "share", "mean idle share of the learner that changed the limit, at such a step"
    ),
    "window/now": MetricInfo(
        "batches", "how far ahead tickets are granted from this step on; at most the limit"
    ),
    "window/wait": MetricInfo(
        "share", "of the learner's steps: waiting for samples, mean over the last batches"
    ),
    "window/lower": MetricInfo(
        "batches", "by which the window would have to grow to halve the target of waiting"
    ),
    "is/mean_weight": MetricInfo("-", "mean importance weight: an effective learning rate"),
    "is/ess": MetricInfo(
        "share",
        "effective sample size of the raw ratios start/behavior: the share of a batch that "
        "staleness and mismatch leave",
    ),
    "is/ratio_max": MetricInfo("-", "largest ratio start/behavior of a token"),
    "is/zero_share": MetricInfo("share", "tokens whose weight the bound set to 0"),
    "kl/behavior_start_k1": MetricInfo(
        "nats/token",
        "k1 estimate of KL(behavior || start); start is the learner as the batch begins",
    ),
    "kl/behavior_start_k3": MetricInfo(
        "nats/token",
        "k3 estimate of KL(behavior || start): staleness and engine mismatch, whatever the "
        "proximal policy",
    ),
    "kl/start_target_k3": MetricInfo(
        "nats/token",
        "k3 estimate of KL(start || target), mean over the passes of the batch's updates; "
        "only where a later pass repeats completions of the first",
    ),
    "kl/behavior_target_k3": MetricInfo("nats/token", "k3 estimate of KL(behavior || target)"),
    "kl/moved": MetricInfo(
        "nats/token",
        "k3 estimate of KL(policy before the batch || policy after it): the movement by this "
        "batch, on the samples of the split (record.split_every) or on all (record.kl_moved)",
    ),
    "kl/target_ref_k1": MetricInfo("nats/token", "k1 estimate of KL(target || reference)"),
    "kl/target_ref_k3": MetricInfo("nats/token", "k3 estimate of KL(target || reference)"),
    "kl/beta": MetricInfo("-", "coefficient of the KL penalty in the reward for this batch"),
    "mismatch/k3_at_lag_0": MetricInfo(
        "nats/token",
        "k3 between engine and learner on tokens sampled by the starting weights, with keys "
        "and values of the same weights",
    ),
    "mismatch/max_at_lag_0": MetricInfo(
        "nats", "largest |log ratio| of such a token; exactly 0 in exact mode"
    ),
    "mismatch/k3_one_version": MetricInfo(
        "nats/token",
        "k3 between engine and learner, on tokens sampled by the version that also computed "
        "all their keys and values",
    ),
    "mismatch/max_one_version": MetricInfo(
        "nats", "largest |log ratio| of such a token; exactly 0 in exact mode, at any lag"
    ),
    "split/mismatch": MetricInfo(
        "nats/token",
        "mean of log mu - log pi_v; pi_v is the learner's forward pass with the weights that "
        "sampled the token (record.split_every)",
    ),
    "split/staleness": MetricInfo(
        "nats/token",
        "mean of log pi_v - log pi_start: how far the weights have moved since the token was "
        "sampled",
    ),
    "split/update": MetricInfo(
        "nats/token", "mean of log pi_start - log pi_theta, with pi_theta after the batch's updates"
    ),
    "split/total": MetricInfo(
        "nats/token", "mean of log mu - log pi_theta on the same tokens, the sum of the three parts"
    ),
    "split/mismatch_k3": MetricInfo("nats/token", "k3 of the first part: engine mismatch"),
    "split/staleness_k3": MetricInfo("nats/token", "k3 of the second part: staleness"),
    "split/update_k3": MetricInfo("nats/token", "k3 of the third part: the batch's own update"),
    "split/coverage": MetricInfo(
        "share", "share of the selected tokens whose version the ring still held (weights.slots)"
    ),
    "clip/share": MetricInfo("share", "tokens whose gradient the trust region set to zero"),
    "loss/policy": MetricInfo("-", "value of the negated surrogate objective"),
    "loss/kl": MetricInfo("-", "KL term of the loss, before its coefficient"),
    "policy/entropy": MetricInfo("nats/token", "entropy of the target policy on sampled states"),
    "policy/behavior_nll": MetricInfo(
        "nats/token", "mean of -log mu, the negative log-likelihood under the behavior policy"
    ),
    "optim/grad_norm": MetricInfo(
        "-", "gradient norm before clipping, mean over the batch's optimizer steps"
    ),
    "optim/gradient_cosine": MetricInfo(
        "-",
        "cosine between the gradients of successive optimizer steps, mean over the batch's "
        "steps (learner.gradient_cosine)",
    ),
    "optim/gradient_cosine_max": MetricInfo("-", "the largest of these cosines"),
    "optim/lr": MetricInfo("-", "learning rate"),
    "optim/steps": MetricInfo("steps", "optimizer steps made on the batch"),
    "optim/early_stops": MetricInfo(
        "count", "batches that KL early stopping has ended before their last step so far"
    ),
    "optim/stop_kl": MetricInfo("nats/token", "KL that early stopping measured last"),
    "optim/skipped": MetricInfo(
        "count", "optimizer steps skipped so far because loss or gradient was not finite"
    ),
    "throughput/learner_tokens_per_s": MetricInfo(
        "tokens/s", "response tokens trained per second of wall time"
    ),
    "throughput/generator_tokens_per_s": MetricInfo(
        "tokens/s", "tokens generated per second of wall time, all generators"
    ),
    "time/step": MetricInfo(
        "s", "wall time of the learner's step; the first one begins with the first ticket"
    ),
    "time/train": MetricInfo("s", "time in forward, backward and update"),
    "time/publish": MetricInfo("s", "time to write the weights into the ring"),
    "weights/bytes": MetricInfo("bytes", "size of a published version; with LoRA only the adapter"),
    "weights/full_bytes": MetricInfo("bytes", "all weights of the model"),
    "time/learner_idle_share": MetricInfo(
        "share",
        "share of the learner's time in which it neither trained nor published: it waited for a "
        "batch, or wrote a checkpoint",
    ),
    "time/generator_idle_share": MetricInfo(
        "share", "share of the generators' time without a completion to decode"
    ),
    "time/generators": MetricInfo(
        "s", "time of all generators that this step's shares of their time are of"
    ),
    "time/reward_wait_share": MetricInfo(
        "share",
        "share of the generators' time without a completion to decode while completions "
        "waited for their rewards",
    ),
    "reward/queue": MetricInfo(
        "answers",
        "finished completions without a reward yet, all generators; only with reward processes",
    ),
    "reward/wait_s": MetricInfo(
        "s",
        "time from a completion's end to its reward, mean since the last step with a measurement",
    ),
    "reward/call_s": MetricInfo("s", "time of a reward call per completion, the same mean"),
    "reward/failed_batch_share": MetricInfo(
        "share", "calls with several completions that failed, so that each was scored alone"
    ),
    "reward/workers": MetricInfo("processes", "reward processes of all generators"),
    "judge/requests": MetricInfo(
        "requests", "requests sent to the judge so far, repetitions included ([reward.judge])"
    ),
    "judge/replies": MetricInfo("replies", "replies of the judge so far"),
    "judge/retries": MetricInfo(
        "requests", "requests repeated so far, after 408, 429, 5xx or no reply"
    ),
    "judge/throttled": MetricInfo("requests", "requests answered by 429 so far"),
    "judge/cached": MetricInfo("questions", "repeated questions so far, whose reply was known"),
    "judge/tokens": MetricInfo(
        "tokens", "tokens of questions and replies so far, by the judge's own count"
    ),
    "judge/seconds": MetricInfo(
        "s", "time of all requests so far; requests at the same time add up"
    ),
    "judge/requests_left": MetricInfo("requests", "requests left of reward.judge.budget_requests"),
    "judge/tokens_left": MetricInfo("tokens", "tokens left of reward.judge.budget_tokens"),
    "time/swap": MetricInfo(
        "s", "time that the generators spent on swapping weights since the last step"
    ),
    "prefix/hits": MetricInfo(
        "calls",
        "prompts since the last step that began with cached keys and values of earlier calls "
        "(generator.prefix_cache_tokens)",
    ),
    "prefix/reused_tokens": MetricInfo(
        "tokens", "cached tokens of these prompts, not encoded again"
    ),
    "prefix/encoded_tokens": MetricInfo("tokens", "encoded tokens of all calls' prompts"),
    "draft/proposed": MetricInfo(
        "tokens", "draft tokens verified since the last step (generator.speculate)"
    ),
    "draft/accepted": MetricInfo(
        "tokens", "of these, the tokens that were those sampled: each saved a decode step"
    ),
    "link/fetch_share": MetricInfo(
        "share",
        "share of the generators' time in which they received weights over a socket; only "
        "with a socket",
    ),
    "link/fetch_mb_per_s": MetricInfo(
        "MB/s", "rate at which a generator received weights in that time"
    ),
    "link/ack_s": MetricInfo(
        "s",
        "time from the first transmission of a sample to its acknowledgment, mean since the "
        "last step",
    ),
    "buffer/groups": MetricInfo("groups", "groups alive: outstanding, stored or leased"),
    "buffer/leases": MetricInfo("groups", "groups leased to generators"),
    "buffer/set_aside": MetricInfo(
        "batches",
        "batches excluded so far because the learner repeatedly exited on them (set_aside/)",
    ),
    "buffer/bytes": MetricInfo("bytes", "size of the stored trajectories"),
    **{
        f"ledger/{line}": MetricInfo("tokens", f"tokens that have ended in the ledger line {line}")
        for line in DISPOSITIONS
    },
    **{
        f"refused/{reason}": MetricInfo("count", f"refused so far: {meaning}")
        for reason, meaning in REFUSALS.items()
    },
    "eval/heldout": MetricInfo("reward", "mean reward on held-out prompts"),
    "eval/heldout_n": MetricInfo("samples", "held-out prompts evaluated"),
    "eval/heldout_length": MetricInfo("tokens", "mean length of held-out completions"),
    "eval/ood": MetricInfo("reward", "mean reward on out-of-distribution prompts"),
    "eval/ood_n": MetricInfo("samples", "out-of-distribution prompts evaluated"),
    "eval/ood_length": MetricInfo("tokens", "mean length of out-of-distribution completions"),
    "memory/learner_mb": MetricInfo("MiB", "resident memory of the learner"),
}
METRICS |= {_name: MetricInfo(*_entry) for _name, _entry in METRIC_NAMES.items()}
BUCKETS = ("0", "1", "2", "3to4", "5to8", "9plus")
for _b in BUCKETS:
    METRICS[f"by_lag/k3_{_b}"] = MetricInfo(
        "nats/token", f"kl/behavior_start_k3 of tokens at lag {_b}"
    )
    METRICS[f"by_lag/weight_{_b}"] = MetricInfo(
        "-", f"mean importance weight of tokens at lag {_b}"
    )
    for _part in ("mismatch", "staleness"):
        METRICS[f"by_lag/{_part}_{_b}"] = MetricInfo(
            "nats/token", f"split/{_part} of tokens at lag {_b}"
        )
        METRICS[f"by_lag/{_part}_k3_{_b}"] = MetricInfo(
            "nats/token", f"split/{_part}_k3 of tokens at lag {_b}"
        )
    METRICS[f"by_age/mismatch_k3_{_b}"] = MetricInfo(
        "nats/token",
        f"split/mismatch_k3 of tokens whose oldest keys and values are {_b} versions older than "
        "the weights that sampled them",
    )
    METRICS[f"by_lag/tokens_{_b}"] = MetricInfo(
        "tokens", f"trained tokens at lag {_b}, summed over optimizer steps"
    )
PATTERNS = {
    re.compile(r"reward_part/.+"): MetricInfo("reward", "mean of a named part of the reward"),
    **{
        re.compile(rf"task/[a-z][a-z0-9-]*_{ending}"): MetricInfo(unit, meaning)
        for ending, unit, meaning in (
            ("share", "share", "the batch's samples that are of the task"),
            ("weight", "share", "its planned share of the groups granted from this step on"),
            ("reward", "reward", "mean reward of its samples"),
            ("length", "tokens", "mean length of its completions"),
            ("lag", "versions", "mean lag over its tokens"),
            ("ess", "share", "is/ess of its tokens"),
            ("removed", "groups", "its groups so far that were removed before training"),
            ("dry", "-", "1: it has no prompts left, or gives no group that can be trained"),
        )
    },
    **{
        re.compile(rf"eval/[a-z][a-z0-9-]*{ending}"): MetricInfo(unit, meaning)
        for ending, unit, meaning in (
            ("", "reward", "mean reward of a set's samples"),
            ("_n", "samples", "prompts of the set with a scored sample"),
            ("_length", "tokens", "mean length of its samples"),
            ("_greedy", "reward", "mean reward of its greedy completions"),
            (r"_pass_at_\d+", "share", "pass@K: probability that one of K samples passes"),
            (r"_pass_at_\d+_(low|high)", "share", "bounds of its 95 % interval over prompts"),
        )
    },
}


def is_known_metric(name: str) -> bool:
    return name in METRICS or any(p.fullmatch(name) for p in PATTERNS)


# section of docs/metrics.md -> families in it, each the part of a name before its slash
SECTIONS = {
    "Rewards and completions": "reward reward_part advantage answer judge",
    "Evaluation": "eval",
    "Tasks of a mixture": "task",
    "Lag": "lag limit window",
    "Importance ratios": "is clip",
    "Distance between policies": "kl policy perplexity perplexity_by_answer",
    "Engine mismatch": "mismatch split",
    "Optimization": "loss optim value reshape",
    "Speed and waiting": "time throughput link prefix draft",
    "Buffer": "buffer ledger refused",
    "Memory": "memory weights",
    "By lag": "by_lag by_age",
}
PAGE_HEAD = """# Metrics

Generated from `asyncrl/records/metrics.py` by `asyncrl config metrics`.

## Look here first

The numbers are the thresholds of the [health checks](failures.md#when-a-run-goes-wrong) or of
[Staleness](staleness.md#choose-a-limit). They come from small models, so use them as a first guess.
If a metric is not healthy, read [Troubleshooting](troubleshooting.md).

"""


def list_first_look() -> dict[str, tuple[str, str]]:
    """Return metric -> (healthy range, meaning of other values), by the bounds of the checks."""
    nearly_all = f"{health_checks.NEARLY_ALL:.0%}"
    mismatch = health_checks.RunFacts._field_defaults["mismatch"]
    return {
        "eval/heldout": ("rises by more than chance", "the policy does not learn the task"),
        "reward/mean": ("rises", "if held-out reward falls meanwhile: the reward can be fooled"),
        "reward/no_spread_share": (f"below {nearly_all}", "no group gives a learning signal"),
        "answer/truncated_share": (f"below {nearly_all}", "completions are too long or never end"),
        "is/ess": ("0.5 and above", "the staleness limit is too high for this learning rate"),
        "lag/max": ("at most staleness.max_lag", "never above it with pace"),
        "kl/moved": (
            f"below 0.02, in no batch {health_checks.RUNAWAY:g} or more",
            "the learning rate is too high, or a batch has too many updates",
        ),
        "kl/target_ref_k3": (
            f"below {health_checks.DRIFT:g} with a KL penalty",
            "the policy drifts away from the reference",
        ),
        health_checks.MISMATCH: (f"at most {mismatch:g}", "engine and learner compute differently"),
        "is/rejected_share": (
            f"with the other excluded shares below {health_checks.REJECTED:g}",
            "the bounds of the correction are too narrow",
        ),
        "is/chi2": (
            f"not below -{health_checks.CUT:g}",
            "completions are sampled from a part of the distribution",
        ),
        "time/reward_wait_share": (
            f"below {health_checks.HELD_UP:g}",
            "rewards hold up generators",
        ),
        "time/learner_idle_share": (
            "a few percent, if the learner is the slower side",
            "more generators or a higher limit would help",
        ),
    }


def _format_table(head: str, rows: list[str]) -> str:
    columns = head.count("|") - 1
    return head + "\n|" + "---|" * columns + "\n" + "\n".join(rows) + "\n"


def _list_families() -> dict[str, list[tuple[str, str, str]]]:
    """Return family -> (name, unit, meaning) of its rows."""
    lags = ", ".join(BUCKETS)
    by_lag = (
        ("k3", "nats/token", "kl/behavior_start_k3"),
        ("weight", "-", "mean importance weight"),
        ("tokens", "tokens", "trained tokens"),
        *(
            (f"{part}{k}", "nats/token", f"`split/{part}{k}`")
            for part in ("mismatch", "staleness")
            for k in ("", "_k3")
        ),
        *((k, u, f"`{m}`") for k, (u, m) in BY_LAG.items()),
    )
    older = "`split/mismatch_k3` by how many versions older the oldest keys and values are, "
    rows = [(n, m.unit, m.meaning) for n, m in METRICS.items() if not n.startswith("by_")]
    rows += [
        (f"by_lag/{kind}_B", unit, f"{meaning} at lag B, one of {lags}")
        for kind, unit, meaning in by_lag
    ]
    rows.append(("by_age/mismatch_k3_B", "nats/token", older + lags))
    rows += [
        (
            pattern.pattern.replace("[a-z][a-z0-9-]*", "NAME")
            .replace(r"\d+", "K")
            .replace("(low|high)", "low, high"),
            entry.unit,
            f"`evaluation.sets`: {entry.meaning}",
        )
        for pattern, entry in PATTERNS.items()
        if pattern.pattern.startswith("eval/")
    ]
    rows += [
        (pattern.pattern.replace("[a-z][a-z0-9-]*", "TASK"), entry.unit, entry.meaning)
        for pattern, entry in PATTERNS.items()
        if pattern.pattern.startswith("task/")
    ]
    rows.append(("reward_part/NAME", "reward", "mean of a named part of the reward"))
    families: dict[str, list[tuple[str, str, str]]] = {}
    for row in rows:
        families.setdefault(row[0].partition("/")[0], []).append(row)
    return families


def format_markdown() -> str:
    """Format docs/metrics.md.  Raises KeyError if a family has no section."""
    first = [
        f"| `{name}` | {healthy} | {otherwise} |"
        for name, (healthy, otherwise) in list_first_look().items()
    ]
    page = PAGE_HEAD + _format_table("| metric | healthy | otherwise |", first)
    families = _list_families()
    for section, names in SECTIONS.items():
        rows = [row for name in names.split() for row in families.pop(name)]
        lines = [
            f"| `{name}` | {unit} | {meaning} |"
            for name, unit, meaning in ((n, u, m.replace("|", r"\|")) for n, u, m in rows)
        ]
        page += f"\n## {section}\n\n" + _format_table("| name | unit | meaning |", lines)
    if families:
        raise KeyError(f"families without a section: {', '.join(families)}")
    return page


class MetricsWriter:
    """RUN/metrics.jsonl, one row per call, and RUN/tensorboard.

    Raises AsyncrlError for a name that the table lacks, and when metrics.jsonl cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.not_finite: set[str] = set()  # names that were reported
        self.run_dir = run_dir
        self.newest = -1  # step of training
        self.evaluations: set[tuple[int, str]] = set()  # (version, names)
        self.file = jsonl.JsonlAppender(run_dir / "metrics.jsonl")
        self.board = EventFile(run_dir / "tensorboard")
        if rows := read(run_dir):
            trained = [row["step"] for row in rows if not name_evaluation(row)]
            self._start_session(1 + max(trained, default=-1), rows)

    def write(
        self,
        step: int,
        values: dict[str, float],
        seconds: float = 0.0,
        histograms: dict[str, list[float]] | None = None,
    ) -> None:
        """Write one row.

        step: the version.  seconds: the RunClock's.  histograms: of whole numbers.  Values that are
        not finite are left out, because JSON has none, and reported once per name."""
        if unknown := [n for n in values if not is_known_metric(n)]:
            raise AsyncrlError(
                f"metrics not in the table of asyncrl/records/metrics.py: {', '.join(unknown)}"
            )
        if not_finite := {n for n, x in values.items() if not math.isfinite(x)}:
            values = {n: x for n, x in values.items() if n not in not_finite}
            if not_finite - self.not_finite:
                print(
                    f"step {step}: not finite, left out of the metrics: "
                    f"{', '.join(sorted(not_finite - self.not_finite))}",
                    file=sys.stderr,
                    flush=True,
                )
                self.not_finite |= not_finite
        row: dict[str, Any] = {"step": step, "t": round(seconds, 4)} | values
        counts = {name: Counter(numbers) for name, numbers in (histograms or {}).items()}
        texts = {name: {f"{x:g}": n for x, n in count.items()} for name, count in counts.items()}
        evaluation = name_evaluation(values)
        repeats = (step, evaluation) in self.evaluations or (not evaluation and step <= self.newest)
        self.file.write(row | texts)
        if repeats:  # by a learner that was restarted from a checkpoint
            self._start_session(step, read(self.run_dir))
            return
        self.board.add(step, values, counts)
        if evaluation:
            self.evaluations.add((step, evaluation))
        else:
            self.newest = step

    def _start_session(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Make TensorBoard drop its events from `step` on; add those of `rows` from there again.

        rows: all valid ones."""
        self.newest, self.evaluations = -1, set()
        self.board.start_session(step)
        for row in rows:
            if evaluation := name_evaluation(row):
                self.evaluations.add((row["step"], evaluation))
            else:
                self.newest = row["step"]
            if row["step"] >= step:
                values = {
                    name: value
                    for name, value in row.items()
                    if name not in ("step", "t") and isinstance(value, int | float)
                }
                counts = {
                    name: Counter({float(text): count for text, count in value.items()})
                    for name, value in row.items()
                    if isinstance(value, dict)
                }
                self.board.add(row["step"], values, counts)

    def close(self) -> None:
        self.file.close()
        self.board.close()


OPTIMIZER_STEPS = "optimizer_steps.jsonl"  # of a run: a row for each optimizer step
# names of metrics in the runs of earlier versions -> their present names
OLD_NAMES = {"adv/mean": "advantage/mean", "adv/abs_max": "advantage/abs_max"}


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Read the rows of metrics.jsonl that no later row replaces, in order.

    Damaged lines are left out.  Renamed metrics have their present names."""
    return select_valid_rows(jsonl.read(run_dir / "metrics.jsonl"))


def name_evaluation(row: Mapping[str, Any]) -> str:
    """Name the metrics of an evaluation's row; "" for a row of training."""
    names = row.keys() - {"step", "t"}
    return ",".join(sorted(names)) if all(name.startswith("eval/") for name in names) else ""


def select_valid_rows(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the rows that later ones replace.

    After a resume the later row of a step wins.  A training row of step s replaces the earlier
    training rows from s on and the evaluations of versions above s, which belong to the abandoned
    branch.  An evaluation replaces an earlier one of the same version and split."""
    # (step, "" for training or the names of an evaluation)
    valid: dict[tuple[int, str], dict[str, Any]] = {}
    newest = -1  # step of training
    for line in lines:
        row = {OLD_NAMES.get(name, name): value for name, value in line.items()}
        step = row.get("step")
        if not isinstance(step, int):
            continue
        evaluation = name_evaluation(row)
        if not evaluation:
            for key in (
                [k for k in valid if k[0] > step or k == (step, "")] if step <= newest else ()
            ):
                del valid[key]
            newest = step
        valid.pop((step, evaluation), None)
        valid[step, evaluation] = row
    return list(valid.values())


def compute_idle_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each side's idle share: its idle time over all its time, both summed over `rows`.

    rows: of metrics.jsonl; those of repeated steps also took time.  Older rows lack the generators'
        time and count by the time of the step."""
    shares = {}
    for side, time_name in (("generator", "time/generators"), ("learner", "time/step")):
        name = f"time/{side}_idle_share"
        timed = [
            (row[name], row.get(time_name, row.get("time/step", 1.0)))
            for row in rows
            if name in row
        ]
        total = sum(seconds for _, seconds in timed)
        shares[side] = sum(share * seconds for share, seconds in timed) / max(total, 1e-9)
    return shares


class RunClock:
    """Seconds of a run's work since the first ticket, without pauses between incarnations."""

    def __init__(self, run_dir: Path) -> None:
        """Continue from the last row of metrics.jsonl in a resumed run."""
        self.earlier_s = max((float(r.get("t", 0.0)) for r in read(run_dir)), default=0.0)
        self.started_at = 0.0  # in this incarnation; 0: not yet

    def start(self, now: float) -> None:
        """Start the clock at `now` (time.monotonic()); only the first call counts."""
        self.started_at = self.started_at or now

    def seconds_at(self, now: float) -> float:
        return self.earlier_s + (max(0.0, now - self.started_at) if self.started_at else 0.0)
