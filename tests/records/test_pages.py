"""What pages, status and doctor show of a run's metrics."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rows_kit
from hostile_messages_kit import honest_hello
from process_kit import ROOT
from process_kit import SMALL as RUN_SETS
from schedules import PROMPTS
from service_kit import SMALL, greet
from store_kit import sample

from asyncrl.cli import run as cli
from asyncrl.config import load
from asyncrl.config.tree import RecordConfig
from asyncrl.contract import messages as m
from asyncrl.contract.messages import Batch, SamplingSettings, Ticket, Trajectory
from asyncrl.contract.versions import Label
from asyncrl.experiments.compare import page as compare_page
from asyncrl.experiments.compare.grid import CellResult
from asyncrl.experiments.serial import run_serial
from asyncrl.records import metrics, rundir
from asyncrl.records.page_kit import PagePlot
from asyncrl.records.trace import TraceSpan
from asyncrl.supervise import doctor, live
from asyncrl.supervise import summary as summaries
from asyncrl.supervise.report import run_view
from asyncrl.supervise.report.plots import Series
from buffer import numbers
from buffer.service import BufferService

ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval/heldout": 0.4, "eval/heldout_n": 100},
    {"step": 0, "reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0},
    {"step": 9, "eval/heldout": 0.9, "eval/heldout_n": 400},
]


def read_series(rows: list[dict[str, Any]], path: Path) -> Series:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    series = Series(path)
    series.refresh()
    return series


def test_an_accuracy_stands_with_its_n_and_interval(tmp_path: Path) -> None:
    """1.96 sqrt(0.24 / 100) = 0.0960; 1.96 sqrt(0.09 / 400) = 0.0294."""
    series = read_series(ROWS, tmp_path / "metrics.jsonl")
    intervals = [(n, round(half, 4)) for n, half in series.list_intervals("eval/heldout")]
    assert intervals == [(100, 0.096), (400, 0.0294)] and series.list_intervals("eval/ood") == []
    lag, idle = {"mean": 1.0, "p95": 2, "max": 2, "limit": 2}, {"generator": 0.1, "learner": 0.2}
    summary = {
        "heldout_start": 0.4,
        "heldout_end": 0.9,
        "ood_start": None,
        "ood_end": None,
        "wall_s": 1.0,
        "steps": 9,
        "lag": lag,
        "trajectories": 1,
        "tokens": 1,
        "speed": {"generator_tokens_per_s": 1.0, "learner_tokens_per_s": 1.0, "idle_share": idle},
        "ledger": {"generated": 1},
        "certainty": {"heldout": {"n": 400, "half": 0.0294}},
    }
    cards = {id_: (value, note) for _, value, id_, note in run_view.build_cards(series, summary)}
    assert cards["heldout-start"] == ("0.400", "+-0.096 (n = 100)")
    assert cards["heldout-end"] == ("0.900", "+-0.029 (n = 400)")
    assert cards["ood-end"][1] == "" and cards["steps"] == ("9", "")
    heads = [cli.format_summary(summary | {"ood_end": x}).splitlines()[0] for x in (None, 0.5)]
    line, measured = (" ".join(head.split()) for head in heads)
    assert line == "held-out 0.400 -> 0.900 +-0.029 (n = 400)"
    assert measured == f"{line} out of distribution - -> 0.500"


def recompute(path: Path) -> dict[str, str]:
    """The figures of a run's page from the lines of metrics.jsonl alone, by card."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    batches = [line for line in lines if "reward/mean" in line]
    survived: list[dict[str, Any]] = []
    for batch in batches:  # a restarted learner goes on from its checkpoint
        survived = [b for b in survived if b["step"] < batch["step"]] + [batch]
    last, seconds = survived[-1], survived[-1]["t"]
    tokens = [b["throughput/learner_tokens_per_s"] * b["time/step"] for b in survived]
    generated = sum(n for name, n in last.items() if name.startswith("ledger/"))
    lag = sum(b["lag/mean"] * n for b, n in zip(survived, tokens, strict=True)) / sum(tokens)
    idle = {}
    for side, whole in (("generator", "time/generators"), ("learner", "time/step")):
        told = [(b[f"time/{side}_idle_share"] * b[whole], b[whole]) for b in batches if whole in b]
        # generators that have not reported before the last batch have told nothing
        idle[side] = sum(x for x, _ in told) / sum(s for _, s in told) if told else 0.0
    evals = {
        split: {line["step"]: line[f"eval/{split}"] for line in lines if f"eval/{split}" in line}
        for split in ("heldout", "ood")
    }
    return {
        "heldout-start": f"{evals['heldout'][0]:.3f}",
        "heldout-end": f"{evals['heldout'][last['step'] + 1]:.3f}",
        "ood-end": f"{evals['ood'][0]:.3f} / {evals['ood'][last['step'] + 1]:.3f}",
        "reward": f"{last['reward/mean']:.3f}",
        "wall": f"{seconds:.0f} s",
        "steps": str(len(survived)),
        "lag-mean": f"{lag:.2f}",
        "lag-max": f"{max(b['lag/max'] for b in survived):.0f} / 2",
        "gen": f"{generated / seconds:,.0f} tok/s",
        "learn": f"{sum(tokens) / seconds:,.0f} tok/s",
        "idle": f"{idle['generator']:.0%} / {idle['learner']:.0%}",
    }


