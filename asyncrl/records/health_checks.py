"""Health checks: rules over metrics.jsonl that find runs which do not learn, with what to try.

Pure: reads no file and imports no torch.  `asyncrl run` prints each finding once; the summary and
the report's first lines keep it.  A rule is a function of the rows that returns a `HealthFinding`
or None.  It belongs in RULES, in END_RULES if only a finished run can be judged by it, or in
KNOWN_RULES if it also needs the run's settings (`RunFacts`).  Every rule judges measurements:
settings that are known to fail are not a finding until they do.

>>> one = {"reward/mean": 0.0, "reward/no_spread_share": 1.0, "reward/min": 0.0, "reward/max": 0.0}
>>> stuck = [{"step": n} | one for n in range(8)]
>>> [s.name for s in signs(stuck)]
['constant_rewards']
>>> signs(stuck)[0].said
'every completion of the last 8 batches has the reward 0, so no group gives a learning signal'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean, median, median_low, pvariance
from typing import Any, NamedTuple

from asyncrl.config.engines import ENGINES
from asyncrl.config.tree import Config
from asyncrl.contract.errors import REFUSALS

Rows = Sequence[Mapping[str, Any]]

# batches that a rule looks at: at least, at most
LEAST = 5
WINDOW = 20
NEARLY_ALL = 0.95
# share of the generators' time from which waiting for rewards is reported
HELD_UP = 0.1
EXPLAINED = 0.2  # share of the wait for a reward that its calls must account for
Z_95 = 1.96  # of a 95 % interval
Z_EACH = 3.0  # of an interval that is tested after every evaluation: 1 in 700 on one side
ALARM = 0.001  # probability that one test of a series of independent noise calls it growing
PARTS = 18  # a series is reduced to the medians of at most this many stretches
GROWN = 2.0  # late over early from which growth is reported
HARMLESS = 1e-5  # nats a token: a smaller mismatch changes the weight of no completion
MOVED = 0.02  # nats a token to the reference: a policy that moved less needs no KL penalty
# nats a token: KL terms that work held it below this (docs/log), runs without end at 0.2 to 0.4
DRIFT = 0.1
RISING = 1.25  # late third over middle third: 1 for a level, 5/3 for a line
FEWEST = 3  # values in a third of a series if the run gives too few for LEAST
MISMATCH = "mismatch/k3_at_lag_0"
ONE_VERSION = "mismatch/k3_one_version"
SPLIT = "split/mismatch_k3"
# engine against learner at equal weights; the last two only if record.split_every is not 0
MISMATCHES = (MISMATCH, ONE_VERSION, SPLIT)
OWN = "by_age/mismatch_k3_0"  # tokens of one version in the split, as ONE_VERSION
# last measurements that engine_mismatch judges: it fires on half of them, so on 5 bad ones
JUDGED = 9
MOST_ALARM = 0.05  # replaces ALARM in a run that is too short for it
CUT = 0.005  # is/chi2 below minus this: part of the policy was not sampled from
ONCE = 1e-3  # the same for one batch in which no ratio is above 1
REJECTED = 0.5
JUMP = 2.0  # factor of the completions' length
RUNAWAY = 0.05  # nats a token in one batch: healthy runs move 1e-4 to 0.02 (docs/log)
MANY_UPDATES = 4
SWINGS = 3  # turns of accuracy, each larger than chance
ASIDE = "buffer/set_aside"
SILENT = 0.01  # share of the gradient below which a KL penalty has no effect


class HealthFinding(NamedTuple):
    """A problem that a rule found in a run."""

    name: str  # a fixed name, for programs
    said: str  # the observation, with its numbers
    try_this: str  # the advice, with the keys to change

    def as_line(self) -> str:
        return f"{self.said}; {self.try_this}"


class RunFacts(NamedTuple):
    """Facts about a run, besides its rows, that a rule may need."""

    config: Config
    # nats a token: the largest healthy k3 between engine and learner at equal weights
    mismatch: float = 1e-3


def recent_rows(rows: Rows, least: int = LEAST, window: int = WINDOW) -> Rows:
    """Return the rows of the last `window` batches, or none if there are fewer than `least`."""
    batches = [r for r in rows if "reward/mean" in r]
    return batches[-window:] if len(batches) >= least else []


def mean(rows: Rows, name: str) -> float | None:
    """Return the mean of a metric over the rows that have it."""
    values = [float(r[name]) for r in rows if name in r]
    return sum(values) / len(values) if values else None


def series(rows: Rows, name: str) -> list[float]:
    """Return a metric's finite values, in order."""
    return [float(r[name]) for r in rows if name in r and math.isfinite(r[name])]


