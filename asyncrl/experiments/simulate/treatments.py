"""What each treatment of late samples costs: the same run with each, with the same seeds."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.simulate.questions import average_outcomes, simulate_seeds
from asyncrl.experiments.simulate.times import TimeModel

# name -> staleness.on_exceed
TREATMENTS: dict[str, Literal["pace", "drop", "mask", "downweight"]] = {
    "wait": "pace",
    "mask": "mask",
    "downweight": "downweight",
    "drop": "drop",
}
HEAD = (
    "treatment",
    "tokens/s",
    "learner idle",
    "dropped",
    "masked",
    "downweighted",
    "cut",
    "lag",
    "p95",
    "max",
)


class Treatment(msgspec.Struct, frozen=True, kw_only=True):
    """A run under one treatment, means over the seeds.

    Shares in [0, 1]: learner_idle of the run's seconds (a run's own metric is the mean over its
    steps, which bursts make smaller), dropped and masked of the tokens that were drawn,
    downweighted of the trained tokens' weight, cut of the samples.  tokens_per_s: trained, those of
    less weight as a part."""

    name: str
    deadline_s: float | None  # agent.deadline_s; None: no sessions
    tokens_per_s: float
    learner_idle: float
    dropped: float
    masked: float
    downweighted: float
    cut: float
    lag_mean: float
    lag_p95: float
    lag_max: int


def refuse(config: Config) -> None:
    """Raises ConfigError where not every treatment can be."""
    staleness = config.staleness
    why = ""
    if staleness.ess_floor or math.isinf(staleness.limit):
        why = "late is what passes a limit: set staleness.max_lag to a number"
    elif staleness.inject is not None:
        why = "injected lag keeps to its limit: leave staleness.inject out"
    elif staleness.order != "auto":
        why = "each treatment has its own order: leave staleness.order out"
    if why:
        raise ConfigError(f"--treatments: {why}")


def compare(
    config: Config,
    times: TimeModel,
    seeds: int,
    deadline_s: float | None = None,
    *,
    evaluate: bool = True,
) -> list[Treatment]:
    """Every treatment, and for sessions `wait` with another deadline: deadline_s, or what a tenth
    of the sessions under `wait` pass.  Raises ConfigError."""
    refuse(config)
    sessions = config.agent.uses_sessions
    if deadline_s is not None and not sessions:
        raise ConfigError("--deadline: is of sessions, and the config has no [agent]")
    if deadline_s is not None and not (0 < deadline_s < math.inf):
        raise ConfigError(f"--deadline {deadline_s:g}: write seconds above 0")

    def simulate_treatment(
        name: str, how: Literal["pace", "drop", "mask", "downweight"]
    ) -> dict[str, Any]:
        staleness = msgspec.structs.replace(config.staleness, on_exceed=how)
        changed = msgspec.structs.replace(config, staleness=staleness)
        found = average_outcomes(simulate_seeds(changed, times, seeds, evaluate=evaluate))
        return {"name": name, "deadline_s": config.agent.deadline_s if sessions else None} | found

    rows = [simulate_treatment(name, how) for name, how in TREATMENTS.items()]
    if sessions:
        limit = rows[0]["sample_p90_s"] if deadline_s is None else deadline_s
        agent = msgspec.structs.replace(config.agent, deadline_s=limit)
        config = msgspec.structs.replace(config, agent=agent)
        rows.append(simulate_treatment("deadline", "pace"))
    return [treatment(row) for row in rows]


def treatment(row: dict[str, Any]) -> Treatment:
    drawn = max(row["generated"], 1)
    taken = {
        "dropped": row["losses"].get("dropped_stale", 0) + row["losses"].get("abandoned", 0),
        "masked": row["losses"].get("masked_stale", 0),
    }
    return Treatment(
        **{name: row[name] for name in Treatment.__struct_fields__ if name in row},
        **{name: tokens / drawn for name, tokens in taken.items()},
        learner_idle=row["waited_share"],
        downweighted=row["faded_share"],
        cut=row["cut_share"],
    )


def table(rows: list[Treatment]) -> list[str]:
    """Lines for a reader."""
    cells = [list(HEAD)]
    for row in rows:
        name = f"{row.name} {row.deadline_s:.3g} s" if row.name == "deadline" else row.name
        shares = (row.learner_idle, row.dropped, row.masked, row.downweighted, row.cut)
        cells.append(
            [
                name,
                f"{row.tokens_per_s:,.0f}",
                *(f"{share:.1%}" for share in shares),
                f"{row.lag_mean:.2f}",
                f"{row.lag_p95:g}",
                f"{row.lag_max}",
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    return ["  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)) for line in cells]
