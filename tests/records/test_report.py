"""The report is opened in a real browser, which runs its scripts; the numbers are read from the
page that it built."""

import json
import re
import shutil
from pathlib import Path

import pytest
from browser_kit import dom
from process_kit import Ended

from asyncrl.records.metrics import BUCKETS, METRICS
from asyncrl.supervise.report import plots, run_page

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
    assert html.count('class="canvas"') >= 11, "every plot was drawn by the browser"
    for title in (
        "Held-out reward",
        "Lag of trained tokens",
        "Effective sample size",
        "Entropy",
        "Completion length",
        "Throughput",
        "Idle share",
        "Where generated tokens ended, so far",
    ):
        assert f"<figcaption><b>{title}</b>" in html, title
    assert html.index('id="advice"') < html.index('class="card"')
    inside = re.search(r'id="summary">(.*?)</script>', html, re.S)
    assert inside and json.loads(inside.group(1))["ledger"] == summary["ledger"]
    colored = r'<span class="token[^"]*" style="background:rgba\([^"]+\)" title="[^"]*lag \d'
    assert re.search(colored, html), "tokens are colored by their lag"
    for lane in ("learner", "generator-0"):
        assert re.search(rf'class="tick lane"[^>]*>{lane}<', html), f"no lane {lane}"


def test_the_report_of_a_long_run_is_one_small_file(gain: Ended, tmp_path: Path) -> None:
    run_dir = tmp_path / "long"
    shutil.copytree(gain.json["run_dir"], run_dir)
    whole = [*METRICS, *(f"by_lag/{kind}_{bucket}" for kind in ("ess", "k3") for bucket in BUCKETS)]
    shifted = {
        name: [(7919 * step + i) % 997 / 997 for step in range(1300)]
        for i, name in enumerate(whole)
    }
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1300):
            row = {name: values[step] for name, values in shifted.items()}
            file.write(json.dumps({"step": step, "t": 0.3 * step, **row}) + "\n")
    page = run_page.write(run_dir).read_text()
    assert len(page.encode()) < 2 * 2**20, "goal: below 2 MB, however long the run"
    links = set(re.findall(r"https?://[^\s\"']+", page)) - {"http://www.w3.org/2000/svg"}
    assert links == set(), "nothing is fetched from elsewhere"
    for plots_of in plots.PAGES.values():
        for plot in plots_of:
            assert json.dumps(plot.title) in page, plot.title


def test_both_sides_were_busy_at_once(gain: Ended) -> None:
    """The timeline's claim, from the spans themselves: the learner trained while the generator
    decoded."""
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
