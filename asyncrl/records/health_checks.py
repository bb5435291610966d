"""Health checks: rules over metrics.jsonl that find runs which do not learn, with what to try.

Pure: reads no file and imports no torch.  `asyncrl run` prints each finding once; the summary and
the report's first lines keep it.  A rule is a function of the rows that returns a `Finding`
or None.  It belongs in RULES, in END_RULES if only a finished run can be judged by it, or in
KNOWN_RULES if it also needs the run's settings (`RunFacts`).  Every rule judges measurements:
settings that are known to fail are not a finding until they do.

health_checks.toml has the advice of findings, and the rules that only compare values with bounds
(`match_rules`), also those of the advice on speed and of the live view.

>>> one = {"reward/mean": 0.0, "reward/no_spread_share": 1.0, "reward/min": 0.0, "reward/max": 0.0}
>>> stuck = [{"step": n} | one for n in range(8)]
>>> check_constant_rewards(stuck).said
'every completion of the last 8 batches has the reward 0, so no group gives a learning signal'
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from statistics import fmean, median, median_low, pvariance
from typing import Any, NamedTuple

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract.errors import REFUSALS
from asyncrl.contract.messages import Numbers
from asyncrl.contract.toml_writer import read_table

Rows = Sequence[Mapping[str, Any]]
Points = Sequence[tuple[float, float]]  # (mean reward, prompts) of evaluations

# batches that a rule looks at: at least, at most
LEAST = 5
WINDOW = 20
NEARLY_ALL = 0.95
EXPLAINED = 0.2  # share of the wait for a reward that its calls must account for
Z_95 = 1.96  # of a 95 % interval
Z_EACH = 3.0  # of an interval that is tested after every evaluation: 1 in 700 on one side
ALARM = 0.001  # probability that one test of a series of independent noise calls it growing
PARTS = 18  # a series is reduced to the medians of at most this many stretches
GROWN = 2.0  # late over early from which growth is reported
# nats a token: the largest healthy k3 between engine and learner at equal weights
HEALTHY_MISMATCH = 1e-3
HARMLESS = 1e-5  # nats a token: a smaller mismatch changes the weight of no completion
RISING = 1.25  # late third over middle third: 1 for a level, 5/3 for a line
FEWEST = 3  # values in a third of a series if the run gives too few for LEAST
REFERENCE_KL = "kl/target_ref_k3"
MISMATCH = "mismatch/k3_at_lag_0"
ONE_VERSION = "mismatch/k3_one_version"
SPLIT = "split/mismatch_k3"
# engine against learner at equal weights; the last two only if record.split_every is not 0
MISMATCHES = (MISMATCH, ONE_VERSION, SPLIT)
OWN = "by_age/mismatch_k3_0"  # tokens of one version in the split, as ONE_VERSION
# last measurements that check_engine_mismatch judges: it fires on half of them, so on 5 bad ones
JUDGED = 9
MOST_ALARM = 0.05  # replaces ALARM in a run that is too short for it
CUT = 0.005  # is/chi2 below minus this: part of the policy was not sampled from
ONCE = 1e-3  # the same for one batch in which no ratio is above 1
JUMP = 2.0  # factor of the completions' length
RUNAWAY = 0.05  # nats a token in one batch: healthy runs move 1e-4 to 0.02 (docs/log)
SWINGS = 3  # turns of the held-out reward, each larger than chance
TREATMENTS = ("rejected", "vetoed", "masked")  # of tokens that are excluded from the loss
# metrics whose means over the last batches a rule judges
RECENT = (
    "answer/truncated_share",
    "time/reward_wait_share",
    *("reward/queue", "reward/wait_s", "reward/call_s", "reward/workers"),
    *(f"is/{treatment}_share" for treatment in TREATMENTS),
)
REWARDS = ("reward/min", "reward/max", "eval/heldout", "eval/ood")
SOLVED = 0.0005  # share of the range of rewards: closer to its ends, none or all are solved


class Finding(NamedTuple):
    """The result of a rule: a problem of a run, or the side that limits its speed."""

    name: str  # a fixed name, for programs
    said: str  # the observation, with its numbers
    try_this: str = ""  # the advice, with the keys to change

    def as_line(self) -> str:
        return f"{self.said}; {self.try_this}"

    @property
    def remedy(self) -> str:
        """The advice as a sentence that follows the observation; "" without one."""
        return f". To try: {self.try_this}" if self.try_this else ""


class BoundRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule of health_checks.toml, which explains its fields."""

    said: str
    name: str = ""
    try_this: str = ""
    at_least: Numbers = {}
    below: Numbers = {}


