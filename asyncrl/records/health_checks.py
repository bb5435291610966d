"""Signs that a run does not learn what it was meant to: rules over metrics.jsonl, with what to try.

Pure: reads no file and imports no torch.  `asyncrl run` says each sign once on the terminal; the
summary and the report's first lines keep them.  A rule is a function of the rows that returns a
`HealthFinding` or None; it belongs into RULES, or into END_RULES if only a finished run can be
judged by it,
or into KNOWN_RULES if it must know the run's settings (`RunFacts`) as well.  Every rule looks at
what
was measured: settings that are known to go wrong, and did not, are no sign.

>>> one = {"reward/mean": 0.0, "reward/no_spread_share": 1.0, "reward/min": 0.0, "reward/max": 0.0}
>>> stuck = [{"step": n} | one for n in range(8)]
>>> [s.name for s in signs(stuck)]
['constant_rewards']
>>> signs(stuck)[0].said
'every answer of the last 8 batches was given the reward 0: no group has a spread to learn from'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean, median, median_low, pvariance
from typing import Any, NamedTuple

from asyncrl.config.tree import Config
from asyncrl.contract.errors import REFUSALS

Rows = Sequence[Mapping[str, Any]]

# batches that a rule looks at: at least, at most
LEAST = 5
WINDOW = 20
NEARLY_ALL = 0.95
# share of the generators' time, from which on rewards are said to be what they wait for
HELD_UP = 0.1
EXPLAINED = 0.2  # share of the wait for a reward that its calls must account for
Z_95 = 1.96  # of a 95 % interval
Z_EACH = 3.0  # of an interval that is looked at after every evaluation: 1 in 700 of one side
ALARM = 0.001  # chance that one look at a series of independent noise calls it growing
PARTS = 18  # a series is reduced to the medians of so many stretches, at most
GROWN = 2.0  # late over early, from which on growth is worth a word
HARMLESS = 1e-5  # nats a token: a mismatch below it moves the weights of no answer
MOVED = 0.02  # nats a token to the reference: a policy that has moved so little needs no KL term
# nats a token: KL terms that work held it below this (docs/log), runs without end at 0.2 to 0.4
DRIFT = 0.1
RISING = 1.25  # late third over middle third: 1 for a level, 5/3 for a line
FEWEST = 3  # values of a third of a series, where the run gives too few for LEAST
MISMATCH = "mismatch/k3_at_lag_0"
ONE_VERSION = "mismatch/k3_one_version"
SPLIT = "split/mismatch_k3"
# of the engine under equal weights: the second and the third where record.split_every is not 0
MISMATCHES = (MISMATCH, ONE_VERSION, SPLIT)
OWN = "by_age/mismatch_k3_0"  # the split's own tokens of one version, as ONE_VERSION
# measurements that engine_mismatch judges: half of a run's last 9, so 5 bad ones of 20 in all
JUDGED = 9
MOST_ALARM = 0.05  # of a run that is too short for ALARM
CUT = 0.005  # is/chi2 below minus it: part of the policy was not sampled from
ONCE = 1e-3  # the same of one batch in which no ratio is above 1
REJECTED = 0.5
JUMP = 2.0  # of the answers' length
RUNAWAY = 0.05  # nats a token in one batch: healthy runs move 1e-4 to 0.02 (docs/log)
MANY_UPDATES = 4
SWINGS = 3  # turns of accuracy, each larger than chance
ASIDE = "buffer/set_aside"
SILENT = 0.01  # share of the gradient below which a KL term decides nothing


class HealthFinding(NamedTuple):
    """One finding."""

    name: str  # a fixed name, for programs
    said: str  # what was seen, with its numbers
    try_this: str  # what to change, with its key

    def as_line(self) -> str:
        return f"{self.said}; {self.try_this}"


class RunFacts(NamedTuple):
    """What a rule may know of a run beside its rows."""

    config: Config
    # nats a token: the largest healthy k3 between engine and learner at equal weights
    mismatch: float = 1e-3


def recent_rows(rows: Rows, least: int = LEAST, window: int = WINDOW) -> Rows:
    """The rows of the last `window` batches; none while there are fewer than `least`."""
    batches = [r for r in rows if "reward/mean" in r]
    return batches[-window:] if len(batches) >= least else []


def mean(rows: Rows, name: str) -> float | None:
    """Mean of a metric over the rows that have it."""
    values = [float(r[name]) for r in rows if name in r]
    return sum(values) / len(values) if values else None


def series(rows: Rows, name: str) -> list[float]:
    """A metric's finite values, in order."""
    return [float(r[name]) for r in rows if name in r and math.isfinite(r[name])]


