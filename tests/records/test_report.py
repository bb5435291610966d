"""The report is opened in a real browser, which runs its scripts; the numbers are read from the
page that it built.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser_kit import dom
from process_kit import Ended

pytestmark = pytest.mark.slow


def text_of(html: str, id_: str) -> str:
    found = re.search(rf'id="{id_}">([^<]*)<', html)
    assert found, f"no element {id_}"
    return found.group(1)


def test_the_browser_shows_the_run(gain: Ended, tmp_path: Path) -> None:
    summary = gain.json
    html = dom(Path(summary["run_dir"]) / "report.html", tmp_path)
    assert text_of(html, "heldout-end") == f"{summary['heldout_end']:.3f}"
    assert text_of(html, "lag-mean") == f"{summary['lag']['mean']:.2f}"
    assert text_of(html, "steps") == "40"
    assert html.count('class="main-svg"') >= 11, "every plot was drawn by the browser"
    for title in (
        "Accuracy",
        "Lag of trained tokens",
        "Effective sample size",
        "Entropy",
        "Completion length",
        "Throughput",
        "Idle share",
    ):
        assert re.search(rf'class="gtitle"[^>]*>{title}<', html), title
    inside = re.search(r'id="summary">(.*?)</script>', html, re.S)
    assert inside and json.loads(inside.group(1))["ledger"] == summary["ledger"]
    for lane in ("learner", "generator-0"):
        assert re.search(rf'class="ytick"[^>]*>\s*<text[^>]*>{lane}', html), (
            f"no lane {lane} in the timeline"
        )


def test_both_sides_were_busy_at_once(gain: Ended) -> None:
    """The timeline's claim, from the spans themselves: the learner trained while the generator
    decoded.
    """
    events = json.loads((Path(gain.json["run_dir"]) / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}

    def spans(process: str, name: str) -> list[tuple[float, float]]:
        return sorted(
            (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["ph"] == "X" and names[e["pid"]] == process and e["name"] == name
        )

    decoding, training = spans("generator-0", "decode"), spans("learner", "train")
    both = sum(any(c < b and a < d for c, d in decoding) for a, b in training)
    # how long is the machine's affair: either side may stand still while the other works
    assert len(training) >= 40 and both > 0.5 * len(training), f"{both} of {len(training)}"
