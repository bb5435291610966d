"""Every key of every method acts where it is accepted: changed by itself on up to two batches
through the learner's step, it changes the weights, a metric or an error.

The keys come from the structs, so that one more is tried without a line here; what it needs around
it comes from its `read_with`.  BESIDE has what a key needs more, EXCEPTIONS those that cannot act
on two batches of one process, each with its reason."""

import json
import math
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import reference_pages
from learner_step_kit import GROUPS, SIZE, batch_with_parts, weights
from process_kit import ROOT, Ended

from asyncrl.algorithms import settings
from asyncrl.config import bundled_configs, layers, load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError
from asyncrl.models.policy import build_model
from asyncrl.records import metrics
from asyncrl.supervise import run as runner
from learner.step import LearnerCore

# a value that puts a key on, for those that hang on it
ON: dict[str, Any] = {
    **{"loss.coefficient": 1.0, "correction.level": "token", "correction.reject": "ratio"},
    **{"correction.reject2": "k2", "correction.veto": "ratio", "correction.m2": 0.02},
    **{"kl.reward.coefficient": 0.1, "kl.loss.coefficient": 0.1, "stop.kl_max": 1e-4},
    **{"stop.lr_by_ess": "sqrt", "reshape.kl_penalty": 0.1, "reshape.budget": "tokens"},
    **{"reshape.clip": 0.05},
}
_REJECTS = {
    "correction.reject": "ratio",
    "correction.reject_at": "target",
    "correction.reject_lo": 0.9,
    "correction.reject_hi": 1.1,
}
_REJECTS_TWICE = {
    "correction.reject": "ratio",
    "correction.reject_at": "target",
    "correction.reject2": "k2",
    "correction.reject2_hi": 0.02,
}
_VETOES = {"correction.veto": "probability", "correction.veto_below": 0.1}
# what a key needs besides
BESIDE: dict[str, dict[str, Any]] = {
    "advantage.ema_decay": {"advantage.baseline": "ema"},
    "advantage.truncated": {"advantage.truncated": "penalty", "advantage.truncation_penalty": 0.5},
    "advantage.truncation_penalty": {"advantage.truncation_penalty": 0.5},
    "advantage.truncation_ramp": {
        "advantage.truncation_penalty": 0.5,
        "advantage.truncation_ramp": 4,
    },
    "correction.bound": {"correction.hi": 1.05},
    "correction.lo": {"correction.bound": "mask", "correction.lo": 0.5},
    "correction.denominator": _VETOES,
    "correction.m2": {"correction.m2": 0.02},
    **{
        f"correction.{key}": _REJECTS
        for key in ("reject", "reject_over", "reject_lo", "reject_hi", "reject_when", "reject_at")
    },
    **{
        f"correction.{key}": _REJECTS_TWICE
        for key in ("reject2", "reject2_over", "reject2_lo", "reject2_hi")
    },
    "correction.veto": _VETOES,
    "correction.veto_below": _VETOES,
    "kl.reward.target": {"kl.reward.reference": "reference"},
    "kl.reward.horizon": {"kl.reward.reference": "reference"},
    "loss.cispo_absolute": {"loss.eps_high": 1.0},
    "loss.dppo_divergence": {"loss.dppo_threshold": 1e-3},
    "loss.dual_clip": {"loss.dual_clip": 1.01},
    "stop.every": {"learner.epochs": 2},
}
# what a method needs besides
NEEDS: dict[str, dict[str, Any]] = {
    **{name: {"correction.proximal": "behavior"} for name in settings.ON_BEHAVIOR},
    "reinforce": {"correction.proximal": "recompute"},
    "function": {"advantage.function": "own_methods:rloo", "loss.function": "own_methods:half"},
    "clip_cov": {"loss.cov_share": 0.3, "loss.cov_lo": -0.5},
    "kl_cov": {"loss.cov_share": 0.3},
}
# another value than the one that follows from the key's type
OTHER: dict[str, Any] = {
    **{"advantage.function": "own_methods:to_go", "loss.function": "own_methods:ppo"},
    **{"advantage.part_weights": {"length": 3.0}, "advantage.k": 2, "advantage.truncated": "fixed"},
    **{"correction.bound": "mask", "correction.function": "test_algorithms:half"},
    **{"correction.hi": 1.05, "correction.lo": 0.9, "correction.m2": 0.01},
    **{"correction.reject": "tv", "correction.reject2": "tv", "correction.reject2_lo": 0.001},
    **{"correction.reject_at": "proximal", "correction.veto": "none"},
    **{"correction.veto_below": 0.01, "kl.loss.reference": "reference"},
    **{"kl.reward.reference": "reference", "kl.reward.target": 1e-9, "loss.band_hi": 1.01},
    **{"loss.band_lo": 0.99, "loss.cov_hi": 0.01, "loss.cov_lo": 0.0, "loss.cov_share": 0.6},
    **{"loss.dppo_high": 1e-4, "loss.dppo_threshold": 1e-3, "loss.dual_clip": 1.2},
    **{"loss.eps_high": 1.5, "reshape.clip": 0.01, "reshape.gamma_min": 0.9},
    **{"reshape.kl_budget": 1e-5, "reshape.rho_min": 0.99, "reshape.weight_max": 1.0},
    **{"stop.ess_min": 0.999, "stop.ess_on_policy": 0.5, "stop.kl_max": 1e-6},
}
BATCHES = {"advantage.ema_decay": 3}  # two where a key is not named
EXCEPTIONS = {
    "kl.preset": "names other keys, which are tried",
    "correction.preset": "names other keys, which are tried",
    "value.path": "a directory of a reward model (test_critic)",
    "loss.center_top": "the tiny vocabulary has fewer tokens (test_learner_step)",
    "advantage.no_spread": "acts in the buffer, which holds such groups back (test_store_rules)",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("act") / name for name in ("policy", "reference")}
    for number, path in enumerate(made.values()):
        build_model(path, "abcdefgh", hidden=16, layers=1, seed=number)
    return made


