"""`asyncrl simulate` with sessions, by hand in simulated time, and what each treatment of late ones
costs."""

import json
from typing import Any

import pytest
from simulate_kit import BARE, ROOT, config, simulate, with_seeds

from asyncrl import cli
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.simulate import what_if
from asyncrl.experiments.simulate.simulation import Simulation
from asyncrl.experiments.simulate.times import TimeModel, change

# a call: 16 tokens of 10 ms, two decode calls of 8 steps
CALL = 0.16
BEAT = 0.08 + 1e-6  # what comes back while a decode call is under way waits for its end
KNOWN = change(BARE, lengths=16, calls=4, tool=0.5)
SESSIONS = ("agent.env='none:None'", "agent.max_tokens=64", "agent.sessions=256")
WHOLE = 4 * CALL + 3 * 0.5
TAIL = "pareto(0.1, 1.1, 20)"


def of(*sets: str) -> Config:
    return config(*SESSIONS, *sets)


def run(known: TimeModel, *sets: str, seed: int = 0) -> Any:
    return simulate(of(*sets), known, seed)


def test_a_session_is_its_calls_and_the_tools_between_them() -> None:
    o = run(KNOWN, "staleness.max_lag=0")
    assert o.step_s == pytest.approx(WHOLE + BARE.train, abs=3 * BEAT)  # type: ignore[operator]
    assert o.sample_p90_s == pytest.approx(WHOLE, abs=3 * BEAT) and o.cut_share == 0
    assert o.tokens == 20 * 16 * 64 and o.generated == o.tokens and o.lag_max == 0
    assert o.waited_share == pytest.approx(1 - 0.4 / o.step_s)
    one = run(change(KNOWN, calls=1), "staleness.max_lag=0")
    assert one.sample_p90_s == pytest.approx(CALL) and one.tokens == 20 * 16 * 16


def test_the_agents_bounds_end_a_session() -> None:
    three = run(KNOWN, "agent.max_calls=3", "staleness.max_lag=0")
    assert three.tokens == 20 * 16 * 48
    assert three.sample_p90_s == pytest.approx(3 * CALL + 1.0, abs=2 * BEAT)
    # the third call has 8 tokens left, and no fourth follows
    assert run(KNOWN, "agent.max_tokens=64", "generator.max_new_tokens=40").tokens == 20 * 16 * 64
    short = run(KNOWN, "generator.max_new_tokens=40", "agent.max_tokens=40")
    assert short.tokens == 20 * 16 * 40


def test_a_deadline_cuts_in_the_tool_and_lets_a_call_end() -> None:
    """At 0.4 s the first tool is at work; at 0.7 s the second call, which ends at 0.82 s."""
    for deadline, tokens, lasts in ((0.4, 16, 0.4), (0.7, 32, 2 * CALL + 0.5)):
        o = run(KNOWN, f"agent.deadline_s={deadline}", "staleness.max_lag=0")
        assert o.tokens == 20 * 16 * tokens and o.cut_share == 1
        assert o.sample_p90_s == pytest.approx(lasts, abs=BEAT)
        assert o.step_s == pytest.approx(lasts + 0.4, abs=2 * BEAT)
    # one that ends by itself is not cut
    assert run(KNOWN, "agent.deadline_s=2.5", "staleness.max_lag=0").cut_share == 0


def test_the_gateways_sessions_bound_what_is_open_and_rows_what_is_drawn() -> None:
    """16 sessions a batch, 8 open at once: twice the time; 4 rows: calls wait for each other, not
    for the tools of others."""
    half = run(KNOWN, "staleness.max_lag=0", "agent.sessions=8")
    assert half.step_s == pytest.approx(2 * WHOLE + 0.4, abs=6 * BEAT)
    rows = run(KNOWN, "staleness.max_lag=0", "generator.slots=4")
    assert rows.step_s == pytest.approx(4 * 4 * CALL + 0.4, abs=6 * BEAT)
    # two generators share the gateway's sessions
    two = run(KNOWN, "staleness.max_lag=0", "agent.sessions=16", "generators=2")
    assert two.step_s == pytest.approx(WHOLE + 0.4, abs=3 * BEAT)
    assert run(
        KNOWN, "staleness.max_lag=0", "agent.sessions=8", "generators=2"
    ).step_s == pytest.approx(2 * WHOLE + 0.4, abs=6 * BEAT)


def test_each_call_is_drawn_with_the_newest_weights_and_keeps_its_version() -> None:
    """Sessions of 2.14 s over updates of 0.2 s: whole sessions, each call at or after the version
    of the one before."""
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


def test_generators_that_are_lost_lose_their_open_sessions_and_the_ledger_sums() -> None:
    known = change(KNOWN, lost_every=6.0, restart=0.5, failed=0.02)
    sets = ("staleness.max_lag=2", "reward.on_error='drop'", "reward.error_budget=1.0")
    o = run(known, *sets, "generators=2")
    assert o.losses["lost_with_process"] > 0 and o.lag_max <= 2
    assert o.tokens == 20 * 16 * 64
    assert o.generated == o.tokens + sum(o.losses.values()) + o.left_over


