import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient
from tinker_kit import draw, policy_datum, tuned_datum
from tinker_local_kit import LocalServer, sampler_of, step
from watch_kit import ask_about_damage, sample_row, write_lines

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.contract.toml_writer import fill
from asyncrl.records import process_log
from asyncrl.records.page_kit import CardBlock, ListBlock
from asyncrl.records.process_log import INTERRUPTED, ProcessIncarnation
from asyncrl.supervise import tinker_status
from asyncrl.supervise.report.plots import PAGES
from asyncrl.supervise.report.token_samples import SHADES
from asyncrl.supervise.tinker_status import TinkerModelView
from asyncrl.tinker import app, sample_log
from asyncrl.tinker import server as module
from asyncrl.viewer.app import WatchApp


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    local = LocalServer(tmp_path, "staleness.max_lag=2")
    (local.folder / "logs" / "server.log").write_text("started\na lag of 3 was refused\n")
    yield local
    local.stop()


def ask(client: TestClient, name: str, **query: Any) -> Any:
    reply = client.get(f"/api/{name}", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def read_rows(html: str) -> list[tuple[str, ...]]:
    rows = (re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in html.split("<tr>"))
    return [tuple(row) for row in rows if row]


def test_the_pages_of_a_served_model(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_log, "EVERY", 2)
    watch = TestClient(WatchApp([server.folder]).build_application())
    assert ask(watch, "runs") == [], "no client has come yet"
    with module.record_process(server.folder), server.client() as service:
        process_log.append_event(server.folder, "training", os.getpid(), "began")
        process_log.append_event(server.folder, "sampling", 1, "began")
        process_log.append_event(server.folder, "sampling", 1, "ended", code=-9)
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        first = draw(sampler_of(client), 4)
        step(client, [policy_datum(sequence) for sequence in first[:2]])
        step(client, [policy_datum(first[2]), *map(policy_datum, draw(sampler_of(client), 1))])
        step(
            client, [policy_datum(sequence, spans=True) for sequence in draw(sampler_of(client), 2)]
        )
        tuned = service.create_lora_training_client("tiny", rank=4).result()
        step(tuned, [tuned_datum([5, 6, 7, 1])], "cross_entropy")

        states = {state["id"]: state for state in ask(watch, "runs")}
        name, other = sorted(states, key=lambda id: states[id]["step"], reverse=True)
        assert [(states[x]["state"], states[x]["step"]) for x in (name, other)] == [
            ("running", 3),
            ("running", 1),
        ]
        seen = ask(watch, "overview", run=name)[name]
        cards = dict(re.findall(r'class="card">([^<]+)<b[^>]*>([^<]+)<', seen))
        assert (cards["version"], cards["lag limit"], cards["largest lag"]) == ("3", "2", "1")
        assert (cards["sequences sampled"], cards["never trained"]) == ("7", "1")
        assert cards["server"] == "running" and "sampling (process 1) ended with SIGK" in seen
        titles = {p: {x["title"] for x in ask(watch, "plots", page=p, run=name)} for p in PAGES}
        assert {"Completion length", "Seconds a batch", "Throughput"} == titles["overview"]
        assert {"Lag over time", "Lag of trained tokens"} <= titles["staleness"]
        assert {"Loss parts", "Gradient norm"} <= titles["learner"]
        [processes] = ask(watch, "processes").values()  # once for both models
        assert [(row["name"], row["alive"]) for row in processes] == [
            *(("server", True), ("training", True), ("sampling", False))
        ]
        assert processes[0]["memory_mb"] > 1 and "refused" in processes[0]["last_line"]
        counted = read_rows(ask(watch, "ledger", run=name)[name])
        assert counted[:3] == [
            ("never trained", "1", "14.3%"),
            ("trained once", "6", "85.7%"),
            ("trained more often", "0", "0.0%"),
        ]
        assert counted[4][:2] == ("lag 1", str(len(first[2].tokens)))
        assert sum(float(share[:-1]) for *_, share in counted[3:]) == pytest.approx(100, abs=0.3)
        supervised = read_rows(ask(watch, "ledger", run=other)[other])
        assert supervised[3:] == [("supervised", "3", "100.0%")]
        rows = ask(watch, "samples", run=name)["rows"]
        assert {row["batch"] for row in rows} == {0, 2}
        assert ask(watch, "samples", run=name, reward="0..")["rows"] == [], "none is known"
        row = ask(watch, "sample", run=name, number=rows[-1]["number"])
        [one] = [x for x in first if x.sequence_id in row["sequence_ids"]]
        [sequence] = row["sequences"]
        assert (sequence["prompt"], sequence["tokens"]) == ("2+2=", list(one.tokens))
        assert sequence["behavior"] == pytest.approx(list(one.logprobs), abs=1e-4)
        assert sequence["shades"]["log_ratio"] == pytest.approx([0.0] * len(one.tokens), abs=1e-3)
        assert set(sequence["versions"][0][:1] + sequence["used"]) == {"0", 1}
        none = ask(watch, "samples", run=other)
        assert none["rows"] == [] and "tenth optimizer step" in none["none"]
        settings = ask(watch, "config", run=name)["runs"][name]
        assert settings["staleness.max_lag"] == 2 and settings["this model.rank"] == 2
        logs = ask(watch, "logs", run=name)
        assert logs["file"] == "logs/server.log" and "a lag of 3" in logs["text"]
    assert {state["state"] for state in ask(watch, "runs")} == {"stopped"}
    assert "SIGK" not in ask(watch, "overview", run=name)[name]
    folder = server.folder / name
    shown = CliRunner().invoke(main, ["samples", str(folder), "--step", "0"]).output
    assert "batch 0  datum" in shown and "  prompt    2+2=" in shown
    refused = CliRunner().invoke(main, ["samples", str(server.folder)])
    assert refused.exit_code == 2 and "has several models" in refused.output


@pytest.fixture
def served(tmp_path: Path) -> Path:
    server = tmp_path / "server"
    model = server / "s-1-train-0"
    (server / "logs").mkdir(parents=True)
    model.mkdir()
    (server / tinker_status.CONFIG).write_text("[staleness]\nmax_lag = 2\n[server]\nport = 0\n")
    for name in ("sampling", "server", "training"):
        (server / "logs" / f"{name}.log").write_text(f"{name} has started\n")
    least = {"model": {"path": "m"}, "task": {"name": "sort"}}
    (model / "config.toml").write_text(load.dump(load.build(least)))
    (model / tinker_status.MODEL).write_text(json.dumps({"rank": 4, "version": 7, "time": NOON}))
    return model


NOON = time.mktime((2026, 3, 4, 15, 6, 7, 0, 0, -1))
LAGS = [{"batch": 0, "lags": {"0": 6}, "unknown": 0}, {"batch": 1, "lags": {"1": 3}, "unknown": 1}]
METRICS = [
    {"step": 0, "t": 1.5, "lag/mean": 0.0, "lag/max": 2, "lag/unknown_share": 0.0},
    {"step": 1, "t": 4.5, "lag/mean": 0.75, "lag/max": 1, "lag/unknown_share": 0.25},
]
COUNTS = {"sampled": 1200, "never_trained": 300, "trained_once": 600, "trained_again": 300}


def read_model(folder: Path) -> TinkerModelView:
    model = TinkerModelView("one", folder)
    model.refresh()
    return model


def read_overview(model: TinkerModelView) -> tuple[list[str], dict[str, str]]:
    ended, _, cards = model.list_overview({})
    assert isinstance(ended, ListBlock) and isinstance(cards, CardBlock)
    return [item.text for item in ended.items], {card[0]: card[1] for card in cards.cards}


def test_a_model_without_a_step(served: Path) -> None:
    model = read_model(served)
    state = model.describe_state()
    assert (state["state"], state["step"], state["lag"], state["rows"]) == ("stopped", 7, None, 0)
    ended, cards = read_overview(model)
    assert (ended, cards["largest lag"], cards["sequences sampled"]) == ([], "-", "-")
    sequences, tokens = model.list_ledger({})
    assert sequences.heading == "0 sequences sampled, with 0 tokens"
    assert [row[1:] for row in sequences.rows] == [("0", "0.0%")] * 3
    assert (tokens.heading, tokens.rows) == ("0 tokens trained", [])
    (served / tinker_status.MODEL).write_text("{}")
    assert read_model(served).describe_state()["step"] == 0
    for damaged in ("null", "[" * 100_000):
        (served / tinker_status.MODEL).write_text(damaged)
        state = read_model(served).describe_state()
        assert (state["state"], state["step"]) == ("unreadable", 0)
        assert state["problem"].startswith(f"{served / tinker_status.MODEL}: ")


def test_a_model_in_training(served: Path) -> None:
    server = served.parent
    write_lines(served / "metrics.jsonl", METRICS, end="no json\n")
    write_lines(served / "trained.jsonl", LAGS)
    write_lines(served / "token_samples.jsonl", [sample_row(0), {"batch": 1}])
    (served / tinker_status.LEDGER).write_text(json.dumps(COUNTS | {"sampled_tokens": 5000}))
    process = ProcessIncarnation(server, "server", alone=True)
    for event, more in (("began", {}), ("ended", {"code": 3}), ("began", {})):
        process_log.append_event(server, "training", 17, event, **more)
    process_log.append_event(server, "sampling", 18, "began")
    process_log.append_event(server, "sampling", 18, "ended", code=1, why="lost")
    model = read_model(served)
    state = model.describe_state()
    assert {key: state[key] for key in ("state", "step", "seconds", "lag", "rows")} == {
        "state": "running",
        "step": 2,
        "seconds": 4.5,
        "lag": 0.75,
        "rows": 2,
    }
    assert (state["samples"], state["damaged"]) == (1, 2)
    (ended,), cards = read_overview(model)
    assert cards == {
        "version": "2",
        "server": "running",
        "sequences sampled": "1,200",
        "never trained": "300",
        "mean lag of the newest step": "0.75",
        "largest lag": "2",
        "lag limit": "2",
        "share of unknown lag in the newest step": "0.25",
    }
    assert ended.startswith("sampling (process 18) ended with exit code 1: lost at ")
    assert model.home == server
    assert [process["restarts"] for process in model.list_processes()] == [0, 1, 0]
    sequences, tokens = model.list_ledger({})
    assert sequences.heading == "1,200 sequences sampled, with 5,000 tokens"
    assert tokens.heading == "10 tokens trained"
    assert tokens.rows[-1] == ("unknown lag", "1", "10.0%")
    process.end(0)
    process.release()
    assert model.describe_state()["state"] == "stopped" and read_overview(model)[0] == []
    (model.path / "ledger.json").write_text('{"sampled": 3}')
    lines = fill(tinker_status.STATE, **tinker_status.examine(model.path)).splitlines()
    assert any("3 sampled = 0 never trained + 0 once" in line for line in lines)


FILES = ("model.json", "ledger.json", "trained.jsonl", "token_samples.jsonl", "config.toml")


@pytest.mark.parametrize("name", [*FILES, "../tinker.toml", "../logs/lives.jsonl"])
def test_a_damaged_file_of_a_server_gets_one_clear_answer(served: Path, name: str) -> None:
    write_lines(served / "metrics.jsonl", METRICS)
    write_lines(served / "trained.jsonl", LAGS)
    write_lines(served / "token_samples.jsonl", [sample_row(0)])
    (served / tinker_status.LEDGER).write_text(json.dumps(COUNTS | {"sampled_tokens": 5000}))
    process_log.append_event(served.parent, "sampling", 18, "ended", code=1)
    errors = ask_about_damage(served.parent, served / name)
    places = (str(served.parent), "sample 0: the run has")
    assert all(any(place in error for place in places) for error in errors)
    assert name not in FILES[:3] or any(str(served / name) in error for error in errors)


def test_the_settings_and_logs_of_a_model_are_its_server_s(served: Path) -> None:
    model = read_model(served)
    assert model.read_settings() == {
        "this model.model": "s-1-train-0",
        "this model.rank": 4,
        "this model.version": 7,
        "this model.time": "2026-03-04 15:06:07",
        "staleness.max_lag": 2,
        "server.port": 0,
    }
    assert model.list_logs() == ["logs/server.log", "logs/training.log", "logs/sampling.log"]
    assert model.read_log_tail("logs/training.log") == "training has started"
    (served / "metrics.jsonl").touch()
    answer = ask(TestClient(WatchApp([served.parent]).build_application()), "samples")
    assert (answer["rows"], answer["all"], answer["shades"]) == ([], 0, SHADES)
    assert answer["none"] == (
        "No samples yet: the server logs some of every tenth optimizer step on sampled tokens."
    )


def test_the_ledger_follows_sampling(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LEDGER_S", 0.01)
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2).result()
        draw(sampler_of(client), 3)
        # the file may still count from before the samples
        while not (seen := tinker_status.examine(server.folder)["models"][0]["ledger"]).get(
            "sampled"
        ):
            time.sleep(0.01)
        assert (seen["sampled"], seen["never_trained"]) == (3, 3)


def test_a_server_tells_that_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PROGRESS_S", 0.0)

    async def pause() -> None:
        for _ in range(9):
            await asyncio.sleep(0)

    asyncio.run(
        module.run_workers(cast(Any, SimpleNamespace(start=pause, stop=pause))).__aenter__()
    )
    first, *later = capsys.readouterr().err.splitlines()
    assert set(later) == {f"{first} (0 s)"} and len(later) < 9, "none once it has started"


def test_doctor_names_the_processes_and_how_they_ended(tmp_path: Path) -> None:
    (tmp_path / "tinker.toml").write_text("")
    (tmp_path / "url").write_text("http://127.0.0.1:8931\n")

    def lines() -> list[str]:
        result = CliRunner().invoke(main, ["doctor", str(tmp_path)])
        assert result.exit_code == 0
        return result.output.splitlines()

    assert lines() == [
        "the server is not running",
        *(f"  {name} has not been started" for name in ("server", "training", "sampling")),
        "no model yet: a training client creates one",
    ]
    process = ProcessIncarnation(tmp_path, "server", alone=True)
    process_log.append_event(tmp_path, "training", 17, "began")
    shown = lines()
    assert shown[0] == "the server is running at http://127.0.0.1:8931"
    assert shown[1:3] == [
        f"  server is running (process {os.getpid()})",
        "  training is running (process 17)",
    ]
    process.end(INTERRUPTED)
    process.release()
    shown = lines()
    assert shown[0] == "the server is not running"
    assert f"server (process {os.getpid()}) was asked to end" in shown[1]
    assert "training (process 17) ended without a report" in shown[2]  # with the server
    with pytest.raises(ZeroDivisionError), module.record_process(tmp_path):
        1 / 0  # noqa: B018
    assert "ended with exit code 1: division by zero" in lines()[1]
    with pytest.raises(KeyboardInterrupt), module.record_process(tmp_path):
        raise KeyboardInterrupt
    assert "was asked to end" in lines()[1]
