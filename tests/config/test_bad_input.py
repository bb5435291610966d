"""What goes wrong at a user's desk: one clear line, an exit code, nothing half-written."""

import codecs
import errno
import hashlib
import io
import json
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

import click
import process_kit
import pytest
import transformers
from bad_input_kit import refused
from process_kit import ENV, FEW, ROOT, TEXTS, Ended, demo_command, run_cli, run_command
from run_kit import finish, start, steps_done, wait_until

from asyncrl.cli import CommandGroup, main, result
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models import policy
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer, load_transformers_tokenizer
from asyncrl.records import jsonl, process_log, rundir
from asyncrl.supervise.doctor import find_checkpoint
from asyncrl.supervise.preflight import preflight
from asyncrl.tasks.file import read_prompts
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


@pytest.mark.parametrize(("lines", "said"), TEXTS["a_bad_prompts_file"])
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
    ("at_import", "said"), TEXTS["a_reward_module_that_cannot_be_imported_is_said_before_the_start"]
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
    sets = ("learner.steps=400", "learner.checkpoint_every=2", "name='ck'", *words)
    process = start(tmp_path, model, *sets)
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
    steps = int(newest.name[7:]) + 2
    process = start(tmp_path, sort_model, "--resume", str(run_dir), f"learner.steps={steps}")
    summary = finish(process, tmp_path)
    log = "".join(p.read_text() for p in run_dir.glob("logs/attempt_2/learner.log"))
    assert f"{newest.name} is damaged" in log and f"{before.name} at version" in log
    assert summary["steps"] == steps
    for path in newest_checkpoints(run_dir):
        (path / "manifest").unlink()
    done = asyncrl("run", "--resume", str(run_dir), f"learner.steps={steps + 2}")
    last = done.err.splitlines()[-1]
    assert done.code == 5 and "no checkpoint in" in last and "start a new run" in last, last


def test_resume_refuses_changes_and_has_nothing_to_do_at_an_end(asyncrl: Call, gain: Ended) -> None:
    run_dir = gain.json["run_dir"]
    before = (Path(run_dir) / "config.toml").read_text()
    why = "it has made 40 steps, and learner.steps = 30 is fewer; give --set learner.steps=N above"
    for words, code, said in (
        ([run_dir, "seed=7"], 2, ("seed cannot change when a run is resumed",)),
        ([run_dir], 6, ("has made all its 40 steps", "--set learner.steps=N")),
        (["nowhere"], 2, ("no run directory",)),
        ([run_dir, "learner.steps=30"], 2, (why,)),
    ):
        refused(asyncrl("run", "--resume", *words), code, *said)
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


def test_a_full_disk_ends_the_run_with_a_whole_checkpoint(tmp_path: Path, sort_model: Path) -> None:
    """A file system of 3 MiB, which a few checkpoints fill: a checkpoint or the metrics fail."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)]
    limit = subprocess.run(mount, capture_output=True).returncode == 0
    # no right to mount: a file-size limit makes the same write fail
    words = [] if limit else ["prlimit", "--fsize=700000"]
    try:
        run_dir = tmp_path / "runs" / "full"
        learner = ("learner.steps=60", "learner.checkpoint_every=1", "learner.keep_checkpoints=50")
        argv = demo_command("run", tmp_path, sort_model, *SMALL, *learner, "name='full'")
        run_dir.parent.mkdir()
        if limit:
            (small / "runs").mkdir()
            argv = [word.replace(str(tmp_path / "runs"), str(small / "runs")) for word in argv]
            run_dir = small / "runs" / "full"
        done = run_command([*words, *argv])
        assert done.code == 1 and "free some space" in done.err, done.err[-3000:]
        assert re.search("(could not|cannot) be written", done.err)
        assert all(checkpoint.verify(p) == "" for p in newest_checkpoints(run_dir))
        assert not list(run_dir.glob("checkpoints/epoch_*/.number_*"))
    finally:
        if limit:
            subprocess.run(["umount", str(small)], check=True)


TURNS = [{"role": "user", "content": "12="}]


class FullDisk(io.StringIO):
    """A stderr that lies on it."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def writes_nothing(error: OSError) -> CommandGroup:
    group = CommandGroup("asyncrl", places={}, sections={})

    @group.command()
    def run() -> None:
        raise error

    return group


