"""Diagnose runs of other frameworks: their logs, exact token data and the keys to change.

A run is judged by measurements with their evidence; nothing is predicted.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import IO, TYPE_CHECKING, Any

import msgspec

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers
from asyncrl.contract.toml_writer import read_table
from asyncrl.records import atomic_write, jsonl, metrics, page_kit
from asyncrl.records.health_checks import BOUND_RULES, LEAST, BoundRule, find_growth, match_rules
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import Block, ListBlock, TableBlock

if TYPE_CHECKING:
    from torch import Tensor

MOST = 10_000  # steps of a metric that are kept, at least half of them if there are more
LONGEST = 1 << 27  # bytes of one TensorBoard event
LOG_FILE = re.compile(  # of metrics, by its path
    r"(?!.*((traces|completions|samples|summaries)\.jsonl|/rollouts/))"
    r".*((trainer_state\.json|\.jsonl|\.csv)(\.gz)?$|events\.out\.tfevents[^/]*$)"
)
TOKEN_FILE = re.compile(r"(?:train_data_step(\d+)|step_(\d+)/rank_\d+)\.jsonl(?:\.gz)?$")
STEPS = 8  # steps whose tokens are read, spread over the run
TOKENS = 500_000  # of a step, at least
SHORT = 16  # tokens: completions below it may all be of one length
MIXED = 0.1  # mean lag from which a difference of engine and trainer is not judged alone
NUMBERS = ("median", "first third", "last third", "least", "largest")
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")
Column = dict[int, float]  # step -> value, in order
Rows = Iterator[JsonObject]  # with their step


class Framework(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of diagnose.toml, which explains its fields."""

    title: str
    seen: str
    names: dict[str, list[str]]
    keys: dict[str, str]
    prefix: str = ""
    asynchronous: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    traps: dict[str, list[str]] = {}

    def matches(self, pattern: str, name: str) -> bool:
        return re.fullmatch(self.prefix + pattern, name) is not None


TABLES: JsonObject = read_table(__file__)
FRAMEWORKS = msgspec.convert(TABLES["frameworks"], dict[str, Framework])
BOUND_RULES["diagnosis"] = msgspec.convert(TABLES["findings"], list[BoundRule])


@functools.lru_cache(100_000)
def match_name(name: str) -> frozenset[str]:
    """Return the frameworks that log a metric of this name."""
    return frozenset(
        key
        for key, framework in FRAMEWORKS.items()
        for patterns in (framework.refused, *framework.names.values())
        if any(framework.matches(pattern, name) for pattern in patterns)
    )


@dataclass
class RunLog:
    """Metrics of a run, by name and step; notes say what was left out, and why."""

    path: Path
    columns: dict[str, Column] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    framework: str = ""
    token_files: dict[int, list[Path]] = field(default_factory=dict)

    @property
    def description(self) -> Framework:
        return FRAMEWORKS[self.framework]

    def find(self, role: str) -> tuple[str, Column]:
        """Return a role's metric and its values by step; without one, "" and none."""
        names, changed = self.description.names, self.description.asynchronous
        if role in changed and self.find("lag")[1]:
            names = changed
        for pattern in names.get(role, ()):
            for name, column in self.columns.items():
                if self.description.matches(pattern, name):
                    return name, column
        return "", {}

    def require(self, role: str, otherwise: str = "") -> Column:
        """Return a role's values by step. Raises ConfigError without any; otherwise: advice."""
        if column := self.find(role)[1]:
            return column
        names = " or ".join(self.description.names.get(role, ["which this framework lacks"]))
        meaning = TABLES["roles"][role]
        raise ConfigError(f"{self.path}: a simulation also needs {meaning}: {names}{otherwise}")

    def add_file(self, path: Path) -> None:
        """Add the metrics of a file, unless another file has them."""
        repeated = []
        for name, column in read_columns(path, self.notes).items():
            first, known = next(iter(column)), self.columns.setdefault(name, {})
            if known and first <= next(iter(known)):
                repeated.append(name)
                continue
            drop_from(first, known)
            known.update(column)
        if repeated:
            text = f"{len(repeated)} metrics, such as {repeated[0]}, are in a file read before"
            self.notes.append(f"{path.name}: {text}; give this file alone to read it")


