"""`asyncrl simulate`: cases reckoned by hand, in simulated time; the fit to a trace written here;
the command and its errors."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from process_kit import as_options, write_lines
from service_kit import CountedDict
from simulate_kit import BARE, ROOT, config, run, simulate, with_seeds

from asyncrl.cli import main
from asyncrl.config.tree import Config
from asyncrl.contract import admission
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.simulate import times, what_if
from asyncrl.experiments.simulate.simulation import Simulation
from asyncrl.experiments.simulate.times import TimeModel, change
from asyncrl.records import process_log
from asyncrl.records.trace import TraceSpan

GENERATE = 0.64  # seconds of a batch, when all its answers are written at once


@pytest.mark.parametrize("generators", [1, 2])
def test_synchronous_each_side_idles_for_the_others_share(generators: int) -> None:
    """6.4 s of generation, 4 s of learning; two generators take as long: 8 rows cost what 16 do."""
    o = run(change(BARE, step=0.1, train=4.0), "staleness.max_lag=0", f"generators={generators}")
    assert o.step_s == pytest.approx(10.4)
    assert o.idle_generator == pytest.approx(4 / 10.4, abs=0.03)  # by turns: 7.2 / 10.4
    assert o.idle_learner == pytest.approx(6.4 / 10.4)
    assert o.lag_histogram == {0: 1.0} and o.tickets_max == 4
    assert o.tokens == 20 * 16 * 64 and o.losses == {}
    assert o.tickets_mean == pytest.approx(4 * 6.4 / 10.4)
    short = run(change(BARE, train=0.019), "staleness.max_lag=0")  # sleeps less than one poll
    assert short.idle_generator < 0.005 < short.idle_learner


def test_an_evaluating_generator_neither_gets_nor_takes() -> None:
    """Two others write the batches; its free slots are all that it requests."""
    sets = ("generators=3", "evaluation.generators=1", "evaluation.every=5", "staleness.max_lag=0")
    made = Simulation(config(*sets), change(BARE, step=0.1, train=4.0))
    assert made.run()["step_s"] == pytest.approx(10.4)
    slots = config(*sets).generator.slots
    waiting = {name: samples for name, (samples, _) in made.requests.waiting.items()}
    assert waiting == dict.fromkeys(("generator-0", "generator-1"), slots)
    assert made.meter.free == 2 * slots


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_where_the_learner_limits_the_lag_is_the_limit(limit: int) -> None:
    """When batch n is committed, the tickets of batch n + 1 + k go out with version n + 1."""
    o = run(change(BARE, step=1e-4, train=1.0), f"staleness.max_lag={limit}", "generator.slots=256")
    assert o.step_s == pytest.approx(1.0, rel=0.01) and o.idle_learner < 0.01
    assert o.lag_closed_form == pytest.approx(o.lag_mean, rel=0.02)
    first = dict.fromkeys(range(limit), 1 / 20)  # batches 0..k start with version 0
    assert o.lag_histogram == pytest.approx(first | {limit: 1 - limit / 20})


def test_where_the_generators_limit_they_never_wait() -> None:
    """A batch fills the engine, so the next one starts when it ends, with the version before the
    update it feeds: lag 1."""
    o = run(change(BARE, train=0.1), "staleness.max_lag=4", "generator.slots=16")
    assert o.idle_generator < 0.02 and o.idle_learner == pytest.approx(1 - 0.1 / GENERATE, abs=0.02)
    assert o.step_s == pytest.approx(GENERATE, rel=0.02)
    assert o.lag_histogram == pytest.approx({0: 1 / 20, 1: 19 / 20})
    assert o.lag_closed_form == pytest.approx(1, abs=0.05), "a batch in the engine, none in a queue"


def test_weights_swapped_in_mid_answer_split_its_lag() -> None:
    """Limit 1, learning about half as long as an answer: of two batches, one starts at a commit,
    and the next commit comes half way through it.

    Batches 0 and 1 start at 0 with version 0; from then on the even ones start at commit n - 2 and
    are swapped to version n half way (half lag 1, half 0); the odd ones start there, with the
    version before the one they train."""
    # a free slot keeps a request open, and with it the commits' news come at once
    sets = ("staleness.max_lag=1", "generator.slots=33")
    o = run(change(BARE, train=0.30), *sets)
    assert o.lag_histogram == pytest.approx({0: (1 + 9 / 2) / 20, 1: (10 + 9 / 2) / 20})
    # two batches for an answer, an update, and one call that answers linger for
    assert o.step_s == pytest.approx((GENERATE + 0.30 + 0.08) / 2, rel=0.03)
    drained = run(change(BARE, train=0.30), *sets, "weights.in_flight='between_groups'")
    # between_groups: no answer has two versions
    assert drained.lag_histogram == pytest.approx({0: 1 / 20, 1: 19 / 20})
    # and a batch waits until the one before it has ended
    assert drained.step_s == pytest.approx(GENERATE, rel=0.03)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ({"publish": 0.3}, 0.3),
        ({"swap": 0.2}, 0.2),
        ({"batch": 0.1}, 0.1),
        ({"commit": 0.15}, 0.15),
        ({"wire": 0.01}, 0.03),  # delivery, commit, tickets
        ({"reward": 0.5}, 2.0),  # 16 answers, 4 at a time
        ({"row": 0.001}, 64 * 16 * 0.001),
        ({"ready": 0.005}, 0.0),  # it waits for the batch anyway
    ],
)
def test_what_a_synchronous_step_is_made_of(times: dict[str, float], seconds: float) -> None:
    """Each adds its own time, and nothing else."""
    o = run(change(BARE, **times), "staleness.max_lag=0", "reward.workers=4")
    assert o.step_s == pytest.approx(GENERATE + 0.4 + seconds, rel=0.02)


def test_the_learner_idles_between_two_updates_whose_batches_are_there() -> None:
    """5 ms of 105."""
    sets = ("staleness.max_lag=2", "generator.slots=256")
    plain, o = (run(change(BARE, step=1e-4, train=0.1, ready=x), *sets) for x in (0.0, 0.005))
    assert o.step_s - plain.step_s == pytest.approx(0.005 * 19 / 20)
    assert o.idle_learner - plain.idle_learner == pytest.approx(5 / 105, abs=0.003)


def test_reward_processes_are_fed_whatever_the_engine_does() -> None:
    """Calls of 30 ms beside decode calls of 80 ms, one process: a step is its 16 calls, and the
    first one waits for the first answers."""
    sets = ("staleness.max_lag=4", "generator.slots=64", "reward.workers=1")
    o = run(change(BARE, reward=0.03, train=0.1), *sets)
    assert o.step_s == pytest.approx(16 * 0.03 + GENERATE / 20, rel=0.02)


@pytest.mark.parametrize(
    ("sets", "workers"),
    [
        ((), 0),
        (("reward.workers=3",), 3),
        (("reward.function='a:b'",), len(os.sched_getaffinity(0))),
        (("reward.function='a:b'", "reward.workers=0"), 1),
    ],
)
def test_how_many_reward_processes_there_are(sets: tuple[str, ...], workers: int) -> None:
    (generator,) = Simulation(config(*sets), BARE).generators
    assert generator.workers == workers


def test_training_time_follows_the_tokens() -> None:
    o = run(change(BARE, train_tokens=2 * 16 * 64), "staleness.max_lag=0")
    assert o.step_s == pytest.approx(GENERATE + 0.2)
    assert times.parse(TimeModel(), ["train=0.5"]).train_tokens is None, "that of any batch"
    assert times.parse(TimeModel(), ["train=0.5", "train_tokens=100"]).train_tokens == 100


BY_TURNS, AT_ONCE = ("staleness.max_lag=0",), ("staleness.max_lag=4", "generator.slots=64")
HALVES = ("staleness.max_lag=0", "generator.slots=8", "generators=2")


@pytest.mark.parametrize(
    ("cores", "beside", "threads", "sets", "seconds"),
    [
        (None, 1.5, 1, BY_TURNS, 1.28),
        (None, 1.5, 1, AT_ONCE, 0.96),
        (1, 1.0, 1, BY_TURNS, 1.28),
        (1, 1.0, 1, AT_ONCE, 1.28),  # each at half its speed
        (2, 1.0, 1, AT_ONCE, 0.64),
        (2, 1.5, 1, AT_ONCE, 0.96),
        (1, 1.0, 1, HALVES, 2 * GENERATE + 0.64),
        (2, 1.0, 1, HALVES, GENERATE + 0.64),
        (2, 1.5, 1, HALVES, 1.5 * GENERATE + 0.64),
        (2, 1.0, 2, AT_ONCE, 0.8 * 0.64),  # three threads take turns on two cores
        (None, 1.0, 2, AT_ONCE, 0.6 * 0.64),
    ],
)
def test_processes_share_the_cores_and_slow_each_other_down(
    cores: int | None, beside: float, threads: int, sets: tuple[str, ...], seconds: float
) -> None:
    """Up to the calls, and parts of updates, that begin before the other side does."""
    known = change(BARE, train=0.64, cores=cores, beside=beside)
    rel = 0.1 if sets == AT_ONCE else 0.02
    assert run(known, *sets, threads=threads).step_s == pytest.approx(seconds, rel=rel)


@pytest.mark.parametrize(
    ("limit", "cores", "divided"), [(0, 2, True), (1, 2, False), (1, 3, True), (1, None, True)]
)
def test_a_batch_is_divided_as_on_a_machine_with_these_cores(
    limit: int, cores: int | None, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two generators and a learner, of a thread each."""
    batches: set[float] = set()

    def share(samples: int, waiting: int, batch: float) -> int:
        batches.add(batch)
        return samples

    monkeypatch.setattr(admission, "share_batch", share)
    run(change(BARE, cores=cores), f"staleness.max_lag={limit}", "generators=2")
    assert batches == {16 if divided else math.inf}