@pytest.mark.slow
@pytest.mark.parametrize("story", ["plain", "resumed", "learner killed", "all killed in turn"])
def test_every_figure_of_a_page_follows_from_the_metrics(
    forked: Callable[..., dict[str, Any]], tmp_path: Path, story: str
) -> None:
    kills: dict[str, dict[str, Any]] = {
        "learner killed": {"die": {"learner": 4}},
        "all killed in turn": {"die": {"generator-0": 40, "buffer": 9, "learner": 6}},
    }
    sets = ["learner.steps=8", "learner.checkpoint_every=3", "record.stream=true"]
    sets += (
        ["durability.mode='process'"] if "buffer" in kills.get(story, {"die": {}})["die"] else []
    )
    run_dir = tmp_path / "run"
    if story == "resumed":
        forked(run_dir, *sets, stop=3)
    made = forked(run_dir, *sets, **kills.get(story, {}))
    if story in kills:
        assert set(made["deaths"]) == set(kills[story]["die"]), "a kill came too late"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "reward/mean" in line)
    assert first["time/step"] <= first["t"] + 1e-4, "the wait for the first ticket counts"
    summary = summaries.compose(load.load(run_dir / "config.toml"), run_dir)
    series = read_series(made["rows"], tmp_path / "rows.jsonl")
    cards = {id_: value for _, value, id_, _ in run_view.build_cards(series, summary)}
    found = recompute(run_dir / "metrics.jsonl")
    for side in ("gen", "learn"):  # times of the lines are rounded
        shown, wanted = (float(x[side].split()[0].replace(",", "")) for x in (cards, found))
        assert abs(shown - wanted) <= 1 + wanted / 1e4
    assert cards == found | {side: cards[side] for side in ("gen", "learn")}
    told = cli.format_summary(summary).splitlines()[3].removeprefix("speed").strip()
    (generated, generator_idle), (trained, learner_idle) = (
        (cards[side].partition(" ")[0], share)
        for side, share in zip(("gen", "learn"), cards["idle"].split(" / "), strict=True)
    )
    assert told == (
        f"generators {generated} tokens/s ({generator_idle} idle), "
        f"learner {trained} tokens/s ({learner_idle} idle)"
    )


