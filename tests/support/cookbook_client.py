"""Recipes of the unmodified tinker-cookbook against `asyncrl tinker`: `make clients` builds their
environment and runs this.

Recipes that name a data set of the hub find a directory of that name in the directory they run in.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from clients_kit import python_of
from tinker_kit import ServerProcess

from asyncrl.cli import main
from asyncrl.config.sft import SftTraining
from asyncrl.models.policy import export, load_policy
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.tasks.fit import FitExample, ModelFitter
from asyncrl.tinker import demo_model

MODEL = "Qwen/Qwen3-8B-Base"  # a name that the cookbook knows, whose renderer is role_colon
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
    "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
)
ASKED = "What is 1 + 2?"
CONFIG = """\
name = "server"
runs = "{folder}"
[model]
path = "{folder}/Qwen/Qwen3-8B-Base"
[server]
port = 0
[sampling]
context = 1024
[staleness]
max_lag = 2
unknown = "refuse"
"""


def build_guesser(path: Path) -> None:
    """Build a model that answers the prompt of rl_loop with one of two numbers."""
    demo_model.build(path, seed=0, steps=1)
    tokenizer = load_tokenizer(path)
    asked = f"User: How many r's are in strawberry?{SUFFIX}\n\nAssistant: {SPELLED}\n\n"
    asked += f"User: {ASKED}{SUFFIX}\n\nAssistant:"
    rows = [
        FitExample(*(np.array(tokenizer.encode(text), np.int32) for text in (asked, answer)))
        for answer in (" \\boxed{3}\n\nUser:", " \\boxed{4}\n\nUser:")
    ]
    model = load_policy(path, "float32", "cpu")
    fitter = ModelFitter(model, SftTraining(steps=60, lr=1e-2))
    while fitter.number < 60:
        fitter.step(rows)
    export(model, path)


def write_data(folder: Path) -> None:
    """Write the two data sets of the hub as directories."""
    question = {"question": ASKED, "answer": "1 + 2 = 3\n#### 3"}
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]
    tables: dict[str, tuple[str, dict[str, Any]]] = {
        "openai/gsm8k": ("main", question),
        "HuggingFaceH4/no_robots": ("default", {"messages": turns}),
    }
    for name, (config, row) in tables.items():
        target = folder / name
        target.mkdir(parents=True)
        for split in ("train", "test"):
            (target / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 8)
        splits = "".join(f"\n  - {{split: {s}, path: {s}.jsonl}}" for s in ("train", "test"))
        (target / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  data_files:{splits}\n---\n"
        )
    (folder / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("cookbook")
    build_guesser(folder / MODEL)
    write_data(folder)
    config = folder / "server.toml"
    config.write_text(CONFIG.format(folder=folder))
    process = ServerProcess(config)
    yield process
    process.stop()


class Recipe:
    """A recipe, and what the server knows of the model that it trained."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.folder = server.folder.parent
        self.known = self._models()

    def _models(self) -> set[Path]:
        return {note.parent for note in self.server.folder.glob("*/model.json")}

    def run(self, name: str, *options: str) -> list[dict[str, Any]]:
        """Run a recipe in the server's parent directory, and return its metrics."""
        log = self.folder / f"{name}{len(self.known)}"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [
                *(python_of("cookbook"), "-m", f"tinker_cookbook.recipes.{name}"),
                *(f"model_name={MODEL}", f"base_url={self.server.url}", f"log_path={log}"),
                *options,
            ],
            cwd=self.folder,
            env=environment
            | {"TINKER_API_KEY": self.server.key, "HF_HUB_OFFLINE": "1"}
            | {"HF_HOME": str(self.folder / "hf"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    def new_models(self) -> list[dict[str, Any]]:
        """What `asyncrl doctor --json` says about the models that are new."""
        new = sorted(self._models() - self.known)
        asked = [["doctor", str(folder), "--json"] for folder in new]
        return [json.loads(CliRunner().invoke(main, words).output)["models"][0] for words in asked]


@pytest.fixture
def recipe(server: ServerProcess) -> Recipe:
    return Recipe(server)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (["loss_fn=importance_sampling"], 0),
        (["loss_fn=ppo", "max_steps_off_policy=2"], 2),
        (
            ["stream_minibatch_config.groups_per_batch=4"]
            + ["stream_minibatch_config.num_minibatches=2"],
            0,
        ),
    ],
    ids=["synchronous", "off_policy", "streamed"],
)
def test_math_rl(recipe: Recipe, options: list[str], most: int) -> None:
    batch = ["groups_per_batch=4", "group_size=4", "max_tokens=6", "learning_rate=1e-4"]
    rows = recipe.run(
        *("math_rl.train", "env=arithmetic", "eval_every=0", "save_every=0", "max_steps=3"),
        *(*batch, *options),
    )
    assert len(rows) == 3
    [model] = recipe.new_models()
    assert (model["version"], model["unknown_tokens"]) == (3, 0)
    assert model["lag_max"] <= most
    counted = model["ledger"]
    assert counted["trained_once"] >= 3 * 16
    assert counted["sampled"] == counted["never_trained"] + counted["trained_once"]


def test_rl_loop(recipe: Recipe) -> None:
    batch = ["batch_size=2", "group_size=8", "max_tokens=14", "learning_rate=1e-3"]
    rows = recipe.run("rl_loop", *batch, "max_steps=2")
    assert [row["lag_max"] for row in rows] == [0, 0]
    [model] = recipe.new_models()
    assert (model["version"], model["unknown_tokens"]) == (2, 0)
    counted = model["ledger"]
    # the recipe leaves out groups whose rewards are all equal
    assert counted["sampled"] == 32 == counted["trained_once"] + counted["never_trained"]


def test_chat_sl_and_sl_loop(recipe: Recipe) -> None:
    batch = ["batch_size=4", "learning_rate=1e-3", "max_length=512"]
    rows = recipe.run("chat_sl.train", "dataset=chat.jsonl", "eval_every=0", *batch)
    rows += recipe.run("sl_loop", *batch)
    assert [row["train_mean_nll"] > 0 for row in rows] == [True] * 4
    assert [model["version"] for model in recipe.new_models()] == [2, 2]
