"""asyncrl/viewer: what a page and a terminal show of a run, from its files alone."""

import dataclasses
import io
import json
import math
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from click.testing import CliRunner
from process_kit import TEXTS, until
from starlette.testclient import TestClient
from watch_kit import (
    MARKUP,
    ask_about_damage,
    client,  # noqa: F401  # noqa: F401
    metric_row,
    run_dir,  # noqa: F401  # noqa: F401  # noqa: F401
    sample_row,
    write_lines,
)

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.records import jsonl, process_log, rundir
from asyncrl.records.health_checks import BOUND_RULES, Finding
from asyncrl.records.process_log import ProcessIncarnation
from asyncrl.supervise import doctor
from asyncrl.supervise.hosts import TAIL_BYTES
from asyncrl.supervise.report import advice, plots, run_view
from asyncrl.supervise.report.plots import Series, downsample
from asyncrl.supervise.report.run_view import RunView
from asyncrl.supervise.report.token_samples import SHADES, SampleStore, format_terminal
from asyncrl.transport import http_server, sockets
from asyncrl.transport.http_server import HttpServer, ListenAddress
from asyncrl.viewer import run_search, server
from asyncrl.viewer.app import POLICY, WatchApp, _parse_number


def steps(series: Series) -> list[int]:
    return [int(step) for step in series.axes["step"].values]


def read_series(path: Path, rows: list[dict[str, Any]]) -> Series:
    write_lines(path, rows)
    series = Series(path)
    series.refresh()
    return series


def carried(page: str, id: str) -> Any:
    begin = page.index(f'id="{id}">') + len(f'id="{id}">')
    return json.loads(page[begin : page.index("</script>", begin)])


def test_a_report_carries_samples_whose_tokens_are_colored(run_dir: Path) -> None:
    page = run_view.write_report(run_dir).read_text()
    assert 'data-samples="token-samples-rows"' in page and MARKUP not in page
    found = carried(page, "token-samples-rows")
    assert set(found["shades"]) >= {"version", "lag", "log_ratio", "weight"}
    assert [row["batch"] for row in found["rows"]] == [0, 1, 2, 3]
    (sequence,) = found["rows"][3]["sequences"]
    assert sequence["pieces"] == ["1", MARKUP, "<eos>"]
    assert sequence["shades"]["version"] == ["1.0", "1.1", "1.1"]
    assert sequence["shades"]["log_ratio"] == [0.25, 0.0, None]
    assert sequence["shades"]["weight"] == [1.0, 0.0, 1.5]


def test_a_report_with_many_long_samples_stays_small(run_dir: Path) -> None:
    long = sample_row(0)["sequences"][0]
    for key in set(long) - {"prompt", "versions"}:
        long[key] = long[key] * 500
    rows = [sample_row(n, sequences=[long | {"versions": [["1.0", 0, 1500]]}]) for n in range(40)]
    write_lines(run_dir / "token_samples.jsonl", rows)
    page = run_view.write_report(run_dir).read_text()
    shown = [row["batch"] for row in carried(page, "token-samples-rows")["rows"]]
    assert {0, 39} < set(shown) and shown == sorted(shown) and len(shown) < 16
    assert len(page) < 1_000_000
    (run_dir / "token_samples.jsonl").unlink()
    page = run_view.write_report(run_dir).read_text()
    assert "data-samples" not in page and "Tokens of some samples" not in page


def test_metrics_are_read_as_they_grow(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    series = Series(path)
    series.refresh()
    assert series.sample_line("reward/mean") == ([], [])
    write_lines(path, [metric_row(0), metric_row(1)], end='{"step": 2, "t"')
    series.refresh()
    assert steps(series) == [0, 1], "the torn line waits"
    with path.open("a") as file:
        file.write(': 1.0, "reward/mean": 0.75}\nnot json\n{"step": 3, "reward/mean": "text"}\n')
    series.refresh()
    series.refresh()
    assert steps(series) == [0, 1, 2, 3] and series.file.damaged == 1
    assert series.sample_line("reward/mean") == ([0.0, 1.0, 2.0], [0.5, 0.501, 0.75])
    assert series.sample_line("reward/mean", "time")[0] == [0.0, 0.5, 1.0]
    assert series.get_latest("reward/mean") == 0.75 and series.get_latest("no/such") is None
    more = {"throughput/learner_tokens_per_s": 100.0, "time/step": 2.0}
    series = read_series(tmp_path / "m", [metric_row(step, **more) for step in range(3)])
    assert series.sample_line("reward/mean", "tokens")[0] == [200.0, 400.0, 600.0]
    path = tmp_path / "metrics.jsonl"
    series = read_series(path, [metric_row(step) for step in range(5)])
    new = tmp_path / "new"
    write_lines(new, [metric_row(step) for step in range(7)])
    os.replace(new, path)
    series.refresh()
    assert steps(series) == list(range(7))
    write_lines(path, [metric_row(9)])
    series.refresh()
    assert steps(series) == [9]
    path.unlink()
    series.refresh()
    assert steps(series) == []
    path = tmp_path / "metrics.jsonl"
    series = read_series(path, [metric_row(step) for step in range(5)])
    with path.open("a") as file:
        for step in (3, 4, 5):
            file.write(json.dumps(metric_row(step, **{"adv/mean": 9.0})) + "\n")
    series.refresh()
    assert steps(series) == [0, 1, 2, 3, 4, 5]
    assert series.get_values("advantage/mean").tolist() == [9.0] * 3, "by its name now"


def test_downsampling_keeps_extremes_and_order() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 500)
    y[77_777] = 50.0
    few_x, few_y = downsample(x, y, 1000)
    assert len(few_x) <= 1000 and few_y.max() == 50.0 and (np.diff(few_x) > 0).all()
    assert np.array_equal(y[few_x.astype(int)], few_y)
    rows = [{"batch": n, "lags": {"0": 3, "2": 1}} for n in range(240)]
    seen = plots.plot_lag_over_time([{"batch": -1}, *rows])
    assert [line.label for line in seen.lines] == ["lag 0", "lag 2"] and seen.kind == "areas"
    assert [line.xs for line in seen.lines] == [[*range(0, 240, 2)]] * 2
    assert [list(line.ys) for line in seen.lines] == [[0.75] * 120, [0.25] * 120]
    assert plots.plot_lag_over_time([]).lines == []


def read_samples(run_dir: Path) -> SampleStore:
    store = SampleStore(run_dir / "token_samples.jsonl")
    store.refresh()
    return store