def plotted(rows: list[dict[str, Any]], path: Path) -> dict[str, PagePlot]:
    series = read_series(rows, path / "metrics.jsonl")
    steps = Series(path / "optimizer_steps.jsonl")
    steps.refresh()
    drawn = run_view.build_plots(series, steps, {"lag_histogram": {"0": 1}})
    return {plot.title: plot for plot in drawn}


def labels(rows: list[dict[str, Any]], path: Path) -> dict[str, list[str]]:
    return {title: [x.label for x in plot.lines] for title, plot in plotted(rows, path).items()}


def test_the_curve_of_accuracy_has_the_intervals_as_a_band(tmp_path: Path) -> None:
    accuracy = plotted(ROWS, tmp_path)["Held-out reward"]
    (held_out,) = [line for line in accuracy.lines if line.label == "held-out"]
    halves = [high - y for high, y in zip(held_out.high, held_out.ys, strict=True)]
    assert [round(half, 4) for half in halves] == [0.096, 0.0294] and accuracy.top == 1.02
    beyond = {"step": 1, "reward/mean": 3.0, "reward/min": -5.0, "reward/max": 5.0}
    wide = plotted([*ROWS, beyond], tmp_path)["Held-out reward"]
    assert wide.top == 0, "rewards beyond 1 are not cut off"


def test_a_kind_of_work_has_one_colour() -> None:
    """Also where another kind is missing, and an unknown one has none of theirs."""

    def colors(*lanes: tuple[str, list[str]]) -> dict[str, int]:
        spans = {
            process: [TraceSpan(name, 0.1 * i, 0.1 * i + 0.05) for i, name in enumerate(names)]
            for process, names in lanes
        }
        plot, _ = run_view.plot_timeline(spans)
        return {line.label: line.color for line in plot.lines}

    whole = colors(
        ("learner", ["train", "publish", "checkpoint"]),
        ("generator-0", ["decode", "prefill", "weights", "reward", "polish"]),
    )
    assert whole == run_view.KINDS | {"polish": run_view.OTHER_KIND}
    assert len(set(whole.values())) == 8
    got = colors(("learner", ["train"]), ("generator-0", ["weights"]))
    assert got == ({k: whole[k] for k in ("weights", "train")})


def test_what_a_run_does_not_measure_has_no_empty_plot(tmp_path: Path) -> None:
    rows = [{"step": 1, "t": 1.0, "reward/mean": 0.5, "split/update_k3": 0.1}]
    assert [*plotted(rows, tmp_path)] == [
        "Held-out reward",
        "Reward",
        "Lag of trained tokens",
        "Log ratio to the behavior policy, in three parts",
    ]

    def shown(step_s: float) -> float:
        steps = [TraceSpan("train", step_s * i, step_s * (i + 0.9)) for i in range(20)]
        plot, seconds = run_view.plot_timeline({"learner": steps, "generator-0": []})
        (train,) = plot.lines
        assert plot.y_names == ["learner", "generator-0"] and set(train.ys) == {0}
        assert min(train.xs) >= 0 and max(train.until) <= seconds
        return seconds

    assert shown(0.1) == run_view.TIMELINE_S
    assert shown(5.0) == pytest.approx(run_view.STEPS_SHOWN * 4.5)
    assert run_view.plot_timeline({}) == (PagePlot("", "", [], "seconds", "spans", y_names=[]), 0.0)


def test_a_warm_run_has_answer_lengths(small_model: Path) -> None:
    model = f"model.path={str(small_model)!r}"
    sets = [model, *RUN_SETS[:-1], "evaluation.every=0", "staleness.inject=1"]
    config = load.load(ROOT / "configs" / "demo.toml", sets)
    cell = CellResult("late", 0, run_serial(config, 0), config)
    points = compare_page.list_points(cell, "answer/length")
    (line,) = compare_page.plot_curves("answer/length", {"late": [points]}).lines
    assert len(line.ys) == 6 and all(1 <= y <= 12 for y in line.ys)