RUNS: dict[str, Any] = {}  # by what it ran with: keys share most of what is around them


def found(models: dict[str, Path], keys: dict[str, Any], batches: int = 2) -> Any:
    """Weights and metrics after two batches, or the error's text."""
    name = f"{batches} {sorted(keys.items())}"
    if name not in RUNS:
        RUNS[name] = run(models, keys, batches)
    return RUNS[name]


def run(models: dict[str, Path], keys: dict[str, Any], batches: int) -> Any:
    raw = {
        **{"model.path": str(models["policy"]), "model.device": "cpu", "task.name": "sort"},
        **{"generator.max_new_tokens": 12, "learner.optimizer": "sgd", "learner.lr": 0.5},
        **{"learner.groups": GROUPS, "learner.group_size": SIZE, "learner.minibatches": 2},
        **{"record.split_every": 0, "record.reference_kl_every": 0},
        **{
            key: str(models[value]) if value == "reference" else value
            for key, value in keys.items()
        },
    }
    try:
        learner = LearnerCore(load.convert(raw, "c.toml"), models["policy"])
        rows = [learner.train(batch_with_parts(number)) for number in range(batches)]
    except AsyncrlError as error:
        return str(error)
    numbers = [{name: x for name, x in row.items() if not math.isnan(x)} for row in rows]
    return numbers, weights(learner).tolist()


def other(field: Any, key: str, now: Any) -> Any:
    """Another value that the field may have."""
    if key in OTHER:
        return OTHER[key]
    kind, _ = layers.split_annotations(field.type)
    options = [kind, *(layers.split_annotations(option)[0] for option in typing.get_args(kind))]
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            return next(value for value in typing.get_args(option) if value != now)
    if isinstance(now, bool):
        return not now
    if isinstance(now, int):
        return now + 2
    return 0.3 if now in (None, 0.0) or now > 100 else now * 0.7


def context(struct: Any, section: str, field: Any, key: str) -> dict[str, Any]:
    """What `key` needs around it to be read."""
    keys: dict[str, Any] = {}
    tag, value = layers.get_tag(struct)
    if tag:
        keys[f"{section}.{tag}"] = value
    fields = layers.map_fields(struct)
    pending = list(layers.list_conditions(field, f"{section}."))
    while pending:
        chooser, values = pending.pop()
        keys[chooser] = values[0] if values else ON[chooser]
        name = chooser.rpartition(".")[2]
        if chooser.startswith(f"{section}.") and name in fields:
            pending += layers.list_conditions(fields[name], f"{section}.")
    return keys | NEEDS.get(value, {}) | BESIDE.get(key, {})


def expected(section: str, struct: Any, key: str) -> bool:
    """Whether a key is tried; gdpo looks at rewards as they came, and refuses what shapes them."""
    shaping = ("advantage.truncated", "advantage.truncation_penalty", "advantage.truncation_ramp")
    of_built_in = struct is settings.FunctionLoss and key == "loss.norm_length"
    shaped = struct is settings.GdpoAdvantage and key in shaping
    return key not in EXCEPTIONS and not of_built_in and not shaped


def cases() -> list[Any]:
    made = []
    plain: list[tuple[str, Any]] = [
        ("reshape", settings.Reshape),
        ("value", settings.Value),
        ("kl.reward", settings.KLReward),
        ("kl.loss", settings.KLLoss),
        ("stop", settings.Stop),
    ]
    for section, kind in (
        ("advantage", settings.Advantage),
        ("loss", settings.Loss),
        ("correction", settings.Correction),
    ):
        plain += [(section, struct) for struct in settings.list_variants(kind)]
    for section, struct in plain:
        for name, field in layers.map_fields(struct).items():
            if not expected(section, struct, f"{section}.{name}"):
                continue
            made.append(pytest.param(section, struct, field, id=f"{struct.__name__}.{name}"))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("section", "struct", "field"), cases())
