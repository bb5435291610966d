"""What the field calls things is found where a user looks, and the keys that it leads to are
there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.config import load
from asyncrl.records import health_checks, metrics

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()
NAMES = ALGORITHMS.split("## By the names you may know")[1].split("\n## ")[0]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
RULES = (*health_checks.RULES, *health_checks.END_RULES, *health_checks.KNOWN_RULES)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dynamic sampling", ["advantage.no_spread='filter'"]),
        ("partial rollouts", ["weights.in_flight='keep_kv'", "weights.in_flight='recompute_kv'"]),
        (
            "adaptive KL controller",
            ["kl.reward.controller='adaptive'", "kl.reward.target=3.0", "kl.reward.horizon=100"],
        ),
    ],
)
def test_a_name_leads_to_its_keys(name: str, keys: list[str]) -> None:
    """In docs/algorithms.md and in the settings' own descriptions."""
    (line,) = [x for x in NAMES.splitlines() if x.startswith(f"| {name}")]
    before = ["kl.reward.coefficient=0.1"]
    for key in keys:
        path, value = key.split("=")
        load.load("configs/demo.toml", [*before, key])
        if key.endswith("'adaptive'"):  # the keys after it are the controller's own
            before.append(key)
        assert path in line and (value[0] != "'" or value.replace("'", '"') in line), key
    assert name in (ROOT / "configs" / "schema.json").read_text()


def test_every_key_of_the_table_exists() -> None:
    named = re.findall(r"`(\w+(?:\.\w+)+)", NAMES)
    assert len(named) > 10 and set(named) <= set(load.list_keys()), set(named) - set(
        load.list_keys()
    )


def test_every_sign_is_named_with_what_it_is() -> None:
    table = TROUBLESHOOTING.split("## When a run goes wrong")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table))
    code = (ROOT / "asyncrl" / "records" / "health_checks.py").read_text()
    said = {
        name
        for named_here in re.findall(r'inding\(\s*("\w+"(?: if \w+ else "\w+")?),', code)
        for name in re.findall(r'"(\w+)"', named_here)
    } | {"answers_missing", *(rule.name for rule in health_checks.BOUND_RULES["latest"])}
    # growing_mismatch, answers_missing and the rules of the newest values are in none of the lists
    assert len(said) == len(RULES) + 4 and said <= named, said - named
    read = set(re.findall(r'"((?:kl|split|mismatch|reward|answer|eval)/\w+)"', code))
    assert len(read) > 8 and all(metrics.is_known_metric(x) for x in read), (
        "a rule reads what no run writes"
    )
