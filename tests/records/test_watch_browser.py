"""The page of `asyncrl watch`, and the report, in the installed Chromium: clicked through."""

import copy
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from browser_kit import dom
from click.testing import CliRunner
from playwright.sync_api import Page, sync_playwright
from process_kit import SMALL, TEXTS, Ended
from run_kit import finish, let_go, start, wait_until

from asyncrl.cli import main
from asyncrl.records.metrics import BUCKETS, METRICS
from asyncrl.supervise.report import plots, run_view
from asyncrl.transport.http_server import ListenAddress
from asyncrl.viewer.app import WatchApp

pytestmark = pytest.mark.slow

PAGES = ("overview", "staleness", "learner", "processes", "ledger", "samples", "config", "logs")
MARKUP = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
PATIENCE_MS = 120_000


@pytest.fixture
def run_dir(gain: Ended, tmp_path: Path) -> Path:
    """A copy of a real run in which a sample, a log and the run's name hold markup.

    The sample is a session of two training sequences; an environment's token begins the second."""
    path = tmp_path / "<b>gain"
    shutil.copytree(gain.json["run_dir"], path)
    samples = path / "token_samples.jsonl"
    row = json.loads(samples.read_text().splitlines()[-1])
    row["sequences"][0]["pieces"][0] = row["sequences"][0]["prompt"] = MARKUP
    later = copy.deepcopy(row["sequences"][0])
    later["versions"] = [[later["versions"][0][0], 1, len(later["tokens"])]]
    row["sequences"].append(later)
    row["parts"] = {MARKUP: 1.0}
    row["reward"], row["calls"] = 1e6, 2
    with samples.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with next(path.rglob("learner.log")).open("a") as file:
        file.write(MARKUP + "\n")
    return path


@pytest.fixture
def address(run_dir: Path) -> Iterator[str]:
    listener = ListenAddress().listen()
    app = WatchApp([run_dir], token="secret").build_application()
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(timeout=120)


@pytest.fixture
def page() -> Iterator[Page]:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "Chromium is missing: `make browser` installs it or says how"
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        opened = chromium.new_context(color_scheme="dark").new_page()
        opened.set_default_timeout(PATIENCE_MS)
        yield opened
        chromium.close()


def test_every_page_opens_without_errors_or_foreign_scripts(address: str, page: Page) -> None:
    errors: list[str] = []
    hosts: set[str] = set()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(f"{address}/?token=secret")
    page.locator(".card").first.wait_for()
    assert "token" not in page.url
    for name in PAGES:
        page.get_by_role("button", name=name, exact=True).click()
        ready = {
            "processes": "table",
            "ledger": "table",
            "samples": ".token",
            "config": "pre",
            "logs": "#log",
        }.get(name, ".plot svg.canvas")
        page.locator(ready).first.wait_for()
        assert page.locator("#error").is_hidden(), name
    page.get_by_role("button", name="samples", exact=True).click()
    page.get_by_label("sort").select_option("reward")
    page.get_by_text(MARKUP).first.wait_for()
    assert page.evaluate("window.ran") is None
    title = page.locator(".token").first.get_attribute("title") or ""
    assert "version" in title and "advantage" in title and "log_ratio" in title
    session = page.locator("article.sample").filter(has_text=MARKUP).first
    turns = session.locator(".turn .who").all_inner_texts()
    environment = "from the environment, not sampled"
    assert turns == ["prompt", "response", "prompt", environment, "response"]
    assert errors == [] and hosts == {address.removeprefix("http://")}


