"""What a config does that names nothing: tests/data/defaults.toml and, of every method,
tests/data/method_defaults.toml; of asyncrl/config/tree.py and asyncrl/algorithms/settings.py.

A default changes every run that does not name its key.  Who changes one changes it there as well,
and says so in the CHANGELOG."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import tomli_w
from click.testing import CliRunner

from asyncrl.algorithms import settings
from asyncrl.cli import main
from asyncrl.config import bundled_configs, load, presets, rules

DEFAULTS = Path(__file__).parents[1] / "data" / "defaults.toml"
METHODS = DEFAULTS.with_name("method_defaults.toml")


def test_every_default_is_the_one_that_is_written_down() -> None:
    least = {"model": {"path": "m"}, "task": {"name": "sort"}}
    assert load.dump(load.build(least)) == DEFAULTS.read_text()


def test_the_defaults_of_every_method_are_written_down() -> None:
    """Of each advantage, surrogate and proximal policy, and of what its keys read besides."""
    found = {
        kind.__name__.lower(): {
            struct.__struct_config__.tag: {
                name: value
                for name, value in msgspec.to_builtins(struct()).items()
                if value is not None
            }
            for struct in settings.list_variants(kind)
        }
        for kind in (settings.Advantage, settings.Loss, settings.Correction)
    }
    sections = (settings.Reshape, settings.Value, settings.KLReward, settings.KLLoss, settings.Stop)
    found |= {kind.__name__.lower(): msgspec.to_builtins(kind()) for kind in sections}
    assert tomli_w.dumps(found) == METHODS.read_text()


def test_a_bare_config_trains_as_the_demo_does() -> None:
    """Model and task alone are the demo's algorithm and limit, whatever size the demo has."""
    least = {"model": {"path": "m"}, "task": {"name": "sort"}}
    bare = load.convert(least, "bare.toml")
    demo = load.load("demo")
    for section in ("advantage", "correction", "loss", "kl", "stop", "staleness"):
        assert getattr(bare, section) == getattr(demo, section), section
    assert bare.staleness.max_lag == 2 and bare.correction.proximal == "behavior"


def write_header(path: Path, *sizes: int) -> Path:
    """Write the headers of weight files with `sizes` parameters each, without data."""
    path.mkdir(parents=True)
    for number, size in enumerate(sizes):
        entry = {"dtype": "BF16", "shape": [size // 10, 10], "data_offsets": [0, 2 * size]}
        header = json.dumps({"w": entry, "__metadata__": {"format": "pt"}}).encode()
        file = path / f"model-{number}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@pytest.mark.parametrize(
    ("sizes", "sets", "rate", "reason"),
    [
        ((10_000_000,), (), 2e-4, ""),
        ((134_515_000,), (), 1e-5, "default for 134,515,000 parameters"),
        ((134_515_000,), ("lora.rank=8",), 1e-4, "default for adapters on 134,515,000 parameters"),
        ((900_000_000, 900_000_000), (), 1e-6, "default for 1,800,000,000 parameters"),
        ((134_515_000,), ("learner.lr=3e-5",), 3e-5, "--set learner.lr=3e-5"),
        ((134_515_000,), ("learner.optimizer=sgd",), 2e-4, ""),
        ((), (), 2e-4, ""),
    ],
)
def test_the_learning_rate_is_that_of_the_models_size(
    sizes: tuple[int, ...], sets: tuple[str, ...], rate: float, reason: str, tmp_path: Path
) -> None:
    """With its reason in `config show`; a written config keeps it."""
    model = write_header(tmp_path / "model", *sizes)
    path = tmp_path / "c.toml"
    path.write_text(f"model.path = '{model}'\ntask.name = 'sort'\n")
    origins: dict[str, str] = {}
    made = load.load(path, sets, None, origins)
    assert made.learner.lr == pytest.approx(rate) and origins.get("learner.lr", "") == reason
    (tmp_path / "written.toml").write_text(load.dump(made))
    assert load.load(tmp_path / "written.toml") == made
    shown = CliRunner().invoke(main, ["config", "show", str(path), *(f"--set={x}" for x in sets)])
    assert f"lr = {made.learner.lr!r}  # {reason or 'default'}" in shown.stdout


def test_a_tiny_models_rate_on_a_large_one_is_warned_of(tmp_path: Path) -> None:
    model = write_header(tmp_path / "model", 134_515_000)
    path = tmp_path / "c.toml"
    path.write_text(f"model.path = '{model}'\ntask.name = 'sort'\n")
    assert not rules.find_warnings(load.load(path))
    (warning,) = rules.find_warnings(load.load(path, ["learner.lr=2e-4"]))
    usual = "1e-05 is the default for 134,515,000 parameters"
    assert warning == f"learner.lr: 0.0002 is that of a tiny model; {usual}"
    of_hub = load.build({"model": {"path": "hf://org/name"}, "task": {"name": "sort"}})
    assert of_hub.learner.lr == 1e-6


def test_a_damaged_weight_file_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert presets.count_parameters(tmp_path) == 0


@pytest.mark.parametrize("name", bundled_configs.list_names())
def test_every_bundled_config_gives_its_rate(name: str) -> None:
    origins: dict[str, str] = {}
    load.load(name, [], None, origins)
    assert not origins["learner.lr"].startswith("default")
