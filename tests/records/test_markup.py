"""Markup in prompts, completions, names, reasons and directories never runs on a page.

The pages of a run, of two runs, of a simulation and of a comparison are opened in a real browser.
Terminals get no escape codes."""

import html
import json
import shutil
from pathlib import Path

import pytest
from browser_kit import dom
from process_kit import ROOT, Ended, run_cli
from warm_run_kit import make_record

from asyncrl.config import load
from asyncrl.experiments.compare import page as compare_page
from asyncrl.experiments.compare.analysis import analyze
from asyncrl.experiments.compare.grid import CellResult
from asyncrl.experiments.simulate import what_if
from asyncrl.records import page_kit

pytestmark = pytest.mark.slow

RAN = "document.documentElement.setAttribute('ran','1')"
IMAGE = f'<img src=x onerror="{RAN}">'
# what an agent, a prompt file or a reward function can write
PLANTED = (
    IMAGE,
    f"<script>{RAN}</script>",
    f"</script><script>{RAN}</script>",
    f"</code></pre><svg onload={RAN}>",
    "<!--<script>",
    "\x1b]0;forged\x07\x1b[2J\x1b[31m",
)
ALL = " ".join(PLANTED)


def ran(document: str) -> bool:
    return 'ran="1"' in document[: document.index(">", document.index("<html")) + 1]


@pytest.fixture
def run(gain: Ended, tmp_path: Path) -> Path:
    """A real run with markup in completions, prompts, names and reasons, and in its own name."""
    run_dir = tmp_path / f"run {IMAGE}".replace("/", "")
    shutil.copytree(gain.json["run_dir"], run_dir)
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"prompt": f"prompt {ALL}", "text": f"answer {ALL}", "parts": {ALL: 1.0}}
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in metrics:
        row[f"reward/{ALL}"] = 0.5
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["signs"] = [{"name": "planted", "said": f"sign {ALL}", "try_this": ALL}]
    summary["planted"] = ALL
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (run_dir / "command").write_text(f"asyncrl run {ALL}")
    return run_dir


def test_the_check_can_fail(tmp_path: Path) -> None:
    for number, text in enumerate(PLANTED[:2]):
        page = tmp_path / f"{number}.html"
        page.write_text(f"<!doctype html><html><body>{text}</body></html>")
        assert ran(dom(page, tmp_path / "profile")), text


def test_the_pages_show_markup_and_run_none(run: Path, tmp_path: Path) -> None:
    done = run_cli("report", str(run))
    assert done.code == 0 and "\x1b" not in done.out + done.err, done.err
    document = dom(run / "report.html", tmp_path / "profile")
    assert not ran(document)
    for where in ("prompt", "sign", "asyncrl run"):
        assert f"{where} {html.escape(IMAGE, quote=False)}" in document, where
    assert "<h1>run &lt;img" in document.replace("\n", ""), "the directory's name"
    inside = document.partition('id="summary">')[2].partition("</script>")[0]
    assert json.loads(inside)["planted"] == ALL, "the element holds all that was put in it"
    other = shutil.copytree(run, tmp_path / f"b {IMAGE}".replace("/", ""))
    page = tmp_path / "diff.html"
    done = run_cli("diff", str(run), str(other), "--html", str(page))
    assert done.code in (0, 1) and "\x1b" not in done.out + done.err, done.err
    document = dom(page, tmp_path / "profile")
    assert not ran(document) and "&lt;img src=x" in document
    simulated = tmp_path / "simulate.html"
    empty = {"times": ALL, "limited_by": ALL, "sweep": [], "answers": [{"sentence": ALL}]}
    what_if.write_page(simulated, ALL, empty, f"# {ALL}")
    curve = [{"version": n + 1, "t": 1.0, "reward/mean": 0.5} for n in range(4)]
    record = make_record([[0.0, 4.0], [0.4, 0.9]], curve, ood=[[0.0, 4.0], [0.4, 0.1]])
    config = load.load(ROOT / "configs" / "demo.toml", ["learner.steps=4"])
    arms = [f"a {IMAGE}", f"b {IMAGE}"]  # a label is a directory's name too
    cells = [CellResult(arm, 0, record, config) for arm in arms]
    found = analyze(cells, dict.fromkeys(arms, config))
    settings = [(arm, ALL, ALL) for arm in arms]
    compared = compare_page.write(tmp_path, ALL, cells, found, settings, config)
    for page in (simulated, compared):
        document = dom(page, tmp_path / "profile")
        assert not ran(document), page
        assert html.escape(IMAGE, quote=False) in document, page
    inside = str(page_kit.embed_json({"a": ALL}))
    assert "<" not in inside and json.loads(inside) == {"a": ALL}