def test_a_plot_shows_values_zooms_and_hides_a_line(address: str, page: Page) -> None:
    page.goto(f"{address}/?token=secret")
    figure = page.locator("figure", has_text="Held-out reward").first
    canvas = figure.locator("svg.canvas")
    canvas.wait_for()
    page.keyboard.press("p")  # no update draws it again meanwhile
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    left, middle, right = (box["x"] + share * box["width"] for share in (0.4, 0.5, 0.7))
    top = box["y"] + box["height"] / 2
    page.mouse.move(middle, top)
    assert "training batch" in figure.locator(".tip").inner_text()
    marks = figure.locator(".tick").all_inner_texts()
    page.mouse.move(left, top)
    page.mouse.down()
    page.mouse.move(right, top, steps=3)
    page.mouse.up()
    assert figure.locator(".tick").all_inner_texts() != marks, "zoomed"
    page.mouse.dblclick(middle, top)
    assert figure.locator(".tick").all_inner_texts() == marks, "back"
    shown = figure.locator("path.line").count()
    figure.get_by_role("button", name="training batch").click()
    assert figure.locator("path.line").count() == shown - 1


def test_a_phone_scrolls_one_way_and_keys_change_the_page(address: str, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{address}/?token=secret")
    page.locator(".plot svg.canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    # the whole menu is visible, and the theme is the system's until the reader chooses one
    assert page.evaluate(
        "[...document.querySelectorAll('nav button')].every("
        "b => b.getBoundingClientRect().right <= window.innerWidth)"
    )
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        page.reload()
        shown = page.evaluate("document.documentElement.classList.contains('dark')")
        assert shown is (scheme == "dark")
    dark: Any = page.evaluate("document.documentElement.classList.contains('dark')")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.classList.contains('dark')") is not dark
    page.keyboard.press("5")
    page.locator("table").first.wait_for()
    assert page.url.endswith("#ledger")
    page.keyboard.press("7")
    page.locator("pre strong", has_text="model.path = ").first.wait_for()


def test_the_page_lives_beside_the_run_and_ends_with_it(tmp_path: Path, small_model: Path) -> None:
    process = start(tmp_path, small_model, *SMALL, "name=R", "--watch", hold=4)
    stderr = tmp_path / "stderr"
    (url,) = wait_until(
        lambda: re.findall(r"^watch it at (http://127\S+token=\S+)$", stderr.read_text(), re.M),
        process,
    )
    client = httpx2.Client(base_url=url.partition("/?")[0], timeout=600)
    assert client.get("/api/runs").status_code == 403
    assert client.get(url, follow_redirects=True).status_code == 200
    seen = wait_until(
        lambda: [run for run in client.get("/api/runs").json() if run["rows"] >= 3], process
    )
    assert (seen[0]["id"], seen[0]["state"], seen[0]["steps"]) == ("R", "running", 6)
    alive = client.get("/api/processes").json()["R"]
    assert {"learner", "buffer"} <= {row["name"] for row in alive if row["alive"]}
    let_go(tmp_path)
    summary = finish(process, tmp_path)
    assert summary["steps"] == 6 and f"asyncrl watch {summary['run_dir']}" in stderr.read_text()
    with pytest.raises(httpx2.ConnectError):
        client.get("/api/runs")


def test_slurm_and_watch_are_refused_together() -> None:
    done = CliRunner().invoke(main, ["run", "demo", "--on", "slurm", "--watch"])
    assert done.exit_code == 2 and "asyncrl watch RUN_DIR" in done.stderr


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
    for title in TEXTS["the_browser_shows_the_run"]:
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
    shifted = {n: [(7919 * s + i) % 997 / 997 for s in range(1300)] for i, n in enumerate(whole)}
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1300):
            row = {name: values[step] for name, values in shifted.items()}
            file.write(json.dumps({"step": step, "t": 0.3 * step, **row}) + "\n")
    page = run_view.write_report(run_dir).read_text()
    assert len(page.encode()) < 2 * 2**20, "goal: below 2 MB, however long the run"
    links = set(re.findall(r"https?://[^\s\"']+", page)) - {"http://www.w3.org/2000/svg"}
    assert links == set(), "nothing is fetched from elsewhere"
    for plots_of in plots.PAGES.values():
        for plot in plots_of:
            assert json.dumps(plot.title) in page, plot.title
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