def test_every_shade_of_a_token(run_dir: Path) -> None:
    store = read_samples(run_dir)
    shades = store.read_row(1)["sequences"][0]["shades"]
    assert shades["version"] == ["1.0", "1.1", "1.1"] and shades["lag"] == [2, 1, 1]
    assert shades["log_ratio"] == [0.25, 0.0, None] and shades["update"] == [0.0, 0.25, None]
    assert "mismatch" not in shades and set(shades) <= set(SHADES)
    measured = sample_row(9)
    measured["sequences"][0]["sampler"] = [-0.5, -0.5, None]
    write_lines(run_dir / "token_samples.jsonl", [measured])
    store.refresh()
    shades = store.read_row(0)["sequences"][0]["shades"]
    assert shades["mismatch"] == [0.0, -0.25, None] and shades["staleness"] == [0.25, 0.25, None]
    # tokens of an environment have no behavior policy, and no part in the KL
    session = sample_row(9)
    sequence = session["sequences"][0]
    sequence["versions"] = [["1.0", 0, 1], ["1.1", 2, 3]]
    sequence["start"][1:], sequence["behavior"][1:] = [-9.0, -0.5], [0.0, -0.5]
    write_lines(run_dir / "token_samples.jsonl", [session])
    store.refresh()
    assert store.heads[0]["kl"] == pytest.approx((np.exp(0.25) - 1.25) / 2)
    assert store.read_row(0)["sequences"][0]["shades"]["version"] == ["1.0", None, "1.1"]


def test_a_torn_sample_waits_and_a_damaged_one_is_counted(run_dir: Path) -> None:
    path = run_dir / "token_samples.jsonl"
    store = SampleStore(path)
    line = json.dumps(sample_row(7)) + "\n"
    with path.open("a") as file:
        file.write('{"batch": 5}\n' + line[:50])
    store.refresh()
    assert (len(store.heads), store.damaged) == (4, 1)
    with path.open("a") as file:
        file.write(line[50:])
    store.refresh()
    assert store.read_row(4)["batch"] == 7


def test_text_of_a_sample_cannot_move_the_cursor(run_dir: Path) -> None:
    store = read_samples(run_dir)
    plain = format_terminal(store.read_row(0), "lag", color=False)
    assert "\x1b" not in plain and "\\x1b[2J" in plain and "<script>" in plain
    colored = format_terminal(store.read_row(0), "version", color=True)
    assert "\x1b[2J" not in colored and colored.count("\x1b[38;2;") == 3


def test_the_command_prints_samples_or_json(run_dir: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(main, ["samples", str(run_dir), "--reward", "0", "--limit", "1"])
    assert done.exit_code == 0 and "batch 2  ticket 8" in done.output
    assert "1 of 4 logged samples" in done.stderr
    done = runner.invoke(main, ["samples", str(run_dir), "--step", "1", "--json"])
    (row,) = json.loads(done.stdout)["samples"]
    assert row["batch"] == 1 and row["sequences"][0]["tokens"] == [3, 4, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--color", "red"], "choose one of version"),
        (["--step", "few"], "give a number or a range"),
        (["--text", "["], "not a regular expression"),
        (["--sort", "color"], "--sort color: choose one of batch, reward"),
        (["--rule", "nosuch"], "--rule nosuch: choose one of group, best, worst"),
    ],
)
def test_wrong_options_are_one_clear_line(run_dir: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["samples", str(run_dir), *words])
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr

    (run_dir / "token_samples.jsonl").unlink()
    done = CliRunner().invoke(main, ["samples", str(run_dir)])
    assert done.exit_code == 2 and "record.samples_every" in done.stderr
    done = CliRunner().invoke(main, ["samples", str(run_dir.parent)])
    assert done.exit_code == 2 and "no run directory" in done.stderr


ANSWERS = ("overview", "plots?page=staleness", "processes", "ledger", "config", "logs")


