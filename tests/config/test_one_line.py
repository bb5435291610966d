"""What used to end in a traceback: one line with key and remedy, with --json as JSON too."""

import codecs
import errno
import hashlib
import io
import json
import sys
from pathlib import Path

import click
import pytest
import transformers
from bad_input_kit import refused
from process_kit import ENV, ROOT, SMALL, Ended, demo_command, run_command
from run_kit import start, steps_done, wait_until

from asyncrl.cli import CommandGroup, result
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models import policy
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer, load_transformers_tokenizer
from asyncrl.records import rundir
from asyncrl.supervise.preflight import preflight
from asyncrl.tasks.file import read_prompts

pytestmark = pytest.mark.slow

TURNS = [{"role": "user", "content": "12="}]


def cli(*argv: str, cwd: Path = ROOT) -> Ended:
    return run_command([sys.executable, "-m", "asyncrl.cli", *argv], cwd=cwd)


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


TEMPLATES = [
    (
        "none",
        "",
        "has no chat template: put one there (chat_template.jinja), or give the text as `prompt`",
    ),
    (
        "raises",
        "{{ raise_exception('only\nassistants') }}",
        "fails on its `messages`: TemplateError: only assistants",
    ),
    ("undefined", "{{ messages[0].name.first }}", "fails on its `messages`: UndefinedError"),
]


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


def test_a_prompt_and_messages_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1="}\n' + json.dumps({"prompt": "2=", "messages": TURNS}))
    with pytest.raises(ConfigError, match=r"p.jsonl:2: has both `prompt` and `messages`"):
        read_prompts(str(path), "train")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_bytes(codecs.BOM_UTF8 + (ROOT / "configs" / "demo.toml").read_bytes())
    assert load.load(config) == load.load(ROOT / "configs" / "demo.toml")
    path = tmp_path / "p.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"prompt": "1="}')
    assert [p.text for p in read_prompts(str(path), "train")] == ["1="]


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
    by_hand = cli("learner", "configs/demo.toml", "--run-dir", str(tmp_path / "runs" / "r"))
    refused(by_hand, 2, "cannot be created: Not a directory")


def test_a_file_that_cannot_be_written_is_one_line() -> None:
    done = cli("keys", "/dev/null/keys", "--json")
    why = "Not a directory; is the disk full, or was the file removed or made read-only?"
    refused(done, 1, "/dev/null/keys", why)
    assert done.json["exit_code"] == 1


def test_a_run_directory_that_is_removed_ends_the_run(tmp_path: Path, small_model: Path) -> None:
    process = start(
        tmp_path,
        small_model,
        *SMALL[:-1],
        "learner.steps=100000",
        "evaluation.every=0",
        "name='gone'",
    )
    run_dir = tmp_path / "runs" / "gone"
    wait_until(lambda: steps_done(run_dir) >= 2, process)
    outside = rundir.list_outside_directories(run_dir)
    assert all(p.exists() for p in outside)
    run_dir.rename(tmp_path / "elsewhere")
    code = process.wait(timeout=600)
    err = (tmp_path / "stderr").read_text()
    assert (
        code == 1
        and "Traceback" not in err
        and err.strip().splitlines()[-1].startswith(f"error: {run_dir} was removed or moved")
    ), err[-3000:]
    out = json.loads((tmp_path / "stdout").read_text().strip().splitlines()[-1])
    assert out["exit_code"] == 1 and "was removed or moved" in out["error"]
    assert not any(p.exists() for p in outside)


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["run", "nowhere.toml", "--json"], 2, "no such config file"),
        (["run", "--json", "--sett", "x=1"], 2, "No such option"),
        (["doctor", "nowhere", "--json"], 2, "no run directory"),
        (["export", "nowhere", "x", "--json"], 2, "no model"),
    ],
)
def test_an_error_is_json_too(argv: list[str], code: int, said: str) -> None:
    done = cli(*argv)
    refused(done, code, said)
    assert done.json == {
        "error": done.err.strip().splitlines()[-1].removeprefix("error: "),
        "exit_code": code,
    }


@pytest.mark.parametrize(
    ("lr", "said"),
    [
        ("1e39", "the weights are not finite after 1 batches"),
        ("1e12", "too large for finite logprobs, after 1 batches"),
    ],
)
def test_an_exploding_rate_is_said(lr: str, said: str, tmp_path: Path, small_model: Path) -> None:
    words = (
        *SMALL[:-1],
        "evaluation.every=0",
        f"learner.lr={lr}",
        "reward.function='coin:reward'",
        "name='r'",
    )
    (tmp_path / "coin.py").write_text(
        "def reward(prompt, text):\n    return float(len(text) % 2)\n"
    )
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{ENV['PYTHONPATH']}"}
    done = run_command(demo_command("run", tmp_path, small_model, *words), env=env)
    assert done.code == 1, done.err[-3000:]
    last = done.err.strip().splitlines()[-1]
    assert (
        last.startswith("error: the weights")
        and said in last
        and "learner.lr = 1e+" in last
        and "Traceback" not in done.err
    ), done.err[-3000:]


def test_a_resume_refuses_prompts_and_tells_the_limit(tmp_path: Path, small_model: Path) -> None:
    path, run_dir = tmp_path / "p.jsonl", tmp_path / "runs" / "r"
    rows = [json.dumps({"prompt": f"{i}=", "answer": str(i)}) for i in range(10, 40)]
    path.write_text("\n".join(rows))
    words = (
        *SMALL[:-1],
        "learner.steps=6",
        "evaluation.every=0",
        "staleness.max_lag=3",
        "staleness.inject=3",
        "task.name='file'",
        f"task.prompts={str(path)!r}",
        "name='r'",
    )
    first = run_command(demo_command("run", tmp_path, small_model, *words))
    assert first.code == 0 and first.json["lag"]["max"] == 3, first.err[-3000:]
    again = demo_command(
        "run",
        tmp_path,
        small_model,
        "--resume",
        str(run_dir),
        "staleness.max_lag=1",
        "staleness.inject=1",
        "learner.steps=8",
    )
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
                result.print_result({"numbers": [1]})
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
