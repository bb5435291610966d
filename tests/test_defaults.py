"""What a config does that names nothing: tests/defaults.toml, of asyncrl/config/tree.py and
asyncrl/algorithms/settings.py.

A default changes every run that does not name its key.  Who changes one changes it there as well,
and says so in the CHANGELOG.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.config import load
from asyncrl.config.tree import Config

DEFAULTS = Path(__file__).with_name("defaults.toml")


def test_every_default_is_the_one_that_is_written_down() -> None:
    least = {"model": {"path": "m"}, "task": {"name": "sort"}}
    assert load.dump(msgspec.convert(least, Config)) == DEFAULTS.read_text()


def test_a_bare_config_trains_as_the_demo_does() -> None:
    """Model and task alone are the demo's algorithm and limit, whatever size the demo has."""
    least = {"model": {"path": "m"}, "task": {"name": "sort"}}
    bare = load.convert(least, "bare.toml")
    demo = load.load("demo")
    for section in ("advantage", "correction", "loss", "kl", "stop", "staleness"):
        assert getattr(bare, section) == getattr(demo, section), section
    assert bare.staleness.max_lag == 2 and bare.correction.proximal == "behavior"
