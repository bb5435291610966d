"""`loss.function` and `advantage.function`: the learner's own bits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_step_kit import GROUPS, SIZE, batch, batch_with_parts, model_dir, weights  # noqa: F401
from process_kit import ROOT, SMALL

from asyncrl import losses
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.serial import SerialRun
from learner.step import LearnerCore

FILE = ROOT / "tests" / "support" / "own_methods.py"
OWN = {"loss.function": f"{FILE}:ppo", "advantage.function": f"{FILE}:rloo"}


def convert(path: Path, *sets: str) -> Any:
    raw = {
        "model": {"path": str(path), "device": "cpu"},
        "task": {"name": "sort"},
        "learner": {
            "groups": GROUPS,
            "group_size": SIZE,
            "steps": 9,
            "lr": 0.1,
            "optimizer": "sgd",
        },
        "record": {"split_every": 0, "reference_kl_every": 0},
    }
    return load.convert(raw, "test", sets=sets)


def train(path: Path, *sets: str) -> tuple[torch.Tensor, list[dict[str, float]]]:
    learner = LearnerCore(convert(path, *sets), path)
    rows = [learner.train(batch_with_parts(number)) for number in range(2)]
    return weights(learner), rows


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("learner.minibatches=2", "learner.epochs=2", "advantage.truncated=mask"),
        ("kl.reward.coefficient=0.1", "loss.entropy=0.01"),
        ("kl.loss.coefficient=0.1", "loss.coefficient=0.5"),
    ],
)
def test_a_copy_of_ppo_trains_the_same_bits(sets: tuple[str, ...], model_dir: Path) -> None:
    was, rows = train(model_dir, *sets)
    now, own_rows = train(model_dir, *sets, *(f"{key}={path}" for key, path in OWN.items()))
    # other micro-batches round otherwise
    several = "learner.minibatches=2" in sets
    assert torch.allclose(was, now, atol=1e-5) if several else torch.equal(was, now)
    for number, (row, own) in enumerate(zip(rows, own_rows, strict=True)):
        assert own["loss/function/version"] == number and 0 < own["loss/function/ess"] <= 1
        assert sets or own["loss/policy"] == pytest.approx(own["loss/function/value"], abs=1e-6)
        assert own["reward/used_mean"] == row["reward/used_mean"]


def test_an_advantage_of_tokens_sees_their_behavior_and_penalty(model_dir: Path) -> None:
    own = f"advantage.function={FILE}:to_go"
    sets = ("advantage.truncated=mask", "kl.reward.coefficient=0.1")
    was = train(model_dir, sets[0], "advantage.name=reinforce_pp")[0]
    assert torch.equal(was, train(model_dir, sets[0], own)[0])
    penalized, rows = train(model_dir, *sets, own)
    assert not torch.equal(penalized, train(model_dir, sets[0], own)[0])
    assert rows[1]["kl/answer"] and rows[1]["reward/used_mean"] != rows[1]["reward/mean"]


@pytest.mark.parametrize(
    ("key", "name", "problem"),
    [
        ("loss", "absent", "importing it raised AttributeError: .*; write module:function or"),
        ("loss", "of_rows", r"returned a tensor of \[2\]; return a scalar tensor, or \(loss, metr"),
        ("loss", "in_list", "returned a list; return a scalar tensor"),
        ("loss", "detached", "returned a loss without gradient; compute it from logprobs"),
        ("loss", "elsewhere", "returned a loss without gradient"),
        ("loss", "broken", "the call raised AttributeError: .* at own_methods.py:[0-9]+ in broken"),
        ("loss", "infinite", "its value or gradient on two small rows is not finite"),
        ("loss", "named", "metrics: could not convert .*; return a dict of floats"),
        ("loss", "rloo", "the call raised TypeError: rloo"),
        ("advantage", "half", "the call raised TypeError: half.* missing"),
        ("advantage", "in_list", "returned a list; return a tensor of rows"),
        ("advantage", "infinite", r"returned a tensor of \[\]; return a tensor of rows, \[2\]"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_a_run(
    key: str, name: str, problem: str, model_dir: Path
) -> None:
    path = f"{FILE}:{name}"
    config = convert(model_dir, f"{key}.function={path}")
    with pytest.raises(ConfigError, match=rf"^{key}.function = {path}: {problem}"):
        losses.check_functions(config)


def test_what_a_config_says(model_dir: Path) -> None:
    own = convert(model_dir, "method=ppo", *(f"{key}={path}" for key, path in OWN.items()))
    assert (own.loss.surrogate, own.advantage.name) == ("function", "function")
    assert losses.check_functions(own) == OWN
    gone = convert(model_dir, "loss.function=no/such.py:ppo")
    with pytest.raises(ConfigError, match=r"no/such.py:ppo: importing it raised FileNotFound"):
        losses.check_functions(gone)
    for item, problem in {
        "loss.function=ppo": "loss.function: 'ppo' is not module:function or file.py:function",
        "advantage.name=function": "advantage.function: '' is not module:function or file.py",
        "loss.reduction=seq-mean-token-sum": "loss.reduction: seq-mean-token-sum has no effect on",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            convert(model_dir, f"loss.function={FILE}:ppo", item)
    later = convert(model_dir, f"loss.function={FILE}:ppo", "loss.surrogate=vespo")
    assert later.loss.surrogate == "vespo"


@pytest.mark.slow
def test_a_run_whose_learner_is_killed_ends_as_that_of_the_method(
    forked: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    own = tuple(f"{key}={path}" for key, path in OWN.items())
    was = forked(tmp_path / "was", "staleness.max_lag=0")
    now = forked(tmp_path / "now", "staleness.max_lag=0", *own, die={"learner": 4})
    assert now["deaths"] == ["learner"] and now["digest"] == was["digest"]
    assert [r["loss/function/version"] for r in now["rows"] if "loss/policy" in r][-1] == 5
    assert f'function = "{FILE}:ppo"' in (Path(now["run_dir"]) / "config.toml").read_text()


@pytest.mark.slow
def test_the_serial_loop_calls_them_too(small_model: Path) -> None:
    sets = [*SMALL[:-1], f"model.path={str(small_model)!r}", "staleness.max_lag=1"]
    own = [f"{key}={path}" for key, path in OWN.items()]
    was, now = (SerialRun(load.load("demo", [*sets, *more])) for more in ([], own))
    was.run()
    now.run()
    assert torch.equal(weights(was.core), weights(now.core))


def test_the_example_is_ppo_and_rloo(model_dir: Path) -> None:
    example = ROOT / "configs" / "examples" / "methods" / "ppo.py"
    own = f"loss.function={example}:clipped", f"advantage.function={example}:leave_one_out"
    was, now = train(model_dir), train(model_dir, *own)
    assert torch.allclose(was[0], now[0], atol=1e-5)
    assert now[1][0]["loss/function/moved"] and now[1][0]["loss/function/ratio"] > 0
    assert now[1][0]["advantage/std"] == pytest.approx(was[1][0]["advantage/std"], rel=1e-5)
