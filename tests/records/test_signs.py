import json
import math
from pathlib import Path
from typing import Any

import pytest
from process_kit import SMALL, demo_command, run_command
from signs_kl_kit import names
from signs_kl_kit import rows as usual_rows

from asyncrl.config.load import load
from asyncrl.records.health_checks import apply_rules
from asyncrl.supervise import doctor
from asyncrl.supervise import run as runner
from asyncrl.supervise.report import advice
from asyncrl.tasks.file import FileTask


def rows(n: int, **keys: Any) -> list[dict[str, Any]]:
    """n batches with these metrics; `_` in a name stands for `/` once."""
    return [row | {k.replace("_", "/", 1): v for k, v in keys.items()} for row in usual_rows(n)]


def test_a_healthy_run_has_no_signs() -> None:
    assert apply_rules(rows(30)) == [] and apply_rules([], ended=True) == []
    assert apply_rules(rows(30), ended=True) == []


def test_constant_rewards_are_said_from_the_fifth_batch_on() -> None:
    flat = {"reward_no_spread_share": 1.0, "reward_min": 0.25, "reward_max": 0.25}
    assert apply_rules(rows(4, **flat)) == []
    (sign,) = apply_rules(rows(5, **flat))
    assert sign.name == "constant_rewards" and "last 5 batches has the reward 0.25" in sign.said
    assert "task try" in sign.try_this and sign.as_line() == f"{sign.said}; {sign.try_this}"


def test_rewards_without_spread_in_most_groups() -> None:
    """95 % is the limit, over the last 20 batches only; groups may differ among each other."""
    (sign,) = apply_rules(rows(8, reward_no_spread_share=0.95))
    expected = "in 95% of the groups of the last 8 batches all completions have the same reward"
    assert expected in sign.said and apply_rules(rows(8, reward_no_spread_share=0.94)) == []
    got = names(apply_rules(rows(30) + rows(20, reward_no_spread_share=0.96)))
    assert got == ["constant_rewards"]
    assert apply_rules(rows(30, reward_no_spread_share=1.0) + rows(20)) == []


def test_rewards_that_hold_the_generators_up() -> None:
    of = {"reward_queue": 120.0, "reward_wait_s": 3.0, "reward_call_s": 0.2, "reward_workers": 1.0}
    (sign,) = apply_rules(rows(6, time_reward_wait_share=0.42, **of))
    assert sign.name == "rewards_hold_up"
    assert (
        "idle 42% of their time because of rewards: 120 completions waited, 3 s each, and "
        "calls took 0.2 s in 1 process" in sign.said
    )
    assert "async def" in sign.try_this and "reward.workers" in sign.try_this
    assert apply_rules(rows(6, time_reward_wait_share=0.09, **of)) == []
    assert apply_rules(rows(4, time_reward_wait_share=0.42, **of)) == []
    # No call has ended yet, as in a run of few steps.
    del of["reward_call_s"], of["reward_wait_s"]
    assert apply_rules(rows(6, time_reward_wait_share=0.42, **of)) == []
    of |= {"reward_call_s": 0.2, "reward_wait_s": 3.0}
    # Calls of 20 microseconds explain no wait of 3 s: answers wait for a core.
    assert apply_rules(rows(6, time_reward_wait_share=0.42, **of | {"reward_call_s": 2e-5})) == []


def test_all_answers_truncated() -> None:
    (sign,) = apply_rules(rows(6, answer_truncated_share=1.0))
    assert sign.name == "all_truncated"
    assert "100% of the completions of the last 6 batches" in sign.said
    assert "generator.max_new_tokens" in sign.said
    assert apply_rules(rows(6, answer_truncated_share=0.9)) == []


def evaluated(start: float, end: float, n: int, **keys: Any) -> list[dict[str, Any]]:
    ends = [
        {"step": s, "t": 0.0, "eval/heldout": p, "eval/heldout_n": n}
        for s, p in ((0, start), (30, end))
    ]
    return [ends[0], *rows(30, **keys), ends[1]]