def test_a_write_that_a_full_disk_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to an open file raises without its name."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(SystemExit) as ended:
        writes_nothing(full).main(["run"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(
        "error: writing failed: No space left on device; is the disk full"
    )
    monkeypatch.setattr(sys, "stderr", FullDisk())
    with pytest.raises(SystemExit) as ended:
        writes_nothing(full).main(["run"])
    assert ended.value.code == 1, "also where nothing can be said any more"
    with pytest.raises(OSError, match="a bug"):
        writes_nothing(OSError(errno.EBADF, "a bug")).main(["run"])


def with_template(path: Path, template: str) -> Path:
    policy.build_model(path, "0123456789=", hidden=32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(path)
    return path


TEMPLATES = TEXTS["templates"]


@pytest.mark.parametrize(
    ("template", "said"), [t[1:] for t in TEMPLATES], ids=[t[0] for t in TEMPLATES]
)
def test_a_template_that_cannot_write_messages(template: str, said: str, tmp_path: Path) -> None:
    path = with_template(tmp_path / "m", template)
    for tokenizer in (load_tokenizer(path), load_transformers_tokenizer(path)):
        with pytest.raises(ConfigError) as e:
            encode_prompt(tokenizer, Prompt(7, "12=", "", TURNS, {}, "train"))
        assert "task: train prompt 7" in str(e.value) and said in str(e.value)
        assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_every_prompt_of_a_file_is_tried_before_the_start(tmp_path: Path) -> None:
    """The template refuses one of 300 prompts, far behind those that come first."""
    path = with_template(
        tmp_path / "m",
        "{% for m in messages %}{{ raise_exception('no') if m.content == '299=' "
        "else m.content }}{% endfor %}",
    )
    rows = [
        json.dumps({"messages": [{"role": "user", "content": f"{i}="}], "answer": "1"})
        for i in range(300)
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    (tmp_path / "h.jsonl").write_text('{"prompt": "5=", "answer": "5"}')
    words = [
        f"model.path={str(path)!r}",
        "task.name='file'",
        f"task.prompts={str(tmp_path / 'p.jsonl')!r}",
        f"task.heldout={str(tmp_path / 'h.jsonl')!r}",
    ]
    with pytest.raises(ConfigError, match="train prompt 299: the chat template"):
        preflight(load.load(ROOT / "configs" / "demo.toml", words))


def test_a_byte_order_mark_and_two_forms_of_a_prompt_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_bytes(codecs.BOM_UTF8 + (ROOT / "configs" / "demo.toml").read_bytes())
    assert load.load(config) == load.load(ROOT / "configs" / "demo.toml")
    path = tmp_path / "p.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"prompt": "1="}')
    assert [p.text for p in read_prompts(str(path), "train")] == ["1="]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1="}\n' + json.dumps({"prompt": "2=", "messages": TURNS}))
    with pytest.raises(ConfigError, match=r"p.jsonl:2: has both `prompt` and `messages`"):
        read_prompts(str(path), "train")


@pytest.mark.parametrize("name", ["../escape", "a/b", "..", "/tmp/x", "a\\b"])
def test_a_name_stays_in_runs(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--set name=.*: name: .* must be the name of one directory"
    ):
        load.load(ROOT / "configs" / "demo.toml", [f"name={name!r}"])


def test_a_place_where_no_run_directory_can_be_made(tmp_path: Path, small_model: Path) -> None:
    """`runs` is a file; a read-only directory looks the same to all but root."""
    (tmp_path / "runs").touch()
    done = run_command(demo_command("run", tmp_path, small_model, "name='r'"))
    where = f"runs: the run directory {tmp_path / 'runs' / 'r'} cannot be created: Not a directory"
    refused(done, 2, where, "; choose another place with --set runs=DIR")
    by_hand = run_cli("learner", "configs/demo.toml", "--run-dir", str(tmp_path / "runs" / "r"))
    refused(by_hand, 2, "cannot be created: Not a directory")


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    log = str(ROOT / "tests/data/logs/verl_0.9.1.jsonl.gz")
    done = run_cli("diagnose", log, "--html", str(tmp_path / "none" / "a.html"))
    refused(done, 1, f"{tmp_path / 'none'}", "is its folder missing, or was it removed?")
    done = run_cli("simulate", "configs/demo.toml", "--times", "none.toml")
    refused(done, 2, "Invalid value for '--times': File 'none.toml' does not exist")
    done = run_cli("keys", "/dev/null/keys", "--json")
    why = "Not a directory; is the disk full, or was the file removed or made read-only?"
    refused(done, 1, "/dev/null/keys", why)
    assert done.json["exit_code"] == 1


def test_a_run_directory_that_is_removed_ends_the_run(tmp_path: Path, small_model: Path) -> None:
    sets = (*process_kit.SMALL[:-1], "learner.steps=100000", "evaluation.every=0", "name='gone'")
    process = start(tmp_path, small_model, *sets)
    run_dir = tmp_path / "runs" / "gone"
    wait_until(lambda: steps_done(run_dir) >= 2, process)
    outside = rundir.list_outside_directories(run_dir)
    assert all(p.exists() for p in outside)
    run_dir.rename(tmp_path / "elsewhere")
    code = process.wait(timeout=600)
    err = (tmp_path / "stderr").read_text()
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"error: {run_dir} was removed or moved"), err[-3000:]
    assert code == 1 and "Traceback" not in err
    out = json.loads((tmp_path / "stdout").read_text().strip().splitlines()[-1])
    assert out["exit_code"] == 1 and "was removed or moved" in out["error"]
    assert not any(p.exists() for p in outside)


@pytest.mark.parametrize(("words", "said"), TEXTS["commands"])
def test_an_error_is_json_too(words: str, said: str) -> None:
    done = run_cli(*words.split(), "--json")
    refused(done, 2, said)
    error = done.err.strip().splitlines()[-1].removeprefix("error: ")
    assert done.json == {"error": error, "exit_code": 2}


@pytest.mark.parametrize(
    ("lr", "said"),
    [
        ("1e39", "the weights are not finite after 1 batches"),
        ("1e12", "too large for finite logprobs, after 1 batches"),
    ],
)
def test_an_exploding_rate_is_said(lr: str, said: str, tmp_path: Path, small_model: Path) -> None:
    words = (*process_kit.SMALL[:-1], "evaluation.every=0", "name='r'")
    words += (f"learner.lr={lr}", "reward.function='coin:reward'")
    coin = "def reward(prompt, text):\n    return float(len(text) % 2)\n"
    (tmp_path / "coin.py").write_text(coin)
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{ENV['PYTHONPATH']}"}
    done = run_command(demo_command("run", tmp_path, small_model, *words), env=env)
    assert done.code == 1 and "Traceback" not in done.err, done.err[-3000:]
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("error: the weights") and said in last and "learner.lr = 1e+" in last


def test_a_resume_refuses_prompts_and_tells_the_limit(tmp_path: Path, small_model: Path) -> None:
    path, run_dir = tmp_path / "p.jsonl", tmp_path / "runs" / "r"
    rows = [json.dumps({"prompt": f"{i}=", "answer": str(i)}) for i in range(10, 40)]
    path.write_text("\n".join(rows))
    words = (*process_kit.SMALL[:-1], "learner.steps=6", "evaluation.every=0", "name='r'")
    words += ("staleness.max_lag=3", "staleness.inject=3")
    words += ("task.name='file'", f"task.prompts={str(path)!r}")
    first = run_command(demo_command("run", tmp_path, small_model, *words))
    assert first.code == 0 and first.json["lag"]["max"] == 3, first.err[-3000:]
    resume = ("--resume", str(run_dir), "staleness.max_lag=1", "staleness.inject=1")
    again = demo_command("run", tmp_path, small_model, *resume, "learner.steps=8")
    files = {file: file.read_bytes() for file in run_dir.glob("*.toml")}
    path.write_text("\n".join(reversed(rows)))
    before, now = (
        hashlib.sha256("\n".join(order).encode()).hexdigest()[:12] for order in (rows, rows[::-1])
    )
    why = f"{path}: has changed since the run began (SHA-256 {before}, now {now})"
    refused(run_command(again), 2, why)
    assert files == {file: file.read_bytes() for file in files} and files
    path.write_text("\n".join(rows))
    second = run_command(again).check()
    assert second.json["lag"]["max"] == 3 and second.json["lag"]["limit"] == 3
    assert second.json["lag"]["limit_now"] == 1


def test_a_result_is_the_last_line_before_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A claim that does not hold, say: its numbers are what a program wants, the error is on
    stderr; the next command starts afresh."""

    def ended(words: list[str], given: bool) -> dict[str, object]:
        @click.command()
        @click.option("--json", "as_json", is_flag=True)
        def one(as_json: bool) -> None:
            if given:
                result.put_result({"numbers": [1]})
            raise ConfigError("no")

        group = CommandGroup(commands={"one": one}, places={}, sections={})
        with pytest.raises(SystemExit) as e:
            group.main(["one", *words])
        assert e.value.code == 2
        out, err = capsys.readouterr()
        assert err == "error: no\n"
        return dict(json.loads(out.splitlines()[-1])) if out else {}

    assert ended(["--json"], True) == {"numbers": [1]}
    assert ended(["--json"], False) == {"error": "no", "exit_code": 2} and ended([], False) == {}