def test_every_answer_is_json_and_nothing_is_written(client: TestClient, run_dir: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")}
    for name in (*ANSWERS, "samples", "sample?number=0", "plots?page=learner&axis=time"):
        reply = client.get(f"/api/{name}")
        assert reply.status_code == 200, (name, reply.text)
        json.loads(reply.text)
    assert client.get("/").status_code == 200
    for name in ("watch.js", "plot.js", "page.css"):
        assert client.get(f"/static/{name}").status_code == 200
    client.get("/api/runs")
    assert {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")} == before
    path = run_dir / "optimizer_steps.jsonl"
    for batch in range(2):  # of a run in progress
        rows = [{"step": batch, "update": i, "optim/grad_norm": 1.0} for i in range(2)]
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        drawn = client.get("/api/plots?page=learner").json()
        (norm,) = [p for p in drawn if p["title"] == "Each optimizer step: gradient norm"]
        assert norm["lines"][0]["x"] == [n / 2 for n in range(2 * batch + 2)]
        assert norm["lines"][0]["run"] == "first"


@pytest.mark.parametrize(("query", "message"), TEXTS["a_wrong_question_gets_one_line"])
def test_a_wrong_question_gets_one_line(client: TestClient, query: str, message: str) -> None:
    reply = client.get(f"/api/{query}")
    assert reply.status_code == 400 and message in reply.json()["error"]


def test_a_new_run_appears_and_a_deleted_one_is_said(client: TestClient, run_dir: Path) -> None:
    client.get("/api/runs")
    second = shutil.copytree(run_dir, run_dir.parent / "second")
    assert [run["id"] for run in client.get("/api/runs").json()] == ["first", "second"]
    shutil.rmtree(second)
    shutil.rmtree(run_dir)
    run, _ = client.get("/api/runs").json()
    assert run["state"] == "unreadable" and "removed" in run["problem"]
    for name in ANSWERS:
        assert client.get(f"/api/{name}").status_code in (200, 400)


def test_only_this_machine_without_a_token(run_dir: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        server.serve([run_dir], "0.0.0.0", 0, lambda *_: None, token=False)
    assert str(refused.value) == (
        "--no-token --host 0.0.0.0: everyone with access to this address could read prompts and "
        "logs; leave out --no-token, or listen on 127.0.0.1"
    )
    with ListenAddress().listen() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port: 127.0.0.1:{port}: Address already in use"):
            server.serve([run_dir], "127.0.0.1", port, lambda *_: None, token=True)


WAITS = "time/learner_idle_share", "time/generator_idle_share", "time/reward_wait_share"
SPLIT = "split/staleness_k3", "split/mismatch_k3"


def facts(tmp_path: Path, values: dict[str, float], *, rows: int = 20) -> advice.Facts:
    made = [metric_row(step, **values) for step in range(rows)]
    return advice.Facts(read_series(tmp_path / "metrics.jsonl", made), 4, 2)


@pytest.mark.parametrize(
    ("rule", "fires", "does_not"),
    [
        ("learner_waits", (0.4, 0.05, 0.0), (0.05, 0.05, 0.0)),
        ("generators_wait", (0.05, 0.4, 0.0), (0.4, 0.05, 0.0)),
        ("rewards_wait", (0.05, 0.4, 0.4), (0.05, 0.4, 0.0)),
        ("both_wait", (0.4, 0.4, 0.0), (0.05, 0.4, 0.0)),
        ("balanced", (0.05, 0.05, 0.0), (0.4, 0.4, 0.0)),
    ],
)
def test_what_limits_the_speed(
    rule: str, fires: tuple[float, ...], does_not: tuple[float, ...], tmp_path: Path
) -> None:
    said = advice.apply_rules(facts(tmp_path, dict(zip(WAITS, fires, strict=True))))
    assert [line.name for line in said] == [rule]
    other = advice.apply_rules(facts(tmp_path, dict(zip(WAITS, does_not, strict=True))))
    assert rule not in [line.name for line in other]
    few = facts(tmp_path, dict(zip(WAITS, fires, strict=True)), rows=advice.LEAST - 1)
    assert advice.apply_rules(few) == []


def test_advice_names_its_window_and_weights_shares_by_their_time(tmp_path: Path) -> None:
    """Of 30 batches the newest 20 count; one long step waits, the short ones do not."""
    rows = [
        metric_row(
            step,
            **{WAITS[0]: 0.0, "time/step": 0.1}
            if step != 25
            else {WAITS[0]: 1.0, "time/step": 8.1},
            **{WAITS[1]: 0.25, "time/generators": 1.0} if step % 10 == 0 else {},
        )
        for step in range(30)
    ]
    series = read_series(tmp_path / "m", rows)
    window = advice.Facts(series, 4, 2)
    values = advice.collect_values(window)
    assert values["learner"] == pytest.approx(0.81)
    assert values["generator"] == 0.25, "two reports in the window suffice"
    (line,) = advice.apply_rules(window)
    assert line.name == "both_wait" and line.said.endswith(" (steps 10 to 29)")
    known = facts(tmp_path, dict(zip(WAITS, (0.4, 0.05, 0.0), strict=True)))
    for cores, told in ((None, ""), (4, ""), (3, "4 threads would share 3 cores")):
        (line,) = advice.apply_rules(known._replace(cores=cores, threads=(1, 1)))
        assert line.name == "learner_waits" and "generators = 3" in line.try_this
        assert ("cores" in line.try_this) == bool(told) and told in line.try_this


def test_watch_report_and_doctor_begin_with_equal_lines(run_dir: Path, client: TestClient) -> None:
    values = {"is/ess": 0.3, "lag/mean": 3.0, WAITS[0]: 0.4, WAITS[1]: 0.05}
    write_lines(run_dir / "metrics.jsonl", [metric_row(step, **values) for step in range(20)])
    odd = Finding("odd", "it was odd", "nothing")
    jsonl.note(run_dir / advice.CHECKS, {"step": 7, **odd._asdict()})
    expected = [
        "generation limits the speed",
        "staleness costs samples",
        "health check odd fired at step 7: it was odd",
    ]
    config = load.load(run_dir / "config.toml")
    client.get("/api/runs")
    shown = client.get("/api/overview").json()["first"]
    state = doctor.examine_run(config, run_dir, None)
    lines = doctor.format_state(config, run_dir, None, state).splitlines()
    page = run_view.write_report(run_dir).read_text()
    for html in (page, shown):
        places = [html.index(text) for text in (*expected, 'class="cards"')]
        assert places == sorted(places)
    for number, text in enumerate(expected):
        assert lines[number].startswith(text) and "To try: " in lines[number]


def test_ledger_lines_are_stacked_on_one_grid(tmp_path: Path) -> None:
    rows = [metric_row(step, **{"ledger/trained": 10.0 * step}) for step in range(4)]
    rows[3]["ledger/dropped_stale"] = 5.0
    series = read_series(tmp_path / "m", rows)
    (plot,) = plots.build_plots("ledger", {"a": series})
    assert plot.kind == "areas"
    assert {line.label: line.ys for line in plot.lines} == {
        "trained": [0.0, 10.0, 20.0, 30.0],
        "dropped_stale": [0.0, 0.0, 0.0, 5.0],
    }
    titles = [plot.title for plot in plots.build_plots("ledger", {"a": series, "b": series})]
    assert titles == [f"{plot.title}: {run}" for run in "ab"]


@pytest.mark.parametrize(("rule", "ess", "stale", "engine"), TEXTS["whether_staleness_hurts"])
def test_whether_staleness_hurts(
    rule: str, ess: float, stale: float, engine: float, tmp_path: Path
) -> None:
    values = {"is/ess": ess, "lag/mean": 3.0, **dict(zip(SPLIT, (stale, engine), strict=True))}
    assert [line.name for line in advice.apply_rules(facts(tmp_path, values))] == [rule]
    fresh = values | {"is/ess": 0.7, "split/mismatch_k3": 0.0}
    assert advice.apply_rules(facts(tmp_path, fresh)) == []


def test_accuracy_that_fell_is_told_from_noise(tmp_path: Path) -> None:
    def told(*values: float, largest: float = 1.0) -> str:
        rows = [
            metric_row(i, **{"eval/heldout": v, "eval/heldout_n": 400.0, "reward/max": largest})
            for i, v in enumerate(values)
        ]
        return advice.apply_rules(advice.Facts(read_series(tmp_path / "m", rows), 2, 1))[0].name

    assert told(0.4, 0.8, 0.5) == "accuracy_fell"
    assert told(0.4, 0.8, 0.79) == "accuracy" == told(0.4, 0.5, 0.9)
    # 0.3 of a judge's grades up to 10 may be chance, 3 may not; of shares, 0.3 may not
    assert told(4.0, 5.5, 5.2, largest=10.0) == "accuracy"
    assert told(4.0, 8.0, 5.0, largest=10.0) == "accuracy_fell" == told(0.4, 0.8, 0.5)


def test_every_rule_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()
    rules = {rule.name for table in ("speed", "staleness") for rule in BOUND_RULES[table]}
    rules |= set(re.findall(r'inding\(\s*"(\w+)"', Path(advice.__file__).read_text()))
    assert len(rules) == 10
    for rule in rules:
        assert f"`{rule}`" in page, rule


FINISHED = {"finished": True, "steps": 10**6}


def answer(client: TestClient, question: str) -> Any:
    reply = client.get(f"/api/{question}")
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    return reply.json()


def copy_run(run_dir: Path, to: Path) -> Path:
    shutil.copytree(run_dir, to)
    return to


def append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def write_summary(run_dir: Path, **given: Any) -> dict[str, Any]:
    summary = dict.fromkeys(run_view.SUMMARY_KEYS) | given
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return summary


def wait_for_summary(run: RunView) -> dict[str, Any]:
    return until(run.read_summary)


def test_the_row_of_a_run_has_its_newest_numbers(client: TestClient, run_dir: Path) -> None:
    append(run_dir / "metrics.jsonl", metric_row(30, **{"eval/heldout": 0.75, "lag/mean": 1.5}))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("no json\n")
    append(run_dir / "token_samples.jsonl", {"batch": 5})
    (row,) = answer(client, "runs")
    assert row == {
        "id": "first",
        "path": str(run_dir),
        "state": "stopped",
        "problem": "",
        "step": 31,
        "steps": load.load(run_dir / "config.toml").learner.steps,
        "seconds": 15.0,
        "accuracy": 0.75,
        "reward": 0.53,
        "lag": 1.5,
        "rows": 31,
        "samples": 4,
        "summed_up": False,
        "damaged": 2,
    }


def test_an_evaluation_at_the_end_is_not_a_step(client: TestClient, run_dir: Path) -> None:
    """Its row has the version, which is the number of batches before it; a run may have none."""
    append(run_dir / "metrics.jsonl", {"step": 30, "t": 15.5, "eval/heldout": 0.75})
    (row,) = answer(client, "runs")
    assert row["step"] == 30 and row["accuracy"] == 0.75

    (run_dir / "metrics.jsonl").unlink()
    (row,) = answer(client, "runs")
    assert (row["step"], row["seconds"], row["rows"]) == (0, 0.0, 0)
    assert row["accuracy"] is None and row["reward"] is None and row["lag"] is None
    (run_dir / "config.toml").write_text("[learner]\nsteps = 'many'\n")
    (row,) = answer(client, "runs")
    assert (row["state"], row["steps"]) == ("unreadable", 0) and "learner.steps" in row["problem"]


@pytest.mark.parametrize("name", ["supervisor", "buffer"])
def test_a_run_runs_while_its_buffer_does(client: TestClient, run_dir: Path, name: str) -> None:
    states = lambda: [row["state"] for row in answer(client, "runs")]  # noqa: E731
    if name == "supervisor":
        held = rundir.RunLock(run_dir)
    else:
        held = ProcessIncarnation(run_dir, name, alone=True)
    assert states() == ["running"]
    held.close() if isinstance(held, rundir.RunLock) else held.end(0)
    assert states() == ["stopped"]
    (run_dir / "buffer_summary.json").write_text(json.dumps(FINISHED))
    assert states() == ["stopped"], "it has not written its model"
    (run_dir / "weights_digest").write_text("abc")
    assert states() == ["finished"]


def test_settings_are_read_again_when_their_file_changes(run_dir: Path) -> None:
    run = RunView("first", run_dir)
    first = run.config
    assert run.config is first, "and not before"
    path = run_dir / "config.toml"
    path.write_text(path.read_text() + "\n")
    assert run.config is not first and run.config == first
    text, status = path.read_text(), path.stat()
    path.write_text(text.replace("seed = 0", "seed = 1"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert run.config.seed == 1
    path.unlink()
    with pytest.raises(ConfigError, match="the run directory was removed"):
        run.config  # noqa: B018


def test_a_run_in_progress_is_summed_up(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "COMPOSE_S", 3600.0)
    run = RunView("first", run_dir)
    assert not run.describe_state()["summed_up"]
    found = wait_for_summary(run)
    assert found["wall_s"] == 14.5 and run.describe_state()["summed_up"]
    append(run_dir / "metrics.jsonl", metric_row(30))
    assert run.read_summary() is found, "an hour later at the earliest: it costs"
    assert run._next_summary > time.monotonic() + run_view.COMPOSE_S / 2
    run._next_summary = 0.0
    until(lambda: run.read_summary()["wall_s"] >= 15)


def test_the_summary_of_a_run(run_dir: Path) -> None:
    written = write_summary(run_dir, heldout_end=0.5)
    assert RunView("first", run_dir).read_summary() == written

    (run_dir / "summary.json").write_text('{"heldout_end": 0.5}')
    found = wait_for_summary(RunView("first", run_dir))
    assert found["wall_s"] == 14.5 and found["heldout_end"] is None
    run = RunView("first", run_dir)
    run._summary = {"signs": [{"name": "odd", "said": "it was odd", "try_this": "nothing"}]}
    run._next_summary = math.inf
    (fired,) = run.list_advice(run.read_summary()["signs"])[1]
    assert fired.name == "check odd"


def test_a_run_that_cannot_be_summed_up_has_no_summary(run_dir: Path) -> None:
    run = RunView("first", run_dir)
    wait_for_summary(run)
    (run_dir / "config.toml").unlink()
    began = time.monotonic()
    run._compose()
    now = time.monotonic()
    assert run.read_summary() == {} and began + run_view.COMPOSE_S <= run._next_summary
    assert run._next_summary <= now + max(
        run_view.COMPOSE_S, (now - began) / run_view.COMPOSE_SHARE
    )


def test_the_last_batches_of_a_finished_run_give_no_advice(run_dir: Path) -> None:
    """Its generators had no more tickets: they idle without a limit of the speed."""
    idle = {"time/learner_idle_share": 0.0, "time/generator_idle_share": 0.0}
    last = 1 + int(load.load(run_dir / "config.toml").staleness.limit)
    late = idle | {"time/generator_idle_share": 1.0}
    rows = [metric_row(step, **(idle if step < 20 else late)) for step in range(20 + last)]
    write_lines(run_dir / "metrics.jsonl", rows)
    run = RunView("first", run_dir)
    run._next_summary = math.inf
    run.refresh()
    rules = lambda: [finding.name for finding in run.list_advice([])[0]]  # noqa: E731
    assert "generators_wait" in rules()
    (run_dir / "buffer_summary.json").write_text(json.dumps(FINISHED))
    (run_dir / "weights_digest").write_text("abc")
    assert "balanced" in rules()


def test_the_overview_has_the_figures_of_the_summary(client: TestClient, run_dir: Path) -> None:
    slow = {"time/reward_wait_share": 0.5, "reward/queue": 9.0, "reward/call_s": 2.0}
    slow |= {"reward/workers": 1.0, "link/ack_s": 3.0}
    append(run_dir / "metrics.jsonl", metric_row(30, **slow))
    sign = {"name": "odd", "said": "it was odd", "try_this": "nothing"}
    summary = {
        "heldout_start": 0.25,
        "heldout_end": 0.5,
        "ood_end": None,
        "wall_s": 15.0,
        "steps": 31,
        "lag": {"mean": 1.25, "max": 2, "limit": 4},
        "speed": {
            "generator_tokens_per_s": 1000.0,
            "learner_tokens_per_s": 900.0,
            "idle_share": {"generator": 0.1, "learner": 0.2},
        },
        "signs": [sign],
    }
    write_summary(run_dir, **summary)
    answer(client, "runs")
    seen = answer(client, "overview")["first"]
    for text in ("0.250", "0.500", "1.25", "2 / 4", "1,000 tok/s", "900 tok/s", "10% / 20%"):
        assert f">{text}</b>" in seen
    rewards, link = "rewards hold the generators up", "the link holds deliveries up"
    places = [seen.index(x) for x in (rewards, link, "health check odd fired: it was odd")]
    assert places == sorted(places)
    (run_dir / "summary.json").write_text("{}")
    (run_dir / "metrics.jsonl").unlink()
    answer(client, "runs")
    assert "<li" not in answer(client, "overview")["first"]


def test_the_ledger_is_that_of_the_summary(client: TestClient, run_dir: Path) -> None:
    run = RunView("first", run_dir)
    run._next_summary = math.inf  # none is composed meanwhile
    assert run.list_ledger(run.read_summary()) == []
    line = {"tokens": 9, "samples": 2, "mean_length": 4.5, "mean_reward": 0.5, "upto_8": 9}
    lines = {"ledger": {"generated": 12, "trained": 9}, "ledger_lines": {"trained": line}}
    write_summary(run_dir, **lines, failures={"reward": 2})
    tables = {block.id: block.rows for block in run.list_ledger(run.read_summary())}
    assert tables == {
        "ledger": [
            ("generated", "12", "", "", "", ""),
            ("trained", "9", "75.00%", "2", "4.5", "0.500"),
        ],
        "by-length": [("5 to 8", "9", "100.00%")],
        "failures": [("reward", "2")],
    }
    shown = answer(client, "ledger")["first"]
    assert "<td>75.00%</td>" in shown and "Failed samples" in shown


def test_processes_with_restarts_host_and_memory(client: TestClient, run_dir: Path) -> None:
    for pid in (11, 12):
        process_log.append_event(run_dir, "generator-0", pid, "began", host="one")
        process_log.append_event(run_dir, "generator-0", pid, "ended", code=1, why="lost")
    process_log.append_event(run_dir, "generator-0", 13, "began", host="two")
    process_log.append_event(run_dir, "generator-0", 13, "ended", code=0)
    append(
        process_log.get_path(run_dir), {"at": 0.0, "name": "rewards", "pid": 9, "event": "began"}
    )
    learner = ProcessIncarnation(run_dir, "learner", alone=False)
    rows = {row["name"]: row for row in answer(client, "processes")["first"]}
    generator = rows["generator-0"]
    assert (generator["restarts"], generator["host"], generator["pid"]) == (2, "two", 13)
    assert generator["memory_mb"] is None and "exit code 0" in generator["said"]
    assert (rows["learner"]["restarts"], rows["learner"]["pid"]) == (0, os.getpid())
    assert rows["learner"]["alive"] and 10 < rows["learner"]["memory_mb"] < 10**5
    assert (rows["rewards"]["host"], rows["rewards"]["pid"]) == ("", 9), "of an older version"
    never = rows["buffer"]
    assert (never["restarts"], never["host"], never["pid"]) == (0, "", None)
    learner.end(0)
    rows = {row["name"]: row for row in answer(client, "processes")["first"]}
    assert rows["learner"]["memory_mb"] is None and rows["learner"]["pid"] == os.getpid()
    own = run_view.measure_resident_mb(os.getpid())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert own == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, rel=0.2)
    assert run_view.measure_resident_mb(None) is None
    assert run_view.measure_resident_mb(2**30) is None


def test_plots_by_page_axis_and_smoothing(client: TestClient, run_dir: Path) -> None:
    rows = [metric_row(step) | {"reward/mean": float(step % 2)} for step in range(30)]
    write_lines(run_dir / "metrics.jsonl", rows)
    answer(client, "runs")

    def reward(query: str) -> dict[str, list[float]]:
        drawn = answer(client, f"plots{query}")
        return dict(next(x for p in drawn for x in p["lines"] if x["metric"] == "reward/mean"))

    assert reward("") == reward("?page=overview&axis=step&smooth=0")
    assert reward("")["x"] == list(range(30)) and reward("")["y"][:3] == [0, 1, 0]
    assert reward("?axis=time")["x"] == [step / 2 for step in range(30)]
    wave = lambda line: max(line["y"][20:]) - min(line["y"][20:])  # noqa: E731
    smoothed = [wave(reward(f"?smooth={share}")) for share in (0, 0.5, 0.9, 0.99)]
    assert smoothed == sorted(smoothed, reverse=True) and len(set(smoothed)) == 4
    assert reward("?smooth=7") == reward("?smooth=0.99"), "at most"
    assert reward("?smooth=-1") == reward("?smooth=0"), "at least"


def test_the_lags_of_each_run_have_a_plot_of_their_own(client: TestClient, run_dir: Path) -> None:
    titles = lambda query: [p["title"] for p in answer(client, f"plots?{query}")]  # noqa: E731
    title = plots.plot_lag_over_time([]).title
    assert title in titles("page=staleness") and title not in titles("page=overview")
    second = copy_run(run_dir, run_dir.parent / "second")
    (copy_run(run_dir, run_dir.parent / "third") / "trained.jsonl").unlink()
    answer(client, "runs")
    of_lags = [t for t in titles("page=staleness") if t.startswith(title)]
    assert of_lags == [f"{title}: first", f"{title}: second"], "the third has trained nothing"
    assert titles("page=staleness&runs=second").count(title) == 1
    two = [t for t in titles("page=staleness&runs=first|second") if t.startswith(title)]
    assert two == of_lags
    updates = [{"step": 0, "update": n, "optim/grad_norm": 1.0} for n in range(2)]
    append(second / "optimizer_steps.jsonl", *updates)
    norms = [t for t in titles("page=learner") if t.startswith("Each optimizer step")]
    assert norms and norms == [t for t in titles("page=learner&run=second") if t in norms]
    assert not [t for t in titles("page=learner&run=first") if t in norms]
    for run in ("first", "second"):
        append(
            run_dir.parent / run / "metrics.jsonl",
            *(metric_row(s, **{"optim/grad_norm": s}) for s in (30, 31)),
        )
    answer(client, "runs")
    assert set(norms) < set(titles("page=learner")), "below those of the batches"


def test_samples_are_chosen_by_each_key_of_the_question(client: TestClient, run_dir: Path) -> None:
    rows = [
        sample_row(n, n, n / 4, lag_mean=float(n), group_key=f"g{n}", rules=["random"])
        for n in range(70)
    ]
    rows[9]["rules"] = ["longest"]
    rows[3]["sequences"][0]["pieces"] = ["1", "needle", "<eos>"]
    (run_dir / "token_samples.jsonl").unlink()
    answer(client, "runs")
    assert answer(client, "samples")["none"] == (
        "This run has logged no samples yet: it logs some of every record.samples_every-th batch "
        "(record.token_samples)."
    )
    write_lines(run_dir / "token_samples.jsonl", rows)
    answer(client, "runs")

    def batches(query: str) -> list[int]:
        found = answer(client, f"samples?{query}")
        assert (found["all"], found["shades"]) == (70, SHADES)
        return [row["batch"] for row in found["rows"]]

    assert batches("") == list(range(69, 9, -1)), "the newest 60"
    assert batches("limit=2") == [69, 68] and batches("sort=reward&limit=1") == [69]
    assert batches("step=..1") == [1, 0] and batches("step=5") == [5]
    assert batches("reward=0.5..0.75") == [3, 2] and batches("lag=..1") == [1, 0]
    assert batches("ticket=8") == [2] and batches("group_key=g7") == [7]
    assert batches("rule=longest") == [9] and batches("text=needle") == [3]
    assert batches("ticket=x&limit=1") == [69] and batches("rule=&limit=1") == [69]
    assert batches("ticket=%C2%B2") == batches(""), "a superscript 2 is not a number"
    second = copy_run(run_dir, run_dir.parent / "second")
    write_lines(second / "token_samples.jsonl", [sample_row(99)])
    answer(client, "runs")
    (row,) = answer(client, "samples?run=second")["rows"]
    assert row["batch"] == 99


def test_one_sample_with_its_tokens(client: TestClient) -> None:
    assert answer(client, "sample?number=0")["batch"] == 0
    assert answer(client, "sample?number=3")["sequences"][0]["tokens"] == [3, 4, 1]
    for question, number in (("sample", -1), ("sample?number=-1", -1), ("sample?number=4", 4)):
        reply = client.get(f"/api/{question}")
        assert reply.status_code == 400
        assert reply.json() == {"error": f"sample {number}: the run has 4 samples"}


def test_settings_of_runs_and_in_what_they_differ(client: TestClient, run_dir: Path) -> None:
    seen = answer(client, "config")
    assert seen["runs"]["first"]["task.name"] == "sort" and seen["differences"] == []
    path = copy_run(run_dir, run_dir.parent / "second") / "config.toml"
    text = path.read_text().replace("name = 'sort'", "name = 'rle'")
    path.write_text(text.replace('name = "sort"', 'name = "rle"') + "\n[added]\nkey = 1\n")
    answer(client, "runs")
    assert answer(client, "config")["differences"] == [
        {"key": "added.key", "values": {"first": None, "second": 1}},
        {"key": "task.name", "values": {"first": "sort", "second": "rle"}},
    ]
    chosen = answer(client, "config?run=second")
    assert list(chosen["runs"]) == ["second"] and chosen["differences"] == []
    path.write_text("model = [")
    reply = client.get("/api/config?run=second")
    assert reply.status_code == 400 and reply.json()["error"].startswith(f"{path}: ")


def test_logs_the_newest_attempt_first_and_their_end(client: TestClient, run_dir: Path) -> None:
    (run_dir / "logs" / "attempt_2").mkdir()
    long = run_dir / "logs" / "attempt_2" / "learner.log"
    long.write_bytes(b"begin\n" + b"x" * 3000 + b"\n" + b"\xff" * 70_000 + b"\nend")
    (run_dir / "supervisor.log").write_text("")
    (run_dir / "notes.txt").write_text("no log")
    seen = answer(client, "logs")
    assert seen["files"] == [
        "supervisor.log",
        "logs/attempt_2/learner.log",
        "logs/attempt_1/learner.log",
    ]
    assert (seen["file"], seen["text"]) == ("supervisor.log", "")
    text = answer(client, "logs?file=logs/attempt_2/learner.log")["text"]
    assert text.endswith("\nend") and "begin" not in text and len(text) < 2100
    first = answer(client, "logs?file=logs/attempt_1/learner.log")["text"]
    assert first.startswith("starting\n") and "\x1b" not in first and "<script>" in first
    long.write_bytes(b"a" * (TAIL_BYTES - 5) + b"\nlast")
    assert RunView("", run_dir).read_log_tail("logs/attempt_2/learner.log").startswith("aaa")
    shutil.rmtree(run_dir / "logs")
    (run_dir / "supervisor.log").unlink()
    assert answer(client, "logs") == {"files": [], "file": "", "text": ""}


def test_questions_name_runs_in_their_order(client: TestClient, run_dir: Path) -> None:
    copy_run(run_dir, run_dir.parent / "second")
    copy_run(run_dir, run_dir.parent / "third")
    answer(client, "runs")
    for query, ids in (
        ("", ["first", "second", "third"]),
        ("?runs=third|first", ["third", "first"]),
        ("?run=second", ["second"]),
        ("?run=second&runs=third", ["third"]),
    ):
        assert list(answer(client, f"ledger{query}")) == ids
    reply = client.get("/api/ledger?runs=first|none")
    assert reply.json() == {"error": "no run of this page is named none"}


@pytest.mark.parametrize("question", ["samples", "sample?number=0", "logs"])
def test_a_question_about_one_run_before_there_is_any(tmp_path: Path, question: str) -> None:
    reply = TestClient(WatchApp([tmp_path], expected=True).build_application()).get(
        f"/api/{question}"
    )
    assert (reply.status_code, reply.json()) == (400, {"error": "this page has no run yet"})


def test_a_new_run_of_a_known_name_goes_by_its_path(client: TestClient, run_dir: Path) -> None:
    moved = run_dir.parent / "moved" / "first"
    copy_run(run_dir, moved)
    shutil.rmtree(run_dir)
    rows = answer(client, "runs")
    assert [row["id"] for row in rows] == ["first", str(moved)]
    assert [row["state"] for row in rows] == ["unreadable", "stopped"]
    assert list(answer(client, f"config?run={moved}")["runs"]) == [str(moved)]


def test_runs_are_found_up_to_three_levels_below_and_by_age(run_dir: Path) -> None:
    top = run_dir.parent
    places = ("old", "a/b/deep", "a/b/c/too_deep", "no_run", "no_settings", "first/checkpoints/run")
    old, deep, too_deep, no_run, no_settings, inside = (
        copy_run(run_dir, top.parent / "made" / place) for place in places
    )
    top = top.parent / "made"
    first = copy_run(run_dir, top / "second")
    (old / "run_id").unlink()
    (no_run / "run_id").unlink()
    (no_run / "metrics.jsonl").unlink()
    (no_settings / "config.toml").unlink()
    for seconds, path in enumerate((old, deep, first)):
        os.utime(path / "config.toml", (seconds, seconds))
    found = run_search.find_runs([top])
    assert [run.path for run in found][:3] == [old, deep, first] and found[3:][0].path == inside
    assert [run.id for run in found] == ["old", "deep", "second", "run"]
    shutil.copy(first / "config.toml", inside.parents[1])
    shutil.copy(first / "run_id", inside.parents[1])
    assert inside not in [run.path for run in run_search.find_runs([top])], "it belongs to its run"
    deep = [Path(f"/{x}/a/b/c/d/e/f") for x in "xy"]
    assert run_search._choose_names(deep) == ["/x/a/b/c/d/e/f", "/y/a/b/c/d/e/f"]
    again = run_search.find_runs([first, top, too_deep])
    assert len({run.path for run in again}) == len(again) == 5 and again[0].path == first
    for place, message in ((top / "absent", "no such directory"), (no_run, "no run directory")):
        with pytest.raises(ConfigError, match=message):
            run_search.find_runs([top, place])


def test_runs_of_one_name_are_told_apart_by_their_folders(run_dir: Path) -> None:
    top = run_dir.parent
    for folder in ("x/seed", "y/seed"):
        copy_run(run_dir, top / folder)
    names = [run.id for run in run_search.find_runs([top])]
    assert sorted(names) == ["runs/first", "x/seed", "y/seed"]


def test_every_reply_carries_the_policy_that_runs_no_foreign_script(client: TestClient) -> None:
    for place in ("/", "/api/runs", "/static/watch.js", "/static/none", "/api/plots?page=x"):
        headers = client.get(place).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    rules = {rule.split()[0]: rule.split()[1:] for rule in POLICY.split("; ")}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert rules["frame-ancestors"] == ["'none'"] and rules["script-src"] == ["'self'"]
    assert rules["connect-src"] == rules["font-src"] == ["'self'"]
    assert rules["style-src"] == ["'self'", "'unsafe-inline'"]
    assert rules["img-src"] == ["'self'", "data:", "blob:"]
    reply = client.get("/static/none")
    assert (reply.status_code, reply.text) == (404, "no such file")
    assert reply.headers["content-type"].startswith("text/plain")
    assert client.get("/static/..%2fapp.py").status_code == 404
    assert client.get("/").headers["content-type"].startswith("text/html")


def test_the_token_is_asked_for_and_kept_by_the_browser_alone(run_dir: Path) -> None:
    guarded = TestClient(
        WatchApp([run_dir], token="sécret").build_application(), follow_redirects=False
    )
    for query in ("", "?token=wrong", "?token=%ff"):
        assert guarded.get(f"/api/runs{query}").status_code == 403
    refused = guarded.get("/")
    assert refused.status_code == 403 and refused.headers["content-type"].startswith("text/plain")
    assert refused.text == "asyncrl watch: open the address that it printed, with its token\n"
    opened = guarded.get("/?token=s%C3%A9cret")
    assert opened.status_code == 303 and opened.headers["location"] == "/", "without the token"
    cookie = opened.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert guarded.get("/api/runs").status_code == 200
    wrong = TestClient(WatchApp([run_dir], token="secret").build_application())
    wrong.cookies.set("asyncrl_watch", "other")
    assert wrong.get("/api/runs").status_code == 403
    wrong.cookies.set("asyncrl_watch", "secret")
    assert wrong.get("/api/runs").status_code == 200


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "buffer_summary.json"])
def test_a_deeply_nested_file_hides_its_own_run_only(run_dir: Path, name: str) -> None:
    copy_run(run_dir, run_dir.parent / "second")
    nested = "a = " * (name == "config.toml") + "[" * 100_000
    (run_dir.parent / "second" / name).write_text(nested + "\n")
    shown = answer(TestClient(WatchApp([run_dir.parent]).build_application()), "runs")
    assert [row["state"] for row in shown if row["id"] == "first"] == ["stopped"]


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "trained.jsonl", "token_samples.jsonl", "summary.json", "config.toml"]
    + ["buffer_summary.json", "logs/lives.jsonl"],
)
def test_a_damaged_file_gets_one_clear_answer(run_dir: Path, name: str) -> None:
    line = {"tokens": 9, "samples": 2, "mean_length": 4.5, "mean_reward": 0.5, "upto_8": 9}
    speed = {"generator_tokens_per_s": 9.0, "idle_share": {"generator": 0.1, "learner": 0.2}}
    counts = {"ledger": {"generated": 9}, "ledger_lines": {"trained": line}, "speed": speed}
    write_summary(run_dir, **counts, lag={"mean": 1.0}, failures={"reward": 2})
    (run_dir / "buffer_summary.json").write_text(json.dumps(FINISHED))
    process_log.append_event(run_dir, "generator-0", 7, "ended", code=1)
    for error in ask_about_damage(run_dir.parent, run_dir / name):
        assert "\n" not in error
        assert str(run_dir.parent) in error or error.startswith("sample 0: the run has")


