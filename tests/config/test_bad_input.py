"""What goes wrong at a user's desk: one clear line, an exit code, nothing half-written."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_input_kit import refused
from process_kit import ENV, FEW, ROOT, Ended, demo_command, run_command
from run_kit import finish, start, steps_done, wait_until

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.records import jsonl, process_log
from asyncrl.supervise.doctor import find_checkpoint
from learner import checkpoint

pytestmark = pytest.mark.slow

Call = Callable[..., Ended]
SMALL = (*FEW, "evaluation.every=0")


def model_without(path: Path, model: Path, names: tuple[str, ...] = (), cut: str = "") -> Path:
    shutil.copytree(model, path)
    for pattern in names:
        for f in path.glob(pattern):
            f.unlink()
    if cut:
        data = (path / cut).read_bytes()
        (path / cut).write_bytes(data[: len(data) // 2])
    return path


MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("no such directory", {"names": ("*",)}, "is not a model directory (it has no config.json)"),
    ("no tokenizer", {"names": ("tokenizer*",)}, "has no tokenizer"),
    ("no weights", {"names": ("*.safetensors",)}, "has no weights"),
    ("weights cut short", {"cut": "model.safetensors"}, "is damaged"),
]


@pytest.mark.parametrize(("how", "said"), [m[1:] for m in MODELS], ids=[m[0] for m in MODELS])
def test_a_model_directory_that_cannot_work(
    how: dict[str, Any], said: str, asyncrl: Call, tmp_path: Path, sort_model: Path
) -> None:
    path = model_without(tmp_path / "m", sort_model, **how)
    done = asyncrl("run", f"model.path={str(path)!r}", "model.warm_start=false", "name='bad'")
    refused(done, 2, "model.path", str(path), said)
    assert not (tmp_path / "runs").exists()


def test_a_prompt_longer_than_the_context(asyncrl: Call, tmp_path: Path) -> None:
    done = asyncrl("run", "generator.max_new_tokens=44", "generator.context=48", "name='bad'")
    refused(done, 2, "generator.context", "tokens; context 48 less max_new_tokens 44 leaves 4")
    assert "set generator.context to at least" in done.err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "1="}', '{"promt": "2="}'], ":2: "),
        (['{"prompt": "1="}', "", "{nonsense"], ":3: "),
        ([], "has no prompts"),
        (['[{"prompt": "1="}, {"prompt": "2="}]'], "it is of type list: write one object a line"),
        (['{"prompt": 12}'], "its `prompt` is of type int"),
        (['{"prompt": "1="}', '{"prompt": "1="}'], "cannot be both trained on and held out"),
    ],
)
def test_a_bad_prompts_file(lines: list[str], said: str, asyncrl: Call, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    done = asyncrl("run", "task.name='file'", f"task.prompts={str(path)!r}", "name='bad'")
    refused(done, 2, f"{path}", said)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "function", ["no_such_module:reward", "json:no_such_function", "json", "json:__name__"]
)
def test_a_reward_function_that_is_not_there(function: str, asyncrl: Call, tmp_path: Path) -> None:
    done = asyncrl("run", f"reward.function={function!r}", "name='bad'")
    refused(done, 2, "reward.function", function)
    assert not (tmp_path / "runs").exists()


def rewards(tmp_path: Path, body: str) -> str:
    head = "import time\nfrom asyncrl.contract.messages import Prompt\n\n"
    code = f"{head}def reward(prompt: Prompt, text: str):\n{body}"
    (tmp_path / "bad_reward.py").write_text(code)
    return "reward.function='bad_reward:reward'"


@pytest.mark.parametrize(
    ("at_import", "said"),
    [
        ("import sys; sys.exit(5)", "called sys.exit(5)"),
        ("input()", "EOFError"),
        ("import os; os._exit(0)", "3 processes ended"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_reward_module_that_cannot_be_imported_is_said_before_the_start(
    at_import: str, said: str, tmp_path: Path, sort_model: Path
) -> None:
    (tmp_path / "bad_reward.py").write_text(f"print('hello')\n{at_import}\n")
    done = with_rewards(tmp_path, sort_model, "reward.function='bad_reward:reward'")
    refused(done, 2, "reward.function = bad_reward:reward", said)
    assert not (tmp_path / "runs").exists() and "hello" not in done.out


def with_rewards(tmp_path: Path, model: Path, *words: str) -> Ended:
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    return run_command(demo_command("run", tmp_path, model, *SMALL, *words, "name='r'"), env=env)


def test_a_reward_that_fails_on_right_answers_is_said(tmp_path: Path, sort_model: Path) -> None:
    broken = rewards(tmp_path, "    raise ValueError('no such answer')\n")
    done = with_rewards(tmp_path, sort_model, broken)
    refused(done, 2, "reward.function = bad_reward:reward", "no such answer")
    assert not (tmp_path / "runs").exists()


LATER = "    if text == prompt.answer:\n        return 1.0\n"  # passes the check before the run
BROKEN = [
    ("raises", 600.0, LATER + "    raise ValueError('no such answer')\n", "no such answer"),
    ("nan", 600.0, LATER + "    return float('nan')\n", "nan"),
    ("hangs", 5.0, LATER + "    time.sleep(3600)\n", "deadline"),
]


@pytest.mark.parametrize(
    ("deadline_s", "body", "why"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_a_reward_that_always_fails_stops_the_run_past_its_budget(
    deadline_s: float, body: str, why: str, tmp_path: Path, sort_model: Path
) -> None:
    words = (f"reward.deadline_s={deadline_s}", "reward.workers=1", "learner.steps=3")
    done = with_rewards(tmp_path, sort_model, rewards(tmp_path, body), *words)
    assert done.code == 1 and "Traceback" not in done.err.split("error: ")[-1], done.err[-3000:]
    last = [x for x in done.err.splitlines() if x.startswith("error: ")][-1]
    assert "reward.error_budget" in last and why in last.lower(), last


def test_on_error_stop_ends_at_the_first_failure(tmp_path: Path, sort_model: Path) -> None:
    words = ("reward.on_error='stop'", "reward.workers=1", "learner.steps=3")
    done = with_rewards(tmp_path, sort_model, rewards(tmp_path, BROKEN[0][2]), *words)
    assert done.code == 1 and "no such answer" in done.err and "reward.on_error = stop" in done.err


def test_a_reward_that_fails_at_times_is_never_a_zero(tmp_path: Path, sort_model: Path) -> None:
    """One call in nine fails: the answer is written again; every reward that is trained on is 1."""
    body = (
        "    reward.calls = getattr(reward, 'calls', 0) + 1\n"
        "    if reward.calls % 9 == 0:\n        raise ValueError('now and then')\n"
        "    return 1.0\n"
    )
    words = ("reward.workers=1", "learner.steps=4", "reward.error_budget=0.9")
    done = with_rewards(tmp_path, sort_model, rewards(tmp_path, body), *words).check()
    rows = jsonl.read(tmp_path / "runs" / "r" / "metrics.jsonl")
    assert {r["reward/mean"] for r in rows if "reward/mean" in r} == {1.0}
    assert sum(done.json["failures"].values()) > 0 and done.json["ledger"]["failed"] > 0


def test_a_port_in_use(asyncrl: Call, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = asyncrl("run", f"wires.address={address!r}", "name='bad'")
    assert done.code == 2 and f"cannot listen on {address}" in done.err.splitlines()[-1], done.err[
        -2000:
    ]


def test_a_run_directory_in_use_or_taken(asyncrl: Call, tmp_path: Path, sort_model: Path) -> None:
    process = start(tmp_path, sort_model, "learner.steps=400", "name='taken'")
    run_dir = tmp_path / "runs" / "taken"
    wait_until(lambda: steps_done(run_dir) >= 1, process)
    config = (run_dir / "config.toml").read_text()
    done = asyncrl("run", "--resume", str(run_dir), "learner.steps=500")
    refused(done, 2, f"{run_dir} is in use by process {process.pid}")
    assert "report" not in done.err and (run_dir / "config.toml").read_text() == config
    ends = [row for row in process_log.read_events(run_dir) if row["event"] == "ended"]
    assert not ends, "the run goes on"
    refused(asyncrl("run", "name='taken'"), 2, str(run_dir), "holds a run already")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=600) == 130


def stopped(tmp_path: Path, model: Path, *words: str) -> Path:
    process = start(
        tmp_path, model, "learner.steps=400", "learner.checkpoint_every=2", "name='ck'", *words
    )
    run_dir = tmp_path / "runs" / "ck"
    wait_until(lambda: steps_done(run_dir) >= 6, process)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=600) == 130
    return run_dir


def newest_checkpoints(run_dir: Path) -> list[Path]:
    return sorted(
        run_dir.glob("checkpoints/epoch_*/number_*"),
        key=lambda p: int(p.name.removeprefix("number_")),
    )


def test_damaged_foreign_or_no_checkpoints(asyncrl: Call, tmp_path: Path, sort_model: Path) -> None:
    run_dir = stopped(tmp_path, sort_model)
    before, newest = newest_checkpoints(run_dir)[-2:]
    data = (newest / "state.pt").read_bytes()
    (newest / "state.pt").write_bytes(data[: len(data) // 2])
    process = start(
        tmp_path, sort_model, "--resume", str(run_dir), f"learner.steps={int(newest.name[7:]) + 2}"
    )
    summary = finish(process, tmp_path)
    log = "".join(p.read_text() for p in run_dir.glob("logs/attempt_2/learner.log"))
    assert f"{newest.name} is damaged" in log and f"{before.name} at version" in log
    assert summary["steps"] == int(newest.name[7:]) + 2
    for path in newest_checkpoints(run_dir):
        (path / "manifest").unlink()
    done = asyncrl("run", "--resume", str(run_dir), f"learner.steps={summary['steps'] + 2}")
    assert (
        done.code == 5
        and "no checkpoint in" in done.err.splitlines()[-1]
        and "start a new run" in done.err.splitlines()[-1]
    ), done.err[-2000:]


def test_resume_refuses_changes_and_has_nothing_to_do_at_an_end(asyncrl: Call, gain: Ended) -> None:
    run_dir = gain.json["run_dir"]
    refused(
        asyncrl("run", "--resume", run_dir, "seed=7"), 2, "seed cannot change when a run is resumed"
    )
    refused(
        asyncrl("run", "--resume", run_dir), 6, "has made all its 40 steps", "--set learner.steps=N"
    )
    refused(asyncrl("run", "--resume", "nowhere"), 2, "no run directory")
    before = (Path(run_dir) / "config.toml").read_text()
    why = "it has made 40 steps, and learner.steps = 30 is fewer; give --set learner.steps=N above"
    refused(asyncrl("run", "--resume", run_dir, "learner.steps=30"), 2, why)
    assert (Path(run_dir) / "config.toml").read_text() == before


def test_the_steps_made_are_those_of_the_newest_learner(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    for epoch, number in ((1, 9), (1, 10), (2, 0), (2, 8), (10, 2)):
        (tmp_path / "checkpoints" / f"epoch_{epoch}" / f"number_{number}").mkdir(parents=True)
    for place in ("epoch_11/.number_12.part", "epoch_12.new/number_13"):
        (tmp_path / "checkpoints" / place).mkdir(parents=True)
    newest = find_checkpoint(tmp_path)
    assert newest is not None and newest["version"] == 2


@pytest.mark.parametrize("number", [0, 1])
def test_an_export_of_an_untrained_model_is_noted(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "checkpoints" / "epoch_1" / f"number_{number}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "config.json").write_text("{}")
    checkpoint.seal(path)
    (tmp_path / "run" / "config.toml").write_text(load.dump(load.load("configs/demo.toml")))
    main(["export", str(tmp_path / "run"), str(tmp_path / "out")], standalone_mode=False)
    assert (tmp_path / "out" / "config.json").exists() and (tmp_path / "out" / "README.md").exists()
    assert ("has made no step" in capsys.readouterr().err) == (number == 0)


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["run"], 2, "give either a CONFIG or --resume"),
        (["runn"], 2, "No such command 'runn'. Did you mean run? --help lists"),
        (["config", "shw"], 2, "Did you mean show?"),
        (["config", "explain", "foo.bar"], 2, "there is no section foo; sections: advantage, "),
    ],
)
def test_commands_typed_wrong(argv: list[str], code: int, said: str) -> None:
    done = run_command([sys.executable, "-m", "asyncrl.cli", *argv])
    assert done.code == code and said in done.err and "Traceback" not in done.err, done.err


def test_a_full_disk_ends_the_run_with_a_whole_checkpoint(tmp_path: Path, sort_model: Path) -> None:
    """A file system of 3 MiB, which a few checkpoints fill: a checkpoint or the metrics fail."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)],
        capture_output=True,
        text=True,
    )
    limit = mounted.returncode == 0
    # no right to mount: a file-size limit makes the same write fail
    words = [] if limit else ["prlimit", "--fsize=700000"]
    try:
        run_dir = tmp_path / "runs" / "full"
        argv = demo_command(
            "run",
            tmp_path,
            sort_model,
            *SMALL,
            "learner.steps=60",
            "learner.checkpoint_every=1",
            "learner.keep_checkpoints=50",
            "name='full'",
        )
        run_dir.parent.mkdir()
        if limit:
            (small / "runs").mkdir()
            argv = [
                a.replace(f"runs={str(tmp_path / 'runs')!r}", f"runs={str(small / 'runs')!r}")
                for a in argv
            ]
            run_dir = small / "runs" / "full"
        done = run_command([*words, *argv])
        assert (
            done.code == 1
            and re.search("(could not|cannot) be written", done.err)
            and "free some space" in done.err
        ), done.err[-3000:]
        assert all(checkpoint.verify(p) == "" for p in newest_checkpoints(run_dir))
        assert not list(run_dir.glob("checkpoints/epoch_*/.number_*"))
    finally:
        if limit:
            subprocess.run(["umount", str(small)], check=True)
