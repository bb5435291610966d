"""Take the annotated pictures of docs/watch.md: report, live page, samples and a comparison.

    python benchmarks/screenshots.py RUN COMPARISON

RUN: a finished run of configs/demo.toml.  COMPARISON: the directory of an `asyncrl compare`.  The
numbered marks are explained on the page.  Needs Chromium (`make browser`); draws into docs/img."""

from __future__ import annotations

import argparse
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from lib.results_file import ROOT
from playwright.sync_api import Locator, Page, sync_playwright

from asyncrl.transport.http_server import ListenAddress
from asyncrl.viewer.app import WatchApp

IMAGES = ROOT / "docs" / "img"
WIDTH, HEIGHT = 1100, 900
DRAW_MS = 1500  # until plots and fonts stand
COMPARISON = ("table", "ul", "ul >> nth=1", "table >> nth=1")
# the mark stands left above its element
MARK = """(element, number) => {
  const box = element.getBoundingClientRect(), mark = document.createElement("div");
  mark.textContent = number;
  mark.style.cssText = `position:absolute;z-index:99;left:${Math.max(box.x + scrollX - 13, 1)}px;` +
    `top:${Math.max(box.y + scrollY - 11, 1)}px;width:24px;height:24px;border-radius:12px;` +
    "background:#dc2626;color:white;font:bold 15px/24px sans-serif;text-align:center";
  document.body.append(mark);
}"""


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Yield the address of the live page of a run."""
    listener = ListenAddress().listen()
    app = WatchApp([run], token="pictures").build_application()
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/?token=pictures"
    finally:
        running.should_exit = True
        thread.join()


def shoot(page: Page, name: str, marked: Sequence[Locator]) -> None:
    """Mark the elements with 1, 2, ... and write docs/img/NAME.png."""
    page.wait_for_timeout(DRAW_MS)
    for number, element in enumerate(marked, 1):
        element.first.evaluate(MARK, number)
    page.screenshot(path=IMAGES / f"{name}.png")
    print(IMAGES / f"{name}.png")


def shoot_file(page: Page, path: Path, name: str, marked: Sequence[str]) -> None:
    page.goto(path.absolute().as_uri())
    # the path of the program that was started is of this machine
    page.locator("h1 + p").evaluate("p => p.textContent = p.textContent.replace(/\\/\\S+\\//, '')")
    shoot(page, name, [page.locator(selector) for selector in marked])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("comparison", type=Path)
    args = parser.parse_args()
    with sync_playwright() as play, served(args.run) as address:
        chromium = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = chromium.new_context(viewport={"width": WIDTH, "height": HEIGHT}).new_page()
        page.set_default_timeout(60_000)
        report = ["ul", ".cards", "figure.plot", "figure.plot details"]
        shoot_file(page, args.run / "report.html", "report", report)
        page.goto(address)
        page.locator(".plot svg.canvas").first.wait_for()
        overview = ["#pages", "#runs button", "#axis", "#main ul", ".cards", "figure.plot"]
        shoot(page, "watch", [page.locator(selector) for selector in overview])
        page.goto(address)
        page.get_by_role("button", name="samples", exact=True).click()
        page.get_by_label("color").select_option("log_ratio")
        page.get_by_label("sort").select_option("kl")
        page.locator(".token").first.wait_for()
        samples = [".filters input", ".filters select >> nth=3", "article .head", ".turn.model"]
        shoot(page, "samples", [page.locator(selector) for selector in samples])
        shoot_file(page, args.comparison / "report.html", "compare", COMPARISON)
        chromium.close()


if __name__ == "__main__":
    main()