def read(path: Path, name: str = "") -> RunLog:
    """Read a run. name: of its framework, by default recognized.

    Raises ConfigError for a path without metrics."""
    if name not in ("", *FRAMEWORKS):
        raise ConfigError(f"--as {name}: choose one of {', '.join(FRAMEWORKS)}")
    if not path.exists():
        raise ConfigError(f"{path}: does not exist; give a log file, or the directory of a run")
    if (path / "run_id").exists():
        raise ConfigError(f"{path}: is a run of asyncrl; type: asyncrl doctor {path}")
    log = RunLog(path)
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if LOG_FILE.match(file.as_posix())]
    # each checkpoint has the whole history so far
    states = [file for file in files if file.name.startswith("trainer_state")]
    newest = max(states, key=lambda file: file.stat().st_size, default=None)
    found: Counter[str] = Counter()
    for file in files:
        if match := TOKEN_FILE.search(file.resolve().as_posix()):
            log.token_files.setdefault(int(match[1] or match[2]), []).append(file)
            found["nemo-rl" if match[1] else "prime-rl"] += 100
        elif file not in states or file == newest:
            log.add_file(file)
    found.update(key for metric in log.columns for key in match_name(metric))
    if not found:
        raise ConfigError(
            f"{path}: no metric of {', '.join(x.title for x in FRAMEWORKS.values())}; give the "
            f"file or directory with the metrics of a run{'; '.join(['', *log.notes])}"
        )
    log.framework = name or found.most_common(1)[0][0]
    if not found[log.framework]:
        raise ConfigError(f"--as {name}: {path} has metrics of {', '.join(found)}; leave out --as")
    refused = {x: "of another framework" for x in log.columns if log.framework not in match_name(x)}
    for pattern, reason in log.description.refused.items():
        refused |= {x: reason for x in log.columns if log.description.matches(pattern, x)}
    for metric, reason in refused.items():
        del log.columns[metric]
        log.notes.append(f"{metric} is refused: {reason}")
    if not log.columns and not log.token_files:
        raise ConfigError(f"{path}: nothing can be judged: {'; '.join(log.notes)}")
    return log


def read_columns(path: Path, notes: list[str]) -> dict[str, Column]:
    """Return the known metrics of a file. A row whose step goes back replaces what it repeats."""
    columns: dict[str, Column] = {}
    unknown: Counter[str] = Counter()
    stride, going_back = 1, ""
    for row in read_rows(path, notes):
        number = read_number(next((row[name] for name in TABLES["steps"] if name in row), None))
        if number is None or not number.is_integer() or is_thinned(int(number), stride):
            continue
        step = int(number)
        values = {
            name: read_number(value)
            for name, value in row.items()
            if match_name(name) and TABLES["shadowed"].get(name) not in row
        }
        known = [column for name in values if (column := columns.get(name))]
        last = max((next(reversed(column)) for column in known), default=step)
        if step < last and step <= min(next(iter(column)) for column in known):
            going_back = f"steps begin again at {step}: of several runs the last counts"
            columns.clear()
        elif step < last:
            going_back = f"steps go back from {last} to {step}: of repeated steps the later count"
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                unknown[name] += value is not None
                continue
            column = columns.setdefault(name, {})
            drop_from(step, column)
            column[step] = value
            if len(column) > MOST:
                stride *= 2
                for key, old in columns.items():
                    columns[key] = {x: y for x, y in old.items() if not is_thinned(x, stride)}
    notes += [f"{path.name}: {going_back}"] if going_back else []
    notes += [f"{path.name}: one step of {stride} is read"] if stride > 1 else []
    notes += [f"{name}: {count} values are not finite" for name, count in unknown.items() if count]
    return {name: column for name, column in columns.items() if column}


def is_thinned(step: int, stride: int) -> bool:
    """Return whether a step is left out: all but one of `stride`, the same in every column."""
    return zlib.crc32(b"%d" % step) % stride > 0


def drop_from(step: int, column: Column) -> None:
    """Drop the values from a step on."""
    while column and next(reversed(column)) >= step:
        column.popitem()


def read_number(value: Any) -> float | None:
    """Return a number, or the number in a text; otherwise None."""
    with suppress(TypeError, ValueError, OverflowError):
        return float(value)
    return None


# ---- files ---------------------------------------------------------------------------------------


def open_log(path: Path) -> IO[bytes]:
    """Open a file, also one of gzip. Raises ConfigError for a pickle, unread."""
    file: Any = path.open("rb")
    if file.peek(2)[:2] == b"\x1f\x8b":
        file = gzip.GzipFile(fileobj=file)
    with suppress(EOFError, OSError, zlib.error):
        if file.peek(2)[:2] in PICKLES:
            raise ConfigError(
                f"{path}: a pickle or an archive, which is not read because loading it can run "
                "code; give the metrics file of the run"
            )
    return file  # type: ignore[no-any-return]