def rough() -> TimeModel:
    return change(
        TimeModel(),
        lengths="lognormal(20, 0.6)",
        noise="lognormal(1, 0.4)",
        train="exponential(0.2)",
        train_tokens=None,
        no_spread=0.25,
    )


LATE = "staleness.max_lag=1 generators=2 staleness.on_exceed="
SITUATIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "staleness.max_lag=2"),
    ({"failed": 0.02}, "staleness.max_lag=1 reward.error_budget=1.0 generators=3"),
    *(
        ({}, LATE + late + order)
        for order in ("", " staleness.order='freshest'")
        for late in ("'drop'", "'mask'")
    ),
    ({}, "staleness.max_lag=3 staleness.inject=2"),
    ({}, "staleness.max_lag=inf generators=2"),
    ({"ess": 0.8}, "staleness.max_lag={auto='ess',floor=0.7,most=3} generators=2"),
    (
        {"reward": "pareto(0.05, 2.5, 1)"},
        "staleness.max_lag=2 reward.workers=4 advantage.no_spread='filter'",
    ),
]


@pytest.mark.parametrize(("changes", "sets"), SITUATIONS)
def test_the_limit_holds_and_every_token_has_an_end(changes: dict[str, Any], sets: str) -> None:
    evaluation = "evaluation.every=5 evaluation.prompts=8 evaluation.final_prompts=16 "
    evaluation += "evaluation.ood_prompts=8 "
    o = simulate(config(*(evaluation + sets).split()), change(rough(), **changes), 3, evaluate=True)
    hard = "on_exceed='" not in sets or "drop" in sets
    assert o.steps == 20 and sum(o.lag_histogram.values()) == pytest.approx(1)
    if hard:
        assert o.lag_max <= o.max_lag
    assert o.generated == o.tokens + o.left_over + sum(o.losses.values())
    assert (o.losses.get("failed", 0) > 0) == ("failed" in changes)
    words = {"'drop'": "dropped_stale", "'mask'": "masked_stale", "'filter'": "filtered"}
    for word, line in words.items():
        assert (o.losses.get(line, 0) > 0) == (word in sets), line
    if "staleness.inject=2" in sets:
        assert o.lag_histogram[2] == pytest.approx(18 / 20, abs=0.03)