def test_links_out_of_a_run_are_no_logs(client: TestClient, run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "logs").mkdir(exist_ok=True)
    (tmp_path / "secret.log").write_text("secret")
    (run_dir / "logs" / "link.log").symlink_to(tmp_path / "secret.log")
    assert "logs/link.log" not in answer(client, "logs")["files"]
    assert client.get("/api/logs?file=logs/link.log").status_code == 400


@pytest.mark.parametrize(
    ("host", "header", "status"),
    [
        *(("127.0.0.1", name, 200) for name in ("127.0.0.1:80", "localhost", "[::1]:7860")),
        *(("127.0.0.1", name, 421) for name in ("evil.example:80", "127.0.0.1.evil.example", "")),
        ("", "server.example:7860", 200),
    ],
)
def test_a_local_page_has_names(run_dir: Path, host: str, header: str, status: int) -> None:
    page = TestClient(WatchApp([run_dir], host=host).build_application())
    assert page.get("/api/runs", headers={"host": header}).status_code == status


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, places: list[Path], host: str = "127.0.0.1", **more: bool
) -> Iterator[tuple[str, int]]:
    started: list[HttpServer] = []
    announced: list[tuple[str, int]] = []
    ready = threading.Event()

    class Stoppable(HttpServer):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            started.append(self)

    def announce(url: str, runs: int) -> None:
        announced.append((url, runs))
        ready.set()

    monkeypatch.setattr(http_server, "HttpServer", Stoppable)
    thread = threading.Thread(
        target=server.serve, args=(places, host, 0, announce), kwargs={"token": True} | more
    )
    thread.start()
    assert ready.wait(300)
    try:
        yield announced[0]
    finally:
        started[0].end()
        thread.join(300)
    assert not thread.is_alive()