@cache
def _orders(late: int, early: int) -> tuple[int, ...]:
    """Of the orders of so many late and early values: how many have 0, 1, ..., late * early pairs
    with the late one above.
    """
    if not late or not early:
        return (1,)
    # the largest of all is a late one, above n; or an early one
    above = _orders(late - 1, early)
    below = _orders(late, early - 1)
    out = [0] * (late * early + 1)
    for pairs, orders in enumerate(above):
        out[pairs + early] += orders
    for pairs, orders in enumerate(below):
        out[pairs] += orders
    return tuple(out)


def chance_above(late: Sequence[float], early: Sequence[float]) -> float:
    """Chance that `late` lies above `early` so often, if their order is none: Mann and Whitney's U,
    exact, one-sided; ties count as below.
    """
    pairs = sum(x > y for x in late for y in early)
    orders = _orders(len(late), len(early))
    return sum(orders[pairs:]) / sum(orders)


def growth(values: Sequence[float], chance: float = ALARM) -> tuple[float, float] | None:
    """(early, late): medians of the first and the last third of a series that grows; None: it does
    not.

    The series is cut into at most PARTS stretches, whose medians forget single spikes and what
    neighbours have in common.  It grows when the last third lies above the rest by more than chance
    (`chance_above` at most `chance`) and is GROWN times the first third.  So independent noise is
    called growing at no more than one look in 1000, and noise whose level does not double hardly
    ever."""
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
    """Nearly no group has rewards that differ, so nearly every advantage is zero."""
    last = recent_rows(rows)
    share = mean(last, "reward/no_spread_share")
    if share is None or share < NEARLY_ALL:
        return None
    values = {float(r[k]) for r in last for k in ("reward/min", "reward/max") if k in r}
    if len(values) != 1:
        said = (
            f"in {share:.0%} of the groups of the last {len(last)} batches all answers have the "
            "same "
            "reward: hardly anything to learn from"
        )
    else:
        said = (
            f"every answer of the last {len(last)} batches was given the reward {values.pop():g}: "
            "no group has a spread to learn from"
        )
    return HealthFinding(
        "constant_rewards",
        said,
        "look at rewards by `asyncrl task try`; prompts of another "
        "difficulty, or a reward with more steps, give a spread",
    )


def all_truncated(rows: Rows) -> HealthFinding | None:
    """Nearly no answer comes to its end."""
    last = recent_rows(rows)
    share = mean(last, "answer/truncated_share")
    if share is None or share < NEARLY_ALL:
        return None
    said = (
        f"{share:.0%} of the answers of the last {len(last)} batches were cut at "
        "generator.max_new_tokens"
    )
    return HealthFinding(
        "all_truncated",
        said,
        "raise it, or look whether the model ends its answers at all (its end-of-sequence token)",
    )


def interval(mean_value: float, count: float, lo: float, hi: float) -> float:
    """Half the 95 % interval of a mean of `count` values in [lo, hi]: their variance is at most
    (mean - lo)(hi - mean).
    """
    return Z_95 * math.sqrt(max((mean_value - lo) * (hi - mean_value), 0.0) / max(count, 1.0))