def test_ten_thousand_generators_cost_little_more_than_a_hundred() -> None:
    """Counted in events, and in requests that they look at: those that find no ticket sleep."""
    counts = []
    for n in (100, 10_000):
        s = Simulation(config(f"generators={n}", "learner.groups=32"), rough(), evaluate=False)
        requests = s.requests.waiting = CountedDict()
        o = s.run()
        counts.append(next(s.count))
        assert o["idle_generator"] > 0.7 and o["lag_max"] <= 2
        assert 0 < requests.looked < 2 * counts[-1]
    assert counts[1] < counts[0] + 2 * 10_000


@pytest.mark.parametrize(
    ("spec", "mean"),
    [
        (0.5, 0.5),
        ("exponential(2)", 2.0),
        ("uniform(1, 3)", 2.0),
        ("normal(4, 0.5)", 4.0),
        ("lognormal(1, 0.5)", math.exp(0.125)),
        ("pareto(1, 3, 1e9)", 1.5),
        ([1.0, 2.0, 6.0], 3.0),
        ({"sequence": [1.0, 2.0, 6.0]}, 3.0),
    ],
)
def test_distributions_have_their_means(spec: Any, mean: float) -> None:
    sample = times.make_sampler(spec, random.Random(1), stage=random.Random(2).random)
    values = [sample() for _ in range(30_000)]
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.03)


