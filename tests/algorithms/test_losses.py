"""`asyncrl.losses` against the learner itself, by bits, and what it refuses."""

import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learner_step_kit import GROUPS, SIZE, batch, batch_with_parts, model_dir, weights  # noqa: F401
from process_kit import ROOT, SMALL
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl import losses
from asyncrl.algorithms import kl
from asyncrl.algorithms import loss as step_loss
from asyncrl.config import load, methods
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.experiments.serial import SerialRun
from asyncrl.models import packed_forward
from asyncrl.models.policy import build_model
from learner.step import LearnerCore

BEYOND = {"reshape-stop": "learner.minibatches", "gac": "gradient_cosine", "vcpo": "lr_by_ess"}
SERVED = [name for name in methods.METHODS if name not in BEYOND]
LENGTH = {"norm_length": 20}  # of dr_grpo


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp("losses") / name for name in ("policy", "reference")]
    for seed, path in enumerate(made):
        build_model(path, "abcdefgh", hidden=16, layers=1, seed=seed)
    return made


class Recorded:
    """The only micro-batch of a step of the learner, by a method, and its padded tensors."""

    def __init__(self, models: list[Path], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        compute = step_loss.compute_micro_loss

        def record(prep: Any, step: Any, part: Any, lp: Any, **more: Any) -> Any:
            leaf = lp.detach().clone().requires_grad_(True)
            self.loss, sums = compute(prep, step, part, leaf, **more)
            self.metrics = step.metrics | step_loss.finish(sums)
            self.gradient = torch.autograd.grad(self.loss, leaf)[0]
            assert torch.equal(part, torch.arange(len(leaf)))
            self.prep, self.lp = prep, leaf.detach()
            return compute(prep, step, part, lp, **more)

        raw = {
            "method": method,
            "model": {"path": str(models[0]), "reference": str(models[1]), "device": "cpu"},
            "task": {"name": "sort"},
            "generator": {"max_new_tokens": 20},
            "learner": {"steps": 9, "groups": GROUPS, "group_size": SIZE},
            "record": {"split_every": 0, "reference_kl_every": 0},
        }
        with monkeypatch.context() as patch:
            patch.setattr(step_loss, "compute_micro_loss", record)
            in_order = lambda core, model, packed, samples: [list(samples)]  # noqa: E731
            patch.setattr(LearnerCore, "_split_micro_batches", in_order)
            LearnerCore(load.convert(raw, "test"), models[0]).train(batch())
        b = self.prep.batch
        position = torch.cat([torch.arange(int(n)) for n in b.seq.bincount(minlength=b.count)])
        self.at = (b.seq, position)
        self.mask = self.pad(torch.ones_like(b.mask), False)

    def pad(self, x: torch.Tensor | None, elsewhere: float = torch.nan) -> torch.Tensor | None:
        """[N] as [rows, tokens]."""
        if x is None:
            return None
        shape = self.prep.batch.count, int(self.at[1].max()) + 1
        return x.new_full(shape, elsewhere).index_put(self.at, x)


@pytest.mark.parametrize("method", SERVED)
def test_loss_gradient_metrics_and_advantages_are_the_learners(
    method: str, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Recorded(models, method, monkeypatch)
    b = learner.prep.batch
    logprobs = learner.pad(learner.lp).requires_grad_(True)
    keys = LENGTH if method == "dr_grpo" else {}
    tensors = {name: learner.pad(getattr(b, name)) for name in ("start", "reference")}
    tensors["reference"] = learner.pad(b.reward_reference or b.reference)
    tensors["version"] = learner.pad(b.proximal) if method in ("tis-version", "ppo-ewma") else None
    result = losses.loss(
        logprobs,
        learner.pad(b.behavior),
        learner.pad(learner.prep.advantage),
        learner.mask,
        7 - learner.pad(b.token_lag, 0),
        method,
        current_version=7,
        groups=b.groups + 5,
        **keys,
        **{name: x for name, x in tensors.items() if x is not None},
    )
    assert torch.equal(result.loss, learner.loss)
    got = torch.autograd.grad(result.loss, logprobs)[0]
    assert torch.equal(got, learner.pad(learner.gradient, 0.0)) and float(got.abs().max()) > 0
    shown = {name: x for name, x in learner.metrics.items() if name in result.metrics}
    assert result.metrics == shown and {"is/ess", "by_lag/k1_0"} <= {*shown}
    columns = {
        "start": tensors["start"] if tensors["start"] is not None else logprobs.detach(),
        **{name: getattr(b, name) for name in ("greedy", "greedy_truncated", "greedy_lengths")},
        "reference": tensors["reference"],
        "truncated": b.truncated,
    }
    adv = losses.advantages(
        b.rewards,
        b.groups + 5,
        learner.mask,
        method,
        max_new_tokens=20,
        **{name: x for name, x in columns.items() if x is not None},
    )
    assert torch.equal(adv[learner.mask], learner.prep.advantage) and not adv[~learner.mask].any()


MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])
LP = torch.tensor([[-1.0, -2.0, torch.nan], [torch.nan, -0.5, -3.0]])
GIVEN: dict[str, Any] = {
    "logprobs": LP,
    "behavior_logprobs": LP.double() + 0.5,
    "advantages": torch.tensor([1, -1]),
    "mask": MASK,
}