def accuracy_unchanged(rows: Rows) -> HealthFinding | None:
    """Held-out accuracy at the end differs from that at the start by less than chance may make of
    it.
    """
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
        f"held-out accuracy went from {before:.3f} to {after:.3f} in {len(batches)} batches, which "
        f"is within chance (+-{half:.3f} at n = {counts})"
    )
    return HealthFinding(
        "unmoved_accuracy",
        said,
        "more steps, a larger learner.lr, or more evaluation.final_prompts to see smaller gains",
    )


def answers_missing(path: str, without: int, of: int) -> HealthFinding:
    """`without` of the `of` prompts have nothing that the built-in reward could compare with."""
    said = (
        f"{path}: {without} of {of} prompts have no `answer`, which the task's own reward compares "
        "with: it is 0 for them"
    )
    return HealthFinding(
        "answers_missing", said, "add answers to the file, or give reward.function"
    )


def generalization_falls(rows: Rows) -> HealthFinding | None:
    """What is trained gets better while what is not trained gets worse, both by more than
    chance.
    """
    far = sorted((r for r in rows if r.get("eval/ood_n")), key=lambda r: r["step"])
    near = sorted((r for r in rows if r.get("eval/heldout_n")), key=lambda r: r["step"])
    batches = recent_rows(rows, window=len(rows))
    if len(far) < 2 or len(near) < 2 or not batches:
        return None

    def change(
        first: Mapping[str, Any], last: Mapping[str, Any], split: str
    ) -> tuple[float, float, float]:
        """Before, after, and what chance may make of their difference."""
        ends = [(float(r[f"eval/{split}"]), float(r[f"eval/{split}_n"])) for r in (first, last)]
        lo = min(0.0, *(p for p, _ in ends))
        hi = max(1.0, *(p for p, _ in ends))
        half = math.hypot(*(interval(p, n, lo, hi) for p, n in ends)) * Z_EACH / Z_95
        return ends[0][0], ends[1][0], half

    far_before, far_after, chance = change(far[0], far[-1], "ood")
    if not far_after < far_before - chance:
        return None
    what = "held-out accuracy"
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
        f"accuracy fell from {far_before:.3f} to {far_after:.3f}, "
        f"more than chance (+-{chance:.3f})"
    )
    return HealthFinding(
        "out_of_distribution",
        said,
        "end the run earlier, hold it to its start by a KL term (kl.reward.coefficient), or train "
        "on "
        "prompts of that kind too",
    )


def possible(config: Config, name: str) -> int:
    """How many values of a measured metric a run of this config gives in all."""
    record = config.record
    every = {ONE_VERSION: record.split_every, SPLIT: record.split_every}.get(name, 1)
    if name == "kl/target_ref_k3" and not (
        config.kl.loss.coefficient > 0 or config.kl.reward.coefficient > 0
    ):
        every = record.reference_kl_every
    return -(-config.learner.steps // every) if every else 0


def alarm(values: int) -> float:
    """The chance at which a series of at most `values` is called growing: ALARM, or, where so few
    cannot be that sure, the smallest that they can show, up to MOST_ALARM.

    >>> alarm(30), round(alarm(12), 4), alarm(5)
    (0.001, 0.002, 0.05)
    """
    third = min(values, PARTS) // 3
    least = 1 / math.comb(min(values, PARTS), third)
    return min(max(ALARM, least), MOST_ALARM)


def growing_mismatch(rows: Rows, about: RunFacts | None = None) -> HealthFinding | None:
    """Engine and learner at equal weights come further and further apart, as they do before runs
    collapse.
    """
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
                "keep a checkpoint of now; lower learner.lr, or let the engine compute as the "
                "learner does "
                "(generator.dtype, exact)",
            )
    return None


# ---- with the run's settings ---------------------------------------------------------------------