def test_bands_are_named_for_what_they_are() -> None:
    c = load.load("demo", ["evaluation.final_prompts=1024", "evaluation.prompts=256"])
    said = compare_page.describe_bands({"seeds": [0, 1, 2]}, c)
    assert "bands: from the lowest to the highest seed, no interval" in said
    assert "mean over 3 seeds" in said
    # 0.98 / sqrt(n)
    assert (
        "+-0.031 at most (n = 1,024 held-out prompts) at both ends, +-0.061 at most (n = 256 "
        "held-out prompts) between" in said
    )
    assert "bands" not in compare_page.describe_bands({"seeds": [0]}, c)


def test_what_is_the_same_throughout_is_one_line(tmp_path: Path) -> None:
    """With one update a batch the policy trained is the start: the batch's own move differs."""
    rows = [
        {
            "step": n,
            "t": 1.0,
            "kl/behavior_start_k3": 0.01 * n,
            "kl/behavior_target_k3": 0.01 * n + (1e-3 if several and n == 3 else 1e-15),
            "kl/moved": 0.002,
        }
        for several in (False, True)
        for n in range(5)
    ]
    title = "KL: behavior policy, learner's start, target policy"
    assert labels(rows[:5], tmp_path)[title] == [
        "behavior to start = behavior to target",
        "update of one batch",
    ]
    assert labels(rows[5:], tmp_path)[title] == [
        "behavior to start",
        "behavior to target",
        "update of one batch",
    ]


def test_stops_reshape_rates_and_lags_are_shown_where_they_act(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "step": n,
            "t": 1.0,
            "optim/stop_kl": 0.0,
            "optim/early_stops": 0.0,
            "optim/lr_scale": 1.0,
            "by_lag/ess_0": 1.0,
            "by_lag/ess_3to4": 0.9,
            "by_lag/k3_1": 0.01,
        }
        for n in range(4)
    ]
    still = labels(rows, tmp_path)
    assert still["Effective sample size by lag"] == ["lag 0", "lag 3to4"]
    assert still["KL of the behavior policy to the learner's start by lag"] == ["lag 1"]
    assert not {"Learning-rate scale", "Reshape"} & still.keys()
    assert not [title for title in still if "early stopping" in title]
    assert run_view.list_early_stops(rows) == []
    rows[2] |= {"optim/stop_kl": 0.04, "optim/early_stops": 1.0, "optim/lr_scale": 0.5}
    rows[3] |= {"optim/stop_kl": 0.01, "optim/early_stops": 1.0, "reshape/sigma2": 0.1}
    acting = labels(rows, tmp_path)
    assert acting["Learning-rate scale"] == ["of the batch's last step"]
    assert acting["Reshape"] == ["sigma2, variance of log w"]
    assert acting["Last KL that early stopping measured in a batch"] == ["KL"]
    assert run_view.list_early_stops(rows) == [0.04]


def test_each_optimizer_step_is_drawn_where_batches_have_several(tmp_path: Path) -> None:
    """At an even distance within the batch, of a batch that stopped early too."""

    def drawn(*updates: int) -> dict[str, PagePlot]:
        rows = [
            {
                "step": n,
                "update": i,
                "optim/grad_norm": 10.0 * n + i,
                "is/target_ratio": 1.0,
                "is/target_ratio_max": 2.0 + i,
                "reshape/sigma2": 0.1,
                "reshape/p_correct": 0.5,
            }
            for n, count in enumerate(updates)
            for i in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "optimizer_steps.jsonl").write_text(lines)
        plots = plotted(ROWS, tmp_path)
        lead = "Each optimizer step: "
        return {t.removeprefix(lead): plot for t, plot in plots.items() if t.startswith(lead)}

    assert drawn(1, 1, 1) == {}
    shown = drawn(2, 4)
    got = list(shown)
    assert got == (
        ["ratio to the behavior policy", "gradient norm", "reshape", "C = A log w and its gate"]
    )
    (norm,) = shown["gradient norm"].lines
    assert norm.xs == [0, 0.5, 1, 1.25, 1.5, 1.75] and norm.ys == [0, 1, 10, 11, 12, 13]
    assert [x.label for x in shown["ratio to the behavior policy"].lines] == ["mean", "largest"]
    assert "variance of log w" in shown["reshape"].metrics["reshape/sigma2"]