@cache
def _orders(late: int, early: int) -> tuple[int, ...]:
    """Count the orders of `late` and `early` values by their pairs with the late value above.

    Element i is the number of orders with i such pairs, i = 0, ..., late * early."""
    if not late or not early:
        return (1,)
    # the largest value is either a late one, which is above all early ones, or an early one
    above = _orders(late - 1, early)
    below = _orders(late, early - 1)
    out = [0] * (late * early + 1)
    for pairs, orders in enumerate(above):
        out[pairs + early] += orders
    for pairs, orders in enumerate(below):
        out[pairs] += orders
    return tuple(out)


def chance_above(late: Sequence[float], early: Sequence[float]) -> float:
    """Return the probability of so many pairs with `late` above `early` in a random order.

    The exact one-sided test of Mann and Whitney's U; ties count as below."""
    pairs = sum(x > y for x in late for y in early)
    orders = _orders(len(late), len(early))
    return sum(orders[pairs:]) / sum(orders)


def growth(values: Sequence[float], chance: float = ALARM) -> tuple[float, float] | None:
    """Return the medians of the first and last third of a series that grows, otherwise None.

    The series is cut into at most PARTS stretches, whose medians remove single spikes and the
    correlation of neighbors.  It grows if the last third lies above the rest by more than chance
    (`chance_above` at most `chance`) and is GROWN times the first third.  So at most one test in
    1000 calls independent noise growing, and noise whose level does not double almost never."""
    length = len(values)
    many = min(PARTS, len(values))
    parts = [median(values[i * length // many : (i + 1) * length // many]) for i in range(many)]
    third = many // 3
    if not third or chance_above(parts[-third:], parts[:-third]) > chance:
        return None
    early = median(parts[:third])
    late = median(parts[-third:])
    return (early, late) if late >= GROWN * early else None


def constant_rewards(rows: Rows) -> HealthFinding | None:
    """Almost no group has rewards that differ, so almost every advantage is zero."""
    last = recent_rows(rows)
    share = mean(last, "reward/no_spread_share")
    if share is None or share < NEARLY_ALL:
        return None
    values = {float(r[k]) for r in last for k in ("reward/min", "reward/max") if k in r}
    if len(values) != 1:
        said = (
            f"in {share:.0%} of the groups of the last {len(last)} batches all completions have "
            "the same reward, so there is almost no learning signal"
        )
    else:
        said = (
            f"every completion of the last {len(last)} batches has the reward {values.pop():g}, "
            "so no group gives a learning signal"
        )
    return HealthFinding(
        "constant_rewards",
        said,
        "look at rewards with `asyncrl task try CONFIG`; use prompts of another difficulty, or a "
        "reward with more levels",
    )


def all_truncated(rows: Rows) -> HealthFinding | None:
    """Almost every completion is cut."""
    last = recent_rows(rows)
    share = mean(last, "answer/truncated_share")
    if share is None or share < NEARLY_ALL:
        return None
    said = (
        f"{share:.0%} of the completions of the last {len(last)} batches were cut at "
        "generator.max_new_tokens"
    )
    return HealthFinding(
        "all_truncated",
        said,
        "raise it, or check that the model ends its completions (its end-of-sequence token)",
    )


def interval(mean_value: float, count: float, lo: float, hi: float) -> float:
    """Return half the width of the 95 % interval of a mean of `count` values in [lo, hi].

    Their variance is at most (mean - lo)(hi - mean)."""
    return Z_95 * math.sqrt(max((mean_value - lo) * (hi - mean_value), 0.0) / max(count, 1.0))


def accuracy_unchanged(rows: Rows) -> HealthFinding | None:
    """Held-out reward at the end is within chance of that at the start."""
    evals = sorted((r for r in rows if r.get("eval/heldout_n")), key=lambda r: r["step"])
    batches = recent_rows(rows, least=1, window=len(rows))
    if len(evals) < 2 or not batches or evals[0]["step"] == evals[-1]["step"]:
        return None
    first = evals[0]
    last = evals[-1]
    before = float(first["eval/heldout"])
    after = float(last["eval/heldout"])
    seen = [float(r[k]) for r in batches for k in ("reward/min", "reward/max") if k in r]
    lo = min([0.0, before, after, *seen])
    hi = max([1.0, before, after, *seen])
    sizes = [float(r["eval/heldout_n"]) for r in (first, last)]
    half = math.hypot(interval(before, sizes[0], lo, hi), interval(after, sizes[1], lo, hi))
    if abs(after - before) > half:
        return None
    counts = " and ".join(f"{x:g}" for x in dict.fromkeys(sizes))
    said = (
        f"held-out reward went from {before:.3f} to {after:.3f} in {len(batches)} batches, which "
        f"is within chance (+-{half:.3f} at n = {counts})"
    )
    return HealthFinding(
        "unmoved_accuracy",
        said,
        "train more steps or raise learner.lr; raise evaluation.final_prompts to see smaller gains",
    )


def answers_missing(path: str, without: int, of: int) -> HealthFinding:
    """Build the finding for `without` of `of` prompts that the built-in reward cannot judge."""
    said = (
        f"{path}: {without} of {of} prompts have no `answer` for the task's own reward to compare "
        "with, so their reward is 0"
    )
    return HealthFinding(
        "answers_missing", said, "add answers to the file, or give reward.function"
    )


def generalization_falls(rows: Rows) -> HealthFinding | None:
    """Training improves one reward and lowers another, both by more than chance."""
    far = sorted((r for r in rows if r.get("eval/ood_n")), key=lambda r: r["step"])
    near = sorted((r for r in rows if r.get("eval/heldout_n")), key=lambda r: r["step"])
    batches = recent_rows(rows, window=len(rows))
    if len(far) < 2 or len(near) < 2 or not batches:
        return None

    def change(
        first: Mapping[str, Any], last: Mapping[str, Any], split: str
    ) -> tuple[float, float, float]:
        """Return the values before and after, and the margin of chance of their difference."""
        ends = [(float(r[f"eval/{split}"]), float(r[f"eval/{split}_n"])) for r in (first, last)]
        lo = min(0.0, *(p for p, _ in ends))
        hi = max(1.0, *(p for p, _ in ends))
        half = math.hypot(*(interval(p, n, lo, hi) for p, n in ends)) * Z_EACH / Z_95
        return ends[0][0], ends[1][0], half

    far_before, far_after, chance = change(far[0], far[-1], "ood")
    if not far_after < far_before - chance:
        return None
    what = "held-out reward"
    near_before, near_after, margin = change(near[0], near[-1], "heldout")
    if not near_after > near_before + margin:  # as with a checker that can be fooled
        width = max(1, len(batches) // 5)
        rewards = [mean(x, "reward/mean") or 0.0 for x in (batches[:width], batches[-width:])]
        what = "the training reward"
        near_before = rewards[0]
        near_after = rewards[1]
        if not near_after > near_before + chance:
            return None
    said = (
        f"{what} rose from {near_before:.3f} to {near_after:.3f} while out-of-distribution "
        f"reward fell from {far_before:.3f} to {far_after:.3f}, "
        f"more than chance (+-{chance:.3f})"
    )
    return HealthFinding(
        "out_of_distribution",
        said,
        "end the run earlier, add a KL penalty (kl.reward.coefficient), or also train on prompts "
        "of that kind",
    )


def possible(config: Config, name: str) -> int:
    """Return how many values of a metric a whole run of this config measures."""
    record = config.record
    every = {ONE_VERSION: record.split_every, SPLIT: record.split_every}.get(name, 1)
    if name == "kl/target_ref_k3" and not (
        config.kl.loss.coefficient > 0 or config.kl.reward.coefficient > 0
    ):
        every = record.reference_kl_every
    return -(-config.learner.steps // every) if every else 0


def alarm(values: int) -> float:
    """Return the probability at which a series of at most `values` is called growing.

    ALARM, or the smallest that so few values can reach, up to MOST_ALARM.

    >>> alarm(30), round(alarm(12), 4), alarm(5)
    (0.001, 0.002, 0.05)
    """
    third = min(values, PARTS) // 3
    least = 1 / math.comb(min(values, PARTS), third)
    return min(max(ALARM, least), MOST_ALARM)


def growing_mismatch(rows: Rows, about: RunFacts | None = None) -> HealthFinding | None:
    """The mismatch of engine and learner at equal weights grows, as it does before a collapse."""
    for name in MISMATCHES:
        chance = ALARM if about is None else alarm(possible(about.config, name))
        found = growth(series(rows, name), chance)
        if found is not None and found[1] >= HARMLESS:
            said = (
                f"the mismatch of engine and learner at equal weights grows: {name} from "
                f"{found[0]:.1e} to {found[1]:.1e} nats a token"
            )
            return HealthFinding(
                "growing_mismatch",
                said,
                "keep the current checkpoint; lower learner.lr, or make the engine compute like "
                "the learner (generator.dtype, exact)",
            )
    return None


# ---- with the run's settings ---------------------------------------------------------------------


def calls_explain(queue: float, wait: float, call: float, workers: float) -> bool:
    """Decide whether the reward calls explain how long completions wait for their rewards.

    If not, the completions wait for a core, and no change of the function would help.

    >>> calls_explain(120, 20.0, 0.2, 1)
    True
    >>> calls_explain(21, 0.3, 2e-5, 1)
    False
    """
    return max(queue / max(workers, 1.0), 1.0) * call >= EXPLAINED * wait


def rewards_block_generators(rows: Rows) -> HealthFinding | None:
    """Generators are idle while their completions wait for rewards."""
    batches = recent_rows(rows)
    share = mean(batches, "time/reward_wait_share")
    if share is None or share < HELD_UP:
        return None
    queue, wait, workers = (
        mean(batches, f"reward/{x}") or 0.0 for x in ("queue", "wait_s", "workers")
    )
    call = mean(batches, "reward/call_s")  # None: no call has ended yet
    if call is None or not calls_explain(queue, wait, call, workers):
        return None
    return HealthFinding(
        "rewards_hold_up",
        f"in the last {len(batches)} batches the generators were idle {share:.0%} of their time "
        f"because of rewards: {queue:.0f} completions waited, {wait:.2g} s each, and calls took "
        f"{call:.2g} s in {workers:.0f} process{'es' * (workers > 1)}",
        "if the function waits for something, make it `async def` (reward.concurrency); if each "
        "call has much to set up, let it take lists (`batched = True`, reward.batch); "
        "reward.workers adds processes",
    )


def refusals(latest: Mapping[str, Any]) -> dict[str, int]:
    """Return how many messages the buffer has refused so far, by reason.

    latest: the newest value of each metric, or a row.

    >>> refusals({"refused/number": 2.0, "reward/mean": 0.5})
    {'number': 2}
    """
    return {
        name.partition("/")[2]: int(count)
        for name, count in latest.items()
        if name.startswith("refused/") and count
    }


def refused_messages(rows: Rows) -> HealthFinding | None:
    """The buffer has refused messages, of a process of the run or of a stranger."""
    found = next((said for row in reversed(rows) if (said := refusals(row))), {})
    if not found:
        return None
    many = sum(found.values())
    return HealthFinding(
        "refused_messages",
        f"the buffer has refused {many} message{'s' * (many > 1)}: "
        + "; ".join(f"{count} {REFUSALS[reason]}" for reason, count in found.items()),
        "a refused process of the run was ended; the buffer's log has the first messages "
        "(logs/attempt_*/buffer.log)",
    )


def batches_set_aside(rows: Rows) -> HealthFinding | None:
    """A batch on which the learner repeatedly exited was excluded."""
    many = int(next((row[ASIDE] for row in reversed(rows) if ASIDE in row), 0))
    if not many:
        return None
    return HealthFinding(
        "batches_set_aside",
        f"{many} batch{'es were' if many > 1 else ' was'} excluded because the learner repeatedly "
        f"exited on {'them' if many > 1 else 'it'}",
        "look at RUN/set_aside and the ends of logs/attempt_*/learner.log",
    )


def dry_tasks(rows: Rows) -> HealthFinding | None:
    """Tasks of a mixture have no prompts left, or give no group that can be trained."""
    last = next(iter(recent_rows(rows, least=1, window=1)), {})
    dry = [k.removeprefix("task/").removesuffix("_dry") for k, x in last.items() if _is_dry(k, x)]
    if not dry:
        return None
    removed = ", ".join(f"{name} {last.get(f'task/{name}_removed', 0):.0f}" for name in dry)
    return HealthFinding(
        "dry_tasks",
        f"the mixture gets no more groups to train from {', '.join(dry)} (removed so far: "
        f"{removed}); the other tasks have its share",
        "if its groups have equal rewards, it is too easy or too hard: change its prompts, weight "
        "or curriculum; if its prompts ran out, raise passes",
    )


def _is_dry(name: str, value: Any) -> bool:
    return name.startswith("task/") and name.endswith("_dry") and value == 1


def engine_mismatch(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """Engine and learner differ at equal weights by more than rounding, in half of the last values.

    There are three measures.  MISMATCH uses tokens sampled by the batch's starting weights, which
    a run with lag has only in its first batches.  ONE_VERSION uses tokens whose version computed
    all their keys and values.  SPLIT uses all tokens of the split, where a completion continued on
    keys and values of older weights differs, too."""
    for name in MISMATCHES:
        found = series(rows, name)[-JUDGED:]
        own = series(rows, OWN)[-JUDGED:]
        if not found or (k3 := median_low(found)) <= about.mismatch:
            continue
        said = (
            f"engine and learner differ at equal weights by k3 = {k3:.1e} nats a token ({name}), "
            f"above {about.mismatch:g}"
        )
        if name != ONE_VERSION and own and median_low(own) <= about.mismatch:
            said += f", but by {median_low(own):.1e} where no older keys and values are read"
            return HealthFinding(
                "engine_mismatch",
                f"{said} ({OWN})",
                "the difference comes from completions continued across weights: set "
                'weights.in_flight = "recompute_kv" or "between_groups"',
            )
        if evidence := cut_off(rows):
            cuts = _cuts(about)
            return HealthFinding(
                "truncated_sampling" if cuts else "engine_mismatch",
                f"{said}; {evidence}",
                _whole_distribution(cuts),
            )
        return HealthFinding(
            "engine_mismatch",
            said,
            f"{_mismatch_cause(about)}, or correct for it: `asyncrl run --resume RUN --set "
            "correction.preset=mis`",
        )
    return None


def _mismatch_cause(about: RunFacts) -> str:
    generator = about.config.generator
    if generator.quantize != "none" and not about.config.learner.shared_rounding:
        return (
            f"generator.quantize = {generator.quantize} causes it: set learner.shared_rounding = "
            "true"
        )
    return "check generator.dtype and weights.in_flight"


def cut_off(rows: Rows) -> str:
    """Return the evidence that the engine sampled only from a part of the policy, or "".

    The engine renormalizes that part, so every ratio learner / engine is at most 1 at equal
    weights, and the mean square of the ratios, chi2 + 1, stays below 1 under lag, too.  A
    difference in arithmetic has no such effect."""
    both = [r for r in rows if "is/chi2" in r and "is/ratio_max" in r]
    once = [
        float(r["is/chi2"]) for r in both if r["is/ratio_max"] <= 1 + ONCE and r["is/chi2"] < -ONCE
    ]
    last = series(recent_rows(both), "is/chi2")
    if last and median(last) < -CUT:
        seen = f"is/chi2 is {median(last):.3f} in the median of the last {len(last)} batches"
    elif once and len(both) <= LEAST:
        seen = f"is/chi2 is {once[-1]:.3f} in a batch without a ratio above 1 (is/ratio_max)"
    else:
        return ""
    return f"{seen}; below zero it shows that only a part of the distribution was sampled from"


def _cuts(about: RunFacts) -> str:
    """Name the run's settings that restrict the sampled distribution unknown to the learner."""
    generator = about.config.generator
    if ENGINES[generator.engine].records_support:
        return ""
    return " and ".join(
        f"generator.{name} = {value:g}"
        for name, value, whole in (("top_p", generator.top_p, 1), ("top_k", generator.top_k, 0))
        if value != whole
    )


def _whole_distribution(cuts: str) -> str:
    if cuts:
        return f"the cause is {cuts}, not the dtype; sample from the whole distribution"
    return (
        "look for top_p, top_k or min_p where completions are sampled (a client's own settings, "
        "the engine's defaults) before you look at the dtype"
    )


def truncated_sampling(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """Completions come from a part of the policy, by too little for `engine_mismatch`."""
    evidence = cut_off(rows)
    if not evidence or engine_mismatch(rows, about) is not None:
        return None
    return HealthFinding("truncated_sampling", evidence, _whole_distribution(_cuts(about)))


def drift(rows: Rows, about: RunFacts) -> tuple[float, float] | None:
    """Return the KL to the reference in the middle and last third, if it is large and rises.

    k3 estimates, in nats a token."""
    kls = series(rows, "kl/target_ref_k3")
    third = len(kls) // 3
    if third < max(FEWEST, min(LEAST, possible(about.config, "kl/target_ref_k3") // 3)):
        return None
    middle = median(kls[third : 2 * third])
    late = median(kls[-third:])
    return (middle, late) if late >= DRIFT and late >= RISING * middle else None


def gains(rows: Rows) -> bool:
    """Decide whether the training reward is visibly higher in the last third than in the middle."""
    rewards = series(rows, "reward/mean")
    third = len(rewards) // 3
    if not third:
        return False
    parts = (rewards[third : 2 * third], rewards[-third:])
    error = math.sqrt(sum(pvariance(part) / third for part in parts))
    return fmean(parts[1]) - fmean(parts[0]) > error


def kl_drift(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """The policy leaves the reference and nothing holds it.

    Either there is no KL penalty and the reward does not rise any more, or the penalty is k1 in
    the loss, whose expected gradient on policy is zero (k1+ has that of k2)."""
    term = about.config.kl.loss
    free = not term.coefficient > 0 and not about.config.kl.reward.coefficient > 0
    idle = term.coefficient > 0 and term.estimator == "k1" and term.off_policy == "none"
    found = drift(rows, about) if free or idle else None
    if found is None or (free and gains(rows)):
        return None
    said = (
        f"KL to the reference rises from {found[0]:.2f} to {found[1]:.2f} nats a token "
        "(kl/target_ref_k3) "
    )
    if free:
        return HealthFinding(
            "kl_drift",
            f"{said}without a KL penalty, and the reward does not rise with it",
            "end the run or lower learner.lr; to hold the policy, set kl.loss.coefficient = 0.01 "
            'or more (kl.loss.estimator = "k3"), or k1 in the reward (kl.reward.coefficient)',
        )
    return HealthFinding(
        "kl_drift",
        f"{said}under a KL penalty with k1 in the loss, which has no expected gradient on policy",
        'set kl.loss.estimator = "k3" or "k2", or use k1 in the reward (kl.reward.coefficient)',
    )


def stale_kl_reward(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """k1 in the reward is measured once a batch, so later updates do not see how far they go."""
    term = about.config.kl.reward
    updates = series(recent_rows(rows), "optim/steps")
    if not (term.coefficient > 0 and term.estimator in ("k1", "k1+")) or not updates:
        return None
    found = drift(rows, about)
    if found is None or median(updates) < MANY_UPDATES:
        return None
    return HealthFinding(
        "stale_kl_reward",
        f"KL to the reference rises from {found[0]:.2f} to {found[1]:.2f} nats a token "
        f"(kl/target_ref_k3) under k1 in the reward, which {median(updates):.0f} updates a batch "
        "share; it is measured only before the first of them",
        "make fewer updates a batch (learner.epochs, learner.minibatches), set stop.kl_max, or use "
        "k3 in the loss (kl.loss.coefficient), which every update sees",
    )


def kl_runaway(rows: Rows) -> HealthFinding | None:
    """Within one batch the policy moves further than a trust region should allow."""
    for name in ("kl/start_target_k3", "kl/moved"):
        last = series(rows, name)[-LEAST:]
        if len(last) >= FEWEST and (far := median(last)) >= RUNAWAY:
            updates = median(series(recent_rows(rows, least=1), "optim/steps") or [1])
            return HealthFinding(
                "kl_runaway",
                f"in one batch the policy moves by {far:.2f} nats a token ({name}), in "
                f"{updates:.0f} update{'s' * (updates > 1)}; healthy runs stay below 0.02",
                "lower learner.lr"
                + (
                    ", make fewer updates a batch (learner.epochs), or end them with stop.kl_max"
                    if updates > 1
                    else " or learner.clip_norm"
                ),
            )
    return None


def batch_rejected(rows: Rows) -> HealthFinding | None:
    """The correction excludes most of what is generated from the loss."""
    last = recent_rows(rows)
    shares = {
        what: mean(last, f"is/{what}_share") or 0.0 for what in ("rejected", "vetoed", "masked")
    }
    gone = sum(shares.values())
    if gone < REJECTED:
        return None
    parts = ", ".join(f"{x:.0%} {what}" for what, x in shares.items() if x)
    return HealthFinding(
        "batch_rejected",
        f"{gone:.0%} of the tokens of the last {len(last)} batches are excluded from the loss "
        f"({parts})",
        "the bounds of [correction] are too narrow for this lag and engine: widen them "
        "(correction.reject_hi, veto_below, hi), lower staleness.max_lag, or look at is/ess and "
        "mismatch/k3_one_version",
    )


def length_jump(rows: Rows) -> HealthFinding | None:
    """Completions are suddenly at least twice or at most half as long as before."""
    batches = [r for r in rows if "answer/length" in r]
    lengths = series(batches, "answer/length")
    for end in range(len(lengths), 2 * LEAST + LEAST - 1, -1):
        before = median(lengths[end - 3 * LEAST : end - LEAST])
        after = median(lengths[end - LEAST : end])
        if min(before, after) > 0 and not 1 / JUMP < after / before < JUMP:
            step = batches[end - LEAST]["step"]
            return HealthFinding(
                "length_jump",
                f"from batch {step} on completions are {after:.0f} tokens long, {before:.0f} in "
                f"the {2 * LEAST} batches before",
                "look in samples.jsonl for completions that do not end, or for a reward that pays "
                "for length; go back to an earlier checkpoint, lower learner.lr, or change the "
                "reward",
            )
    return None


def oscillating_accuracy(rows: Rows) -> HealthFinding | None:
    """Held-out reward goes up and down repeatedly, by more than chance."""
    evals = sorted((r for r in rows if r.get("eval/heldout_n")), key=lambda r: r["step"])
    points = [(float(r["eval/heldout"]), float(r["eval/heldout_n"])) for r in evals]
    if len(points) < SWINGS + 2:
        return None
    lo = min(0.0, *(p for p, _ in points))
    hi = max(1.0, *(p for p, _ in points))
    turns: list[float] = []  # the accuracy at each
    way = 0  # 1: up, -1: down, since `extreme`
    extreme = points[0]
    for point in points[1:]:
        if way * (point[0] - extreme[0]) > 0:
            extreme = point
            continue
        up = way <= 0 and _exceeds(point, extreme, lo, hi)
        down = way >= 0 and _exceeds(extreme, point, lo, hi)
        if up or down:
            turns += [extreme[0]] if way else []
            way = 1 if up else -1
            extreme = point
    if len(turns) < SWINGS:
        return None
    told = ", ".join(f"{x:.2f}" for x in turns[-4:])
    return HealthFinding(
        "oscillating_accuracy",
        f"held-out reward has turned {len(turns)} times, by more than chance each time: {told}",
        "lower learner.lr or use larger batches (learner.groups); lower staleness.max_lag if "
        "is/ess is below 0.9",
    )


def _exceeds(
    larger: tuple[float, float], smaller: tuple[float, float], lo: float, hi: float
) -> bool:
    """Decide whether one (mean, prompts) exceeds the other by more than chance."""
    half = math.hypot(*(interval(p, n, lo, hi) for p, n in (larger, smaller))) * Z_EACH / Z_95
    return larger[0] - smaller[0] > half


def kl_collapse(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """k3 in the reward collapses: its gradient pushes away from the reference."""
    term = about.config.kl.reward
    if not (term.coefficient > 0 and term.estimator in ("k3", "k3+", "low_var_kl", "low_var_kl+")):
        return None
    accuracy = series(sorted(rows, key=lambda r: r.get("step", 0)), "eval/heldout")
    found = drift(rows, about)
    if len(accuracy) > 1 and accuracy[-1] < max(accuracy) / 2:
        what = f"held-out reward fell to {accuracy[-1]:.3f} from {max(accuracy):.3f}"
    elif found is not None:
        what = (
            f"KL to the reference rises from {found[0]:.2f} to {found[1]:.2f} nats a token "
            "(kl/target_ref_k3)"
        )
    else:
        return None
    return HealthFinding(
        "kl_collapse",
        f"{what} under a KL penalty with k3 in the reward, which is known to collapse",
        'set kl.reward.estimator = "k1", or use k3 in the loss (kl.loss.coefficient), and go back '
        "to an earlier checkpoint",
    )


def kl_without_effect(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """The policy has left the reference, and the KL penalty's gradient is too small to matter."""
    last = recent_rows(rows, least=WINDOW)
    moved = series(last, "kl/target_ref_k3")
    terms = (
        ("kl.loss", about.config.kl.loss, "kl/gradient_share"),
        ("kl.reward", about.config.kl.reward, "kl/reward_gradient_share"),
    )
    for key, term, metric in terms:
        share = series(last, metric)
        if (
            not term.coefficient > 0
            or not share
            or not moved
            or median(share) >= SILENT
            or median(moved) < MOVED
        ):
            continue
        said = (
            f"the KL penalty's gradient is {median(share):.1%} of the policy term's ({metric}) at "
            f"a KL of {median(moved):.2f} nats a token to the reference, so it has no effect"
        )
        return HealthFinding(
            "kl_without_effect",
            said,
            f"raise {key}.coefficient = {term.coefficient:g} tenfold or more, or remove the "
            "penalty",
        )
    return None


RULES: tuple[Callable[[Rows], HealthFinding | None], ...] = (
    constant_rewards,
    all_truncated,
    rewards_block_generators,
    generalization_falls,
    kl_runaway,
    batch_rejected,
    length_jump,
    oscillating_accuracy,
    refused_messages,
    batches_set_aside,
    dry_tasks,
)
END_RULES: tuple[Callable[[Rows], HealthFinding | None], ...] = (accuracy_unchanged,)

KNOWN_RULES: tuple[Callable[[Rows, RunFacts], HealthFinding | None], ...] = (
    engine_mismatch,
    truncated_sampling,
    kl_drift,
    stale_kl_reward,
    kl_collapse,
    kl_without_effect,
)


def signs(rows: Rows, about: RunFacts | None = None, *, ended: bool = False) -> list[HealthFinding]:
    """Apply the rules to a run's rows so far.

    about: the run's settings.  ended: also apply the rules for finished runs."""
    found = [rule(rows) for rule in (*RULES, *(END_RULES if ended else ()))]
    found.append(growing_mismatch(rows, about))
    found += [rule(rows, about) for rule in KNOWN_RULES] if about is not None else []
    return [s for s in found if s is not None]
