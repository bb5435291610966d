"""learner/sample_log.py: the samples that a run logs with every token."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_step_kit import GROUPS, SIZE, batch, core, model_dir  # noqa: F401

from asyncrl.algorithms import loss as step_loss
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.records import jsonl
from learner.sample_log import FILE, BatchLog, SampleLog, choose_samples, decode_pieces


def logged(c: Any, run_dir: Path, *batches: int) -> list[dict[str, Any]]:
    """Train on the batches and return the rows of token_samples.jsonl."""
    c.sample_log = SampleLog(c.config, run_dir, 0, load_tokenizer(c.config.model.path))
    for number in batches:
        c.train(batch(number, seed=number))
    c.sample_log.file.close()
    return [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]


def test_a_row_has_all_that_the_learner_knows_of_a_token(model_dir: Path, tmp_path: Path) -> None:
    record = {"samples_every": 1, "token_samples": ["group"]}
    made = core(model_dir, learner={"minibatches": 2, "epochs": 2}, record=record)
    rows = logged(made, tmp_path, 0)
    source = batch(0, seed=0)
    assert [(row["ticket"], row["sample"]) for row in rows] == [(0, s) for s in range(SIZE)]
    tokenizer = load_tokenizer(model_dir)
    for row, sample, runs in zip(rows, source.samples, source.token_lags, strict=False):
        (sequence,) = row["sequences"]
        ids = np.frombuffer(sample.tokens, "<i4").tolist()
        assert sequence["tokens"] == ids and "".join(sequence["pieces"]) == tokenizer.decode(ids)
        behavior = np.frombuffer(sample.behavior_logprobs, "<f4").astype(float)
        assert np.allclose(sequence["behavior"], behavior, atol=1e-4)
        assert sequence["lag"] == [runs[0][2]] * len(ids)
        assert row["lag_max"] == runs[0][2] and row["length"] == len(ids)
        head = {"batch": source.number, "attempt": 0, "group_key": "", "parts": {}, "segments": []}
        assert row | head | {"finish": "stop", "calls": 0, "excluded": 0} == row
        assert sequence["mask"] == sequence["used"] == [1] * len(ids)
        # four steps were made: the last pass is not the first one
        assert sequence["start"] != sequence["target"]
        ratio = np.minimum(np.exp(np.array(sequence["start"]) - behavior), 2.0)  # truncated
        assert np.allclose(sequence["weight"], ratio, rtol=2e-3, atol=1e-3)
        assert len(set(sequence["advantage"])) == 1
        assert set(sequence["clip"]) <= {0, 1, 2, 3} and "sampler" not in sequence
    rewards = [sample.reward for sample in source.samples[:SIZE]]
    assert np.allclose(rows[0]["group_rewards"], rewards)
    advantages = [row["sequences"][0]["advantage"][0] for row in rows]
    assert np.argsort(advantages).tolist() == np.argsort(rewards).tolist()


def test_each_rule_chooses_its_sample(model_dir: Path) -> None:
    rules = ["group", "best", "worst", "off_policy", "longest", "random"]
    made = core(model_dir, record={"samples_every": 10, "token_samples": rules})
    packed = made._pack_batch(batch(20))
    prep = step_loss.prepare(packed, made.config)
    prep.start = made._forward(made.model, packed, range(packed.count))
    prep.known, prep.passed = torch.ones_like(prep.known), torch.ones_like(prep.passed)
    by_rule: dict[str, list[int]] = {}
    for sample, why in choose_samples(packed, prep, made.config, 20).items():
        for rule in why:
            by_rule.setdefault(rule, []).append(sample)
    rewards, lengths = packed.rewards.tolist(), np.diff(packed.offsets).tolist()
    assert by_rule["group"] == [i for i, g in enumerate(packed.group_of) if g == 2 % GROUPS]
    assert by_rule["best"] == [rewards.index(max(rewards))]
    assert by_rule["worst"] == [rewards.index(min(rewards))]
    assert by_rule["longest"] == [lengths.index(max(lengths))]
    source = random.Random(made.config.seed * 1_000_003 + 20)
    assert by_rule["random"] == [source.choice(range(packed.count))]
    moved = (prep.start - packed.behavior).abs()
    far = [float(moved[packed.find_token_positions([i])].mean()) for i in range(packed.count)]
    assert by_rule["off_policy"] == [far.index(max(far))]
    prep.batch.mask[packed.find_token_positions([far.index(max(far))])] = 0
    chosen = choose_samples(packed, prep, made.config, 20)
    (again,) = [i for i, why in chosen.items() if "off_policy" in why]
    assert again == far.index(sorted(far)[-2]), "tokens that nothing sampled have no part in it"
    prep.passed[packed.find_token_positions([by_rule["best"][0]])] = False
    left = choose_samples(packed, prep, made.config, 20)
    assert by_rule["best"][0] not in left, "no pass has seen it"


def test_only_every_few_batches_are_logged(model_dir: Path, tmp_path: Path) -> None:
    made = core(model_dir, record={"samples_every": 2, "token_samples": ["best"]})
    assert [row["batch"] for row in logged(made, tmp_path, 0, 1, 2)] == [0, 2]
    assert logged(core(model_dir, record={"token_samples": []}), tmp_path, 0) == []


def test_a_resumed_learner_drops_what_it_trains_again(model_dir: Path, tmp_path: Path) -> None:
    made = core(model_dir, record={"samples_every": 1, "token_samples": ["best"]})
    logged(made, tmp_path, 0, 1, 2)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"batch": 0, "torn')
    log = SampleLog(made.config, tmp_path, 1, None)
    log.file.close()
    assert [json.loads(line)["batch"] for line in (tmp_path / FILE).read_text().splitlines()] == [0]
    assert log.written == len((tmp_path / FILE).read_bytes())


def test_the_file_keeps_to_its_bound(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = core(model_dir, record={"samples_every": 1, "token_samples_mib": 1})
    log = SampleLog(made.config, tmp_path, 0, None)
    log.add([{"batch": 0, "filler": "x" * 300_000}] * 5)
    assert not log.is_due(0) and (tmp_path / FILE).stat().st_size <= 2**20
    assert capsys.readouterr().err.count("record.token_samples_mib = 1") == 1
    log.file.close()


def test_each_optimizer_step_has_its_row(model_dir: Path, tmp_path: Path) -> None:
    """With IS-reshape's own numbers; a resumed learner drops the rows that it makes again."""
    learner = {"epochs": 3, "minibatches": 2, "gradient_cosine": "log"}
    sections = {"loss": {"surrogate": "reshape"}, "correction": {"proximal": "behavior"}}
    made = core(model_dir, learner=learner, **sections)
    log = BatchLog(made.config, tmp_path, 0)
    for number in range(2):
        metrics = made.train(batch(number, seed=number))
        log.add(made.updates)
    log.file.close()
    rows = jsonl.read(tmp_path / "optimizer_steps.jsonl")
    assert [(r["step"], r["update"]) for r in rows] == [(n, i) for n in range(2) for i in range(6)]
    names = {"gamma", "gamma_base", "sigma2", "c", "p_correct", "share", "ratio"}
    names = {f"reshape/{name}" for name in names} | {"is/target_ratio_max", "optim/grad_norm"}
    assert all(names <= row.keys() for row in rows)
    more = "loss/policy kl/behavior_target_k3 kl/start_target_k3 is/target_ratio is/target_ess "
    more += "clip/share policy/entropy step update optim/lr optim/gradient_cosine"
    own = {key for row in rows for key in row if not key.startswith("reshape/")}
    assert own == {name for name in names if not name.startswith("reshape/")} | {*more.split()}
    assert all(row["is/target_ratio_max"] >= row["is/target_ratio"] > 0 for row in rows)
    assert ["optim/gradient_cosine" in row for row in rows] == [False] + [True] * 11
    last = rows[6:]
    assert max(row["is/target_ratio_max"] for row in last) == metrics["is/target_ratio_max"]
    assert last[-1]["reshape/sigma2"] == metrics["reshape/sigma2"] != last[0]["reshape/sigma2"]
    BatchLog(made.config, tmp_path, 1).file.close()
    assert jsonl.read(tmp_path / "optimizer_steps.jsonl") == rows[:6]


def test_the_log_of_steps_keeps_to_its_bound(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = BatchLog(core(model_dir, record={"optimizer_steps_mib": 1}).config, tmp_path, 0)
    log.add([{"step": 0, "filler": "x" * 300_000}] * 5)
    log.add([{"step": 1}])
    log.file.close()
    assert [row["step"] for row in jsonl.read(log.path)] == [0] * 3
    assert capsys.readouterr().err.count("record.optimizer_steps_mib = 1: later rows") == 1


class ByteTokenizer:
    """Decodes bytes as UTF-8, as byte-level tokenizers do."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["plain", "naïve 漢字 ✓", "", "\N{REPLACEMENT CHARACTER}a"])
def test_pieces_add_up_to_the_text(text: str) -> None:
    ids = list(text.encode())
    pieces = decode_pieces(ByteTokenizer(), ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text


def test_pieces_of_broken_characters_have_one_place_each() -> None:
    ids = [*b"a", 0xE6, 0xBC, *b"b", 0xFF]
    pieces = decode_pieces(ByteTokenizer(), ids)
    assert len(pieces) == len(ids) and "a" in pieces[0] and "b" in "".join(pieces[3:])
