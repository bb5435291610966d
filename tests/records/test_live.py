import io
import itertools
from importlib.metadata import version

import msgspec
import pytest
from click.testing import CliRunner
from process_kit import TEXTS
from rich.console import Console

import asyncrl
from asyncrl.cli import main
from asyncrl.contract.messages import RunStatus, StatusRequest
from asyncrl.supervise import live


def status(committed: int, steps: int = 100) -> RunStatus:
    return RunStatus("r", committed, steps, 1, {"reward/mean": 0.5}, {}, [], {}, False)


def test_what_is_left_follows_the_last_batches() -> None:
    """Ten slow batches of 100 s, then twenty of 10 s: only those count.  A batch that takes long
    counts before it ends."""
    pace, now = live.ProgressPace(), 0.0
    pace.observe(0, now)
    assert pace.estimate_seconds(100, now) is None, "one look says nothing of the pace"
    for n in range(1, 31):
        now += 100.0 if n <= 10 else 10.0
        pace.observe(n, now)
        pace.observe(n, now + 1)  # a look without a new batch
    assert pace.estimate_seconds(100, now) == 700.0 == pace.estimate_seconds(100, now + 10)
    assert pace.estimate_seconds(100, now + 220) == 70 * 420 / 21
    assert pace.estimate_seconds(30, now) == 0.0


@pytest.mark.parametrize(("seconds", "said"), TEXTS["durations_for_a_reader"])
def test_durations_for_a_reader(seconds: float, said: str) -> None:
    assert live.format_duration(seconds) == said


def test_the_line_and_the_table_say_it() -> None:
    assert live.format_status(status(30), 700.0).startswith(
        "step 30/100 (12 min left)  reward 0.500"
    )
    assert live.format_status(status(30)).startswith("step 30/100  reward")
    for left, said in ((700.0, "12 min left"), (None, "")):
        out = io.StringIO()
        Console(file=out, width=160).print(live.build_table(status(30), left))
        assert "30/100" in out.getvalue() and ("left" in out.getvalue()) == bool(said)
        assert said in out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 160])
def test_who_waits_for_what_is_whole_on_a_narrow_terminal(width: int) -> None:
    waiting = [("learner", "a batch: 3 of 8 groups are there", "buffer", 12.3)]
    shown = msgspec.structs.replace(status(30), waits=waiting)
    out = io.StringIO()
    Console(file=out, width=width).print(live.build_table(shown, 700.0))
    text = " ".join(out.getvalue().split())
    assert "waits learner 12.3 s for a batch: 3 of 8 groups are there (buffer)" in text
    assert "30/100" in text and "12 min left" in text and "…" not in text


MIXED = {"eval/heldout": 0.5, "eval/math": 0.3125, "eval/essays-long": 0.75, "eval/hard": 0.125} | {
    f"task/{title}_{name}": value
    for title, share in (("math", 0.75), ("essays-long", 0.25))
    for name, value in (
        ("share", share),
        ("weight", share),
        ("reward", 0.5),
        ("lag", 1.25),
        ("ess", 0.875),
        ("removed", 12.0),
    )
}


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_tasks_of_a_mixture_have_their_labels_at_every_width(width: int) -> None:
    shown = status(30)
    shown.metrics.update(MIXED)
    out = io.StringIO()
    Console(file=out, width=width).print(live.build_table(shown, 700.0))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width and "…" not in out.getvalue()
    text = " ".join(out.getvalue().split())
    if width == 40:
        for title, share, heldout in (("math", 75, "0.312"), ("essays-long", 25, "0.750")):
            numbers = f"share {share}% reward 0.500 held-out {heldout} lag 1.25 ESS 0.875 removed"
            assert f"{title} {numbers} 12" in text
        assert any("held-out 0.750" in line for line in lines)  # no label without its number
    else:
        header = next(line for line in lines if "held-out" in line and "task" in line)
        row = next(line for line in lines if line.lstrip().startswith("essays-long"))
        assert " ".join(header.split()) == "tasks task share reward held-out lag ESS removed"
        assert row.split() == ["essays-long", "25%", "0.500", "0.750", "1.25", "0.875", "12"]
        assert header.index("held-out") + len("held-out") == row.index("0.750") + len("0.750")
    assert "sets hard 0.125" in text
    line = live.format_status(shown)
    assert "math: share 75%, reward 0.500, held-out 0.312; essays-long: share 25%" in line


