"""What drop, mask, downweight and no limit at all take, by the length of the answers: numbers by
hand, and the report of real runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_kit import Ended
from store_kit import sample, stale

from asyncrl.contract.versions import Label
from asyncrl.supervise.report import run_view
from buffer.ledger import LedgerSums, read_bins

pytestmark = pytest.mark.slow


def line(store: Any, name: str) -> dict[str, float]:
    return dict(store.sum_ledger()[name])


def test_mask_and_drop_say_how_long_the_answers_were() -> None:
    store, (a, b) = stale("mask", k=1)
    # 6 tokens, the first 3 two versions old
    store.deliver(sample(a, 0, (Label(1, 0), 3), (Label(1, 1), 2), (Label(1, 2), 1)), 0.0)
    groups, _ = store.ask(1, 2)
    assert groups and store.commit(2, Label(1, 3), "d3")
    assert read_bins(line(store, "masked_stale"), "upto_") == {8: 3}
    # two fresh answers of 4 before it
    assert read_bins(line(store, "trained"), "upto_") == {4: 8, 8: 3}
    store, (a, b) = stale("drop")
    store.deliver(sample(b, 0, (Label(1, 0), 17)), 0.0)
    store.deliver(sample(a, 0, (Label(1, 0), 1)), 0.0)
    assert store.ask(1, 2)[0] == []
    assert read_bins(line(store, "dropped_stale"), "upto_") == {1: 1, 32: 17}


def test_the_report_shows_each_length_with_its_shares() -> None:
    kept, lost = LedgerSums(), LedgerSums()
    for length in (4, 4, 9):
        kept.add(length, 1, length, 1.0, faded=length / 2 if length == 9 else 0.0)
    lost.add(7, 1, 16, 0.0)
    lines = {"trained": kept, "masked_stale": lost, "filtered": LedgerSums()}
    rows = run_view.build_length_ledger(
        {"ledger_lines": {name: sums.as_dict() for name, sums in lines.items()}}
    )
    assert rows == [
        ("completion length", "tokens", "trained", "masked_stale", "faded"),
        ("3 to 4", "8", "100.00%", "0.00%", "0.00%"),
        ("9 to 16", "16", "56.25%", "43.75%", "28.12%"),
    ]


@pytest.mark.parametrize(
    ("on_exceed", "limit"), [("drop", "1"), ("mask", "1"), ("downweight", "1"), ("pace", "inf")]
)
def test_real_runs_keep_what_each_choice_promises(
    on_exceed: str, limit: str, asyncrl: Callable[..., Ended]
) -> None:
    s = (
        asyncrl(
            "run",
            "learner.steps=12",
            "learner.groups=4",
            "learner.group_size=4",
            "evaluation.every=0",
            f"staleness.max_lag={limit}",
            f"staleness.on_exceed='{on_exceed}'",
            "name='x'",
        )
        .check()
        .json
    )
    ledger = s["ledger"]
    assert s["steps"] == 12
    assert sum(v for k, v in ledger.items() if k != "generated") == ledger["generated"]
    assert s["lag"]["max"] <= 1 or on_exceed in ("downweight", "pace")
    assert on_exceed == "mask" or ledger["masked_stale"] == 0
    assert on_exceed == "drop" or ledger["dropped_stale"] == ledger["abandoned"] == 0
    for name, x in s["ledger_lines"].items():
        if name != "lost_with_process":
            assert sum(read_bins(x, "upto_").values()) <= x["tokens"]
            assert name != "trained" or sum(read_bins(x, "upto_").values()) == x["tokens"]
    rows = run_view.build_length_ledger(
        json.loads((Path(s["run_dir"]) / "summary.json").read_text())
    )
    assert len(rows) > 1
    assert all(
        f">{row[0]}</td>" in (Path(s["run_dir"]) / "report.html").read_text() for row in rows[1:]
    )
