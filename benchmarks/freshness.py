"""Compare the admission window with a limit that is always filled, by simulation.

    python benchmarks/freshness.py [--quick] [--json] [--seeds 3]

Proves: with spare generators the window keeps the mean lag at 2.0 or less, whatever the limit is,
for at most 2 % of the throughput.  With slow rewards it keeps the throughput, at a lag near the
least: that of the smallest constant limit within 2 % of the throughput.  It works with 1 to 1,000
generators.

The times are those of configs/demo.toml (lib/demo_times.toml); the slow reward is that of
slow_rewards.py.  Simulated seconds do not depend on the load of the machine."""

from __future__ import annotations

from typing import Any

from lib import rounds
from lib.results_file import ROOT

from asyncrl.config.load import load
from asyncrl.experiments.simulate import times
from asyncrl.experiments.simulate.what_if import average_outcomes, simulate_seeds

TIMES = times.load(ROOT / "benchmarks" / "lib" / "demo_times.toml", times.TimeModel())
SLOW_TIMES = times.parse(TIMES, ["reward=pareto(0.2,2.5,4)"])
SLOW = (
    "reward.function='benchmarks.lib.slow_reward:waiting'",
    "reward.workers=32",
    "learner.groups=8",
    "generator.slots=64",
)
FILLED = "staleness.wait=0"
LIMITS = (4, 8, 16)
CONSTANT = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # among which the least lag is searched
CROWDS = (1, 10, 100, 1000)  # numbers of generators
MOST_LAG = 2.0
LEAST_SPEED = 0.98  # of the filled limit's throughput
MOST_OF_LEAST = 1.3


def run(model: times.TimeModel, seeds: int, *sets: str) -> dict[str, Any]:
    """The mean outcome over the seeds."""
    config = load(ROOT / "configs" / "demo.toml", list(sets))
    return average_outcomes(simulate_seeds(config, model, seeds, evaluate=False))


def compared(name: str, model: times.TimeModel, seeds: int, *sets: str) -> dict[str, Any]:
    """The window and the filled limit, and the throughput of the first over the second."""
    window = run(model, seeds, *sets)
    filled = run(model, seeds, *sets, FILLED)
    return {
        "name": name,
        "speed": window["tokens_per_s"] / filled["tokens_per_s"],
        "lag": window["lag_mean"],
        "lag_filled": filled["lag_mean"],
        "window": window["limit_mean"],
        "waiting": window["waited_share"],
        "waiting_filled": filled["waited_share"],
        "tokens_per_s_filled": filled["tokens_per_s"],
    }


def fresh_goals(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals where generators are spare."""
    name = row["name"]
    lags = {"lag_filled": round(row["lag_filled"], 2), "window": round(row["window"], 2)}
    return [
        rounds.goal(f"{name}: mean lag", row["lag"], MOST_LAG, at_least=False, **lags),
        rounds.goal(f"{name}: throughput", row["speed"], LEAST_SPEED, at_least=True),
    ]


def slow_goals(row: dict[str, Any], constant: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals where rewards are the slower side."""
    name, needed = row["name"], LEAST_SPEED * row["tokens_per_s_filled"]
    least = min(x["lag_mean"] for x in constant if x["tokens_per_s"] >= needed)
    ratio = row["lag"] / least
    lags = {"lag": round(row["lag"], 2), "least": round(least, 2)}
    lags["lag_filled"] = round(row["lag_filled"], 2)
    return [
        rounds.goal(f"{name}: lag / least", ratio, MOST_OF_LEAST, at_least=False, **lags),
        rounds.goal(f"{name}: throughput", row["speed"], 1.0, at_least=True),
    ]


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--seeds", type=int, default=3)
    args = p.parse_args()
    seeds = 1 if args.quick else args.seeds
    steps = f"learner.steps={30 if args.quick else 120}"
    rows = []
    goals = []
    for count in (2, 4):
        for limit in LIMITS:
            name = f"{count} generators, limit {limit}"
            sets = (steps, f"generators={count}", f"staleness.max_lag={limit}")
            rows.append(compared(name, TIMES, seeds, *sets))
            goals += fresh_goals(rows[-1])
    constant = [
        run(SLOW_TIMES, seeds, steps, *SLOW, FILLED, f"staleness.max_lag={limit}")
        for limit in CONSTANT
    ]
    for limit in LIMITS:
        name = f"slow rewards, limit {limit}"
        slow = (steps, *SLOW, f"staleness.max_lag={limit}")
        rows.append(compared(name, SLOW_TIMES, seeds, *slow))
        goals += slow_goals(rows[-1], constant)
    for count in CROWDS[:2] if args.quick else CROWDS:
        sets = (steps, f"generators={count}", "staleness.max_lag=8")
        rows.append(compared(f"{count} generators, limit 8", TIMES, 1, *sets))
        goals += fresh_goals(rows[-1])
    result = {
        "what": "simulated runs of configs/demo.toml with a window and with a filled limit",
        "seeds": seeds,
        "rows": rows,
        "slow_constant": [
            {key: x[key] for key in ("max_lag", "tokens_per_s", "lag_mean")} for x in constant
        ],
    }
    rounds.report("freshness", goals, result, args)


if __name__ == "__main__":
    main()
