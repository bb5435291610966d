"""benchmarks/transport.py: what is compared and what is said, by hand-made rounds; and its quick
run, in which every answer is counted."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from process_kit import ROOT, load_program, run_command

ANSWERS = {64: 100, 1024: 100, 16384: 100}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    # last: benchmarks/learner.py must not hide the package
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    return load_program(ROOT / "benchmarks" / "transport.py")


def turns(**seconds: float) -> dict[str, dict[str, float]]:
    return {name: {"wall": wall, "cpu": wall / 4} for name, wall in seconds.items()}


def test_a_ratio_is_of_one_round_and_ray_is_held_against_its_own_rounds(bench: Any) -> None:
    """Ours over the rival, in answers a second: above 1 we are faster."""
    together = [
        turns(memory=1.0, disk=2.0, raw=0.5, tcp=1.0, curve=2.0),
        turns(memory=2.0, disk=4.0, raw=2.0, tcp=1.0, curve=1.0),
        turns(memory=1.0, disk=2.0, raw=0.6, tcp=1.0, curve=4.0),
    ]
    alone = [turns(memory=1.0, ray=5.0), turns(memory=1.0, ray=3.0), turns(memory=1.0, ray=4.0)]
    passes = {tokens: [together, alone] for tokens in ANSWERS}
    goals, without = bench.judged(passes, ANSWERS, {"redis": "no redis here"})
    found = {row["figure"]: row for row in goals}
    assert found["64 tokens: memory / raw"]["value"] == 0.6
    assert found["64 tokens: memory / raw"]["spread"] == [0.5, 1.0]
    assert found["1024 tokens: memory / ray"]["value"] == 4.0  # 5, 3, 4: not those of `together`
    assert found["1024 tokens: curve / tcp"]["value"] == 0.5
    assert found["1024 tokens: disk / memory"]["value"] == 0.5
    # 0.5, 1 and 0.5 s of 100 answers
    assert found[bench.CPU_FIGURE]["value"] == 5000.0 and not found[bench.CPU_FIGURE]["met"]
    said = {row["figure"]: row for row in without}
    assert said["1024 tokens: memory / redis"]["value"] == "not measured: no redis here"
    assert not any(row["met"] for row in without)
    assert {*found, *said} == {each.figure for each in bench.GOALS} | {bench.CPU_FIGURE}
    medians = bench.medians(passes, ANSWERS)["1024"]
    assert medians["raw"] == {"answers_per_s": 167, "cpu_us": 1500.0}
    assert medians["ray"]["answers_per_s"] == 25
    slower = [turns(memory=9.0, ray=9.0)]
    passes = {1024: [together, slower]}
    assert bench.medians(passes, ANSWERS)["1024"]["memory"]["answers_per_s"] == 100


def test_a_rival_that_loses_doubles_or_cuts_a_message_is_none(bench: Any, tmp_path: Path) -> None:
    from lib import transport_rivals

    class Kept(transport_rivals.Rival):
        spoil = staticmethod(lambda frames: frames)

        def put(self, frames: list[bytes]) -> None:
            self.frames = frames

        def take(self, many: int) -> list[Any]:
            return list(self.spoil(self.frames))

    for frame in (1, 8, 32):
        rival = Kept(tmp_path, 64, 2)
        rival.frame = frame
        rival.batches(2)
        assert rival.check()["taken"] == 32
    for spoil in (lambda frames: frames[1:], lambda frames: [*frames, frames[0]]):
        rival = Kept(tmp_path, 64, 2)
        rival.spoil = spoil
        with pytest.raises(RuntimeError, match=r"answers of .* bytes went"):
            rival.batches(1)
    rival = Kept(tmp_path, 64, 2)
    rival.spoil = lambda frames: [frames[0], *frames[:-1]]  # as many, and one of them twice
    rival.batches(1)
    with pytest.raises(RuntimeError, match="15 different"):
        rival.check()


def test_the_quick_run_has_every_part_of_ours_and_says_which_rival_is_not_there(bench: Any) -> None:
    """By a Python without their libraries: no rival but zmq."""
    nowhere = str(ROOT / "no-such-python")
    without = [f"--{name}-python={nowhere}" for name in ("redis", "ray", "reverb", "straw")]
    argv = [sys.executable, "benchmarks/transport.py", "--quick", "--json", *without]
    done = run_command(argv).check()
    result = json.loads(done.out.splitlines()[-1])
    assert set(result["missing"]) == set(bench.RIVALS) - {"raw"}
    assert all(nowhere in why for why in result["missing"].values()) and not result["met"]
    figures = {row["figure"] for row in result["goals"]}
    assert figures == {each.figure for each in bench.GOALS} | {bench.CPU_FIGURE}
    for length in bench.LENGTHS:
        checked = result["checked"][str(length.tokens)]
        assert set(checked) == {*bench.OURS, "raw"}
        assert [name for name in bench.OURS if checked[name]["encrypted"]] == ["curve"]
        journaled = {name: checked[name]["journal_bytes"] for name in bench.OURS}
        assert [x for x in bench.OURS if journaled[x] > 8 * length.tokens] == ["process", "disk"]
        made = {one["taken"] for name, one in checked.items() if name != "raw"}
        assert len(made) == 1 and made.pop() > 0  # as many batches of each
        assert checked["raw"]["taken"] == checked["raw"]["sent"] > 0
        medians = result["medians"][str(length.tokens)]
        assert all(one["answers_per_s"] > 0 and one["cpu_us"] > 0 for one in medians.values())
