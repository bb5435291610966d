"""Sessions over random schedules of the real gateway and the real store: no token past the limit,
no draw lost or trained twice, every token in the ledger; and each rule is needed."""

import re
from pathlib import Path

import pytest
from session_schedules import AUTO, RULES, place, schedule, several

pytestmark = pytest.mark.slow

# `python tests/support/session_schedules.py 10000` is the long form
SCHEDULES = 40
SEEDS_FOR_A_RULE = 60


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place(tmp_path_factory.mktemp("sessions") / "m")


def test_sessions_keep_the_limit_and_the_ledger_and_are_written_once(where: Path) -> None:
    seen = several(range(SCHEDULES), where)
    # the schedules do what they are for
    for what in ("tokens at the limit", "further rows", "samples adopted, accepted", "orphaned"):
        assert seen[what] > 0, seen
    assert seen["samples adopted over an epoch"] > 0 and seen["tokens trained"] > 1000, seen


def test_adopted_sessions_keep_to_the_limits_that_their_grants_announced(where: Path) -> None:
    """A limit that sets itself, learners that are killed and resumed with other bounds: by draw, no
    token past what the grant said that its call was placed under (SessionWorld.promised)."""
    seen = several(range(12, 24), where, fault="kill_learner", **AUTO)
    assert seen["limit moved"] > 5 and seen["tokens at the limit"] > 25, seen
    assert seen["samples adopted, accepted"] > 15, seen
    for what in ("adopted over an epoch", "spans under another limit"):
        assert seen[f"samples {what}"] > 0, seen


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rule_that_is_switched_off_is_noticed(rule: str, where: Path) -> None:
    for seed in range(SEEDS_FOR_A_RULE):
        try:
            schedule(seed, where, rule, **RULES[rule].shown)
        except Exception as error:
            assert re.search(RULES[rule].said, str(error)), f"seed {seed}: {error!r}"
            return
    pytest.fail(f"{SEEDS_FOR_A_RULE} schedules without {rule}, and nothing noticed")