def test_accuracy_that_moves_less_than_its_interval() -> None:
    """n = 100 at 0.5: 1.96 sqrt(2 x 0.25 / 100) = 0.1386."""
    (sign,) = apply_rules(evaluated(0.5, 0.6, 100), ended=True)
    half = math.sqrt(1.96**2 * (0.25 + 0.24) / 100)
    assert sign.name == "unmoved_accuracy"
    expected = (
        f"from 0.500 to 0.600 in 30 batches, which is within chance (+-{half:.3f} at n = 100)"
    )
    assert expected in sign.said
    assert apply_rules(evaluated(0.5, 0.6, 100)) == [], "a run that goes on is not judged by it"
    assert apply_rules(evaluated(0.5, 0.65, 100), ended=True) == []
    assert apply_rules(evaluated(0.5, 0.35, 100), ended=True) == []
    for level, told in ((0.0, "no prompt"), (0.5, "more steps"), (1.0, "every prompt already")):
        (sign,) = apply_rules(evaluated(level, level, 1000), ended=True)
        assert sign.name == "unmoved_accuracy" and told in sign.try_this, level
        assert ("train more steps" in sign.try_this) == (level == 0.5)


def test_the_interval_follows_the_range_of_the_rewards() -> None:
    """Rewards of -10 to 10 around 0 vary by up to 10: 1.96 sqrt(2 x 100 / 100) = 2.77."""
    wide = {"reward_min": -10.0, "reward_max": 10.0}
    assert names(apply_rules(evaluated(0.0, 2.7, 100, **wide), ended=True)) == ["unmoved_accuracy"]
    assert apply_rules(evaluated(0.0, 2.8, 100, **wide), ended=True) == []
    first = {"step": 0, "eval/heldout": 0.5, "eval/heldout_n": 10}
    assert apply_rules([first, *rows(30)], ended=True) == [], "one evaluation is no movement"


def test_signs_are_said_once_while_a_run_goes_on(tmp_path: Path) -> None:
    """Each on one line, at the first look that finds it; ever fewer looks at the file."""
    told: list[str] = []
    watcher = runner.HealthWatcher(tmp_path, told.append)
    for n in range(1, 40):
        with (tmp_path / "metrics.jsonl").open("a") as f:
            flat = {"reward_no_spread_share": 1.0, "reward_min": 0.0, "reward_max": 0.0}
            f.write(json.dumps(rows(1, **flat)[0] | {"step": n - 1}) + "\n")
        watcher.check(n)
        assert len(told) == (n >= 5)
    assert told[0].startswith("note: every completion of the last 5 batches has the reward 0")
    assert watcher.next == 41  # looked after 5 6 7 8 10 12 15 18 22 27 33
    (line,) = advice.list_fired_checks(tmp_path, [])
    assert line.said.startswith("health check constant_rewards fired at step 5: every completion")
    later = {"name": "constant_rewards", "said": "now more", "try_this": "x"}
    (line,) = advice.list_fired_checks(tmp_path, [later, later])
    assert line.said == "health check constant_rewards fired at step 5: now more"
    assert line.try_this == "x"


@pytest.mark.parametrize(("largest", "lines"), [(0.0, 2), (1.0, 1)])
def test_equal_rewards_are_said_early_and_late(largest: float, lines: int, tmp_path: Path) -> None:
    told: list[str] = []
    watcher = runner.HealthWatcher(tmp_path, told.append)
    watcher.check(0, {})
    (batch,) = rows(1, reward_no_spread_share=1.0, reward_min=0.0, reward_max=largest)
    for n in range(1, 9):
        with (tmp_path / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(batch | {"step": n - 1}) + "\n")
        watcher.check(n, batch)
        assert len(told) == lines - (n < 5)
    if lines == 2:
        assert told[0].startswith("note: every completion of the newest batch has the reward 0, so")
    assert "last 5 batches" in told[-1]