def test_what_each_treatment_costs_where_tools_have_a_long_tail() -> None:
    late = change(KNOWN, tool=TAIL, train=0.1)
    rows = what_if.compare_treatments(of("staleness.max_lag=1"), with_seeds(late, 2))
    found = {row["name"]: row for row in rows}
    wait, mask, down, drop, cut = (
        found[name] for name in ("wait", "mask", "downweight", "drop", "deadline")
    )
    assert [row["lag_max"] for row in (wait, mask, drop, cut)] == [1] * 4
    assert down["lag_max"] > 1
    for row in rows:
        taken = [row[key] for key in ("dropped", "masked", "downweighted", "cut")]
        own = {"mask": 1, "downweight": 2, "drop": 0, "deadline": 3}.get(row["name"])
        assert all((share > 0) == (at == own) for at, share in enumerate(taken)), row
    assert wait["tokens_per_s"] < min(row["tokens_per_s"] for row in (mask, down, cut))
    assert wait["learner_idle"] > cut["learner_idle"]
    # a tenth of the sessions under `wait` pass its deadline
    assert cut["cut"] == pytest.approx(0.1, abs=0.03) and cut["deadline_s"] is not None
    again = what_if.compare_treatments(of("staleness.max_lag=1"), with_seeds(late, 2), 1.5)[-1]
    assert again["deadline_s"] == 1.5 and again["cut"] > cut["cut"]
    assert wait["deadline_s"] == 600.0


def test_shares_are_the_ledgers_and_the_lags() -> None:
    late = change(KNOWN, tool=TAIL, train=0.1)
    staleness = ("staleness.max_lag=1", "staleness.on_exceed='downweight'")
    o = run(late, *staleness, "staleness.half_life=2")
    by_hand = sum(p * (1 - 0.5 ** (max(0, lag - 1) / 2)) for lag, p in o.lag_histogram.items())
    assert o.faded_share == pytest.approx(by_hand) and by_hand > 0
    o = run(late, "staleness.max_lag=1", "staleness.on_exceed='drop'")
    row = what_if.summarize_treatment(vars(o) | {"losses": o.losses | {"abandoned": 7}})
    assert row["dropped"] == pytest.approx((o.losses["dropped_stale"] + 7) / o.generated)
    o = run(late, "staleness.max_lag=1", "staleness.on_exceed='mask'")
    row = what_if.summarize_treatment(vars(o))
    assert row["masked"] == pytest.approx(o.losses["masked_stale"] / o.generated)


def test_answers_have_treatments_too_but_no_deadline() -> None:
    late = change(BARE, reward=TAIL)
    rows = what_if.compare_treatments(config("staleness.max_lag=1"), with_seeds(late, 1))
    assert [row["name"] for row in rows] == ["wait", "mask", "downweight", "drop"]
    assert all(row["deadline_s"] is None and row["cut"] == 0 for row in rows)
    text = what_if.make_table(what_if.TREATMENT_COLUMNS, rows).as_text().splitlines()
    assert [line.split()[0] for line in text] == ["treatment", "wait", "mask", "downweight", "drop"]
    assert len({len(line) for line in text}) == 1
    assert text[1].split()[1] == (f"{rows[0]['tokens_per_s']:,.0f}")


@pytest.mark.parametrize(
    ("sets", "deadline", "said"),
    [
        (["staleness.max_lag=inf"], None, "needs a fixed limit"),
        (["staleness.max_lag={auto='ess'}"], None, "needs a fixed limit"),
        (["staleness.inject=1"], None, "injected lag never exceeds its limit"),
        (["staleness.order='ticket'"], None, "each treatment sets its order"),
        ([], 3.0, "--deadline: belongs to sessions"),
        ([*SESSIONS], 0.0, "--deadline 0: give seconds above 0"),
    ],
)
def test_what_has_no_treatments(sets: list[str], deadline: float | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        what_if.check_treatments(config("staleness.max_lag=2", *sets), deadline)


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", str(ROOT / "configs" / "demo.toml"), "--no-evaluation", "--seeds", "1"]
    for item in (*SESSIONS, "learner.steps=4", "staleness.max_lag=1"):
        words += ["--set", item]
    words += ["--time", "calls=3", "--time", f"tool={TAIL}", "--treatments"]

    def said(*more: str) -> tuple[int, Any]:
        code = cli.main([*words, *more])
        return code, capsys.readouterr()

    code, out = said("--json", "--deadline", "4")
    found = json.loads(out.out)["treatments"]
    assert not code and [row["name"] for row in found] == [*what_if.TREATMENTS]
    assert found[-1]["deadline_s"] == 4 and json.loads(out.out)["answers"] == []
    code, out = said()
    assert not code and "downweighted" in out.out and "deadline" in out.out
    words.remove("--treatments")
    with pytest.raises(SystemExit):
        said("--deadline", "4")
    assert "--deadline: belongs to --treatments" in capsys.readouterr().err