TABLES: dict[str, Any] = read_table(__file__)
TRY_THIS: dict[str, str] = TABLES.pop("try_this")
BOUND_RULES = msgspec.convert(TABLES, dict[str, list[BoundRule]])


def match_rules(table: str, values: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of a table's rules whose bounds the values meet, in order."""
    return [
        Finding(rule.name, rule.said.format_map(values), rule.try_this.format_map(values))
        for rule in BOUND_RULES[table]
        if all(values.get(name, math.nan) >= bound for name, bound in rule.at_least.items())
        and all(values.get(name, math.nan) < bound for name, bound in rule.below.items())
    ]


def make_finding(name: str, said: str, advice: str = "") -> Finding:
    """Make a finding with its advice of health_checks.toml.

    advice: the key of the advice, by default the name."""
    return Finding(name, said, TRY_THIS[advice or name])


class RunFacts(NamedTuple):
    """Facts about a run, besides its rows, that a rule may need."""

    config: Config
    mismatch: float = HEALTHY_MISMATCH


def select_recent_rows(rows: Rows, least: int = LEAST, window: int = WINDOW) -> Rows:
    """Return the rows of the last `window` batches, or none if there are fewer than `least`."""
    batches = [r for r in rows if "reward/mean" in r]
    return batches[-window:] if len(batches) >= least else []


def average(rows: Rows, name: str) -> float | None:
    """Return the mean of a metric over the rows that have it."""
    values = [float(r[name]) for r in rows if name in r]
    return sum(values) / len(values) if values else None


def list_values(rows: Rows, name: str) -> list[float]:
    """Return a metric's finite values, in order."""
    return [float(r[name]) for r in rows if name in r and math.isfinite(r[name])]


@cache
def _count_orders(late: int, early: int) -> tuple[int, ...]:
    """Count the orders of `late` and `early` values by their pairs with the late value above.

    Element i is the number of orders with i such pairs, i = 0, ..., late * early."""
    if not late or not early:
        return (1,)
    # the largest value is either a late one, which is above all early ones, or an early one
    above = _count_orders(late - 1, early)
    below = _count_orders(late, early - 1)
    return tuple(map(sum, zip_longest((0,) * early + above, below, fillvalue=0)))


def compute_chance_above(late: Sequence[float], early: Sequence[float]) -> float:
    """Return the probability of so many pairs with `late` above `early` in a random order.

    The exact one-sided test of Mann and Whitney's U; ties count as below."""
    pairs = sum(x > y for x in late for y in early)
    orders = _count_orders(len(late), len(early))
    return sum(orders[pairs:]) / sum(orders)


def find_growth(values: Sequence[float], chance: float = ALARM) -> tuple[float, float] | None:
    """Return the medians of the first and last third of a series that grows, otherwise None.

    The series is cut into at most PARTS stretches, whose medians remove single spikes and the
    correlation of neighbors.  It grows if the last third lies above the rest by more than chance
    (`compute_chance_above` at most `chance`) and is GROWN times the first third.  So at most one
    test in 1000 calls independent noise growing, and almost none does so if the level does not
    double."""
    length = len(values)
    stretches = min(PARTS, len(values))
    parts = [
        median(values[i * length // stretches : (i + 1) * length // stretches])
        for i in range(stretches)
    ]
    third = stretches // 3
    if not third or compute_chance_above(parts[-third:], parts[:-third]) > chance:
        return None
    early = median(parts[:third])
    late = median(parts[-third:])
    return (early, late) if late >= GROWN * early else None


def check_constant_rewards(rows: Rows, least: int = LEAST) -> Finding | None:
    """Find groups that almost never have rewards that differ, so that advantages are zero.

    least: fewest batches; of a single one only equal rewards of all completions count."""
    batches = select_recent_rows(rows, least)
    share = average(batches, "reward/no_spread_share")
    if share is None or share < NEARLY_ALL:
        return None
    values = {r[k] for r in batches for k in ("reward/min", "reward/max") if k in r}
    window = "newest batch" if least == 1 else f"last {len(batches)} batches"
    if len(values) == 1:
        observation = (
            f"every completion of the {window} has the reward {values.pop():g}, so no group gives "
            "a learning signal"
        )
    elif least > 1:
        observation = (
            f"in {share:.0%} of the groups of the {window} all completions have the same reward, "
            "so there is almost no learning signal"
        )
    else:
        return None
    return make_finding("constant_rewards", observation)


def compute_half_interval(mean_value: float, count: float, lo: float, hi: float) -> float:
    """Return half the width of the 95 % interval of a mean of `count` values in [lo, hi].

    Their variance is at most (mean - lo)(hi - mean)."""
    return Z_95 * math.sqrt(max((mean_value - lo) * (hi - mean_value), 0.0) / max(count, 1.0))


def find_reward_range(values: Iterable[float]) -> tuple[float, float]:
    """Return bounds of a run's rewards: of those in `values`, and at least [0, 1]."""
    values = [float(value) for value in values]
    return min([0.0, *values]), max([1.0, *values])


def list_rewards(rows: Rows) -> list[float]:
    """List the least and the largest reward of each batch, and the means of evaluations."""
    return [r[name] for r in rows for name in REWARDS if name in r]


def list_evaluations(rows: Rows, split: str) -> Points:
    """Return (mean reward, prompts) of a split's evaluation at each step, in order."""
    points = {
        r["step"]: (float(r[f"eval/{split}"]), float(r[f"eval/{split}_n"]))
        for r in rows
        if r.get(f"eval/{split}_n")
    }
    return [points[step] for step in sorted(points)]


def compute_margin(points: Points, lo: float, hi: float, z_value: float = Z_EACH) -> float:
    """Return the margin of chance of the difference of two (mean reward, prompts) in [lo, hi]."""
    return math.hypot(*(compute_half_interval(p, n, lo, hi) for p, n in points)) * z_value / Z_95


def check_unmoved_reward(rows: Rows) -> Finding | None:
    """Find a held-out reward whose end is within chance of its start."""
    points = list_evaluations(rows, "heldout")
    batches = select_recent_rows(rows, least=1, window=len(rows))
    if len(points) < 2 or not batches:
        return None
    ends = points[0], points[-1]
    lo, hi = find_reward_range(list_rewards(rows))
    half = compute_margin(ends, lo, hi, Z_95)
    (before, first_prompts), (after, last_prompts) = ends
    if abs(after - before) > half:
        return None
    counts = " and ".join(f"{x:g}" for x in dict.fromkeys((first_prompts, last_prompts)))
    advice, margin = "", SOLVED * (hi - lo)
    if min(before, after) > hi - margin:
        advice = "all_solved"
    elif max(before, after) < lo + margin:
        advice = "none_solved"
    return make_finding(
        "unmoved_accuracy",
        f"held-out reward went from {before:.3f} to {after:.3f} in {len(batches)} batches, which "
        f"is within chance (+-{half:.3f} at n = {counts})",
        advice,
    )


def check_generalization(rows: Rows) -> Finding | None:
    """Find training that improves one reward and lowers another, both by more than chance."""
    ood, heldout = (list_evaluations(rows, split) for split in ("ood", "heldout"))
    batches = select_recent_rows(rows, window=len(rows))
    if len(ood) < 2 or len(heldout) < 2 or not batches:
        return None
    bounds = find_reward_range(list_rewards(rows))
    chance, margin = (
        compute_margin(points, *bounds) for points in ((ood[0], ood[-1]), (heldout[0], heldout[-1]))
    )
    if not ood[-1][0] < ood[0][0] - chance:
        return None
    rising, before, after = "held-out reward", heldout[0][0], heldout[-1][0]
    if not after > before + margin:  # a checker can be fooled
        width = max(1, len(batches) // 5)
        rising = "the training reward"
        before, after = (
            average(x, "reward/mean") or 0.0 for x in (batches[:width], batches[-width:])
        )
        if not after > before + chance:
            return None
    return make_finding(
        "out_of_distribution",
        f"{rising} rose from {before:.3f} to {after:.3f} while out-of-distribution reward fell "
        f"from {ood[0][0]:.3f} to {ood[-1][0]:.3f}, more than chance (+-{chance:.3f})",
    )


def count_possible_values(config: Config, name: str) -> int:
    """Return how many values of a metric a whole run of this config measures."""
    record = config.record
    interval = {ONE_VERSION: record.split_every, SPLIT: record.split_every}.get(name, 1)
    if name == REFERENCE_KL and not (
        config.kl.loss.coefficient > 0 or config.kl.reward.coefficient > 0
    ):
        interval = record.reference_kl_every
    return -(-config.learner.steps // interval) if interval else 0


def choose_alarm(values: int) -> float:
    """Return the probability at which a series of at most `values` is called growing.

    ALARM, or the smallest that so few values can reach, up to MOST_ALARM.

    >>> choose_alarm(30), round(choose_alarm(12), 4), choose_alarm(5)
    (0.001, 0.002, 0.05)
    """
    least = 1 / math.comb(min(values, PARTS), min(values, PARTS) // 3)
    return min(max(ALARM, least), MOST_ALARM)


def check_growing_mismatch(rows: Rows, facts: RunFacts) -> Finding | None:
    """Find a growing mismatch of engine and learner at equal weights, a sign of collapse."""
    for name in MISMATCHES:
        chance = choose_alarm(count_possible_values(facts.config, name))
        medians = find_growth(list_values(rows, name), chance)
        if medians is not None and medians[1] >= HARMLESS:
            return make_finding(
                "growing_mismatch",
                f"the mismatch of engine and learner at equal weights grows: {name} from "
                f"{medians[0]:.1e} to {medians[1]:.1e} nats a token",
            )
    return None


# ---- with the run's settings ---------------------------------------------------------------------


def add_reward_wait(values: dict[str, Any]) -> dict[str, Any]:
    """Add the part of the wait for rewards that the reward calls explain, above EXPLAINED.

    Below it, completions wait for a core, and a change of the function would not help.

    >>> times = {"reward/queue": 120, "reward/wait_s": 20.0, "reward/call_s": 0.2}
    >>> round(add_reward_wait(times | {"reward/workers": 1})["explained"])
    20
    """
    queue, call, workers = (
        values.get(f"reward/{x}", math.nan) for x in ("queue", "call_s", "workers")
    )
    explained = max(queue / max(workers, 1.0), 1.0) * call
    values["explained"] = explained - EXPLAINED * values.setdefault("reward/wait_s", 0.0)
    values["processes"] = f"{workers:.0f} process{'es' * (workers > 1)}"
    return values


def count_refusals(latest: Mapping[str, Any]) -> dict[str, int]:
    """Return how many messages the buffer has refused so far, by reason.

    latest: the newest value of each metric, or a row.

    >>> count_refusals({"refused/number": 2.0, "reward/mean": 0.5})
    {'number': 2}
    """
    return {
        name.partition("/")[2]: int(count)
        for name, count in latest.items()
        if name.startswith("refused/") and count
    }


def check_refused_messages(rows: Rows) -> Finding | None:
    """Find messages, of a process of the run or of a stranger, that the buffer refused."""
    refused = next((counts for row in reversed(rows) if (counts := count_refusals(row))), {})
    if not refused:
        return None
    total = sum(refused.values())
    return make_finding(
        "refused_messages",
        f"the buffer has refused {total} message{'s' * (total > 1)}: "
        + "; ".join(f"{count} {REFUSALS[reason]}" for reason, count in refused.items()),
    )


def check_dry_tasks(rows: Rows) -> Finding | None:
    """Find tasks of a mixture without prompts, or without groups that can be trained."""
    row = next(iter(select_recent_rows(rows, least=1, window=1)), {})
    dry = [
        k.removeprefix("task/").removesuffix("_dry")
        for k, x in row.items()
        if k.startswith("task/") and k.endswith("_dry") and x == 1
    ]
    if not dry:
        return None
    removed = ", ".join(f"{name} {row.get(f'task/{name}_removed', 0):.0f}" for name in dry)
    return make_finding(
        "dry_tasks",
        f"the mixture gets no more groups to train from {', '.join(dry)} (removed so far: "
        f"{removed}); the other tasks have its share",
    )


def check_engine_mismatch(rows: Rows, facts: RunFacts) -> Finding | None:
    """Find a difference of engine and learner at equal weights in half of the last values.

    There are three measures.  MISMATCH uses tokens sampled by the batch's starting weights, which
    a run with lag has only in its first batches.  ONE_VERSION uses tokens whose version computed
    all their keys and values.  SPLIT uses all tokens of the split, where a completion continued on
    keys and values of older weights differs, too."""
    for name in MISMATCHES:
        mismatches = list_values(rows, name)[-JUDGED:]
        one_version = list_values(rows, OWN)[-JUDGED:]
        if not mismatches or (k3 := median_low(mismatches)) <= facts.mismatch:
            continue
        observation = (
            f"engine and learner differ at equal weights by k3 = {k3:.1e} nats a token ({name}), "
            f"above {facts.mismatch:g}"
        )
        if name != ONE_VERSION and one_version and median_low(one_version) <= facts.mismatch:
            observation += (
                f", but by {median_low(one_version):.1e} where no older keys and values are read"
            )
            return make_finding(
                "engine_mismatch", f"{observation} ({OWN})", "continued_completions"
            )
        if evidence := find_truncation_evidence(rows):
            return report_truncation(f"{observation}; {evidence}", facts, "engine_mismatch")
        generator = facts.config.generator
        cause = "check generator.dtype and weights.in_flight"
        if generator.quantize != "none" and not facts.config.learner.shared_rounding:
            cause = (
                f"generator.quantize = {generator.quantize} causes it: set "
                "learner.shared_rounding = true"
            )
        return Finding(
            "engine_mismatch",
            observation,
            f"{cause}, or correct for it: `asyncrl run --resume RUN --set correction.preset=mis`",
        )
    return None


def find_truncation_evidence(rows: Rows) -> str:
    """Return the evidence that the engine sampled only from a part of the policy, or "".

    The engine renormalizes that part, so every ratio learner / engine is at most 1 at equal
    weights, and the mean square of the ratios, chi2 + 1, stays below 1 under lag, too.  A
    difference in arithmetic has no such effect."""
    measured = [r for r in rows if "is/chi2" in r and "is/ratio_max" in r]
    certain = [
        float(r["is/chi2"])
        for r in measured
        if r["is/ratio_max"] <= 1 + ONCE and r["is/chi2"] < -ONCE
    ]
    recent = list_values(select_recent_rows(measured), "is/chi2")
    # of few tokens, some values are negative by chance
    if recent and median(recent) < -CUT and sum(x < 0 for x in recent) >= 0.9 * len(recent):
        observation = (
            f"is/chi2 is {median(recent):.3f} in the median of the last {len(recent)} batches"
        )
    elif certain and len(measured) <= LEAST:
        observation = (
            f"is/chi2 is {certain[-1]:.3f} in a batch without a ratio above 1 (is/ratio_max)"
        )
    else:
        return ""
    return (
        f"{observation}; below zero it shows that only a part of the distribution was sampled from"
    )


def report_truncation(said: str, facts: RunFacts, unknown: str = "truncated_sampling") -> Finding:
    """Build the finding for a part of the distribution that was not sampled from.

    unknown: its name if no setting of the run restricts the distribution unknown to the learner."""
    generator = facts.config.generator
    cuts = " and ".join(
        f"generator.{name} = {value:g}"
        for name, unrestricted in (("top_p", 1), ("top_k", 0))
        if (value := getattr(generator, name)) != unrestricted
        and not generator.abilities.records_support
    )
    if not cuts:
        return make_finding(unknown, said, "restricted_by_client")
    advice = f"the cause is {cuts}, not the dtype; sample from the whole distribution"
    return Finding("truncated_sampling", said, advice)


def check_truncated_sampling(rows: Rows, facts: RunFacts) -> Finding | None:
    """Find truncated sampling whose effect is too small for `check_engine_mismatch`."""
    evidence = find_truncation_evidence(rows)
    if not evidence or check_engine_mismatch(rows, facts) is not None:
        return None
    return report_truncation(evidence, facts)


def find_median(values: Sequence[float], missing: float = math.nan) -> float:
    return median(values) if values else missing


def collect_kl(rows: Rows, facts: RunFacts) -> dict[str, Any]:
    """Collect what the rules on the KL penalty compare.

    middle, late: KL to the reference in the middle and last third, once there are enough values;
        rise: at least 0 if `late` is visibly higher.
    stall: at least 0 unless the training reward is visibly higher in the last third.
    best, last, kept: held-out reward, and what is left of it above half of its best.
    moved: KL to the reference in the last batches.
    loss_share, reward_share: the share of a penalty in the gradient; inf without one.
    """
    loss, reward = facts.config.kl.loss, facts.config.kl.reward
    kind = reward.estimator.removesuffix("+") if reward.coefficient > 0 else ""
    in_loss = loss.coefficient > 0
    recent, batches = select_recent_rows(rows), select_recent_rows(rows, least=WINDOW)
    kls, rewards = (list_values(rows, name) for name in (REFERENCE_KL, "reward/mean"))
    third, fewest = len(kls) // 3, count_possible_values(facts.config, REFERENCE_KL) // 3
    kls = kls if third >= max(FEWEST, min(LEAST, fewest)) else []
    middle, late = find_median(kls[third : 2 * third]), find_median(kls[-third:])
    stall = 0.0
    if third := len(rewards) // 3:
        parts = rewards[third : 2 * third], rewards[-third:]
        error = math.sqrt(sum(pvariance(part) / third for part in parts))
        stall = error - (fmean(parts[1]) - fmean(parts[0]))
    heldout = list_values(sorted(rows, key=lambda row: row.get("step", 0)), "eval/heldout") or [0.0]
    best, last = max(heldout), heldout[-1]
    return {
        "loss": loss,
        "reward": reward,
        "free": not in_loss and not kind,
        # whose expected gradient on policy is zero; k1+ has that of k2
        "k1_in_loss": in_loss and loss.estimator == "k1" and loss.off_policy == "none",
        "k1_in_reward": kind == "k1",
        "k3_in_reward": kind in ("k3", "low_var_kl"),
        "middle": middle,
        "late": late,
        "rise": late - RISING * middle,
        "stall": stall,
        "updates": find_median(list_values(recent, "optim/steps")),
        "best": best,
        "last": last,
        "kept": last - best / 2 if len(heldout) > 1 else 0.0,
        "moved": find_median(list_values(batches, REFERENCE_KL)),
        "loss_share": find_median(
            list_values(batches, "kl/gradient_share") if in_loss else [], math.inf
        ),
        "reward_share": find_median(
            list_values(batches, "kl/reward_gradient_share") if kind else [], math.inf
        ),
    }


def check_kl_runaway(rows: Rows) -> Finding | None:
    """Find batches in which the policy moves further than a trust region should allow."""
    for name in ("kl/start_target_k3", "kl/moved"):
        moves = list_values(rows, name)[-LEAST:]
        if len(moves) >= FEWEST and (move := median(moves)) >= RUNAWAY:
            updates = median(list_values(select_recent_rows(rows, least=1), "optim/steps") or [1])
            return make_finding(
                "kl_runaway",
                f"in one batch the policy moves by {move:.2f} nats a token ({name}), in "
                f"{updates:.0f} update{'s' * (updates > 1)}; healthy runs stay below 0.02",
                "several_updates" if updates > 1 else "",
            )
    return None


def check_length_jump(rows: Rows) -> Finding | None:
    """Find completions that are suddenly at least twice or at most half as long as before."""
    batches = [r for r in rows if "answer/length" in r]
    lengths = list_values(batches, "answer/length")
    for end in range(len(lengths), 2 * LEAST + LEAST - 1, -1):
        length_before = median(lengths[end - 3 * LEAST : end - LEAST])
        length_after = median(lengths[end - LEAST : end])
        if (
            min(length_before, length_after) > 0
            and not 1 / JUMP < length_after / length_before < JUMP
        ):
            step = batches[end - LEAST]["step"]
            return make_finding(
                "length_jump",
                f"from batch {step} on completions are {length_after:.0f} tokens long, "
                f"{length_before:.0f} in the {2 * LEAST} batches before",
            )
    return None


def check_oscillating_reward(rows: Rows) -> Finding | None:
    """Find a held-out reward that repeatedly rises and falls by more than chance."""
    points = list_evaluations(rows, "heldout")
    if len(points) < SWINGS + 2:
        return None
    lo, hi = find_reward_range(list_rewards(rows))
    turns: list[float] = []  # the reward at each
    direction = 0  # 1: up, -1: down, since `extreme`
    extreme = points[0]
    for point in points[1:]:
        if direction * (point[0] - extreme[0]) > 0:
            extreme = point
            continue
        rises = direction <= 0 and exceeds_chance(point, extreme, lo, hi)
        falls = direction >= 0 and exceeds_chance(extreme, point, lo, hi)
        if rises or falls:
            turns += [extreme[0]] if direction else []
            direction = 1 if rises else -1
            extreme = point
    if len(turns) < SWINGS:
        return None
    rewards = ", ".join(f"{x:.2f}" for x in turns[-4:])
    return make_finding(
        "oscillating_accuracy",
        f"held-out reward has turned {len(turns)} times, by more than chance each time: {rewards}",
    )


def exceeds_chance(
    larger: tuple[float, float], smaller: tuple[float, float], lo: float, hi: float
) -> bool:
    """Decide whether one (mean, prompts) of rewards in [lo, hi] exceeds another beyond chance."""
    return larger[0] - smaller[0] > compute_margin((larger, smaller), lo, hi)


RULES: tuple[Callable[[Rows], Finding | None], ...] = (
    check_constant_rewards,
    check_generalization,
    check_kl_runaway,
    check_length_jump,
    check_oscillating_reward,
    check_refused_messages,
    check_dry_tasks,
)
END_RULES: tuple[Callable[[Rows], Finding | None], ...] = (check_unmoved_reward,)

KNOWN_RULES: tuple[Callable[[Rows, RunFacts], Finding | None], ...] = (
    check_growing_mismatch,
    check_engine_mismatch,
    check_truncated_sampling,
)


def apply_rules(rows: Rows, facts: RunFacts, *, ended: bool = False) -> list[Finding]:
    """Apply the rules to a run's rows so far.

    facts: the run's settings.  ended: also apply the rules for finished runs."""
    newest = {name: value for row in rows for name, value in row.items()}
    batches = select_recent_rows(rows)
    averages = {name: average(batches, name) for name in RECENT}
    recent: dict[str, Any] = {name: x for name, x in averages.items() if x is not None}
    shares = {name: recent.get(f"is/{name}_share", 0.0) for name in TREATMENTS}
    recent |= {"batches": len(batches), "excluded": sum(shares.values())}
    recent["parts"] = ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share)
    findings = [rule(rows) for rule in (*RULES, *(END_RULES if ended else ()))]
    findings += [rule(rows, facts) for rule in KNOWN_RULES]
    return [
        *match_rules("latest", newest),
        *match_rules("recent", add_reward_wait(recent)),
        *filter(None, findings),
        *match_rules("kl", collect_kl(rows, facts)),
    ]