def test_refused_messages_are_said_at_once_and_stay_in_report_and_doctor(tmp_path: Path) -> None:
    (sign,) = apply_rules(rows(2) + rows(1, refused_number=2.0, refused_token=1.0) + rows(1))
    assert sign.name == "refused_messages"
    assert sign.said == (
        "the buffer has refused 3 messages: 2 samples with an impossible reward, part, "
        "log-probability or temperature; 1 samples with tokens that the model does not have"
    )
    told: list[str] = []
    watcher = runner.HealthWatcher(tmp_path, told.append)
    watcher.check(0, {"reward/mean": 0.5})
    assert not told
    watcher.check(0, {"refused/limit": 1.0})
    watcher.check(1, {"refused/limit": 2.0})
    (line,) = told
    assert line.startswith("note: the buffer has refused 1 message: 1 samples by weights older")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows(1, refused_frame=4.0)[0]) + "\n")
    seen = doctor.examine_run(load("configs/demo.toml"), tmp_path, None)
    assert seen["refused"] == {"frame": 4}
    said = "refused: 4 frames that do not decode, have a value out of its range, or are too large"
    assert said in doctor.format_lines(tmp_path, seen)


def test_calls_with_lists_that_always_fail_are_said_at_once(tmp_path: Path) -> None:
    told: list[str] = []
    watcher = runner.HealthWatcher(tmp_path, told.append)
    watcher.check(0, {"reward/failed_batch_share": 0.75})
    assert not told
    watcher.check(1, {"reward/failed_batch_share": 1.0})
    watcher.check(2, {"reward/failed_batch_share": 1.0})
    (line,) = told
    assert "each completion was scored alone" in line and "RUN/reward.log" in line
    (sign,) = apply_rules(rows(1, reward_failed_batch_share=1.0))
    assert sign.name == "reward_batches_fail"


def test_prompts_without_answers(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"prompt": f"{i}="} | ({"answer": "1"} if i % 2 else {})) for i in range(20)
        )
    )
    sets = ["task.name=file", f"task.prompts={str(path)!r}"]
    (sign,) = runner.find_task_signs(load("configs/demo.toml", sets))
    left = len(FileTask(str(path)).sets["train"])
    assert sign.name == "answers_missing" and f"of {left} prompts have no `answer`" in sign.said
    assert "reward.function" in sign.try_this
    with_function = load("configs/demo.toml", [*sets, "reward.function='a:b'"])
    with_env = load("configs/demo.toml", [*sets, "agent.env='file.py:Environment'"])
    assert runner.find_task_signs(with_env) == []  # which pays
    assert runner.find_task_signs(with_function) == []
    assert runner.find_task_signs(load("configs/demo.toml")) == []


def test_a_run_with_nothing_to_learn_says_so(tmp_path: Path, small_model: Path) -> None:
    """For real: prompts without answers, so that no answer is ever right."""
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}{i}="}) for i in range(10, 40)))
    words = (
        "task.name='file'",
        f"task.prompts={str(path)!r}",
        *SMALL[:-1],
        "generator.max_new_tokens=12",
        "learner.steps=8",
        "name='r'",
    )
    done = run_command(demo_command("run", tmp_path, small_model, *words)).check()
    found = ["answers_missing", "constant_rewards", "unmoved_accuracy"]
    assert [s["name"] for s in done.json["signs"]] == found
    html = (tmp_path / "runs" / "r" / "report.html").read_text()
    for sign in done.json["signs"]:
        # its numbers are of the moment when it was first seen
        count = 1 + (sign["name"] == "constant_rewards")  # and of the first batch
        assert done.err.count(f"; {sign['try_this']}\n") == count, done.err
    assert 'id="heldout-end-note">+-0.000 (n = 3)<' in html
    assert done.json["certainty"]["heldout"] == {"n": 3, "half": 0.0}
    head = html.index('<ul id="signs" class="warn">')
    assert html.index("</h1>") < head < html.index('class="card"')
    assert html[head : html.index("</ul>", head)].count("<li>") == 3