def test_without_versions_no_metric_is_by_lag_and_a_mask_may_be_empty() -> None:
    lp = LP.clone().requires_grad_(True)
    result = losses.loss(**GIVEN | {"logprobs": lp, "method": "vespo", "vespo_k_pos": 2.5})
    assert result.loss.dtype == torch.float32 and not any("lag" in x for x in result.metrics)
    later = losses.loss(**GIVEN, method="tis", start=LP - 0.5, **{"loss.eps_high": 0.1})
    assert later.metrics["clip/high"] == 0.5 and later.metrics["is/mean_weight"] == pytest.approx(
        float(torch.tensor(-1.0).exp())
    )
    none = losses.loss(**GIVEN | {"logprobs": lp, "mask": MASK * 0})
    none.loss.backward()
    assert none.loss == 0 and not lp.grad[MASK > 0].any()


def test_advantages_of_rows_and_kl_estimators() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([7, 7, 3, 3])
    assert losses.advantages(rewards, groups, name="dr_grpo").tolist() == [0.5, -0.5, 0, 0]
    parts = {"parts": torch.eye(4)[:, :2], "part_names": ("a", "b")}
    assert losses.advantages(rewards, groups, name="gdpo", **parts).shape == rewards.shape
    assert losses.advantages(rewards, groups, method="reinforce", baseline=0.5)[1] == -0.5
    for name in kl.ESTIMATORS:
        x = torch.tensor([[0.3, -0.2]], requires_grad=True)
        given = losses.estimate_kl(x - 1, x.detach() * 0 - 1, name)
        assert torch.equal(given, kl.estimate(name, (x - 1) + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": LP[:1]}, r"logprobs: its shape is \[1, 3\], that of the mask \[2, 3\]"),
        ({"logprobs": LP.bfloat16()}, "logprobs: it is of torch.bfloat16; give float32"),
        ({"logprobs": MASK}, "logprobs: it is of torch.int64; give float32"),
        ({"logprobs": -LP}, "logprobs: its mean is above 0; give log-probabilities"),
        ({"groups": [0, 0]}, "groups: give a tensor on cpu, as the mask"),
        ({"mask": MASK * 0 + 1}, "logprobs: it is nan at row 0, token 2, in the mask"),
        ({"mask": MASK * 2}, r"mask: give \[rows, tokens\] of bool"),
        ({"mask": MASK[0]}, r"mask: give \[rows, tokens\] of bool"),
        ({"versions": torch.tensor([4, 5]), "current_version": 4}, "current_version = 4 is below"),
        ({"method": "vepso"}, "method: 'vepso' is unknown"),
        ({"eps_hi": 0.3}, r"loss.eps_hi: unknown key; did you mean loss.eps_high\?"),
        ({"learner.lr": 1.0}, "learner.lr: has no effect here; keys of loss, correction, reshape"),
        ({"eps_low": "x"}, "loss.eps_low: Expected `float | null`"),
        ({"method": "dr_grpo"}, "method dr_grpo with these settings needs norm_length="),
        ({"method": "grpo"}, "needs reference="),
        ({"method": "gepo"}, "needs groups="),
        ({"loss.entropy": 0.1}, "needs entropy="),
        ({"method": "tis", "proximal": "interpolate"}, "needs versions="),
        ({"method": "tis", "proximal": "version"}, "needs version="),
        ({"method": "ppo-ewma"}, "needs version="),
        *(({"method": name}, f"it sets .*{key}, which is more") for name, key in BEYOND.items()),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^asyncrl.losses.*{message}"):
        losses.loss(**GIVEN | change)


@pytest.mark.cold
def test_it_needs_torch_alone() -> None:
    code = (
        "import sys, asyncrl.losses\n"
        "print(*{'transformers', 'vllm', 'zmq', 'tokenizers', 'scipy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def run_adapter(name: str, monkeypatch: pytest.MonkeyPatch, **modules: Any) -> dict[str, Any]:
    """Execute a file of docs/adapters beside stand-ins of the framework's modules."""
    for module, content in modules.items():
        monkeypatch.setitem(sys.modules, module.replace("__", "."), SimpleNamespace(**content))
    return runpy.run_path(str(ROOT / "docs" / "adapters" / f"{name}.py"))


def test_the_adapters_take_what_each_framework_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    lp, behavior = (torch.nan_to_num(x.float()) for x in (LP, LP + 0.5))
    adv, expected = torch.tensor([1.0, -1.0]), {}
    for method in ("vespo", "ipo"):
        expected[method] = losses.loss(lp, behavior, adv, MASK, method=method).loss
    trl = run_adapter("trl_trainer", monkeypatch, trl={"GRPOTrainer": object})["MethodTrainer"]()
    trl._metrics = {"train": defaultdict(list)}
    trl.current_gradient_accumulation_steps = 2
    trl._get_per_token_logps_and_entropies = lambda model, ids, mask, length: (lp, None, None)
    inputs = dict.fromkeys(("prompt_ids", "completion_ids", "prompt_mask"), MASK)
    inputs |= {"completion_mask": MASK, "advantages": adv, "sampling_per_token_logps": behavior}
    assert trl._compute_loss(None, inputs) == expected["vespo"] / 2
    assert trl._metrics["train"]["is/ess"]
    register = {"register_policy_loss": lambda name: lambda function: function}
    verl = run_adapter("verl_loss", monkeypatch, verl__trainer__ppo__core_algos=register)
    wide = adv[:, None].expand(2, 3)
    total, metrics = verl["method_loss"](
        behavior, lp, wide, MASK, "token-mean", config=None, rollout_is_weights=None
    )
    assert total == expected["vespo"] and metrics["is/ess"] > 0
    norm: Any = {"reduction": "seq-mean-token-sum-norm", "norm_length": MASK.shape[1]}
    total, _ = verl["method_loss"](behavior, lp, wide, MASK, norm["reduction"])
    assert total == losses.loss(lp, behavior, wide, MASK, method="vespo", **norm).loss
    outputs = {"LossOutputs": SimpleNamespace}
    prime = run_adapter("prime_rl_loss", monkeypatch, prime_rl__trainer__rl__loss=outputs)
    parts = [
        prime["method_loss"](
            SimpleNamespace(
                trainer_logprobs=lp[row],
                inference_logprobs=behavior[row],
                advantages=wide[row],
                loss_mask=MASK[row].bool(),
            ),
            method="ipo",
        ).loss
        for row in range(2)
    ]
    assert float(sum(parts) / MASK.sum()) == pytest.approx(float(expected["ipo"]))


FILE = ROOT / "tests" / "support" / "own_methods.py"
OWN = {"loss.function": f"{FILE}:ppo", "advantage.function": f"{FILE}:rloo"}


def convert(path: Path, *sets: str) -> Any:
    raw = {
        "model": {"path": str(path), "device": "cpu"},
        "task": {"name": "sort"},
        "learner": {"groups": GROUPS, "group_size": SIZE, "steps": 9, "lr": 0.1},
        "record": {"split_every": 0, "reference_kl_every": 0},
    }
    raw["learner"] |= {"optimizer": "sgd"}
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
def test_an_unfit_function_is_refused(key: str, name: str, problem: str, model_dir: Path) -> None:
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


VOCABULARY, WIDTH, CHUNK = 1024, 8, 1 << 15


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operator gave back."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, tuple | list) else [out]
        sizes = [each.numel() for each in found if isinstance(each, torch.Tensor)]
        self.most = max(self.most, *sizes, 0)
        return out


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("tokens", [100, 400, 1600])
def test_no_piece_of_the_logits_is_larger_than_a_chunk(
    tokens: int, truncated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_forward, "LOGIT_CHUNK", CHUNK)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=draw, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=draw)
    support = None
    if truncated:
        kept = [np.unique([token, 0, 7]) for token in targets.tolist()]
        recorded = SampledSupport.from_lists(kept, VOCABULARY)
        support = packed_forward.SupportTable([recorded], [tokens], targets.device)
    with Largest() as seen:
        found, entropy = packed_forward._PickedLogprobs.apply(
            hidden, weight, targets, torch.ones(tokens), True, support
        )
        (found.sum() + entropy.sum()).backward()
    assert 0 < seen.most <= max(CHUNK, tokens * WIDTH) < tokens * VOCABULARY
    # and it is the loss with all logits at once
    logs = (hidden.detach() @ weight.detach().T).log_softmax(-1)
    if support is not None:
        logs = support.renormalize(logs, 0)
    want = logs.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
