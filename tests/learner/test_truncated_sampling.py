"""Runs with top-p and top-k: the learner normalizes over the tokens that the engine kept.

That holds after kills, from the journal and in a replay, too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_kit import engine, request, run
from learner_step_kit import GROUPS, batch, core, model_dir
from run_kit import survive_kills
from trajectory_kit import trajectory

from asyncrl.config import load, rules
from asyncrl.config.engines import ENGINES
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Batch
from asyncrl.contract.sampled_support import SampledSupport
from learner.batch import pack
from learner.step import LearnerCore

__all__ = ["model_dir"]  # a fixture
TRUNCATED = ("generator.top_p=0.8", "generator.top_k=20")


def sampled(learner: LearnerCore, *, recorded: bool = True) -> Batch:
    """Answers of the learner's own weights under top-p 0.8 and top-k 5."""
    plain = batch()
    asked = [
        request(t, s, np.frombuffer(plain.samples[3 * t].prompt_tokens, "<i4").tolist(), 12)
        for t in range(GROUPS)
        for s in range(3)
    ]
    asked = [type(r)(**{**vars(r), "top_p": 0.8, "top_k": 5}) for r in asked]
    found = run(engine(learner.model), asked)
    samples = []
    for r in asked:
        a = found[r.key]
        support = a.support_bytes if recorded else b""
        fields = {"spans": a.spans, "reward": float(r.key[1]), "support": support}
        samples.append(trajectory((*r.key[:2], 0), a.prompt, a.tokens, a.logprobs, **fields))
    runs = [[(0, s.length, 0)] for s in samples]
    zeros = [0] * len(samples)
    return Batch(1, 0, samples, zeros, zeros, runs, {}, GROUPS, {})


@pytest.mark.parametrize("by", ["packed", "transformers"])
def test_start_target_and_reference_are_over_the_kept_tokens(model_dir: Path, by: str) -> None:
    """At equal weights every ratio is 1, of the target to the behavior policy as to the reference;
    over the whole vocabulary none is."""
    found = {}
    for recorded in (True, False):
        learner = core(
            model_dir,
            kl={"loss": {"coefficient": 0.1}, "reward": {"coefficient": 0.1}},
            learner={"minibatches": 2},
        )
        asked = sampled(learner, recorded=recorded)
        if by == "transformers":
            learner.model.fast = None
            assert learner.reference is not None
            learner.reference.fast = None
        found[recorded] = learner.train(asked)
    assert found[True]["mismatch/k3_at_lag_0"] < 1e-10 < 1e-2 < found[False]["mismatch/k3_at_lag_0"]
    assert abs(found[True]["is/chi2"]) < 1e-5 and found[False]["is/chi2"] < -0.1
    assert abs(found[True]["kl/answer"]) < 1e-5  # of the start, to the reference


def test_a_distillation_is_over_the_kept_tokens(model_dir: Path) -> None:
    """The exact KL to the reference at each step: 0 at equal weights."""
    learner = core(model_dir, kl={"preset": "distill"}, loss={"coefficient": 0})
    assert abs(learner.train(sampled(learner))["loss/kl"]) < 1e-5


def test_the_rows_of_a_batch_carry_their_supports(model_dir: Path) -> None:
    learner = core(model_dir)
    asked = sampled(learner)
    packed = pack(asked)
    for row, sample in zip(packed.supports, asked.samples, strict=True):
        assert row is not None and row.encode() == sample.support
    table = learner.model.logprobs(**packed.select_rows([2, 5])).support
    assert table is not None
    assert len(table.truncated) == sum(asked.samples[i].length for i in (2, 5))
    assert learner.model.logprobs(**pack(batch()).select_rows([0, 1])).support is None


def test_an_engine_without_support_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = msgspec.structs.replace(ENGINES["vllm"], records_support=False)
    monkeypatch.setitem(ENGINES, "vllm", silent)
    with pytest.raises(ConfigError, match=r"agent\.forced: constrain needs an engine that"):
        load.load("calc_form", ["generator.engine='vllm'"])
    for engine_name, warned in (("embedded", 0), ("vllm", 1)):
        sets = [*TRUNCATED, f"generator.engine={engine_name}"]
        warnings = rules.find_warnings(load.load("configs/demo.toml", sets))
        said = [line for line in warnings if "top_p and top_k restrict" in line]
        assert len(said) == warned and all("vLLM does not record" in line for line in said)
    config = load.load("configs/demo.toml", [*TRUNCATED, "exact=true", "staleness.max_lag=0"])
    assert config.exact is True and config.generator.top_k == 20


@pytest.mark.slow
def test_kills_and_replay_keep_them(forked: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    batches = survive_kills(forked, tmp_path / "run", *TRUNCATED)
    samples = [sample for batch in batches for sample in batch.samples]
    supports = [SampledSupport.decode(s.support, len(s.mask)) for s in samples]
    assert all(
        support.contains(np.frombuffer(s.tokens, "<i4")).all() and support.sizes.max() <= 20
        for s, support in zip(samples, supports, strict=True)
    )
    assert sum(bool(s.support) for s in samples) > len(samples) / 2


@pytest.mark.slow
def test_without_exact_mode_the_mismatch_is_rounding(
    forked: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    done = forked(tmp_path / "run", *TRUNCATED, "record.split_every=1")
    found = [r["mismatch/k3_one_version"] for r in done["rows"] if "mismatch/k3_one_version" in r]
    assert found and max(found) < 1e-6
