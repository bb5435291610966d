"""Recipes of the unmodified tinker-cookbook against `asyncrl tinker`: `make clients` builds their
environment and runs this.

Recipes that name a data set of the hub find a directory of that name in the directory they run in.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_cookbook_kit import ENVIRONMENTS, MODEL, Recipe, start_server
from tinker_kit import ServerProcess

from asyncrl.config.sft import SftTraining
from asyncrl.models.policy import export, load_policy
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.tasks.fit import FitExample, ModelFitter
from asyncrl.tinker import demo_model

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
    "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
)
ASKED = "What is 1 + 2?"


def build_guesser(path: Path) -> None:
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
    rubric = {"rubric_str": "It is a number.", "extraction_regex": "<score>(.*?)</score>"}
    rubric |= {"grader_output_format_instruction": "Answer <score>1</score> or <score>0</score>."}
    graded = {"convo": turns[:1], "rubric_items": [rubric]}
    (folder / "rubric.jsonl").write_text((json.dumps(graded) + "\n") * 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("cookbook")
    build_guesser(folder / MODEL)
    write_data(folder)
    process = start_server(folder)
    yield process
    process.stop()


@pytest.fixture(params=ENVIRONMENTS)
def recipe(server: ServerProcess, request: pytest.FixtureRequest) -> Recipe:
    return Recipe(server, request.param)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ([], 0),
        (["max_steps_off_policy=2"], 2),
        (
            ["stream_minibatch_config.groups_per_batch=4"]
            + ["stream_minibatch_config.num_minibatches=2"],
            0,
        ),
    ],
    ids=["synchronous", "off_policy", "streamed"],
)
def test_math_rl(recipe: Recipe, options: list[str], most: int) -> None:
    recipe.run_additions(most, *options)


def test_rl_loop(recipe: Recipe) -> None:
    batch = ["batch_size=2", "group_size=8", "max_tokens=14", "learning_rate=1e-3"]
    assert [row["lag_max"] for row in recipe.run("rl_loop", *batch, "max_steps=2")] == [0, 0]
    [model] = recipe.new_models()
    assert (model["version"], model["unknown_tokens"]) == (2, 0)
    counted = model["ledger"]
    # the recipe leaves out groups whose rewards are all equal
    assert counted["sampled"] == 32 == counted["trained_once"] + counted["never_trained"]


def test_rubric(recipe: Recipe) -> None:
    """The model is its own grader.  No answer has a score, so that all rewards are equal."""
    data = [f"{split}_jsonl_path=rubric.jsonl" for split in ("train", "test")]
    names = [f"{who}renderer_name=role_colon" for who in ("", "grader_")]
    rows = recipe.run(
        "rubric.train",
        *(*data, *names, f"grader_llm_name={MODEL}", "groups_per_batch=2", "train_group_size=2"),
        *("max_tokens=6", "eval_every=0", "save_every=0", "max_steps=2"),
    )
    assert [row["env/all/rubric_score"] for row in rows if "optim/lr" in row] == [0, 0]
    [model] = recipe.new_models()
    assert (model["version"], model["unknown_tokens"], model["lag_max"]) == (2, 0, 0)


def test_chat_sl_and_sl_loop(recipe: Recipe) -> None:
    batch = ["batch_size=4", "learning_rate=1e-3", "max_length=512"]
    rows = recipe.run("chat_sl.train", "dataset=chat.jsonl", "eval_every=0", *batch)
    rows += recipe.run("sl_loop", *batch)
    assert [row["train_mean_nll"] > 0 for row in rows] == [True] * 4
    models = recipe.new_models()
    assert [model["version"] for model in models] == [2, 2]
    assert all(model["supervised_tokens"] > 0 == model["trained_tokens"] for model in models)
