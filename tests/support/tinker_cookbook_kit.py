"""Unmodified recipes of tinker-cookbook, from an environment of their own, against a server."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from clients_kit import python_of
from tinker_kit import ServerProcess

from asyncrl.cli import main

MODEL = "Qwen/Qwen3-8B-Base"  # a name that the cookbook knows, whose renderer is role_colon
CONFIG = """\
name = "server"
runs = "{folder}"
[model]
path = "{folder}/Qwen/Qwen3-8B-Base"
[server]
port = 0
[sampling]
context = 3072
[losses]
stable_reinforce = "ppo"
[staleness]
max_lag = 2
unknown = "refuse"
"""
# tinker-cookbook 0.5.8 with an older client, and 0.6.1 with the server's
ENVIRONMENTS = ("cookbook", "cookbook-0.6")
# of math_rl, for a few seconds
ADDITIONS = (
    *("env=arithmetic", "eval_every=0", "save_every=0", "groups_per_batch=4", "group_size=4"),
    *("max_tokens=6", "learning_rate=1e-4"),
)


def start_server(folder: Path) -> ServerProcess:
    config = folder / "server.toml"
    config.write_text(CONFIG.format(folder=folder))
    return ServerProcess(config)


class Recipe:
    def __init__(self, server: ServerProcess, environment: str) -> None:
        self.server = server
        self.environment = environment
        self.folder = server.folder.parent
        self.known = self._models()

    def _models(self) -> set[Path]:
        return {note.parent for note in self.server.folder.glob("*/model.json")}

    def run(self, name: str, *options: str) -> list[dict[str, Any]]:
        log = self.folder / f"{name}{len(self.known)}"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [
                *(python_of(self.environment), "-m", f"tinker_cookbook.recipes.{name}"),
                *(f"model_name={MODEL}", f"base_url={self.server.url}", f"log_path={log}"),
                *options,
            ],
            cwd=self.folder,
            env=environment
            | {"TINKER_API_KEY": self.server.key, "TINKER_BASE_URL": self.server.url}
            | {"HF_HUB_OFFLINE": "1"}
            | {"HF_HOME": str(self.folder / "hf"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    def new_models(self) -> list[dict[str, Any]]:
        new = sorted(self._models() - self.known)
        asked = [["doctor", str(folder), "--json"] for folder in new]
        return [json.loads(CliRunner().invoke(main, words).output)["models"][0] for words in asked]

    def run_additions(self, largest_lag: int, *options: str) -> None:
        """Run three steps of math_rl, and check what the server knows of them."""
        rows = self.run("math_rl.train", *ADDITIONS, "max_steps=3", *options)
        assert len([row for row in rows if "optim/lr" in row]) == 3  # 0.6.1 adds a row of totals
        [model] = self.new_models()
        assert (model["version"], model["unknown_tokens"]) == (3, 0)
        assert model["lag_max"] <= largest_lag
        counted = model["ledger"]
        assert counted["trained_once"] >= 3 * 16
        assert counted["sampled"] == counted["never_trained"] + counted["trained_once"]