def test_a_sequence_is_drawn_along_the_run() -> None:
    done = 0.0
    draw = times.make_sampler(
        {"sequence": [float(i) for i in range(100)]}, random.Random(0), stage=lambda: done
    )
    for done in (0.0, 0.3, 1.0):
        got = [draw() for _ in range(300)]
        assert all(abs(x - 100 * done) <= 6 for x in got) and len(set(got)) > 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense=1"], "unknown time `nonsense`"),
        (["swap"], "give KEY=VALUE"),
        (["swap=-1"], "finite numbers of at least 0"),
        (["swap=gamma(1)"], "is not a distr"),
        (["swap=normal(1)"], "takes 2 numbers"),
        (["swap=[]"], "finite numbers"),
        (["failed=1.5"], "failed"),
        (["swap={ order = [1] }"], "one key `sequence`"),
        (["step='fast'"], "step"),
        (["swap=true"], "swap"),
        (["group_lengths=[[]]"], "Expected `array` of length >= 1"),
    ],
)
def test_times_that_cannot_be_are_one_clear_error(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", "\\[")):
        times.parse(TimeModel(), words)


def test_what_limits_a_run_is_named() -> None:
    def says(known: TimeModel, *sets: str) -> str:
        return what_if.describe_limiting_side(what_if.average_outcomes([vars(run(known, *sets))]))

    assert says(change(BARE, step=1e-3, train=1.0)).startswith("the learner limits it")
    assert says(change(BARE, train=0.1), "generator.slots=16").startswith("the generators limit it")
    assert says(BARE, "staleness.max_lag=0").startswith("both sides wait for each other")
    assert says(change(BARE, train=0.62), "generator.slots=16").startswith("both sides are busy")
    assert says(change(BARE, step=1e-3, train=0.1, buffer=0.05)).startswith("the buffer limits it")


METRICS = {"reward/mean": 0.5, "reward/no_spread_share": 0.25, "answer/length": 24.0}


def write_run(path: Path, known: TimeModel, *, rewards: int = 0) -> None:
    """A run directory as a run leaves it: 60 batches of 2,000 tokens, a generator that decodes
    beside them and by itself."""
    rng = random.Random(5)
    path.mkdir(exist_ok=True)
    (path / "config.toml").write_text((ROOT / "configs" / "demo.toml").read_text())
    learner, at = [], 100.0
    for i in range(60):
        tokens, alone = rng.randint(1500, 2500), i % 2
        end = at + 0.4 * tokens / 2000 * (1.0 if alone else known.beside)
        learner += [["train", at, end, tokens], ["publish", end, end + 0.002]]
        at = end + 0.202
    trains = [s for s in learner if s[0] == "train"]
    lane: list[list[Any]] = []
    for i, batch in enumerate(trains):
        if i % 2:
            lane += [["weights", batch[2] + 0.01, batch[2] + 0.01 + 0.003]]
            continue
        # before the update, and during it
        for start, beside in ((batch[1] - 0.19, 1.0), (batch[1], known.beside)):
            rows, now, end = 0, start, start + (0.19 if beside == 1 else batch[2] - batch[1])
            while now < end:
                admitted = rng.randint(0, 20) if rows else rng.randint(10, 60)
                rows += admitted
                seconds = beside * (8 * (known.step + known.row * rows) + known.admit * admitted)
                finished = rng.randint(0, min(rows - 1, 20)) if rows > 1 else 0
                if now + seconds > end:
                    break
                lane += [["prefill", now, now, admitted]] if admitted else []
                lane += [["decode", now, now + seconds, rows, 8]]
                now += seconds + known.look + known.finish * finished
                rows -= finished
    write_lines(path / "trace" / "learner.jsonl", *learner)
    write_lines(path / "trace" / "generator-0.jsonl", *lane)
    if rewards:
        # the last took a list of two
        calls: list[Any] = [["reward", 100 + i, 100 + i + 0.3] for i in range(rewards - 2)]
        rewarded = [*calls, ["reward", 200, 200.6, 2]]
        write_lines(path / "trace" / "generator-0-rewards.jsonl", *rewarded)
    write_lines(path / "metrics.jsonl", {"step": 0} | METRICS)
    samples = [{"ticket": t, "tokens": [1] * (20 + t % 3)} for t in range(60) for _ in range(8)]
    write_lines(path / "samples.jsonl", *samples)


def test_a_report_says_what_a_simulation_predicts_where_one_side_waits(tmp_path: Path) -> None:
    write_run(tmp_path / "r", change(TimeModel(), step=0.002, row=5e-5, admit=3e-4))
    config = (tmp_path / "r" / "config.toml").read_text()
    (tmp_path / "r" / "config.toml").write_text(config.replace("steps = 120", "steps = 30"))
    samples = [{"ticket": t, "tokens": [1] * 20, "prompt": "2+2", "text": "4"} for t in range(40)]
    write_lines(tmp_path / "r" / "samples.jsonl", *samples)
    name = "time/{}_idle_share"
    for learner, generator, predicted in (
        (0.4, 0.05, "2 generators instead of 1"),
        (0.05, 0.05, ""),
    ):
        idle = {name.format("learner"): learner, name.format("generator"): generator}
        rows = [{"step": step, "t": step * 1.0} | METRICS | idle for step in range(20)]
        write_lines(tmp_path / "r" / "metrics.jsonl", *rows)
        done = CliRunner().invoke(main, ["report", str(tmp_path / "r")])
        assert done.exit_code == 0, done.output
        page = (tmp_path / "r" / "report.html").read_text()
        told = "Simulated with the times of this run: " + predicted
        assert (told in page) == bool(predicted), "the rule fires, or it does not"
        assert json.loads((tmp_path / "r" / "what_if.json").read_text()).keys() == (
            {"learner_waits"} if predicted else set()
        )


def test_a_fit_knows_the_cores_that_the_processes_shared(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    write_run(run_dir, change(TimeModel(), step=0.002, row=5e-5, admit=3e-4))
    assert times.fit(run_dir).cores is None, "an older run"
    for name in ("learner", "generator-0"):
        process_log.append_event(run_dir, name, 1, "began", cores=2)
    assert times.fit(run_dir).cores == 2
    event = {"at": 0.0, "name": "generator-1", "pid": 1, "host": "elsewhere", "event": "began"}
    with process_log.get_path(run_dir).open("a") as file:
        file.write(json.dumps(event | {"cores": 2}) + "\n")
    assert times.fit(run_dir).cores is None, "two machines"


def test_a_fit_finds_the_times_that_made_the_trace(tmp_path: Path) -> None:
    known = change(
        TimeModel(), step=0.002, row=5e-5, admit=3e-4, look=0.003, finish=1e-4, beside=1.4
    )
    write_run(tmp_path / "r", known, rewards=5)
    found = times.fit(tmp_path / "r")
    for name in ("step", "row", "beside", "look", "finish"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.08), name
    assert found.admit == pytest.approx(known.admit, rel=0.15)
    assert isinstance(found.noise, dict) and all(0.9 < x < 1.1 for x in found.noise["sequence"])
    assert isinstance(found.train, dict) and found.train_tokens
    per_token = [x / found.train_tokens for x in found.train["sequence"]]
    assert sum(per_token) / len(per_token) == pytest.approx(0.4 / 2000, rel=0.05)
    assert found.publish == pytest.approx([0.002] * 60, abs=1e-5)
    assert found.swap == pytest.approx([0.003] * 30, abs=1e-5)
    assert found.reward == pytest.approx([0.3] * 5) and found.no_spread == 0.25
    assert found.group_lengths is not None
    assert {tuple(g) for g in found.group_lengths} == {(n,) * 8 for n in (20, 21, 22)}


def test_pauses_that_no_column_explains_are_spread_over_all() -> None:
    pauses = [0.002 + 1e-4 * (i % 7) + (0.06 if i % 20 == 0 else 0.0) for i in range(200)]
    calls = [
        times.EngineCall(i, i + 0.5 + 0.01 * i % 3, i % 3, i % 5, 8, i % 7, pause)
        for i, pause in enumerate(pauses)
    ]
    train = [TraceSpan("train", 300, 301)]
    fitted = times._fit_decode(calls, train)
    new = (
        fitted["admit"]
        - times._fit_decode([call._replace(pause=0.0) for call in calls], train)["admit"]
    )
    explained = (fitted["look"] + fitted["finish"] * c.finished + new * c.admitted for c in calls)
    assert sum(explained) == pytest.approx(sum(pauses)) and fitted["look"] > 0.002


def test_the_gap_between_two_updates_is_fitted_where_the_learner_did_not_wait() -> None:
    spans, at = [], 0.0
    for gap in (0.004, 0.2, 0.005, 0.006, 0.3):
        spans += [TraceSpan("train", at, at + 1), TraceSpan("publish", at + 1, at + 1.1)]
        at += 1.1 + gap
    spans.append(TraceSpan("train", at, at + 1))
    call = times.EngineCall(0, 0, 1, 1, 1, 1, None)
    ready = times._fit_waits(TimeModel(), spans, [], [call])["ready"]
    assert ready == pytest.approx([0.004, 0.005, 0.006])
    assert times._fit_waits(TimeModel(), spans[:4], [], [call]) == {}, "too few of them"


def test_a_few_samples_take_the_mean_length_of_all(tmp_path: Path) -> None:
    """Metrics have the mean of every batch, 24 here; the samples shown are shorter."""
    write_run(tmp_path, TimeModel())
    shown = [{"ticket": t, "tokens": [1] * (10 + t % 3)} for t in range(60)]
    write_lines(tmp_path / "samples.jsonl", *shown)
    lengths = times.fit(tmp_path).lengths
    assert isinstance(lengths, list)
    assert sorted({round(x / 24 * 11) for x in lengths}) == [10, 11, 12]
    assert sum(lengths) / len(lengths) == pytest.approx(24, abs=0.01)


def test_training_beside_a_pause_of_the_generator_is_beside_it() -> None:
    """Half of each update lies in a decode call, half in its pause: 0.13 s are 0.1 by itself."""
    spans = [TraceSpan("train", 0.3 * i, 0.3 * i + 0.13, 100) for i in range(9)]
    calls = [times.EngineCall(t.start - 0.1, t.start + 0.065, 8, 0, 8, 0, 0.1) for t in spans]
    fitted = times._fit_train(change(TimeModel(), beside=1.3), spans, calls)
    assert fitted["train"]["sequence"] == pytest.approx([0.1] * 9, abs=1e-4)


def test_answers_that_all_end_in_one_call_are_fitted_by_its_steps(tmp_path: Path) -> None:
    """The same run, but all answers of a call end in it, after 1 to 6 of its steps."""
    known = change(TimeModel(), step=0.004, row=2e-4, admit=3e-4)
    write_run(tmp_path, known)
    rng = random.Random(6)
    lane: list[list[Any]] = []
    for i in range(100):
        rows, steps, start = rng.randint(10, 200), rng.randint(1, 6), 100 + 0.3 * i
        seconds = steps * (known.step + known.row * rows) + known.admit * rows
        lane += [["prefill", start, start, rows], ["decode", start, start + seconds, rows, steps]]
    write_lines(tmp_path / "trace" / "generator-0.jsonl", *lane)
    found = times.fit(tmp_path)
    for name in ("step", "row", "admit"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.01), name
    assert (found.look, found.finish) == (TimeModel().look, TimeModel().finish), "no pauses"
    # what cannot be fitted
    with pytest.raises(ConfigError, match="no run directory"):
        times.fit(tmp_path / "none")
    write_run(tmp_path / "short", TimeModel())
    (tmp_path / "short" / "trace" / "generator-0.jsonl").write_text("")
    with pytest.raises(ConfigError, match="fit times to: 0 decode calls and 60 batches"):
        times.fit(tmp_path / "short")


def test_questions_are_answered_with_the_same_seeds() -> None:
    one, again, other = (vars(run(rough(), seed=s)) | {"took_s": 0} for s in (1, 1, 2))
    assert one == again != other
    c, known = config("staleness.max_lag=0", "generator.slots=8"), change(rough(), train=0.5)
    seeds = with_seeds(known, 2)

    def ask(questions: Any) -> list[dict[str, Any]]:
        return what_if.answer_questions(c, seeds, seeds(c), questions)

    limit, more, sync, together = ask({"limits": [2], "added_generators": [1], "syncs": [4.0]})
    assert limit["ratio"] > 1.2 and "A limit of 2 instead of 0" in limit["sentence"]
    assert "times the throughput" in limit["sentence"]
    assert more["outcome"]["generators"] == 2 and "2 generators instead of 1" in more["sentence"]
    # 1 ms of 0.7 s
    assert abs(sync["ratio"] - 1) < 0.02
    assert "about the same throughput" in sync["sentence"] and more["lag_range"] is None
    assert limit["lag_range"][0] <= limit["outcome"]["lag_mean"] <= limit["lag_range"][1]
    seeds = with_seeds(change(known, publish=0.4, swap=0.4), 2)
    (faster,) = ask({"syncs": [4.0]})
    assert together["outcome"]["generators"] == together["outcome"]["max_lag"] == 2
    assert "A limit of 2 and 2 generators and a weight sync 4 times" in together["sentence"]
    assert together["ratio"] > max(limit["ratio"], more["ratio"])
    assert f"a step takes {limit['step_ratio']:.2f} of its time" in limit["sentence"]
    seeds = with_seeds(change(BARE, train_tokens=16 * 64), 1)  # 2 x 0.64 and 0.4 s
    for question, seconds in (({"groups": [8]}, 3.36), ({"tokens": [32]}, 0.84)):
        assert ask(question)[0]["outcome"]["step_s"] == pytest.approx(seconds, rel=0.02)
    assert faster["ratio"] > 1.3 and faster["least"] <= faster["ratio"] <= faster["largest"]


def test_sides_of_equal_speed_leave_the_lag_open() -> None:
    """Where the learner is much the slower side, the lag is at the limit either way; where both
    take as long, 5 % of its speed move the lag."""
    c = config("staleness.max_lag=8", "generator.slots=8", "learner.steps=150")
    # seconds in which the generator writes a batch
    writing = simulate(c, change(rough(), train=1e-4)).step_s
    ranges = []
    for train in (3 * writing, writing):
        seeds = with_seeds(change(rough(), train=train), 1)
        (answer,) = what_if.answer_questions(c, seeds, seeds(c), {"limits": [8]})
        low, high = answer["lag_range"]
        ranges.append((high - low, "if the learner's speed is 5% off" in answer["sentence"]))
    (firm, unsaid), (open_, said) = ranges
    assert firm < 0.2 < open_ and said and not unsaid, ranges


def command(*words: str) -> tuple[int, str, str]:
    sets = "--set learner.steps=6 --set learner.groups=4 "
    sets += "--set evaluation.final_prompts=8 --set evaluation.ood_prompts=8"
    demo = str(ROOT / "configs" / "demo.toml")
    done = CliRunner().invoke(main, ["simulate", demo, *sets.split(), *words])
    return done.exit_code, done.stdout, done.stderr


def test_the_command(tmp_path: Path) -> None:
    page = tmp_path / "limits.html"
    words = "--limit 4 --more 1 --sync 2 --generators 1,100 --seeds 2 --time train=0.3 --json"
    code, out, _ = command(*words.split(), "--plot", str(page))
    found = json.loads(out)
    assert [a["outcome"]["max_lag"] for a in found["answers"]] == [4, 2, 2, 4]
    assert code == 0 and found["base"]["steps"] == 6
    assert [(o["generators"], o["max_lag"]) for o in found["sweep"]] == [
        (g, k) for g in (1, 100) for k in (0, 1, 2, 4, 8, 16)
    ]
    base, (asked, *_) = found["base"], found["answers"]
    assert found["tokens_per_s"] == base["tokens_per_s"] > 0
    assert found["idle_share"] == {x: base[f"idle_{x}"] for x in ("generator", "learner")}
    assert found["lag"] == {x: base[f"lag_{x}"] for x in ("mean", "p95", "max", "closed_form")}
    table = {(o["generators"], o["max_lag"]): o for o in found["sweep"]}
    for outcome in (base, asked["outcome"], *table.values()):
        del outcome["took_s"]  # all else is the same for the same seeds
    assert table[1, 2] == base and table[1, 4] == asked["outcome"]
    assert f"mean lag {table[1, 4]['lag_mean']:.2f}" in asked["sentence"]
    html = page.read_text()
    for text in ("Throughput against limit", *(a["sentence"] for a in found["answers"])):
        assert text in html
    code, out, _ = command("--seeds", "1")
    asked = ("A limit of 4 instead of 2", "2 generators instead of 1", "2 learner threads instead")
    for text in (*asked, "lag: mean"):
        assert code == 0 and text in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "1.5"], "--limit 1.5: a staleness limit is a whole number"),
        (["--generators", "0,5"], "from 1 to 10000"),
        (["--more", "-1"], "--more -1"),
        (["--sync", "nan"], "'--sync': nan is not a number"),
        (["--sync", "0"], "'--sync': 0.0 is not in the range x>0"),
        (["--treatments", "--deadline", "0"], "'--deadline': 0.0 is not in the range x>0"),
        (["--from", "/nowhere"], "does not exist"),
        (["--times", "/nowhere.toml"], "/nowhere.toml"),
        (["--time", "swap=fast"], "not a distribution"),
        (["--time", "cores=0"], "--time: cores: Expected `float` > 0.0; choose a number above 0"),
        (["--plot", "/nowhere/p.html"], "the directory /nowhere does not exist"),
        (["--set", "staleness.delay=1"], "staleness.delay: is not simulated"),
        (
            ["--limit", "1", "--set", "staleness.inject=2"],
            "below staleness.inject",
        ),
        (["--time", "failed=0.1", "--set", "reward.on_error='stop'"], "on_error"),
        (["--deadline", "4"], "--deadline: belongs to --treatments"),
        (["--treatments", "--deadline", "3"], "--deadline: belongs to sessions"),
        (["--treatments", "--set", "staleness.max_lag=inf"], "needs a fixed limit"),
        (["--treatments", "--set", "staleness.max_lag={auto='ess'}"], "needs a fixed limit"),
        (["--treatments", "--set", "staleness.inject=1"], "injected lag never exceeds its limit"),
        (["--treatments", "--set", "staleness.order='ticket'"], "each treatment sets its order"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str) -> None:
    code, _, err = command(*words)
    assert code == 2 and message in err and err.count("\n") == 1


# a call: 16 tokens of 10 ms, two decode calls of 8 steps
CALL = 0.16
BEAT = 0.08 + 1e-6  # what comes back while a decode call is under way waits for its end
KNOWN = change(BARE, lengths=16, calls=4, tool=0.5)
SESSIONS = ("agent.env='none:None'", "agent.max_tokens=64", "agent.sessions=256")
WHOLE = 4 * CALL + 3 * 0.5
TAIL = "pareto(0.1, 1.1, 20)"


def of(*sets: str) -> Config:
    return config(*SESSIONS, *sets)


def run_of(known: TimeModel, *sets: str, seed: int = 0) -> Any:
    return simulate(of(*sets), known, seed)


def test_a_session_is_its_calls_and_the_tools_between_them() -> None:
    o = run_of(KNOWN, "staleness.max_lag=0")
    assert o.step_s == pytest.approx(WHOLE + BARE.train, abs=3 * BEAT)  # type: ignore[operator]
    assert o.sample_p90_s == pytest.approx(WHOLE, abs=3 * BEAT) and o.cut_share == 0
    assert o.tokens == 20 * 16 * 64 and o.generated == o.tokens and o.lag_max == 0
    assert o.waited_share == pytest.approx(1 - 0.4 / o.step_s)
    one = run_of(change(KNOWN, calls=1), "staleness.max_lag=0")
    assert one.sample_p90_s == pytest.approx(CALL) and one.tokens == 20 * 16 * 16


def test_the_agents_bounds_end_a_session() -> None:
    three = run_of(KNOWN, "agent.max_calls=3", "staleness.max_lag=0")
    assert three.tokens == 20 * 16 * 48
    assert three.sample_p90_s == pytest.approx(3 * CALL + 1.0, abs=2 * BEAT)
    for most in (64, 40):  # the third call has 8 tokens left, and no fourth follows
        sets = (f"agent.max_tokens={most}", "generator.max_new_tokens=40")
        assert run_of(KNOWN, *sets).tokens == 20 * 16 * most


def test_a_deadline_cuts_in_the_tool_and_lets_a_call_end() -> None:
    """At 0.4 s the first tool is at work; at 0.7 s the second call, which ends at 0.82 s."""
    for deadline, tokens, lasts in ((0.4, 16, 0.4), (0.7, 32, 2 * CALL + 0.5)):
        o = run_of(KNOWN, f"agent.deadline_s={deadline}", "staleness.max_lag=0")
        assert o.tokens == 20 * 16 * tokens and o.cut_share == 1
        assert o.sample_p90_s == pytest.approx(lasts, abs=BEAT)
        assert o.step_s == pytest.approx(lasts + 0.4, abs=2 * BEAT)
    # one that ends by itself is not cut
    assert run_of(KNOWN, "agent.deadline_s=2.5", "staleness.max_lag=0").cut_share == 0


def test_the_gateways_sessions_bound_what_is_open_and_rows_what_is_drawn() -> None:
    """16 sessions a batch, 8 open at once: twice the time; 4 rows: calls wait for each other, not
    for the tools of others."""
    half = run_of(KNOWN, "staleness.max_lag=0", "agent.sessions=8")
    assert half.step_s == pytest.approx(2 * WHOLE + 0.4, abs=6 * BEAT)
    rows = run_of(KNOWN, "staleness.max_lag=0", "generator.slots=4")
    assert rows.step_s == pytest.approx(4 * 4 * CALL + 0.4, abs=6 * BEAT)
    # two generators share the gateway's sessions
    for sessions, turns in ((16, 1), (8, 2)):
        sets = (f"agent.sessions={sessions}", "generators=2")
        two = run_of(KNOWN, "staleness.max_lag=0", *sets)
        assert two.step_s == pytest.approx(turns * WHOLE + 0.4, abs=3 * turns * BEAT)


def test_each_call_is_drawn_with_the_newest_weights_and_keeps_its_version() -> None:
    """Whole sessions over several updates, each call at or after the version of the one before."""
    changed = of("staleness.max_lag=4", "learner.checkpoint_every=100")
    simulated = Simulation(changed, change(KNOWN, train=0.2), 0, evaluate=False)
    assert simulated.run()["lag_max"] <= 4
    several = 0
    for group in simulated.store.retained.values():
        for spans in (stored.trajectory.spans for stored in group.list_stored_samples()):
            assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
            assert spans[-1].end == 64
            labels = [span.label for span in spans]
            assert labels == sorted(labels) and len(labels) <= 8
            several += len(set(labels)) > 1
    assert several > 100


def test_sessions_whose_reward_fails_are_in_the_ledger() -> None:
    known = change(KNOWN, failed=0.02)
    sets = ("staleness.max_lag=2", "reward.on_error='drop'", "reward.error_budget=1.0")
    o = run_of(known, *sets, "generators=2")
    assert o.losses["failed"] > 0 and o.lag_max <= 2 and o.tokens == 20 * 16 * 64
    assert o.generated == o.tokens + sum(o.losses.values()) + o.left_over


def test_what_each_treatment_costs_where_tools_have_a_long_tail() -> None:
    late = change(KNOWN, tool=TAIL, train=0.1)
    rows = what_if.compare_treatments(of("staleness.max_lag=1"), with_seeds(late, 2))
    found = {row["name"]: row for row in rows}
    wait, mask, down, drop, cut = (
        found[name] for name in ("wait", "mask", "downweight", "drop", "deadline")
    )
    assert [row["lag_max"] for row in (wait, mask, drop, cut)] == [1] * 4 and down["lag_max"] > 1
    for row in rows:
        taken = [row[key] for key in ("dropped", "masked", "downweighted", "cut")]
        own = {"mask": 1, "downweight": 2, "drop": 0, "deadline": 3}.get(row["name"])
        assert all((share > 0) == (at == own) for at, share in enumerate(taken)), row
    assert wait["tokens_per_s"] < min(row["tokens_per_s"] for row in (mask, down, cut))
    assert wait["learner_idle"] > cut["learner_idle"]
    # a tenth of the sessions under `wait` pass its deadline
    assert cut["cut"] == pytest.approx(0.1, abs=0.03) and cut["deadline_s"] is not None
    again = what_if.compare_treatments(of("staleness.max_lag=1"), with_seeds(late, 2), 1.5)[-1]
    assert again["deadline_s"] == 1.5 and again["cut"] > cut["cut"] and wait["deadline_s"] == 600.0


def test_shares_are_the_ledgers_and_the_lags() -> None:
    late = change(KNOWN, tool=TAIL, train=0.1)
    staleness = ("staleness.max_lag=1", "staleness.on_exceed='downweight'")
    o = run_of(late, *staleness, "staleness.half_life=2")
    by_hand = sum(p * (1 - 0.5 ** (max(0, lag - 1) / 2)) for lag, p in o.lag_histogram.items())
    assert o.faded_share == pytest.approx(by_hand) and by_hand > 0
    o = run_of(late, "staleness.max_lag=1", "staleness.on_exceed='drop'")
    row = what_if.summarize_treatment(vars(o) | {"losses": o.losses | {"abandoned": 7}})
    assert row["dropped"] == pytest.approx((o.losses["dropped_stale"] + 7) / o.generated)
    o = run_of(late, "staleness.max_lag=1", "staleness.on_exceed='mask'")
    row = what_if.summarize_treatment(vars(o))
    assert row["masked"] == pytest.approx(o.losses["masked_stale"] / o.generated)


def test_answers_have_treatments_too_but_no_deadline() -> None:
    late = change(BARE, reward=TAIL)
    rows = what_if.compare_treatments(config("staleness.max_lag=1"), with_seeds(late, 1))
    assert [row["name"] for row in rows] == ["wait", "mask", "downweight", "drop"]
    assert all(row["deadline_s"] is None and row["cut"] == 0 for row in rows)
    text = what_if.make_table(what_if.TREATMENT_COLUMNS, rows).as_text().splitlines()
    assert text[1].split()[:2] == ["wait", f"{rows[0]['tokens_per_s']:,.0f}"]


def test_the_command_prints_them() -> None:
    words = as_options((*SESSIONS, "staleness.max_lag=1"))
    words += ["--no-evaluation", "--seeds", "1", "--time", "calls=3", "--time", f"tool={TAIL}"]
    code, out, _ = command(*words, "--treatments", "--json", "--deadline", "4")
    found = json.loads(out)["treatments"]
    assert not code and [row["name"] for row in found] == [*what_if.TREATMENTS]
    assert found[-1]["deadline_s"] == 4 and json.loads(out)["answers"] == []
    code, out, _ = command(*words, "--treatments")
    assert not code and "downweighted" in out and "deadline" in out
    text = (ROOT / "docs" / "simulate.md").read_text()  # every time is documented
    assert [name for name in TimeModel.__struct_fields__ if f"`{name}`" not in text] == []