def answer(number: int) -> Trajectory:
    ticket = Ticket(number, 1, "train", PROMPTS[0], [0], SamplingSettings(), Label(1, 0), None, 0)
    made = sample(ticket, length=3)
    made.tokens = np.array([number, 5, 6], "<i4").tobytes()
    made.behavior_logprobs = np.array([-0.5, -1.0, -2.0], "<f4").tobytes()
    return made


def batch(number: int, samples: list[Trajectory]) -> Batch:
    many = len(samples)
    return Batch(1, number, samples, list(range(many)), [0] * many, [], {}, 0, {})


def tickets(rows: Any) -> list[int]:
    return [row["ticket"] for row in rows]


@pytest.mark.parametrize(
    ("most", "shown"), [(4, [0, 2, 4, 6]), (3, [0, 2, 4]), (1, [0]), (9, [*range(8)])]
)
def test_the_samples_shown_are_spread_over_the_batch(most: int, shown: list[int]) -> None:
    samples = [answer(number) for number in range(8)]
    for number in set(range(8)) - set(shown):
        samples[number].tokens = b"odd"  # whoever turns it into numbers raises
    found = list(numbers.select_sample_rows(batch(20, samples), RecordConfig(samples=most)))
    assert tickets(found) == shown and [row["lag"] for row in found] == shown
    for row in found:
        assert row["tokens"] == [row["ticket"], 5, 6] and row["logprobs"] == [-0.5, -1.0, -2.0]


def test_all_samples_are_shown_of_every_batch_that_is_named() -> None:
    many = [answer(number) for number in range(3)]
    record = RecordConfig(samples=0, samples_every=5)
    said = {n: tickets(numbers.select_sample_rows(batch(n, many), record)) for n in range(11)}
    assert {n for n, rows in said.items() if rows} == {0, 5, 10}
    assert said[5] == [0, 1, 2] == tickets(numbers.make_batch_rows(batch(1, many)))
    assert tickets(numbers.make_batch_rows(batch(1, many), [2, 0])) == [2, 0]
    assert not list(numbers.select_sample_rows(batch(0, many), RecordConfig(samples_every=0)))
    one = batch(3, [answer(7)])
    plain = {
        **{"batch": 3, "ticket": 7, "sample": 0, "attempt": 1, "prompt": "", "text": ""},
        **{"reward": 1.0, "parts": {}, "finish": "stop", "lag": 0},
        "versions": [["1.0", 0, 3]],
        "digests": [one.samples[0].spans[0].digest],
        **{"prompt_tokens": [], "tokens": [7, 5, 6], "logprobs": [-0.5, -1.0, -2.0]},
    }
    (found,) = numbers.make_batch_rows(one)
    plain |= {key: found[key] for key in ("prompt", "text", "prompt_tokens", "reward", "parts")}
    assert found == plain and isinstance(found["prompt_tokens"], list)
    one.tasks.append("calc")
    one.samples[0].images = ["d1"]
    assert numbers.make_batch_rows(one) == [plain | {"task": "calc", "images": ["d1"]}]


def test_a_row_of_a_session_has_its_calls_and_sequences() -> None:
    first = rows_kit.row([1, 2], [3, 4, 5], [-0.5, -1.0, -2.0], [1, 0, 1])
    second = rows_kit.row([6], [7], [-0.25], [1])
    session = rows_kit.sample(4, 1, [first, second], calls=3, aside=2)
    (found,) = numbers.make_batch_rows(rows_kit.batch([session], [1]))
    assert {key: found[key] for key in ("calls", "aside", "mask", "rows")} == {
        "calls": 3,
        "aside": 2,
        "mask": [1, 0, 1],
        "rows": [
            {
                "prompt_tokens": [6],
                "tokens": [7],
                "logprobs": [-0.25],
                "mask": [1],
                "versions": [["1.0", 0, 1]],
            }
        ],
    }
    assert found["versions"] == [["1.0", 0, 1], ["1.0", 2, 3]]


