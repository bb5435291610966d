"""Versions per token are exact, and the logged lag is the lag: both reckoned again from what a real
run wrote, by other code."""

import collections
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from holding import held
from process_kit import ENV, Ended

from asyncrl.models import policy

pytestmark = pytest.mark.slow

Call = Callable[..., Ended]


def recorded(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (run_dir / "samples.jsonl").read_text().splitlines()]


def number(label: str) -> int:
    epoch, _, n = label.partition(".")
    assert epoch == "1"
    return int(n)


@pytest.fixture
def written(asyncrl: Call, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any]]:
    """A run that swaps weights in mid-answer, where its generator waits for them (tests/hold), and
    keeps every version and every sample."""
    for name, word in held(answers=True).items():
        monkeypatch.setitem(ENV, name, word)
    text = (
        "run learner.steps=14 learner.groups=8 learner.group_size=8 staleness.max_lag=4 "
        "weights.in_flight='recompute_kv' learner.checkpoint_every=1 learner.keep_checkpoints=100 "
        "record.samples_every=1 record.samples=0 generator.slots=48 generator.temperature=0.9 "
        "learner.lr=1e-3 evaluation.every=0 name='v'"
    )
    done = asyncrl(*text.split()).check()
    return Path(done.json["run_dir"]), done.json


def test_every_token_was_drawn_by_the_version_it_names_and_the_lag_is_its_age(
    written: tuple[Path, dict[str, Any]],
) -> None:
    run_dir, summary = written
    rows = recorded(run_dir)
    assert len(rows) == 14 * 64

    # Log-probabilities again, by plain transformers on the checkpoint that the label names: the
    # whole prefix under that version.
    policies: dict[int, Any] = {}
    swapped = [r for r in rows if len(r["versions"]) >= 2]
    assert len(swapped) >= 10, f"only {len(swapped)} answers saw a swap"
    wrong_version = 0.0
    for r in swapped[:60]:
        ids = torch.tensor([r["prompt_tokens"] + r["tokens"]])
        assert [v[1] for v in r["versions"]] == [0] + [v[2] for v in r["versions"][:-1]]
        assert r["versions"][-1][2] == len(r["tokens"])
        for (label, start, end), digest in zip(r["versions"], r["digests"], strict=True):
            n = number(label)
            if n not in policies:
                path = run_dir / "checkpoints" / "epoch_1" / f"number_{n}" / "model"
                policies[n] = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32
                )
                got = policy.compute_weights_digest(policy.load_policy(path, "float32", "cpu"))
                assert got == digest
            for named, kept in ((n, True), (number(r["versions"][0][0]), False)):
                if named not in policies:
                    continue
                with torch.no_grad():
                    logits = policies[named](input_ids=ids).logits[0]
                logits = logits[len(r["prompt_tokens"]) - 1 : -1] / 0.9
                again = torch.log_softmax(logits.float(), -1).gather(
                    1, ids[0, len(r["prompt_tokens"]) :, None]
                )[:, 0][start:end]
                off = float((again - torch.tensor(r["logprobs"][start:end])).abs().max())
                if kept:
                    assert off < 1e-4, (r["ticket"], label, start, end, off)
                elif named != n:
                    wrong_version = max(wrong_version, off)
    assert wrong_version > 1e-3, "versions are too alike for this test to mean anything"

    # Lags again, from the spans: a batch n starts from version n.
    logged = {
        r["batch"]: {int(k): v for k, v in r["lags"].items()}
        for r in map(json.loads, (run_dir / "trained.jsonl").read_text().splitlines())
    }
    for n in range(14):
        counted: collections.Counter[int] = collections.Counter()
        for r in rows:
            if r["batch"] == n:
                for label, start, end in r["versions"]:
                    counted[n - number(label)] += end - start
                assert r["lag"] == n - number(r["versions"][0][0])
        assert dict(counted) == logged[n] and max(counted) <= 4
    whole = sum(lag * c for lags in logged.values() for lag, c in lags.items()) / sum(
        c for lags in logged.values() for c in lags.values()
    )
    assert summary["lag"]["mean"] == pytest.approx(whole) and whole > 0
    means = {
        r["step"]: r["lag/mean"]
        for r in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if "lag/mean" in r
    }
    for n, lags in logged.items():
        key = n if n in means and len(means) == 14 and min(means) == 0 else n + 1
        assert means[key] == pytest.approx(
            sum(a * c for a, c in lags.items()) / sum(lags.values()), abs=1e-6
        )


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        ("a slow generator", ("generator.slots=8",)),
        ("a slow learner", ("learner.micro_batch_tokens=64",)),
    ],
)
def test_injected_lag_is_exact_whatever_the_speed(
    speed: str, words: tuple[str, ...], asyncrl: Call
) -> None:
    text = (
        "run learner.steps=10 learner.groups=4 learner.group_size=4 staleness.max_lag=3 "
        "staleness.inject=3 evaluation.every=0 record.samples_every=1 record.samples=0 "
        "name='inject'"
    )
    done = asyncrl(*text.split(), *words)
    assert done.code == 0, (speed, done.err[-3000:])
    for r in recorded(Path(done.json["run_dir"])):
        assert [number(v[0]) for v in r["versions"]] == [max(0, r["batch"] - 3)]
        assert r["lag"] == min(3, r["batch"])
