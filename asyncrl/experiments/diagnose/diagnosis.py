"""Judge a run of another framework by measurements with their evidence; predict nothing."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, median, stdev

import msgspec

from asyncrl.experiments.diagnose.run_log import TABLES, RunLog
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.health_checks import BOUND_RULES, LEAST, BoundRule, find_growth, match_rules
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import Block, ListBlock, TableBlock

MIXED = 0.5  # mean lag from which a difference of engine and trainer is not judged alone
BOUND_RULES["diagnosis"] = msgspec.convert(TABLES["findings"], list[BoundRule])
NUMBERS = ("median", "first third", "last third", "least", "largest")


def diagnose(log: RunLog) -> JsonObject:
    """Return the numbers of a run, the findings and notes."""
    values: JsonObject = {"keys": log.description.keys, "at": {}, "lag_note": ""}
    numbers = []
    for role, meaning in TABLES["roles"].items():
        name, column = log.find(role)
        if not column:
            continue
        steps, series = [*column], [*column.values()]
        third = -(-len(series) // 3)
        summary = *map(median, (series, series[:third], series[-third:])), min(series), max(series)
        numbers.append(
            {"role": role, "name": name, "meaning": meaning, "rows": len(series)}
            | dict(zip(("steps", *NUMBERS), ([steps[0], steps[-1]], *summary), strict=True))
        )
        if len(series) < LEAST:
            continue
        evidence = f"{name}, steps {steps[0]} to {steps[-1]}, {len(series)} rows"
        values["at"][role], values[role] = evidence, summary[0]
        values[f"{role}_high"] = fmean(series) + 3 * stdev(series) / math.sqrt(len(series))
        if role in TABLES["growing"] and (grown := find_growth(series)):
            early, late = grown
            values |= {"growth_early": early, "growth_late": late, "growth_at": evidence}
        if role == "reward" and (fallen := find_growth(series[::-1])):
            values["reward_late"], values["reward_early"] = fallen
    if "mixed" in values:
        values["equal"], values["at"]["equal"] = 1 - values["mixed"], values["at"]["mixed"]
    if values.get("step_s", 0) > 0 and "wait_s" in values:
        values["wait_share"] = values["wait_s"] / values["step_s"]
    if (lag := values.get("lag", 0.0)) < MIXED:
        values["at_lag_0"] = 0.0
    else:
        values["lag_note"] = f" (at a mean lag of {lag:.2g}, so lag is a part of it)"
    findings = {x.name: x for x in reversed(match_rules("diagnosis", values))}
    if "truncated_sampler" in findings:  # which is a mismatch itself
        findings.pop("mismatch", None)
    traps = [
        said
        for said, roles in log.description.traps.items()
        if all((role.lstrip("!") in values) != role.startswith("!") for role in roles)
    ]
    return {
        "path": str(log.path),
        "framework": log.framework,
        "findings": [x._asdict() for x in reversed(findings.values())],
        "numbers": numbers,
        "notes": [*dict.fromkeys(log.notes), *traps],
    }


# ---- output --------------------------------------------------------------------------------------


def list_findings(result: JsonObject) -> list[str]:
    findings = [f"{x['name']}: {x['said']}. Change: {x['try_this']}" for x in result["findings"]]
    return findings or ["No rule applies to these numbers."]


def make_table(result: JsonObject) -> TableBlock:
    """Make the table of the numbers of a result."""
    rows = [[x["meaning"], x["name"], *(f"{x[k]:.4g}" for k in NUMBERS)] for x in result["numbers"]]
    return TableBlock(("quantity", "metric", *NUMBERS), rows, heading="Numbers", text_columns=2)


def format_result(result: JsonObject) -> str:
    """Format a result for a terminal."""
    lines = ["Findings", *(f"- {text}" for text in list_findings(result))]
    lines += ["", make_table(result).as_text(), "", "How to read them"]
    return "\n".join(lines + [f"- {note}" for note in result["notes"] or ["no notes"]])


def write_page(path: Path, log: RunLog, result: JsonObject) -> None:
    blocks: list[Block] = [ListBlock(list_findings(result), heading="Findings"), make_table(result)]
    blocks.append(ListBlock(result["notes"], heading="How to read them"))
    subtitle = f"a run of {log.description.title}; its names as in {log.description.seen}"
    atomic_write.write(path, page_kit.render(f"{log.path}", subtitle, blocks, {}))