@pytest.mark.parametrize(("host", "is_local"), TEXTS["which_addresses_are_this_machine_s_alone"])
def test_which_addresses_are_this_machine_s_alone(host: str, is_local: bool) -> None:
    assert sockets.is_loopback(host) is is_local


def test_the_first_free_port_is_taken_where_none_was_chosen() -> None:
    taken = ListenAddress().listen()
    host, port = taken.getsockname()
    assert host == "127.0.0.1"
    assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1, "after a restart"
    address = ListenAddress(port=port, port_name="--port")
    with dataclasses.replace(address, further_ports=(port, 0)).listen() as other:
        assert other.getsockname()[1] not in (0, port)
    with pytest.raises(ConfigError) as error:
        address.listen()
    assert str(error.value).startswith(f"--port: 127.0.0.1:{port}: Address already in use")
    taken.close()
    with address.listen() as again:
        assert again.getsockname()[1] == port
        with socket.create_connection(("127.0.0.1", port), 60):
            assert again.accept()


def test_the_page_is_at_its_address(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"host": "this.machine"}
    with serving(monkeypatch, [run_dir]) as (url, runs):
        address, token = url.split("/?token=")
        assert httpx2.get(url, headers=named).status_code == 421
        assert runs == 1 and len(token) == 24 and address.startswith("http://127.0.0.1:")
        assert httpx2.get(f"{address}/api/runs").status_code == 403
        with httpx2.Client() as browser:
            page = browser.get(url, follow_redirects=True)
            assert page.status_code == 200 and "<html" in page.text and "server" not in page.headers
            assert browser.get(f"{address}/api/runs").json()[0]["id"] == "first"
    with serving(monkeypatch, [run_dir], "0.0.0.0") as (other, _):
        assert other.split("=")[1] != token, "a token of its own"
        assert httpx2.get(other, headers=named, follow_redirects=True).status_code == 200


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_ipv6_is_written_in_brackets(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, [run_dir], host="::1", token=False) as (url, _):
        assert url.startswith("http://[::1]:") and httpx2.get(f"{url}api/runs").status_code == 200


