"""The environment of tinker-cookbook, which has an older client, against `asyncrl tinker`."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from clients_kit import python_of
from process_kit import ROOT
from tinker_cookbook_kit import ENVIRONMENTS, MODEL, Recipe, start_server

from asyncrl.tinker import demo_model

pytestmark = pytest.mark.slow
CLIENT = "tests/tinker_server/test_tinker_client.py"


def test_an_older_client_passes_the_same_tests() -> None:
    """The server keeps its own version of the messages."""
    [older] = re.findall(r"^tinker==(.*)$", (ROOT / "requirements/cookbook.txt").read_text(), re.M)
    assert older != version("tinker")
    python = python_of("cookbook")
    shown = "import tinker, sys; print(tinker.__version__)"
    said = subprocess.run([python, "-c", shown], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == older
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", CLIENT],
        cwd=ROOT,
        env=os.environ | {"TINKER_SERVER_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def test_recipes_train_off_policy(tmp_path: Path) -> None:
    """Of both versions of the cookbook, with the loss that each chooses."""
    demo_model.build(tmp_path / MODEL, seed=0, steps=1)
    server = start_server(tmp_path)
    try:
        for environment in ENVIRONMENTS:
            Recipe(server, environment).run_additions(2, "max_steps_off_policy=2")
    finally:
        server.stop()
    assert "this server computes ppo" in (server.folder / "logs" / "server.log").read_text()