def test_rewards_are_named_when_they_hold_the_run_up() -> None:
    now = {
        "reward/queue": 120.0,
        "reward/wait_s": 3.0,
        "reward/call_s": 0.2,
        "reward/workers": 1.0,
        "time/reward_wait_share": 0.42,
    }
    slow, fine, none = status(30), status(30), status(30)
    slow.metrics.update(now)
    fine.metrics.update(now | {"time/reward_wait_share": 0.01})
    expected = "rewards hold the generators up: idle 42% of the time for them, 120 answers wait"
    assert expected in live.format_status(slow) and "rewards hold" not in live.format_status(fine)
    assert "rewards hold" not in live.format_status(none)
    slow.metrics.update({"reward/call_s": 2e-5})  # the wait is for a core then
    assert "rewards hold" not in live.format_status(slow)
    slow.metrics.pop("reward/call_s")  # no call has ended yet
    slow.metrics.pop("reward/wait_s")
    assert "rewards hold" not in live.format_status(slow) and "nan" not in live.format_status(slow)
    shown = {}
    for name, s in (("fine", fine), ("none", none)):
        out = io.StringIO()
        Console(file=out, width=160).print(live.build_table(s))
        shown[name] = out.getvalue()
    assert "waiting 120" in shown["fine"] and "s a call 0.2" in shown["fine"]
    assert "processes 1" in shown["fine"] and "processes" not in shown["none"]


def test_a_run_is_followed_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal; the buffer is played: a batch every 2 s of a clock that stands."""
    clock, batches = itertools.count(0.0, 2.0), itertools.count()

    class Wire:
        def __init__(self, address: str, curve_dir: str) -> None:
            self.now = 0.0

        def send(self, message: StatusRequest) -> None:
            pass

        def recv(self, timeout: float) -> RunStatus:
            return status(next(batches), 10)

        def close(self) -> None:
            pass

    class Time:
        monotonic = staticmethod(lambda: next(clock))

    monkeypatch.setattr(live, "PeerSocket", Wire)
    monkeypatch.setattr(live, "time", Time)
    monkeypatch.setattr(live, "PLAIN_S", 1.0)
    looks = itertools.count()
    live.follow("ipc://x", "", lambda: next(looks) > 4)
    lines = capsys.readouterr().err.splitlines()
    assert [x.split("  ")[0] for x in lines] == [
        "step 0/10",
        "step 1/10 (18 s left)",
        "step 2/10 (16 s left)",
        "step 3/10 (14 s left)",
        "step 4/10 (12 s left)",
        "step 4/10",
    ]


def test_the_version_is_said() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"asyncrl {asyncrl.__version__}\n"
    assert asyncrl.__version__ == version("asyncrl")


def test_what_no_step_used_is_said_while_it_is_much() -> None:
    def out(s: RunStatus) -> str:
        text = io.StringIO()
        Console(file=text, width=160).print(live.build_table(s))
        return text.getvalue()

    much, little = status(30), status(30)
    for s, skipped in ((much, 300.0), (little, 3.0)):
        sums = {"trained": 700.0, "skipped": skipped, "left_over": 9e9}
        s.ledger.update({name: {"tokens": tokens} for name, tokens in sums.items()})
    said = "of the tokens of its batches 30% skipped by early stopping"
    assert live.format_status(much).endswith(said) and said in out(much)
    for s in (little, status(30)):
        assert "skipped" not in live.format_status(s) and "not used" not in out(s)
