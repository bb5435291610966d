"""The settings of every paper in docs/papers.toml train two batches through the learner's step."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from learner_step_kit import GROUPS, SIZE, batch_with_parts, weights
from process_kit import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import reference_pages

from asyncrl.config import load
from asyncrl.models.policy import build_model
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
        row = learner.train(batch_with_parts(number))
        assert math.isfinite(row["loss/policy"])
    after = weights(learner)
    assert bool(after.isfinite().all()) and not bool((after == before).all())