def calls_explain(queue: float, wait: float, call: float, workers: float) -> bool:
    """Do the calls themselves account for the seconds that an answer waits for its reward?  Where
    they do not, it waits for a core: no change of the function would help.

    >>> calls_explain(120, 20.0, 0.2, 1)
    True
    >>> calls_explain(21, 0.3, 2e-5, 1)
    False
    """
    return max(queue / max(workers, 1.0), 1.0) * call >= EXPLAINED * wait


def rewards_block_generators(rows: Rows) -> HealthFinding | None:
    """Generators that stand idle while their answers wait for rewards."""
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
        f"in the last {len(batches)} batches the generators stood idle {share:.0%} of their time "
        f"for rewards: {queue:.0f} answers waited, "
        f"{wait:.2g} s each, calls took {call:.2g} s "
        f"in {workers:.0f} process{'es' * (workers > 1)}",
        "a function that waits for something should be `async def` (reward.concurrency), one that "
        "has much to set up for each call take lists "
        "(`batched = True`, reward.batch); reward.workers adds processes",
    )


def refusals(latest: Mapping[str, Any]) -> dict[str, int]:
    """Messages that the buffer refused so far, by reason; latest: the newest value of each metric,
    or a row.

    >>> refusals({"refused/number": 2.0, "reward/mean": 0.5})
    {'number': 2}
    """
    return {
        name.partition("/")[2]: int(count)
        for name, count in latest.items()
        if name.startswith("refused/") and count
    }


def refused_messages(rows: Rows) -> HealthFinding | None:
    """The buffer has refused what a process of the run said, or a stranger."""
    found = next((said for row in reversed(rows) if (said := refusals(row))), {})
    if not found:
        return None
    many = sum(found.values())
    return HealthFinding(
        "refused_messages",
        f"the buffer has refused {many} message{'s' * (many > 1)}: "
        + "; ".join(f"{count} {REFUSALS[reason]}" for reason, count in found.items()),
        "the sender was ended, or is no process of this run; the buffer's log names the first ones "
        "(logs/attempt_*/buffer.log)",
    )


def batches_set_aside(rows: Rows) -> HealthFinding | None:
    """A batch on which the learner died again and again is left out."""
    many = int(next((row[ASIDE] for row in reversed(rows) if ASIDE in row), 0))
    if not many:
        return None
    return HealthFinding(
        "batches_set_aside",
        f"{many} batch{'es were' if many > 1 else ' was'} set aside: the learner's lives ended on "
        f"{'them' if many > 1 else 'it'}",
        "look into RUN/set_aside and the ends of logs/attempt_*/learner.log",
    )


def engine_mismatch(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """Engine and learner differ at equal weights by more than rounding explains, in half of the
    last measurements or more.

    Three measures of it: of tokens that the batch's starting weights drew, which a run that lags
    has in its first batches alone; by the split, of tokens whose version computed all they read;
    and of all tokens of the split, where what continues an answer on keys and values of older
    weights differs too."""
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
                'it is the answers continued across weights: weights.in_flight = "recompute_kv" or '
                '"between_groups"',
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
            "look at generator.dtype and weights.in_flight, or correct for it: `asyncrl run "
            "--resume RUN --set correction.preset=mis`",
        )
    return None


def cut_off(rows: Rows) -> str:
    """What says that the engine sampled from a part of the policy only; "": nothing.

    What it can draw is renormalized, so every ratio of the learner to it is at most 1 at equal
    weights, and the mean square of the ratios, chi2 + 1, stays below 1 under lag too, which a
    difference in arithmetic does not bring about."""
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
    return f"{seen}: below zero, it is that of sampling from a part of the distribution only"


def _cuts(about: RunFacts) -> str:
    """The run's own settings that cut what is sampled from."""
    generator = about.config.generator
    return " and ".join(
        f"generator.{name} = {value:g}"
        for name, value, whole in (("top_p", generator.top_p, 1), ("top_k", generator.top_k, 0))
        if value != whole
    )