def test_accepted_keys_act(models: dict[str, Path], section: str, struct: Any, field: Any) -> None:
    key = f"{section}.{field.name}"
    around = context(struct, section, field, key)
    if section == "reshape":
        around |= {"loss.surrogate": "reshape", "correction.proximal": "behavior"}
    if section == "value":
        around |= {"advantage.name": "gae"}
    now = layers.get_value(dict(around), Config, key)
    changed = around | {key: other(field, key, now)}
    for batches in (1, BATCHES.get(key, 2)):  # most act in the first one
        before = found(models, around, batches)
        assert not isinstance(before, str), before
        if before != found(models, changed, batches):
            return
    pytest.fail(f"{key}: {now} and {other(field, key, now)} do the same")


AROUND = (
    *("model.device=cpu", "generator.max_new_tokens=24", "generator.context=64"),
    *("learner.steps=3", f"learner.groups={GROUPS}", f"learner.group_size={SIZE}"),
    *("learner.minibatches=2", "record.split_every=0", "record.reference_kl_every=0"),
)
# what a paper's settings need around them here
SETTING_BESIDE = {"kl.preset = distill": "model.reference={reference}"}
CASES = [
    pytest.param(option, id=f"{row[0]} {row[1]} {number}")
    for row in reference_pages.papers()
    for number, option in enumerate(reference_pages.alternatives(row[2]))
]


@pytest.mark.parametrize("option", CASES)
def test_the_settings_of_a_paper_train(models: dict[str, Path], option: list[str]) -> None:
    sets = [f"model.path={models['policy']}", *AROUND]
    for setting in option:
        key, _, value = setting.partition(" = ")
        sets.append(f"{key}={value}")
        if setting in SETTING_BESIDE:
            sets.append(SETTING_BESIDE[setting].format(reference=models["reference"]))
    learner = LearnerCore(load.load(ROOT / "configs" / "demo.toml", sets), models["policy"])
    before = weights(learner)
    for number in range(2):
        assert math.isfinite(learner.train(batch_with_parts(number))["loss/policy"])
    after = weights(learner)
    assert bool(after.isfinite().all()) and not bool((after == before).all())


MIS = "correction.preset=mis"


@pytest.mark.parametrize("name", bundled_configs.list_names())
def test_a_run_of_every_shipped_config_can_go_on_with_mis(name: str, tmp_path: Path) -> None:
    """Its resolved config gives every key: the preset must replace those it is about, no other."""
    before = load.load(f"configs/{name}.toml")
    (tmp_path / "config.toml").write_text(load.dump(before))
    after = runner.resolve_resume(tmp_path, [MIS])
    assert load.load(tmp_path / "config.toml") == after, "what the processes read"
    correction = after.correction
    assert (correction.level, correction.bound) == ("token", "truncate")
    assert (correction.reject, correction.veto) == ("ratio", "ratio")
    assert correction.proximal == "recompute", "its weights are pi_prox / mu"
    changed = {f for f in msgspec.structs.asdict(before) if getattr(before, f) != getattr(after, f)}
    assert changed == {"correction"}


def test_an_engine_that_differs_goes_on_as_its_sign_advises(asyncrl: Callable[..., Ended]) -> None:
    """For real, the command as the sign gives it: weights that cut and reject from there on."""
    small = ("learner.groups=8", "evaluation.final_prompts=8", "learner.checkpoint_every=2")
    words = ("learner.steps=4", "record.split_every=1", "generator.mantissa_bits=1")
    done = asyncrl("run", *small, *words, "name='off'").check()
    (advised,) = {
        found
        for sign in done.json["signs"]
        if sign["name"] == "engine_mismatch"
        and (
            found := "".join(
                re.findall(r"`asyncrl run --resume RUN --set (\S+)`", json.dumps(sign))
            )
        )
    }
    assert advised == MIS
    run_dir = Path(done.json["run_dir"])
    resumed = asyncrl("run", "--resume", str(run_dir), advised, "learner.steps=8")
    assert resumed.code == 0 and resumed.json["steps"] == 8, resumed.err[-3000:]
    rows = [r for r in metrics.read(run_dir) if "reward/mean" in r]
    weights = [r["is/mean_weight"] for r in rows]
    assert set(weights[:4]) == {1.0} and all(x != 1.0 for x in weights[4:]), "1: no correction"
    assert any(r["is/zero_share"] > 0 for r in rows[4:]), "what is off by so much is rejected"
