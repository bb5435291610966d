"""The state of a Tinker API server from its files, for `asyncrl doctor` and `watch`."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar, NamedTuple

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import read_table
from asyncrl.records import health_checks, jsonl, metrics, process_log
from asyncrl.records.health_checks import Finding
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import Block, CardBlock, ListBlock, TableBlock, format_number
from asyncrl.supervise.doctor import describe_process
from asyncrl.supervise.report.run_view import RunView, format_item, read_settings
from buffer import training_log

STATE: str = read_table(__file__)["state"]
ADVICE = "sample for training at temperature 1, with top_p = 1 and without top_k"
CONFIG = "tinker.toml"
MODEL = "model.json"
LEDGER = "ledger.json"
SERVER = "server"
PROCESSES = (SERVER, "training", "sampling")


def is_server(path: Path) -> bool:
    """Return whether `path` is the directory of a server."""
    return (path / CONFIG).exists()


def is_model(path: Path) -> bool:
    """Return whether `path` is the directory of one of a server's models."""
    return (path / MODEL).exists()


def is_running(folder: Path) -> bool:
    """Return whether a server runs in the directory."""
    return process_log.is_alive(folder, SERVER)


class LagTotals(NamedTuple):
    """The lags of a model's trained tokens; lags: {lag: tokens}."""

    lags: Counter[int]
    unknown: int
    steps: int


def sum_lags(model: Path) -> LagTotals:
    """Add up the lags of a model's optimizer steps.  Raises ConfigError."""
    lags: Counter[int] = Counter()
    rows = jsonl.read(path := model / "trained.jsonl")
    with jsonl.name_damaged(path):
        for row in rows:
            lags.update({int(lag): int(tokens) for lag, tokens in row["lags"].items()})
        unknown = sum(int(row["unknown"]) for row in rows)
        return LagTotals(lags, unknown, int(rows[-1]["batch"]) + 1 if rows else 0)


def read_model_record(model: Path) -> JsonObject:
    """Read the record of a model's creation.  Raises ConfigError."""
    with jsonl.name_damaged(path := model / MODEL):
        record: JsonObject = {"model": model.name, "version": 0, "time": 0.0}
        record |= dict(json.loads(path.read_bytes()))
        return record | {"version": int(record["version"]), "time": float(record["time"])}


def read_ledger(model: Path) -> Counter[str]:
    """Read the numbers of a model's ledger, 0 for what it lacks.  Raises ConfigError."""
    with jsonl.name_damaged(path := model / LEDGER):
        return Counter({name: int(number) for name, number in jsonl.read_object(path).items()})


def describe_processes(server: Path) -> list[JsonObject]:
    """Describe the processes of a server like `doctor.describe_processes`."""
    server_runs = is_running(server)
    events = process_log.read_latest_events(server)
    described = []
    for name in PROCESSES:
        event = events.get(name, {})
        # a server records how its workers end, and they do not outlive it
        runs = server_runs and event.get("event") == "began"
        log = server / "logs" / f"{name}.log"
        described.append(describe_process(name, event, event["pid"] if runs else None, log))
    return described


def examine(path: Path) -> JsonObject:
    """Describe a server or one of its models.  Raises ConfigError."""
    folders = [path] if is_model(path) else sorted(note.parent for note in path.glob(f"*/{MODEL}"))
    server = path.resolve().parent if is_model(path) else path
    if not is_server(server):
        raise ConfigError(f"{path}: not a directory of asyncrl tinker (it has no {CONFIG})")
    address = server / "url"
    server_runs = is_running(server)
    return {
        "running": server_runs,
        "url": address.read_text(encoding="utf-8").strip()
        if server_runs and address.exists()
        else "",
        "processes": describe_processes(server),
        "models": [_describe_model(folder) for folder in folders],
    }


def _describe_model(folder: Path) -> JsonObject:
    record = read_model_record(folder)
    totals = sum_lags(folder)
    ledger = read_ledger(folder)
    return {
        "model": record["model"],
        "version": totals.steps or record["version"],
        "lag_mean": training_log.mean(totals.lags),
        "lag_max": max(totals.lags, default=0),
        "trained_tokens": totals.lags.total() + totals.unknown,
        "unknown_tokens": totals.unknown,
        "supervised_tokens": ledger["supervised_tokens"],
        "ledger": ledger,
        "findings": [finding.as_line() for finding in run_health_checks(folder)],
    }