def test_a_run_that_is_expected_may_begin_later(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "late"
    with pytest.raises(ConfigError, match="no such directory"):
        server.serve([late], "127.0.0.1", 0, lambda *_: None, token=True)
    with serving(monkeypatch, [late], token=False, expected=True) as (url, runs):
        assert runs == 0 and httpx2.get(f"{url}api/runs").json() == []
        run_dir.rename(late)
        assert [row["id"] for row in httpx2.get(f"{url}api/runs").json()] == ["late"]


def test_a_page_has_a_process_of_its_own_until_it_is_closed(run_dir: Path) -> None:
    page = server.watch(str(run_dir))
    address, _ = page.url.split("/?token=")
    assert httpx2.get(f"{address}/api/runs").status_code == 403
    assert repr(page) == f"page at {page.url}" and f'href="{page.url}"' in page._repr_html_()
    assert os.getsid(page.process.pid) == page.process.pid, "Ctrl-C here does not reach it"
    page.close()
    assert page.process.poll() is not None
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{address}/api/runs")


def test_a_pages_process_ends_with_ours(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent's death is asked for before it runs anything."""
    started: list[dict[str, Any]] = []

    class Started:
        stdout = io.StringIO("http://127.0.0.1:7/?token=t\n")

        def __init__(self, command: list[str], **how: Any) -> None:
            started.append(how | {"command": command})

    monkeypatch.setattr(subprocess, "Popen", Started)
    marker = lambda: None  # noqa: E731
    monkeypatch.setattr(server, "end_with_parent", lambda: marker)
    assert server.watch(run_dir).url == "http://127.0.0.1:7/?token=t"
    (how,) = started
    assert how["preexec_fn"] is marker and how["stdin"] == subprocess.DEVNULL
    assert how["command"] == importing.make_command("asyncrl.viewer.server", str(run_dir))


def test_the_process_of_a_page_serves_what_may_begin_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As a process of its own: any free port of this machine, its address on standard output."""
    asked: list[ListenAddress] = []

    class Ended:
        def __init__(self, app: Any, address: ListenAddress) -> None:
            asked.append(address)

        async def serve(self, announce: Callable[[str], None]) -> None:
            announce("http://127.0.0.1:7")

    monkeypatch.setattr(http_server, "HttpServer", Ended)
    monkeypatch.setattr(sys, "argv", ["server", str(tmp_path / "later")])
    monkeypatch.delitem(sys.modules, "asyncrl.viewer.server")
    runpy.run_module("asyncrl.viewer.server", run_name="__main__")
    ports = (*range(7861, 7880), 0)
    got = (asked[0].host, asked[0].port, tuple(asked[0].further_ports))
    assert got == ("127.0.0.1", 7860, ports)
    assert re.fullmatch(r"http://127\.0\.0\.1:7/\?token=\S{24}\n", capfd.readouterr().out)
    server.serve([tmp_path], "127.0.0.1", 7861, lambda *_: None, token=True, expected=True)
    assert (asked[1].port, tuple(asked[1].further_ports)) == (7861, ())


def test_a_run_s_page_is_announced_and_ends_with_the_run(run_dir: Path) -> None:
    said: list[str] = []
    with server.serve_page_beside(run_dir, said.append):
        (line,) = said
        begin, url = line.split("watch it at ")
        assert begin == "" and httpx2.get(url, follow_redirects=True).status_code in (200, 403)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)
    assert said[1:] == [f"its page has ended too; open it again with: asyncrl watch {run_dir}"]


@pytest.mark.parametrize(
    ("host", "forwarding"),
    [("127.0.0.1", "; from another machine: ssh -L 7861:localhost:7861 trainer"), ("0.0.0.0", "")],
)
def test_the_command_names_port_and_machine_of_an_address_that_needs_forwarding(
    host: str, forwarding: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(
        places: list[Path],
        host: str,
        port: int | None,
        announce: Callable[[str, int], None],
        token: bool,
    ) -> None:
        assert places == [run_dir] and port is None and token
        announce(f"http://{host}:7861/?token=x", 1)

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer")
    result = CliRunner().invoke(main, ["watch", str(run_dir), "--host", host])
    assert result.exit_code == 0 and result.stdout == f"http://{host}:7861/?token=x\n"
    assert result.stderr == f"watching 1 run:\nstop with Ctrl-C{forwarding}\n"


def test_a_run_goes_on_without_its_page(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "make_command", lambda *_: ["false"])
    said: list[str] = []
    with server.serve_page_beside(run_dir, said.append):
        assert said == ["note: the page of this run could not start"]
    page = server.PageProcess([run_dir])
    assert repr(page) == "page at no address: it could not start"
    page.close()


def test_a_number_of_a_page_is_one_that_a_float_holds() -> None:
    assert _parse_number({"at": f"-{2**53 - 1}"}, "at", 0.0) == 1 - 2**53
    assert _parse_number({}, "at", 4.0) == 4.0
    for text in (f"{2**53}", f"-{2**53}", "inf", "nan", "x"):
        with pytest.raises(ConfigError, match=f"at={text}: give a number"):
            _parse_number({"at": text}, "at", 0.0)
