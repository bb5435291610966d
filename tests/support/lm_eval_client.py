"""The real lm_eval scores a tiny model behind `asyncrl serve`: `make clients` builds its
environment from nothing and runs this."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from clients_kit import python_of
from model_server_kit import KEY, served

from asyncrl.models import policy
from asyncrl.models.tokenizer import load_tokenizer

QUESTIONS = ["abc", "bcd", "hhaa", "e"]
CHOICE = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WRITE = """\
task: tiny_write
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
target_delimiter: ""
generation_kwargs: {until: ["h"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""


class Expected:
    def __init__(self, directory: Path) -> None:
        self.hf = policy.load_policy(directory, "float32", "cpu").hf
        self.tokenizer = load_tokenizer(directory)

    def score(self, question: str, choice: str) -> tuple[float, bool]:
        """The log-probability of a choice, and whether each of its tokens is the most likely."""
        ids = torch.tensor([self.tokenizer.encode(question + choice)])
        with torch.no_grad():
            logs = torch.log_softmax(self.hf(input_ids=ids).logits[0, len(question) - 1 : -1], -1)
        own = ids[0, len(question) :]
        picked = logs.gather(1, own[:, None])[:, 0]
        return float(picked.sum()), bool((logs.argmax(-1) == own).all())

    def write(self, question: str) -> str:
        """The greedy continuation up to an h, 6 tokens or the end."""
        ids = self.tokenizer.encode(question)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(self.hf(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == self.tokenizer.eos_token_id:
                ids.pop()
                break
        return str(self.tokenizer.decode(ids)[len(question) :].partition("h")[0])


def write_tasks(folder: Path, rows: list[dict[str, Any]]) -> None:
    data = folder / "tiny.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("tiny_choice", CHOICE), ("tiny_write", WRITE)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))


def samples_of(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: int(row["doc_id"]))


def test_lm_eval_gets_the_scores_of_transformers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    policy.build_model(model, "abcdefgh", max_positions=64, seed=3)
    expected = Expected(model)
    rows = []
    for number, question in enumerate(QUESTIONS):
        greedy = expected.write(question)[:1] or "a"
        choices = [greedy, "dd", "gf"]
        # right in all questions but the first
        scores = [expected.score(question, choice)[0] for choice in choices]
        answer = scores.index((min if number == 0 else max)(scores))
        written = expected.write(question) if number else "wrong"
        rows.append(
            {"question": question, "choices": choices, "answer": answer, "written": written}
        )
    write_tasks(tmp_path, rows)
    with served(model, tmp_path) as server:
        arguments = (
            f"model=tiny,base_url={server.url}/completions,tokenizer={model},max_length=64,"
            "tokenizer_backend=huggingface,num_concurrent=2"
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [
                *(python_of("lm-eval"), "-m", "lm_eval", "--model", "local-completions"),
                *("--model_args", arguments, "--tasks", "tiny_choice,tiny_write"),
                *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")),
                *("--log_samples", "--batch_size", "2"),
            ],
            env=environment
            | {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
            capture_output=True,
            text=True,
            timeout=1800,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    matches = 0
    for row, sample in zip(rows, samples_of(tmp_path, "tiny_choice"), strict=True):
        for choice, found in zip(row["choices"], sample["filtered_resps"], strict=True):
            logprob, greedy = expected.score(row["question"], choice)
            assert float(found[0]) == pytest.approx(logprob, abs=1e-3)
            assert str(found[1]) == str(greedy)
            matches += greedy
    assert matches >= 1  # a greedy match is among them, and one that is none
    assert matches < sum(len(row["choices"]) for row in rows)
    for row, sample in zip(rows, samples_of(tmp_path, "tiny_write"), strict=True):
        assert sample["filtered_resps"] == [expected.write(row["question"])]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    assert math.isclose(scores["tiny_choice"]["acc,none"], 0.75)
    assert math.isclose(scores["tiny_write"]["exact_match,none"], 0.75)