def run_health_checks(model: Path) -> list[Finding]:
    """Apply the health checks to a model's metrics.

    Only checks that compare sampling and training apply, because only the client has rewards."""
    rows = metrics.read(model)
    about = health_checks.RunFacts(load.load(model / "config.toml"))
    findings = filter(None, (rule(rows, about) for rule in health_checks.KNOWN_RULES))
    return [finding._replace(try_this=ADVICE) for finding in findings]


# ---- a model on the pages of `asyncrl watch` -----------------------------------------------------


class TinkerModelView(RunView):
    """The directory of a model, below that of its server.

    Processes, settings and logs are the server's. Rewards and the number of planned steps are
    unknown to the server."""

    no_samples: ClassVar[str] = (
        "No samples yet: the server logs some of every tenth optimizer step on sampled tokens."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.home = self.path.parent  # the server's
        self._findings: tuple[int, list[Finding]] = (-1, [])  # rows of metrics.jsonl, health checks

    def read_summary(self) -> JsonObject:
        return {}

    def read_progress(self) -> tuple[str, int, int]:
        version = read_model_record(self.path)["version"]
        return "running" if is_running(self.home) else "stopped", version, 0

    def count_steps(self) -> int:
        return int(self.series.axes["step"].values[-1]) + 1 if self.series.rows else 0

    def list_overview(self, summary: JsonObject) -> list[Block]:
        """Return ended processes, the health checks that fired, and the main figures."""
        state = self.describe_state()
        ledger = read_ledger(self.path)
        with jsonl.name_damaged(config := self.home / CONFIG):
            limit = float(read_settings(config)["staleness.max_lag"])
        largest = self.series.get_values("lag/max")
        figures = {
            "version": f"{state['step']:,}",
            "server": state["state"],
            "sequences sampled": format_number(ledger.get("sampled"), ","),
            "never trained": format_number(ledger.get("never_trained"), ","),
            "mean lag of the newest step": format_number(state["lag"], ".3g"),
            "largest lag": f"{largest.max():.3g}" if len(largest) else "-",
            "lag limit": f"{limit:g}",
            "share of unknown lag in the newest step": format_number(
                self.series.get_latest("lag/unknown_share"), ".3g"
            ),
        }
        if self._findings[0] != self.series.rows:
            self._findings = self.series.rows, run_health_checks(self.path)
        ended = [row["said"] for row in describe_processes(self.home) if not row["alive"]]
        return [
            ListBlock(ended if state["state"] == "running" else [], id="advice"),
            ListBlock(map(format_item, self._findings[1]), id="signs", style="warn"),
            CardBlock([(name, figure, "", "") for name, figure in figures.items()]),
        ]

    def describe_processes(self) -> list[JsonObject]:
        return describe_processes(self.home)

    def list_ledger(self, summary: JsonObject) -> list[Block]:
        """Return two tables: sequences by their number of trainings, trained tokens by lag."""
        counts = read_ledger(self.path)
        totals = sum_lags(self.path)
        others = {"unknown lag": totals.unknown, "supervised": counts["supervised_tokens"]}
        sampled, tokens = counts["sampled"], counts["sampled_tokens"]
        trained = totals.lags.total() + sum(others.values())
        uses = {
            "never trained": "never_trained",
            "trained once": "trained_once",
            "trained more often": "trained_again",
        }
        sequences = {label: counts[key] for label, key in uses.items()}
        lags = {f"lag {lag}": n for lag, n in sorted(totals.lags.items())}
        lags |= {label: n for label, n in others.items() if n}
        return [
            TableBlock(
                (name, unit, "share"),
                [(label, f"{n:,}", f"{n / max(total, 1):.1%}") for label, n in rows.items()],
                heading=heading,
            )
            for name, unit, rows, total, heading in (
                (
                    "use",
                    "sequences",
                    sequences,
                    sampled,
                    f"{sampled:,} sequences sampled, with {tokens:,} tokens",
                ),
                ("lag", "tokens", lags, trained, f"{trained:,} tokens trained"),
            )
        ]

    def list_changed_settings(self) -> list[str]:
        """List no keys: the defaults of a server are not known here."""
        return []

    def read_settings(self) -> JsonObject:
        """Return the server's settings and those that the model was created with."""
        record = read_model_record(self.path)
        record["time"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
        created_from = {f"this model.{key}": value for key, value in record.items()}
        return created_from | read_settings(self.home / CONFIG)
