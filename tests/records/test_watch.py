"""asyncrl/viewer: what a page and a terminal show of a run, from its files alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient
from watch_kit import (
    MARKUP,
    client,  # noqa: F401
    metric_row,
    run_dir,  # noqa: F401
    sample_row,
    write_lines,
)

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.records import jsonl
from asyncrl.records.health_checks import BOUND_RULES, Finding
from asyncrl.supervise import doctor
from asyncrl.supervise.report import advice, plots, run_page
from asyncrl.supervise.report.series import Series, downsample, smooth_values
from asyncrl.supervise.report.token_samples import (
    SHADES,
    SampleFilter,
    SampleStore,
    format_terminal,
    parse_range,
)
from asyncrl.transport.http_server import ListenAddress
from asyncrl.viewer import run_search, server


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
    page = run_page.write(run_dir).read_text()
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
    page = run_page.write(run_dir).read_text()
    shown = [row["batch"] for row in carried(page, "token-samples-rows")["rows"]]
    assert {0, 39} < set(shown) and shown == sorted(shown) and len(shown) < 16
    assert len(page) < 1_000_000
    (run_dir / "token_samples.jsonl").unlink()
    page = run_page.write(run_dir).read_text()
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
    assert steps(series) == [0, 1, 2, 3] and series.damaged == 1
    assert series.sample_line("reward/mean") == ([0.0, 1.0, 2.0], [0.5, 0.501, 0.75])
    assert series.sample_line("reward/mean", "time")[0] == [0.0, 0.5, 1.0]
    assert series.get_latest("reward/mean") == 0.75 and series.get_latest("no/such") is None


def test_a_replaced_or_shortened_file_is_read_anew(tmp_path: Path) -> None:
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


def test_a_resumed_run_shows_the_later_row_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    series = read_series(path, [metric_row(step) for step in range(5)])
    with path.open("a") as file:
        for step in (3, 4, 5):
            file.write(json.dumps(metric_row(step, **{"adv/mean": 9.0})) + "\n")
    series.refresh()
    assert steps(series) == [0, 1, 2, 3, 4, 5]
    assert series.get_values("advantage/mean").tolist() == [9.0] * 3, "by its name now"


def test_the_token_axis_adds_up_what_was_trained(tmp_path: Path) -> None:
    more = {"throughput/learner_tokens_per_s": 100.0, "time/step": 2.0}
    series = read_series(tmp_path / "m", [metric_row(step, **more) for step in range(3)])
    assert series.sample_line("reward/mean", "tokens")[0] == [200.0, 400.0, 600.0]


def test_downsampling_keeps_extremes_and_order() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 500)
    y[77_777] = 50.0
    few_x, few_y = downsample(x, y, 1000)
    assert len(few_x) <= 1000 and few_y.max() == 50.0 and (np.diff(few_x) > 0).all()
    assert np.array_equal(y[few_x.astype(int)], few_y)


def test_smoothing_keeps_a_constant_and_calms_the_rest() -> None:
    noise = np.tile([0.0, 1.0], 100)
    assert smooth_values(noise, 0.9)[-50:].std() < 0.1 < noise.std()
    assert np.allclose(smooth_values(np.full(9, 3.0), 0.9), 3.0)


def test_the_lag_histogram_over_time_is_of_shares() -> None:
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


def test_samples_cannot_be_chosen_by_what_is_no_pattern_or_order(run_dir: Path) -> None:
    store = read_samples(run_dir)
    for wrong in ({"text": "("}, {"sort": "color"}):
        with pytest.raises(ConfigError, match="--"):
            store.find(SampleFilter(**wrong))


@pytest.mark.parametrize(
    ("words", "bounds"),
    [("3", (3, 3)), ("3..", (3, None)), ("..3", (None, 3)), ("..", (None, None))],
)
def test_ranges(words: str, bounds: tuple[float | None, float | None]) -> None:
    assert parse_range(words, "lag") == bounds
    with pytest.raises(ConfigError, match="--lag x"):
        parse_range("x", "lag")


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


def test_tokens_of_an_environment_have_no_part_in_the_kl(run_dir: Path) -> None:
    """They have no behavior policy: its log-probability is written as 0."""
    session = sample_row(9)
    sequence = session["sequences"][0]
    sequence["versions"] = [["1.0", 0, 1], ["1.1", 2, 3]]
    sequence["start"][1:], sequence["behavior"][1:] = [-9.0, -0.5], [0.0, -0.5]
    write_lines(run_dir / "token_samples.jsonl", [session])
    store = read_samples(run_dir)
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
        (["--rule", "nosuch"], "--rule nosuch: choose one of group, best, worst"),
    ],
)
def test_wrong_options_are_one_clear_line(run_dir: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["samples", str(run_dir), *words])
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_run_without_samples_says_how_they_come(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "token_samples.jsonl").unlink()
    done = CliRunner().invoke(main, ["samples", str(run_dir)])
    assert done.exit_code == 2 and "record.samples_every" in done.stderr
    done = CliRunner().invoke(main, ["samples", str(tmp_path)])
    assert done.exit_code == 2 and "no run directory" in done.stderr


ANSWERS = ("overview", "plots?page=staleness", "processes", "ledger", "config", "logs")


def test_every_answer_is_json(client: TestClient) -> None:
    for name in (*ANSWERS, "samples", "sample?number=0", "plots?page=learner&axis=time"):
        reply = client.get(f"/api/{name}")
        assert reply.status_code == 200, (name, reply.text)
        json.loads(reply.text)
    assert client.get("/").status_code == 200
    for name in ("watch.js", "plot.js", "page.css"):
        assert client.get(f"/static/{name}").status_code == 200


def test_the_learner_s_page_shows_each_optimizer_step(client: TestClient, run_dir: Path) -> None:
    path = run_dir / "optimizer_steps.jsonl"
    for batch in range(2):  # of a run in progress
        rows = [{"step": batch, "update": i, "optim/grad_norm": 1.0} for i in range(2)]
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        drawn = client.get("/api/plots?page=learner").json()
        (norm,) = [p for p in drawn if p["title"] == "Each optimizer step: gradient norm"]
        assert norm["lines"][0]["x"] == [n / 2 for n in range(2 * batch + 2)]
        assert norm["lines"][0]["run"] == "first"


def test_a_run_that_begins_later_appears(client: TestClient, run_dir: Path) -> None:
    client.get("/api/runs")
    shutil.copytree(run_dir, run_dir.parent / "second")
    assert [run["id"] for run in client.get("/api/runs").json()] == ["first", "second"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("plots?page=none", f"page: one of {', '.join(plots.PAGES)}; axis: one of step, time, "),
        ("plots?axis=none", "axis: one of step, time, tokens"),
        ("plots?smooth=x", "give a number"),
        ("plots?smooth=nan", "give a number"),
        ("sample?number=nan", "give a number"),
        ("sample?number=1e300", "give a number"),
        ("sample?number=1e400", "give a number"),
        ("samples?limit=inf", "give a number"),
        ("samples?limit=-inf", "give a number"),
        ("samples?step=x", "--step x: "),
        ("samples?reward=x", "--reward x: "),
        ("samples?lag=x", "--lag x: "),
        ("samples?text=(", "not a regular expression"),
        ("logs?file=../../etc/passwd", "no log file"),
    ],
)
def test_a_wrong_question_gets_one_line(client: TestClient, query: str, message: str) -> None:
    reply = client.get(f"/api/{query}")
    assert reply.status_code == 400 and message in reply.json()["error"]


def test_a_run_being_deleted_is_said_and_the_server_goes_on(
    client: TestClient, run_dir: Path
) -> None:
    client.get("/api/runs")
    shutil.rmtree(run_dir)
    (run,) = client.get("/api/runs").json()
    assert run["state"] == "unreadable" and "removed" in run["problem"]
    for name in ANSWERS:
        assert client.get(f"/api/{name}").status_code in (200, 400)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=str(place)):
            run_search.find_runs([place])


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


def test_the_page_reads_and_never_writes(client: TestClient, run_dir: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")}
    for name in (*ANSWERS, "samples", "runs"):
        client.get(f"/api/{name}")
    assert {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")} == before


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
    facts = advice.Facts(series, 4, 2)
    values = advice.collect_values(facts)
    assert values["learner"] == pytest.approx(0.81)
    assert values["generator"] == 0.25, "two reports in the window suffice"
    (line,) = advice.apply_rules(facts)
    assert line.name == "both_wait" and line.said.endswith(" (steps 10 to 29)")


def test_a_generator_that_would_share_cores_is_proposed_with_them(tmp_path: Path) -> None:
    known = facts(tmp_path, dict(zip(WAITS, (0.4, 0.05, 0.0), strict=True)))
    for cores, told in ((None, ""), (4, ""), (3, "4 threads would share 3 cores")):
        (line,) = advice.apply_rules(known._replace(cores=cores, threads=(1, 1)))
        assert line.name == "learner_waits" and "generators = 3" in line.try_this
        assert ("cores" in line.try_this) == bool(told) and told in line.try_this


def test_watch_report_and_doctor_begin_with_the_same_lines(
    run_dir: Path, client: TestClient
) -> None:
    values = {"is/ess": 0.3, "lag/mean": 3.0, WAITS[0]: 0.4, WAITS[1]: 0.05}
    write_lines(run_dir / "metrics.jsonl", [metric_row(step, **values) for step in range(20)])
    odd = Finding("odd", "it was odd", "nothing")
    jsonl.note(run_dir / advice.CHECKS, {"step": 7, **odd._asdict()})
    expected = [
        "generation limits the speed",
        "staleness costs much",
        "health check odd fired at step 7: it was odd",
    ]
    config = load.load(run_dir / "config.toml")
    client.get("/api/runs")
    shown = client.get("/api/overview").json()["first"]
    lines = doctor.format_lines(run_dir, doctor.examine_run(config, run_dir, None))
    page = run_page.write(run_dir).read_text()
    for html in (page, shown):
        places = [html.index(text) for text in (*expected, 'class="cards"')]
        assert places == sorted(places)
    for number, text in enumerate(expected):
        assert lines[number].startswith(text)
        assert "To try: " in lines[number]


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


@pytest.mark.parametrize(
    ("rule", "ess", "stale", "engine"),
    [
        ("staleness_hurts", 0.3, 0.1, 0.001),
        ("mismatch_dominates", 0.3, 0.001, 0.01),
        ("staleness_harmless", 0.97, 0.001, 0.0),
    ],
)
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
        series = read_series(tmp_path / "m", rows)
        return advice.apply_rules(advice.Facts(series, 2, 1))[0].name

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
