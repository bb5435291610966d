"""The settings of every paper in docs/papers.toml train two batches through the learner's step."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import reference_pages
from learner_step_kit import GROUPS, SIZE, batch_with_parts, weights
from process_kit import ROOT, Ended

from asyncrl.config import bundled_configs, load
from asyncrl.models.policy import build_model
from asyncrl.records import metrics
from asyncrl.supervise import run as runner
from learner.step import LearnerCore

AROUND = (
    "model.device=cpu",
    "generator.max_new_tokens=24",
    "generator.context=64",
    "learner.steps=3",
    f"learner.groups={GROUPS}",
    f"learner.group_size={SIZE}",
    "learner.minibatches=2",
    "record.split_every=0",
    "record.reference_kl_every=0",
)
# what a paper's settings need around them here
BESIDE = {"kl.preset = distill": "model.reference={reference}"}
CASES = [
    pytest.param(option, id=f"{row[0]} {row[1]} {number}")
    for row in reference_pages.papers()
    for number, option in enumerate(reference_pages.alternatives(row[2]))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("papers") / name for name in ("policy", "reference")}
    for number, path in enumerate(made.values()):
        build_model(path, "abcdefgh", hidden=16, layers=1, seed=number)
    return made


@pytest.mark.parametrize("option", CASES)
def test_the_settings_of_a_paper_train(models: dict[str, Path], option: list[str]) -> None:
    sets = [f"model.path={models['policy']}", *AROUND]
    for setting in option:
        key, _, value = setting.partition(" = ")
        sets.append(f"{key}={value}")
        if setting in BESIDE:
            sets.append(BESIDE[setting].format(reference=models["reference"]))
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