def read_rows(path: Path, notes: list[str]) -> Rows:
    """Yield the rows of a file, by its name; a torn end is noted."""
    name = path.name.removesuffix(".gz")
    with open_log(path) as file:
        try:
            if "tfevents" in name:
                yield from read_events(file)
            elif name.endswith(".csv"):
                yield from read_table_rows(file, path.name, notes)
            elif name.endswith(".json"):
                yield from read_history(file)
            else:
                damaged: list[int] = []
                for row in jsonl.decode_lines(file, damaged):
                    data = row.get("data")  # the values of verl
                    yield row | data if isinstance(data, dict) else row
                if damaged:
                    text = f"{len(damaged)} damaged or torn lines, the first is {damaged[0]}"
                    notes.append(f"{path.name}: {text}")
        except (EOFError, OSError, ValueError, zlib.error, struct.error, csv.Error):
            notes.append(f"{path.name}: damaged or torn at its end; what is before it counts")


def read_history(file: IO[bytes]) -> Rows:
    """Yield the objects without others in trainer_state.json; those with a step are its log."""
    text, end = b"", 0
    for chunk in iter(functools.partial(file.read, 1 << 20), b""):
        text, end = text[end:] + chunk, 0
        for match in re.finditer(rb"\{[^{}]*\}", text):
            end = match.end()
            yield json.loads(match[0])
    if not text.rstrip().endswith(b"}"):
        raise EOFError


def read_events(file: IO[bytes]) -> Rows:
    """Yield the events of TensorBoard: a length with its checksum, then data with its own."""
    from google.protobuf.message import DecodeError

    events = metrics.import_protocol()[1]
    while head := file.read(12):
        (length,) = struct.unpack("<Q4x", head)
        data = file.read(length + 4) if length < LONGEST else b""
        if len(data) < length + 4:
            raise EOFError
        try:
            event = events.Event.FromString(data[:-4])
        except DecodeError as error:
            raise EOFError from error
        scalars = [x for x in event.summary.value if x.HasField("simple_value")]
        yield {"step": event.step} | {x.tag: x.simple_value for x in scalars}


def read_table_rows(file: IO[bytes], name: str, notes: list[str]) -> Rows:
    """Yield the rows of a CSV; trackers name the columns of a chart `RUN - METRIC`."""
    reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline=""))
    heads = [head.rpartition(" - ")[0] for head in reader.fieldnames or () if " - " in head]
    runs = list(dict.fromkeys(heads))
    if len(runs) > 1:
        notes.append(f"{name}: has {len(runs)} runs ({', '.join(runs[:5])}); the first is read")
    prefix = f"{runs[0]} - " if runs else ""
    for row in reader:
        yield {key.removeprefix(prefix): x for key, x in row.items() if key}


# ---- findings ------------------------------------------------------------------------------------


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
        if role in TABLES["growing"]:
            lags, later = log.find("lag")[1], series[third:]
            usual = (x for at, x in column.items() if lags.get(at, 0) >= values.get("lag", 0))
            first = next(usual, series[0])  # the first steps have no lag yet
            # an engine that gets no new weights differs so within steps, and goes on to
            leaps = min(later) >= 3 * first and median(later) >= 10 * first
            grown = find_growth(series) or ((first, median(later)) if leaps else None)
            if grown:
                k3 = grown[1] if role == "k3" else grown[1] ** 2 / 2  # about, of |log ratio|
                values |= {"growth_early": grown[0], "growth_late": grown[1], "growth_k3": k3}
                values["growth_at"] = evidence
        if role == "reward" and (fallen := find_growth(series[::-1])):
            values["reward_late"], values["reward_early"] = fallen
    if values.get("length_max", 0) >= SHORT:
        values["to_limit"] = values.get("length", 0) / values["length_max"]
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
    if {"truncated_sampler", "stale_weights"} & findings.keys():  # which are mismatches themselves
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
    estimates: list[Numbers] = []
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
        plain: JsonObject = {"correction.preset": "none"}
        cases = {name: (inside, plain) for name, inside in masks.items()}
        cases |= {name: (mask, keys) for name, keys in TABLES["corrections"].items()}
        for name, (inside, keys) in cases.items():
            if count := int(inside.sum()):
                found = losses.loss(target, behavior, advantages, inside, **keys).metrics
                found["cut"] = found["is/zero_share"] + found["clip/share"]
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
    for total in totals.values():
        total.update({"share": total["count"] ** 2 / totals["all"]["count"]})
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