LINE = "the link holds generators up: fetching weights takes 40% of their time, 12 MB/s each"
TOLD = {
    "generator/busy_s": 6.0,
    "generator/idle_s": 4.0,
    "link/fetch_s": 4.0,
    "link/fetched_mb": 48.0,
    "link/acked": 10.0,
    "link/ack_waited_s": 5.0,
}
SHOWN = {"link/ack_s": 0.5, "link/fetch_share": 0.4, "link/fetch_mb_per_s": 12.0}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[BufferService]:
    config = load.load(ROOT / "configs" / "demo.toml", [*SMALL, "learner.steps=9"])
    rundir.ensure(load.dump(config), tmp_path / "run")
    service = BufferService(config, tmp_path / "run")
    service.send = lambda *_: None  # type: ignore[method-assign]
    service.clock.start(1.0)  # the first ticket
    service.handle(b"l", honest_hello(service.run))
    service.handle(b"g", greet(service.run, "generator-0", 1))
    yield service
    assert service.close() == ""
    rundir.clean(tmp_path / "run")


def commit(service: BufferService, number: int) -> None:
    label = Label(1, number + 1)
    made = m.Commit(1, number, label, f"d{number}", {"reward/mean": 0.5})
    batch = m.Batch(1, number, [], [], [], [], {}, 0, {})
    service.record_commit(made, batch, service.store.limit)


def links(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith("link/")}


def test_what_a_generator_tells_of_its_link_is_in_the_commits_row_and_in_the_status(
    made: BufferService, tmp_path: Path
) -> None:
    commit(made, 0)
    made.handle(b"g", m.LeaseRenewal("generator-0", 1, [], TOLD, None))
    commit(made, 1)
    commit(made, 2)  # nothing has been told since
    assert links(made.latest) == SHOWN
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [links(row) for row in rows] == [{}, SHOWN, {}] and set(SHOWN) <= set(metrics.METRICS)


def test_doctor_names_the_link_of_a_run_that_is_going_on_and_of_one_that_stopped(
    made: BufferService, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    made.handle(b"g", m.LeaseRenewal("generator-0", 1, [], TOLD, None))
    commit(made, 0)
    status = m.RunStatus(made.run, 1, 9, 1, dict(made.latest), {}, [], {}, False)
    seen = doctor.examine_run(made.config, run_dir, status)
    assert seen["link"] == LINE
    text = doctor.format_state(made.config, run_dir, status, seen)
    assert LINE in text.splitlines()[0]
    quiet = m.RunStatus(made.run, 1, 9, 1, {}, {}, [], {}, False)
    assert doctor.examine_run(made.config, run_dir, quiet)["link"] == ""
    # its buffer answers no more: by the last row that tells of links
    commit(made, 1)
    seen = doctor.examine_run(made.config, run_dir, None)
    text = doctor.format_state(made.config, run_dir, None, seen)
    assert seen["link"] == LINE and LINE in text.splitlines()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("link/fetch_share", 0.1, "the link holds generators up: "),
        ("link/fetch_share", 0.1 - 1e-6, ""),
        ("link/ack_s", 1.0, "the link holds deliveries up: "),
        ("link/ack_s", 1.0 - 1e-6, ""),
    ],
)
def test_a_link_is_named_from_its_limit_on(name: str, value: float, said: str) -> None:
    found = live.describe("link", {name: value, "link/fetch_mb_per_s": 12.0})
    assert found.startswith(said) and bool(found) == bool(said)
