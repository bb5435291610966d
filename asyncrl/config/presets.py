"""Presets: names that each set several keys of a section."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The weights are pi_prox / mu, so the proximal policy is the learner at the start of the batch.
PRESETS: dict[str, dict[str, Any]] = {
    "none": {"proximal": "recompute", "level": "none"},
    "tis": {"proximal": "recompute", "level": "token", "bound": "truncate", "hi": 2.0},
    "seq_tis": {"proximal": "recompute", "level": "sequence", "bound": "truncate", "hi": 2.0},
    "icepop": {"proximal": "recompute", "level": "token", "bound": "mask", "lo": 0.5, "hi": 5.0},
    "mis": {
        "proximal": "recompute",
        "level": "token",
        "bound": "truncate",
        "hi": 2.0,
        "reject": "ratio",
        "reject_over": "mean",
        "veto": "ratio",
    },
    "mis_normalized": {
        "proximal": "recompute",
        "level": "token",
        "bound": "truncate",
        "hi": 2.0,
        "self_normalize": True,
        "reject": "ratio",
        "reject_over": "mean",
        "veto": "probability",
        "veto_below": 1e-6,
    },
}
KL_PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"loss.coefficient": 0.04, "loss.estimator": "k3"},  # DeepSeekMath's beta
    "dr_grpo": {"loss.coefficient": 0.0},
    "rloo": {"reward.coefficient": 0.05, "reward.estimator": "k1"},
    # the reverse KL over the vocabulary at each state of the student's own completions
    "distill": {
        "loss.coefficient": 1.0,
        "loss.off_policy": "prefix_full",
        "loss.discount": 0.0,
        "loss.truncate": 2.0,
    },
}

PRESET_TABLES = (("correction", PRESETS), ("kl", KL_PRESETS))


def fill(raw: dict[str, Any]) -> None:
    """Fill the missing keys of every section with a preset."""
    for section, values_by_preset in PRESET_TABLES:
        table = raw.get(section)
        if not isinstance(table, dict):
            continue
        preset = table.get("preset")
        if isinstance(preset, str) and preset in values_by_preset:
            raw[section] = _fill(table, values_by_preset[preset])


def forget(raw: dict[str, Any], sets: Sequence[str]) -> None:
    """Remove the file's keys that a preset on the command line replaces.

    A resolved file has all of them, so that the preset would otherwise change nothing."""
    set_keys = {item.partition("=")[0].strip() for item in sets}
    for section, table in PRESET_TABLES:
        for key in (
            {key for keys in table.values() for key in keys}
            if f"{section}.preset" in set_keys
            else ()
        ):
            *path, name = f"{section}.{key}".split(".")
            parent: Any = raw
            for ancestor in path:
                parent = parent.get(ancestor) if isinstance(parent, dict) else None
            if isinstance(parent, dict) and f"{section}.{key}" not in set_keys:
                parent.pop(name, None)


def _fill(table: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the table with missing keys from `values`, whose keys may be dotted."""
    filled = {k: dict(v) if isinstance(v, dict) else v for k, v in table.items()}
    for key, value in values.items():
        *path, name = key.split(".")
        parent = filled
        for section in path:
            parent = parent.setdefault(section, {})
        parent.setdefault(name, value)
    return filled
