"""A model of a Tinker server as the pages of `asyncrl watch` show it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.contract.errors import AsyncrlError
from asyncrl.supervise import tinker_status
from asyncrl.supervise.report.advice import Advice
from asyncrl.viewer import findings
from asyncrl.viewer.findings import WatchedRun


class WatchedTinkerModel(WatchedRun):
    """The directory of a model, below that of its server.

    Processes, settings and logs are the server's. Rewards and the number of planned steps are
    unknown to the server."""

    no_samples: ClassVar[str] = (
        "No samples yet: the server logs some of every tenth optimizer step on sampled tokens."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._advice: tuple[int, list[Advice]] = (-1, [])  # rows of metrics.jsonl, health checks

    @property
    def server(self) -> Path:
        """Directory of the server."""
        return self.path.parent

    def read_summary(self) -> dict[str, Any]:
        return {}

    def describe_state(self) -> dict[str, Any]:
        """Return the model's row of the list; its step is the version."""
        running, version, problem = False, 0, ""
        try:
            version = tinker_status.read_model_record(self.path).get("version", 0)
            running = tinker_status.is_running(self.server)
        except (AsyncrlError, OSError) as error:
            problem = str(error)
        rows = self.series.rows
        return {
            "id": self.id,
            "path": str(self.path),
            "state": "unreadable" if problem else "running" if running else "stopped",
            "problem": problem,
            "step": int(self.series.axes["step"].values[-1]) + 1 if rows else version,
            "steps": 0,
            "seconds": float(self.series.axes["time"].values[-1]) if rows else 0.0,
            "accuracy": None,
            "reward": None,
            "lag": self.series.get_latest("lag/mean"),
            "rows": rows,
            "samples": len(self.samples.heads),
            "summed_up": False,
            "damaged": self.series.damaged + self.samples.damaged,
        }

    def build_overview(self) -> dict[str, Any]:
        """Return state, health checks and the main figures."""
        state = self.describe_state()
        ledger = tinker_status.read_ledger(self.path)
        limit = findings.read_settings(self.server / tinker_status.CONFIG)["staleness.max_lag"]
        largest = self.series.get_values("lag/max")
        cards = [
            ["version", state["step"]],
            ["server", state["state"]],
            ["sequences sampled", ledger.get("sampled")],
            ["never trained", ledger.get("never_trained")],
            ["mean lag of the newest step", state["lag"]],
            ["largest lag", float(largest.max()) if len(largest) else None],
            ["lag limit", f"{limit:g}"],
            [
                "share of unknown lag in the newest step",
                self.series.get_latest("lag/unknown_share"),
            ],
        ]
        ended = [
            row["said"] for row in tinker_status.describe_processes(self.server) if not row["alive"]
        ]
        return {
            "state": state,
            "advice": [line._asdict() for line in self.list_advice([])],
            "waits": ended if state["state"] == "running" else [],
            "cards": cards,
        }

    def list_advice(self, signs: list[dict[str, Any]]) -> list[Advice]:
        """Return the findings of the health checks; computed once for the same metrics."""
        rows = self.series.rows
        if self._advice[0] != rows:
            problems = tinker_status.run_health_checks(self.path)
            lines = [Advice(x.name, "health", x.said, tinker_status.ADVICE) for x in problems]
            self._advice = rows, lines
        return self._advice[1]

    @property
    def process_group(self) -> str:
        """Directory of the server, because all its models have the same processes."""
        return str(self.server)

    def list_processes(self) -> list[dict[str, Any]]:
        return findings.add_starts(tinker_status.describe_processes(self.server), self.server)

    def read_ledger(self) -> dict[str, Any]:
        """Return two tables: sequences by their number of trainings, trained tokens by lag."""
        counts = tinker_status.read_ledger(self.path)
        totals = tinker_status.sum_lags(self.path)
        others = {
            "unknown lag": totals.unknown,
            "supervised": counts.get("supervised_tokens", 0),
        }
        sampled = counts.get("sampled", 0)
        trained = totals.known_tokens + sum(others.values())
        sequences = [
            [label, counts.get(key, 0), counts.get(key, 0) / max(sampled, 1)]
            for label, key in (
                ("never trained", "never_trained"),
                ("trained once", "trained_once"),
                ("trained more often", "trained_again"),
            )
        ]
        lags = [[f"lag {lag}", n, n / trained] for lag, n in sorted(totals.lags.items())]
        lags += [[label, n, n / trained] for label, n in others.items() if n]
        tokens = counts.get("sampled_tokens", 0)
        return {
            "tables": [
                {
                    "title": f"{sampled:,} sequences sampled, with {tokens:,} tokens",
                    "head": ["use", "sequences", "share"],
                    "rows": sequences,
                },
                {
                    "title": f"{trained:,} tokens trained",
                    "head": ["lag", "tokens", "share"],
                    "rows": lags,
                },
            ]
        }

    def list_changed_settings(self) -> list[str]:
        """List no keys: the defaults of a server are not known here."""
        return []

    def read_settings(self) -> dict[str, Any]:
        """Return the server's settings and those that the model was created with."""
        record = tinker_status.read_model_record(self.path)
        record["time"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
        created_from = {f"this model.{key}": value for key, value in record.items()}
        return created_from | findings.read_settings(self.server / tinker_status.CONFIG)

    def list_logs(self) -> list[str]:
        """Return the names of the server's logs, its own first."""
        names = findings.list_log_names(self.server)
        return sorted(names, key=lambda name: not name.endswith("server.log"))

    def read_log_tail(self, name: str) -> str:
        return findings.read_log_tail(self.server, name)
