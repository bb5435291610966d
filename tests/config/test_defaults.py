"""What a config does that names nothing: tests/data/defaults.toml and, of every method,
tests/data/method_defaults.toml; of asyncrl/config/tree.py and asyncrl/algorithms/settings.py.

A default changes every run that does not name its key.  Who changes one changes it there as well,
and says so in the CHANGELOG.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import tomli_w

from asyncrl.algorithms import settings
from asyncrl.config import load

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
