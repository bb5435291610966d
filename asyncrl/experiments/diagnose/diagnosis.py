"""Judge a run of another framework by measurements with their evidence; predict nothing."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.experiments.diagnose.run_log import TABLES, RunLog, read_rows
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.health_checks import BOUND_RULES, LEAST, BoundRule, find_growth, match_rules
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import Block, ListBlock, TableBlock

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 8  # steps whose tokens are read, spread over the run
TOKENS = 500_000  # of a step, at least
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
    lag = values.get("lag", 0.0)
    # what is not named a wait is, in a synchronous run, the generation itself
    waits = lag >= MIXED or re.search("wait|exposed", values["at"].get("wait_s", ""))
    if values.get("step_s", 0) > 0 and "wait_s" in values and waits:
        values["wait_share"] = values["wait_s"] / values["step_s"]
    if lag < MIXED:
        values["at_lag_0"] = 0.0
    else:
        values["lag_note"] = f" (at a mean lag of {lag:.2g}, so lag is a part of it)"
    tables = measure_tokens(log, values) if log.token_files else []
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
        "tokens": tables,
        "measured": {name: value for name, value in values.items() if isinstance(value, float)},
        "notes": [*dict.fromkeys(log.notes), *traps],
    }


# ---- exact token data ----------------------------------------------------------------------------


def read_samples(log: RunLog, step: int) -> list[list[Tensor]]:
    """Read the completions of a step, up to the one that exceeds TOKENS tokens.

    Each has log mu, log pi, advantage and lag of its trained tokens, [tokens] in float64. Lag is
    counted from the newest version of the step, or is the step's in the log, or nan."""
    import torch

    def pack(value: Any) -> Tensor:
        while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            value = value[0]
        column = [math.nan if x is None else x for x in value]
        return torch.tensor(column, dtype=torch.float64)

    samples: list[list[Tensor]] = []
    lag_of_step = log.find("lag")[1].get(step, math.nan)
    newest, total, refused = 0.0, 0, 0
    for row in (row for file in log.token_files[step] for row in read_rows(file, log.notes)):
        columns = {
            key: next((row[name] for name in names if row.get(name) is not None), None)
            for key, names in TABLES["tokens"].items()
        }
        try:
            behavior, target, mask = (pack(columns[key]) for key in ("behavior", "target", "mask"))
            advantages = pack(columns["advantages"]).expand_as(mask)
            used = (mask * pack(columns["used"] or [1.0])).bool()
            used &= behavior.isfinite() & target.isfinite() & advantages.isfinite()
            version = torch.full_like(mask, -lag_of_step)
            if columns["versions"] is not None:
                version = pack(columns["versions"]).expand_as(mask)
                newest = max(newest, float(version[used].max()))
        except (TypeError, RuntimeError):
            refused += 1
            continue
        if used.any():
            samples.append([x[used] for x in (behavior, target, advantages, version)])
            total += int(used.sum())
        if total >= TOKENS:
            log.notes.append(f"step {step}: its first {total:,} tokens are read")
            break
    if refused:
        log.notes.append(f"step {step}: {refused} rows without token data are left out")
    return [[*columns, newest - version] for *columns, version in samples]


def measure_tokens(log: RunLog, values: JsonObject) -> list[JsonObject]:
    """Compare engine and trainer by the learner's own loss; return tables and add to `values`."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from asyncrl import losses

    steps = sorted(log.token_files)
    totals: dict[str, Counter[str]] = {}
    estimates: list[dict[str, float]] = []
    for step in steps[:: -(-len(steps) // STEPS)]:
        samples = read_samples(log, step)
        if not samples:
            continue
        lengths = torch.tensor([[len(sample[0])] for sample in samples])
        rank = lengths[:, 0].argsort().argsort()[:, None]
        behavior, target, advantages, lag = (
            pad_sequence(list(column), batch_first=True) for column in zip(*samples, strict=True)
        )
        place = torch.arange(behavior.shape[1])
        mask, lag = place < lengths, lag.round()
        masks = {"all": mask}
        quarters = {"position": 4 * place // lengths, "length": 4 * rank // len(rank)}
        for kind, number in quarters.items():
            masks |= {f"{kind} quarter {n + 1}": mask & (number == n) for n in range(4)}
        lags = set(lag[mask & lag.isfinite()].tolist())
        masks |= {f"lag {value:g}": mask & (lag == value) for value in sorted(lags)}
        plain: dict[str, Any] = {"correction.preset": "none"}
        cases = {name: (inside, plain) for name, inside in masks.items()}
        cases |= {name: (mask, keys) for name, keys in TABLES["corrections"].items()}
        for name, (inside, keys) in cases.items():
            if count := int(inside.sum()):
                found = losses.loss(target, behavior, advantages, inside, **keys).metrics
                found["cut"] = found["is/zero_share"] + found["clip/share"]
                found["share"] = count / int(mask.sum())
                total = totals.setdefault(name, Counter())
                total.update({"count": count} | {key: count * x for key, x in found.items()})
                estimates += [found] if name.startswith("length") else []
    if len(estimates) < 2:
        return []
    values["tokens"] = totals["all"]["count"]
    values["token_ratio"] = max(estimate["is/ratio_max"] for estimate in estimates)
    for role, key in (("token_k3", "kl/behavior_start_k3"), ("token_chi2", "is/chi2")):
        series = [estimate[key] for estimate in estimates]
        error = stdev(series) / math.sqrt(len(series))
        values |= {role: fmean(series), f"{role}_error": error}
        values[f"{role}_high"] = values[role] + 3 * error
    tables = []
    for (heading, columns), of_corrections in zip(TABLES["tables"].items(), (0, 1), strict=True):
        rows = [
            [name, *(form.format(total[key] / total["count"]) for key, form in columns.values())]
            for name, total in totals.items()
            if (name in TABLES["corrections"]) == of_corrections
        ]
        tables.append({"heading": heading, "head": ("", *columns), "rows": rows})
    return tables


# ---- output --------------------------------------------------------------------------------------


def list_findings(result: JsonObject) -> list[str]:
    findings = [f"{x['name']}: {x['said']}. Change: {x['try_this']}" for x in result["findings"]]
    return findings or ["No rule applies to these numbers."]


def make_tables(result: JsonObject) -> list[TableBlock]:
    """Make the tables of a result: its numbers, and those of its tokens."""
    rows = [[x["meaning"], x["name"], *(f"{x[k]:.4g}" for k in NUMBERS)] for x in result["numbers"]]
    head = ("quantity", "metric", *NUMBERS)
    numbers = [TableBlock(head, rows, heading="Numbers", text_columns=2)] if rows else []
    return numbers + [TableBlock(**table) for table in result["tokens"]]


def format_result(result: JsonObject) -> str:
    """Format a result for a terminal."""
    lines = ["Findings", *(f"- {text}" for text in list_findings(result))]
    for table in make_tables(result):
        lines += ["", table.as_text()]
    if result["notes"]:
        lines += ["", "How to read them"]
    return "\n".join(lines + [f"- {note}" for note in result["notes"]])


def write_page(path: Path, log: RunLog, result: JsonObject) -> None:
    blocks: list[Block] = [
        ListBlock(list_findings(result), heading="Findings"),
        *make_tables(result),
    ]
    blocks.append(ListBlock(result["notes"], heading="How to read them"))
    subtitle = f"a run of {log.description.title}; its names as in {log.description.seen}"
    atomic_write.write(path, page_kit.render(f"{log.path}", subtitle, blocks, {}))
