"""Every page of `asyncrl watch` in Chromium on a real Tinker server, while it serves and after."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, sync_playwright
from run_kit import wait_until
from tinker import types
from tinker_kit import ServerProcess, draw, policy_datum, write_config

from asyncrl.cli import main
from asyncrl.supervise import tinker_status

pytestmark = pytest.mark.slow
PATIENCE_MS = 120_000
# page -> what of it shows that it is drawn
PAGES = {
    "overview": ".plot svg.canvas",
    "staleness": ".plot svg.canvas",
    "learner": ".plot svg.canvas",
    "processes": "td:has-text('sampling is running')",
    "ledger": "td:has-text('trained once')",
    "samples": ".token",
    "config": "pre:has-text('staleness.max_lag = 0')",
    "logs": "#log:has-text('a lag of 1, and staleness.max_lag = 0')",
}


def train(server: ServerProcess) -> None:
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        sequences = draw(client.save_weights_and_get_sampling_client().result(), 4)
        for place in (0, 2):
            data = [policy_datum(sequence) for sequence in sequences[place : place + 2]]
            client.forward_backward(data, "ppo")
            step = client.optim_step(types.AdamParams(learning_rate=1e-3)).future()
            assert (step.exception(60) is None) == (place == 0)


def click_through(page: Page, address: str, ready: dict[str, str]) -> None:
    page.goto(address)
    for name, shown in ready.items():
        page.get_by_role("button", name=name, exact=True).click()
        page.locator(shown).first.wait_for()
        assert page.locator("#error").is_hidden(), name


def doctor(folder: Path) -> str:
    return CliRunner().invoke(main, ["doctor", str(folder)]).output


def test_every_page_shows_a_server_and_then_its_end(tmp_path: Path) -> None:
    server = ServerProcess(write_config(tmp_path), "staleness.max_lag=0")
    words = [sys.executable, "-m", "asyncrl.cli", "watch", str(server.folder), "--port", "0"]
    watch = subprocess.Popen([*words, "--no-token"], stdout=subprocess.PIPE, text=True)
    try:
        assert watch.stdout is not None
        address = watch.stdout.readline().strip()
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        assert browser, "Chromium is missing: `make browser` installs it or says how"
        with sync_playwright() as play:
            chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            page = chromium.new_page()
            page.set_default_timeout(PATIENCE_MS)
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
            page.goto(address)
            page.get_by_text("No run has begun here yet").wait_for()
            train(server)
            page.get_by_text("version 1 running").wait_for()
            click_through(page, address, PAGES)
            assert f"the server is running at {server.url}" in doctor(server.folder)
            [sampling] = (
                x for x in tinker_status.describe_processes(server.folder) if "sam" in x["name"]
            )
            os.kill(int(sampling["said"].rpartition(" ")[2].rstrip(")")), signal.SIGKILL)
            wait_until(lambda: "sampling (process" in doctor(server.folder), server.process)
            server.stop()
            page.get_by_text("version 1 stopped").wait_for()
            click_through(page, address, PAGES | {"processes": "td:has-text('was asked to end')"})
            shown = doctor(server.folder)
            assert "the server is not running" in shown and "server (process" in shown
            assert "4 sampled = 2 never trained + 2 once + 0 more often" in shown and errors == []
            chromium.close()
    finally:
        for process in (watch, server.process):
            process.send_signal(signal.SIGINT)
            process.wait(60)