def _whole_distribution(cuts: str) -> str:
    if cuts:
        return f"it comes from {cuts}, and is no fault of the dtype; sample from all of it"
    return (
        "look for top_p, top_k or min_p where answers are sampled (a client's own settings, the "
        "engine's defaults) before you look at the dtype"
    )


def truncated_sampling(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """The answers are sampled from a part of the policy, by too little for `engine_mismatch`."""
    evidence = cut_off(rows)
    if not evidence or engine_mismatch(rows, about) is not None:
        return None
    return HealthFinding("truncated_sampling", evidence, _whole_distribution(_cuts(about)))


def drift(rows: Rows, about: RunFacts) -> tuple[float, float] | None:
    """KL to the reference (k3, nats a token) in the middle and the last third of a run, if it is
    large and still rises.
    """
    kls = series(rows, "kl/target_ref_k3")
    third = len(kls) // 3
    if third < max(FEWEST, min(LEAST, possible(about.config, "kl/target_ref_k3") // 3)):
        return None
    middle = median(kls[third : 2 * third])
    late = median(kls[-third:])
    return (middle, late) if late >= DRIFT and late >= RISING * middle else None


def gains(rows: Rows) -> bool:
    """Is the training reward visibly higher in the last third of the batches than in the middle
    one?"""
    rewards = series(rows, "reward/mean")
    third = len(rewards) // 3
    if not third:
        return False
    parts = (rewards[third : 2 * third], rewards[-third:])
    error = math.sqrt(sum(pvariance(part) / third for part in parts))
    return fmean(parts[1]) - fmean(parts[0]) > error


def kl_drift(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """The policy leaves the reference and nothing holds it: no KL term, and no gain any more; or k1
    in the loss, whose expected gradient on policy is zero (k1+ has that of k2).
    """
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
            f"{said}without a KL term, and the reward does not rise with it",
            "end the run or lower learner.lr; to hold it, kl.loss.coefficient = 0.01 or more "
            '(kl.loss.estimator = "k3"), or k1 in the reward (kl.reward.coefficient)',
        )
    return HealthFinding(
        "kl_drift",
        f"{said}under a KL term with k1 in the loss, which has no expected gradient on policy",
        'kl.loss.estimator = "k3" (or "k2"), or k1 in the reward (kl.reward.coefficient)',
    )


def stale_kl_reward(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """k1 in the reward is charged once a batch, before its first update: later ones do not see how
    far they go.
    """
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
        "share: it is measured before the first of them",
        "fewer updates a batch (learner.epochs, learner.minibatches), stop.kl_max, or k3 in the "
        "loss (kl.loss.coefficient), which every update sees",
    )


def kl_runaway(rows: Rows) -> HealthFinding | None:
    """Within one batch the policy moves further than a trust region is meant to let it."""
    for name in ("kl/start_target_k3", "kl/moved"):
        last = series(rows, name)[-LEAST:]
        if len(last) >= FEWEST and (far := median(last)) >= RUNAWAY:
            updates = median(series(recent_rows(rows, least=1), "optim/steps") or [1])
            return HealthFinding(
                "kl_runaway",
                f"in one batch the policy moves by {far:.2f} nats a token ({name}), in "
                f"{updates:.0f} update{'s' * (updates > 1)}: 0.02 is much",
                "lower learner.lr"
                + (
                    ", make fewer updates a batch (learner.epochs), or end them by stop.kl_max"
                    if updates > 1
                    else " or learner.clip_norm"
                ),
            )
    return None


def batch_rejected(rows: Rows) -> HealthFinding | None:
    """Most of what is generated is thrown out of the loss by the correction."""
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
        f"{gone:.0%} of the tokens of the last {len(last)} batches are out of the loss ({parts})",
        "the bounds of [correction] are too narrow for this lag and engine: widen them "
        "(correction.reject_hi, veto_lo, hi), lower staleness.max_lag, or look at is/ess and "
        "mismatch/k3_one_version",
    )


def length_jump(rows: Rows) -> HealthFinding | None:
    """Answers are at once twice or half as long as in the batches before."""
    batches = [r for r in rows if "answer/length" in r]
    lengths = series(batches, "answer/length")
    for end in range(len(lengths), 2 * LEAST + LEAST - 1, -1):
        before = median(lengths[end - 3 * LEAST : end - LEAST])
        after = median(lengths[end - LEAST : end])
        if min(before, after) > 0 and not 1 / JUMP < after / before < JUMP:
            step = batches[end - LEAST]["step"]
            return HealthFinding(
                "length_jump",
                f"from batch {step} on answers are {after:.0f} tokens long, {before:.0f} in the "
                f"{2 * LEAST} batches before",
                "look at samples.jsonl of that time: answers that run on (the end-of-sequence "
                "token), or a reward that pays for length; an earlier checkpoint, a lower "
                "learner.lr, or a reward for length help",
            )
    return None


def oscillating_accuracy(rows: Rows) -> HealthFinding | None:
    """Held-out accuracy goes up and down by more than chance, again and again."""
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
        f"held-out accuracy has turned {len(turns)} times, by more than chance each time: {told}",
        "lower learner.lr, or larger batches (learner.groups); a lower staleness.max_lag if is/ess "
        "is below 0.9",
    )


def _exceeds(
    larger: tuple[float, float], smaller: tuple[float, float], lo: float, hi: float
) -> bool:
    """Is one accuracy above the other by more than chance?  Each: (mean, prompts)."""
    half = math.hypot(*(interval(p, n, lo, hi) for p, n in (larger, smaller))) * Z_EACH / Z_95
    return larger[0] - smaller[0] > half


def kl_collapse(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """k3 in the reward: its gradient is far from that of the KL, pushes away from the reference,
    and accuracy goes.
    """
    term = about.config.kl.reward
    if not (term.coefficient > 0 and term.estimator in ("k3", "k3+", "low_var_kl", "low_var_kl+")):
        return None
    accuracy = series(sorted(rows, key=lambda r: r.get("step", 0)), "eval/heldout")
    found = drift(rows, about)
    if len(accuracy) > 1 and accuracy[-1] < max(accuracy) / 2:
        what = f"held-out accuracy fell to {accuracy[-1]:.3f} from {max(accuracy):.3f}"
    elif found is not None:
        what = (
            f"KL to the reference rises from {found[0]:.2f} to {found[1]:.2f} nats a token "
            "(kl/target_ref_k3)"
        )
    else:
        return None
    return HealthFinding(
        "kl_collapse",
        f"{what} under a KL term with k3 in the reward, whose gradient is known to collapse",
        'kl.reward.estimator = "k1", or k3 in the loss (kl.loss.coefficient); go back to an '
        "earlier checkpoint",
    )


def kl_without_effect(rows: Rows, about: RunFacts) -> HealthFinding | None:
    """The policy has moved away from the reference, and the KL term's gradient is too small to
    matter.
    """
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
            f"the KL term's gradient is {median(share):.1%} of the policy term's ({metric}) at a "
            f"KL of {median(moved):.2f} nats a token to the "
            "reference: it has no effect"
        )
        return HealthFinding(
            "kl_without_effect",
            said,
            f"raise {key}.coefficient = {term.coefficient:g} tenfold or more, or leave the term "
            "out",
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
    """What the rules find in a run's rows so far; about: its settings; ended: also what only its
    end tells.
    """
    found = [rule(rows) for rule in (*RULES, *(END_RULES if ended else ()))]
    found.append(growing_mismatch(rows, about))
    found += [rule(rows, about) for rule in KNOWN_RULES] if about is not None else []
    return [s for s in found if s is not None]
