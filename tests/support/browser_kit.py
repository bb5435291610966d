"""Open a page in the installed Chromium and return what its scripts made of it."""

import shutil
import subprocess
from pathlib import Path

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=20000",
]


def dom(page: Path, profile: Path) -> str:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "Chromium is missing: `make browser` installs it or says how"
    argv = [browser, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.resolve().as_uri()]
    return subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True).stdout
