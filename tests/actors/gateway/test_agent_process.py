"""agent.function, agent.command and environments that play themselves; their process's loop runs
here."""

import ctypes
import json
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from process_kit import until
from pushed_kit import PATIENCE_S, AgentLoop

from actors.gateway.agents import agent_process
from actors.gateway.agents.agent_process import (
    KEPT_BYTES,
    MODEL_VARIABLES,
    PR_SET_CHILD_SUBREAPER,
    judge_exit,
    select_inherited,
)
from actors.gateway.agents.session_messages import (
    AgentLog,
    SessionAccess,
    SessionOrders,
    SessionResult,
    parse_outcome,
)
from actors.gateway.hubs import SPLITS, examine, self_playing
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt

AGENT = (Path(__file__).parents[2] / "data" / "programs" / "agent_functions_agent.txt").read_text()


def seat(number: int, text: str = "1") -> SessionAccess:
    own: Any = {"meta": {"level": "3"}, "messages": [{"role": "user"}], "split": "eval"}
    prompt = Prompt(number, text, answer="secret", **own)
    url = f"http://127.0.0.1/s/{number}"
    return SessionAccess(number, f"s{number}", url, "key", "m", prompt, 5, 2, False, 60.0)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Any]:
    """agent("name"): the loop of agent.function = FILE:name, ready."""
    file = tmp_path / f"own_agent_{tmp_path.name}.py"
    file.write_text(AGENT)
    served: list[AgentLoop] = []

    def begin(name: str) -> AgentLoop:
        served.append(AgentLoop(AgentConfig(function=f"{file}:{name}"), tmp_path / "agent.log"))
        assert served[-1].result() == SessionResult(-1, "ready")
        return served[-1]

    yield begin
    for one in served:
        one.close()
    sys.modules.pop(file.stem, None)


def own_module() -> ModuleType:
    return next(m for name, m in sys.modules.items() if name.startswith("own_agent_"))


def test_a_function_gets_prompt_and_session_and_its_number_is_the_reward(agent: Any) -> None:
    served = agent("numbers")
    assert served.play(seat(1, "0.5"), seat(2, "-2")) == [
        SessionResult(1, "scored", 0.5),
        SessionResult(2, "scored", -2.0),
    ]
    assert ("0.5", "s1", "http://127.0.0.1/s/1/v1") in own_module().asked
    (later,) = served.play(seat(3, "7"))
    assert later.reward == 7.0


def test_what_a_function_may_return(agent: Any) -> None:
    (found,) = agent("parts").play(seat(1))
    assert found == SessionResult(1, "scored", 0.5, {"reward": 0.5, "form": 1.0})
    (found,) = agent("nothing").play(seat(2))
    assert found == SessionResult(2, "judge"), "the config's reward scores it"
    (found,) = agent("text").play(seat(3))
    assert found.kind == "failed" and found.number == 3
    assert found.why == "gave an invalid reward: reward is a str, not a number"
    assert parse_outcome(4, {"form": 1.0}).why == (
        "gave an invalid reward: a dict without `reward`: ['form']"
    )
    assert parse_outcome(5, float("nan")).kind == "failed"
    assert parse_outcome(6, {"reward": _Odd()}).why.endswith("raised ZeroDivisionError: odd")


class _Odd:
    def __float__(self) -> float:
        raise ZeroDivisionError("odd")


def test_an_exception_fails_its_session_alone_and_is_logged(agent: Any, tmp_path: Path) -> None:
    first, second = agent("raises").play(seat(1, "a"), seat(2, "b"))
    assert (first.kind, first.why) == ("failed", "raised KeyError: 'a'")
    assert (second.number, second.why) == (2, "raised KeyError: 'b'")
    log = (tmp_path / "agent.log").read_text()
    assert re.search(r"^--- session s1 raised KeyError: 'a' after \d+\.\d s$", log, re.M)
    assert "Traceback" in log and "raise KeyError(prompt.text)" in log
    (odd,) = agent("half_a_character").play(seat(4))
    assert odd.kind == "failed" and "raised ValueError" in odd.why
    (left,) = agent("leaves").play(seat(3))
    assert (left.kind, left.why) == ("failed", "called sys.exit(3)")


def test_coroutines_share_one_loop_and_a_stop_cancels_one(agent: Any) -> None:
    served = agent("waits")
    (found,) = served.play(seat(1))
    assert found == SessionResult(1, "scored", 1.0)
    served.send(SessionOrders(seats=[seat(2, "for ever"), seat(3)]))
    assert served.result().number == 3 and own_module().waiting.wait(PATIENCE_S)
    served.send(SessionOrders(stop=[99, 2]))
    stopped = served.result()
    assert (stopped.number, stopped.kind) == (2, "failed") and "CancelledError" in stopped.why
    served.send(SessionOrders(stop=[2]))
    assert served.play(seat(4))[0].reward == 1.0, "the loop goes on"
    looped = agent("loop")
    played = [looped.play(seat(5))[0], *looped.play(seat(6), seat(7))]
    assert [found.reward for found in played] == [1.0] * 3, "connections of the module stay usable"
    (found,) = agent("thread").play(seat(5))
    assert found.reward == 1.0


def test_only_a_plain_function_takes_a_thread_and_an_exit_ends_one_session(agent: Any) -> None:
    assert agent("threads").play(seat(1))[0].reward == 0.0
    assert agent("plain_threads").play(seat(1))[0].reward == 1.0, "a coroutine too"
    served = agent("short")
    for number in (1, 2):
        (found,) = served.play(seat(number))
        assert found.kind == "failed" and "TypeError" in found.why, "the loop goes on"
    served = agent("leaves_in_a_task")
    for number in (1, 2):
        (found,) = served.play(seat(number))
        assert (found.kind, found.why) == ("failed", "called sys.exit(4)")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent", "raised AttributeError: "),
        ("CONSTANT", "raised TypeError: CONSTANT is not a function; write module:function"),
    ],
)
def test_a_function_that_is_none_is_refused(name: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / f"refused_{tmp_path.name}.py"
    file.write_text(AGENT)
    served = AgentLoop(AgentConfig(function=f"{file}:{name}"), tmp_path / "agent.log")
    found = served.result()
    assert (found.number, found.kind) == (-1, "broken")
    assert found.why.startswith(f"agent.function = {file}:{name}: importing it {why}")
    assert found.why.endswith("write module:function or file.py:function")
    served.close()


def test_without_the_hub_s_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)  # as where it is not installed
    with pytest.raises(ConfigError) as error:
        self_playing.load("verifiers:words", {})
    assert re.fullmatch(
        r"agent\.env = verifiers:words: [^;]*verifiers[^;]*; .*; install verifiers and the "
        r"environment into a Python, and name it by agent\.python",
        str(error.value),
    )
    served = AgentLoop(AgentConfig(env="verifiers:words", args={"seed": 1}), tmp_path / "log")
    assert served.result().why == str(error.value)
    served.close()
    assert examine.examine("verifiers:words", {}, tmp_path) == {"error": str(error.value)}


def test_an_environment_loads_or_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, adapter = ModuleType("verifiers"), ModuleType("adapter")
    package.__version__ = "0.1.9"
    package.load_environment = print
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "actors.gateway.hubs.verifiers_v0", adapter)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    adapter.load = lambda *words: words
    loaded: Any = self_playing.load("verifiers:words", {"seed": 1})
    assert loaded == ("words", {"seed": 1})
    assert any(path in ("", str(tmp_path)) for path in sys.path), "its module may lie here"

    def refuse(error: BaseException) -> str:
        def load(name: str, args: dict[str, Any]) -> None:
            raise error

        adapter.load = load
        with pytest.raises(ConfigError) as told:
            self_playing.load("verifiers:words", {})
        assert told.value.__cause__ is error
        return str(told.value)

    begin = "agent.env = verifiers:words: "
    assert refuse(ConfigError("no rows")) == f"{begin}no rows"
    assert refuse(AttributeError("no Rubric")) == (
        f"{begin}loading it raised AttributeError: no Rubric; agent.python has verifiers 0.1.9: is "
        "it the environment's version?"
    )
    assert refuse(SystemExit(3)) == f"{begin}loading it called sys.exit(3)"


def test_the_version_chooses_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("verifiers")
    package.__path__ = [str(tmp_path)]
    (tmp_path / "v1").mkdir()
    package.__version__ = "9"
    monkeypatch.setitem(sys.modules, "verifiers", package)
    with pytest.raises(ConfigError) as error:
        self_playing.load("verifiers:words", {})
    assert str(error.value) == (
        "agent.env = verifiers:words: verifiers 9 has neither load_environment(NAME) nor the "
        "module verifiers.v1; install verifiers 0.1 or 0.4"
    )
    (tmp_path / "v1" / "__init__.py").touch()
    assert self_playing.find_adapter(package) == "actors.gateway.hubs.verifiers_v1"
    package.load_environment = print  # 0.1, which may have both
    assert self_playing.find_adapter(package) == "actors.gateway.hubs.verifiers_v0"
    monkeypatch.syspath_prepend(tmp_path)
    assert self_playing.find_adapter(ModuleType("verifiers")) == "", "v1 is no part of a file"


def test_a_failed_load_names_its_first_cause_and_a_remedy() -> None:
    def wrapped(cause: BaseException) -> BaseException:
        outer, middle = RuntimeError("outer"), ValueError("middle")
        outer.__cause__, middle.__cause__ = middle, cause
        return outer

    def told(error: BaseException) -> str:
        return self_playing.describe_failure(error, "0.4").removeprefix("loading it raised ")

    assert told(wrapped(ModuleNotFoundError("No module named 'words'"))) == (
        "ModuleNotFoundError: No module named 'words'; install its package into agent.python, or "
        "run where its module lies"
    )
    wrong = TypeError("f() got an unexpected keyword argument 'x'")
    assert told(wrapped(wrong)) == f"TypeError: {wrong}; see [agent.args]"
    assert told(wrapped(TypeError("other"))) == "TypeError: other"
    assert told(wrapped(KeyError("argument"))) == "KeyError: 'argument'"
    assert told(AttributeError("module has no Rubric")) == (
        "AttributeError: module has no Rubric; agent.python has verifiers 0.4: is it the "
        "environment's version?"
    )


class Words:
    """An environment with two data sets, of which one may fail."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args

    def iterate_rows(self, split: str) -> Iterator[dict[str, Any]]:
        for number in range(2 if split == "train" else 1):
            yield {"messages": [], "answer": f"é{number}", "dataset": split}
        if split == self.args.get("bad"):
            raise self.args["error"]

    async def play(self, prompt: Prompt, session: SessionAccess) -> SessionResult:
        return SessionResult(session.number, "scored", float(len(prompt.text)), truncated=True)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Sequence[tuple[str, dict[str, Any]]]:
    """Environments are `Words`; what they were loaded with."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def load(env: str, args: dict[str, Any]) -> Words:
        asked.append((env, args))
        return Words(args)

    monkeypatch.setattr(self_playing, "load", load)
    return asked


def test_prompts_become_files(loaded: Sequence[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    assert SPLITS == ("train", "eval")
    counts = examine.examine("verifiers:words", {"seed": 3}, tmp_path)
    assert counts == {"train": 2, "eval": 1} and loaded == [("verifiers:words", {"seed": 3})]
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["é0", "é1"]
    assert len((tmp_path / "eval.jsonl").read_text().splitlines()) == 1
    made = self_playing.build_text_messages("1+1=", "row 0")
    assert made == [{"role": "user", "content": "1+1="}]
    for error, why in (
        (ConfigError("row 3 is no text"), "row 3 is no text"),
        (KeyError("x"), "raised KeyError: 'x'"),
    ):
        made = examine.examine("verifiers:words", {"bad": "train", "error": error}, tmp_path)
        assert made == {"error": f"agent.env = verifiers:words: its data set: {why}"}


def test_an_environment_is_examined_in_a_process_of_its_own(
    loaded: Sequence[tuple[str, dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Standard output is the result alone; what the environment prints goes to standard error."""

    def iterate_rows(self: Words, split: str) -> Iterator[dict[str, Any]]:
        os.write(1, f"loading {split}\n".encode())
        yield {"messages": [], "answer": "a", "dataset": split}

    monkeypatch.setattr(Words, "iterate_rows", iterate_rows)
    monkeypatch.setattr(sys, "argv", ["examine", "verifiers:words", '{"n": 1}', str(tmp_path)])
    monkeypatch.delitem(sys.modules, "actors.gateway.hubs.examine")
    kept = os.dup(1)
    try:
        runpy.run_module("actors.gateway.hubs.examine", run_name="__main__")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert capfd.readouterr() == ('{"train": 1, "eval": 1}', "loading train\nloading eval\n")
    assert loaded == [("verifiers:words", {"n": 1})]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "train.jsonl"]


def test_an_environment_plays(loaded: Sequence[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    served = AgentLoop(AgentConfig(env="verifiers:words", args={"seed": 4}), tmp_path / "log")
    assert served.result().kind == "ready" and loaded == [("verifiers:words", {"seed": 4})]
    (found,) = served.play(seat(1, "four"))
    assert found == SessionResult(1, "scored", 4.0, truncated=True)
    served.close()


STOPPED = "was stopped because its session was over"


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The children that this process has already are no strays; it adopts orphans, as agents' does.

    Programs' folders lie in tmp_path / "folders", which is empty again in the end."""
    before, end_strays = children(), agent_process.end_strays
    monkeypatch.setattr(agent_process, "end_strays", lambda running: end_strays(running | before))
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
    assert children() <= before and list(folders.iterdir()) == []


class Playing(AgentLoop):
    """Programs, which are ready, and the gateway's end of their socket."""

    def __init__(self, log: Path, *command: str, env_pass: tuple[str, ...] = ()) -> None:
        super().__init__(AgentConfig(command=[*command], env_pass=[*env_pass]), log)
        assert self.result() == SessionResult(-1, "ready")


@pytest.fixture
def playing(processes: None, tmp_path: Path) -> Iterator[Any]:
    """playing("shell code"): programs that are `sh -c` of it."""
    made: list[Playing] = []

    def begin(code: str, **more: Any) -> Playing:
        made.append(Playing(tmp_path / "agent.log", "sh", "-c", code, **more))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def test_a_program_reads_its_task_but_never_the_answer(playing: Any, tmp_path: Path) -> None:
    found = playing(f'cp "$ASYNCRL_TASK" {tmp_path}/file; cat > {tmp_path}/stdin; echo 0.5')
    assert found.play(seat(3, "ab")) == [SessionResult(3, "scored", 0.5)]
    prompt = {"id": 3, "text": "ab", "messages": [{"role": "user"}], "meta": {"level": "3"}}
    own = {"session": "s3", "seed": 5, "attempt": 2, "first": False, "deadline_s": 60.0}
    expected = {**prompt, "split": "eval", "images": [], **own, "model": "m"}
    for name in ("file", "stdin"):
        assert json.loads((tmp_path / name).read_text()) == expected, name


def test_programs_variables(playing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SECRET_KEY": "a", "GIVEN_ONE": "b", "given_two": "c", "LC_ALL": "C", "LC": "d"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    playing(f"env -0 > {tmp_path}/env; echo 1", env_pass=("GIVEN_*",)).play(seat(3))
    pairs = (tmp_path / "env").read_text().rstrip("\0").split("\0")
    env = dict(pair.split("=", 1) for pair in pairs)
    assert {name for name in given if name in env} == {"GIVEN_ONE", "LC_ALL"}
    folder = Path(env["ASYNCRL_TASK"]).parent
    assert folder.name.startswith("asyncrl-agent-") and folder.parent == tmp_path / "folders"
    expected = {
        "OPENAI_BASE_URL": "http://127.0.0.1/s/3/v1",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1/s/3",
        "ANTHROPIC_API_KEY": "key",
        "ASYNCRL_URL": "http://127.0.0.1/s/3",
        "ASYNCRL_SESSION": "s3",
        "ASYNCRL_REWARD": str(folder / "reward"),
        "PATH": os.environ["PATH"],
        **dict.fromkeys(MODEL_VARIABLES, "m"),
    }
    assert {name: env.get(name) for name in expected} == expected
    assert "PATH" in select_inherited([]) and not select_inherited([]).get("LC")


def test_the_variables_that_every_program_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_A"),
        *("TMPDIR", "TEMP", "TMP", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "NODE_PATH", "NVM_DIR"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
        *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    }
    given = dict.fromkeys([*names, "AWS_KEY", "path", "XDG_HOME", "HOMEPATH"], "x")
    monkeypatch.setattr(agent_process.os, "environ", given)
    assert select_inherited([]) == dict.fromkeys(names, "x")
    assert select_inherited(["AWS_*", "pa?h"]).keys() == names | {"AWS_KEY", "path"}
    kinds = ("OPUS", "SONNET", "HAIKU")
    assert (
        *("ASYNCRL_MODEL", "OPENAI_MODEL", "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"),
        *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in kinds),
    ) == agent_process.MODEL_VARIABLES


def test_a_program_leads_its_session_and_is_interrupted(playing: Any, tmp_path: Path) -> None:
    code = f"cat /proc/self/status > {tmp_path}/status; ps -o sid= -p $$ > {tmp_path}/sid; echo $$"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        (result,) = playing(code).play(seat(1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert int((tmp_path / "sid").read_text()) == result.reward
    ignored = re.search(r"SigIgn:\s*(\w+)", (tmp_path / "status").read_text())
    assert ignored and not int(ignored[1], 16) >> (signal.SIGINT - 1) & 1


PARTS = SessionResult(7, "scored", 1.0, {"reward": 1.0, "a": 2.0})
NO_REWARD = (
    "ended and gave no reward: print it as the last line, or write it to the file $ASYNCRL_REWARD"
)


@pytest.mark.parametrize(
    ("code", "out", "err", "written", "expected"),
    [
        (0, "a\n0.5\n\n", "", "", SessionResult(7, "scored", 0.5)),
        (0, "x", "", "3", SessionResult(7, "scored", 3.0)),
        (0, '{"reward": 1, "a": 2}', "", "", PARTS),
        (0, "1", "", " \n", SessionResult(7, "scored", 1.0)),
        (0, "null", "", "", SessionResult(7, "judge")),
        (0, "\n", "oh", "", NO_REWARD),
        (0, "well done", "", "", "gave an invalid reward, not a number or JSON: 'well done'"),
        (0, "NaN", "", "", "gave an invalid reward: reward is nan, not a finite number"),
        (0, '"2"', "", "", "gave an invalid reward: reward is a str, not a number"),
        (0, "{}", "", "", "gave an invalid reward: a dict without `reward`: []"),
        (3, "1", "first\nlast\n\n", "", "ended with 3: last"),
        (3, "1", "", "1", "ended with 3: 1"),
        (3, "", "", "", "ended with 3"),
        (-9, "1", "", "", "was ended by SIGKILL: 1"),
    ],
)
def test_a_programs_end_is_a_reward_or_says_why_not(
    code: int, out: str, err: str, written: str, expected: SessionResult | str
) -> None:
    found = judge_exit(7, code, out.encode(), err.encode(), written.encode())
    if isinstance(expected, str):
        expected = SessionResult(7, "failed", why=expected)
    assert found == expected


def test_results_are_logged_with_what_was_printed(playing: Any, tmp_path: Path) -> None:
    found = playing('read task; case "$task" in *good*) echo 0.25;; *) echo oh >&2; exit 4;; esac')
    assert found.play(seat(1, "good"), seat(2, "bad")) == [
        SessionResult(1, "scored", 0.25),
        SessionResult(2, "failed", why="ended with 4: oh"),
    ]
    log = re.sub(r"\d+\.\d s", "T s", (tmp_path / "agent.log").read_text())
    lines = "--- session s1 T s: scored 0.25\n0.25\n", "--- session s2 T s: ended with 4: oh\noh\n"
    assert log in (lines[0] + lines[1], lines[1] + lines[0])
    (third,) = playing('echo null > "$ASYNCRL_REWARD"').play(seat(3))
    assert third.kind == "judge"
    assert re.search(r"--- session s3 \d\.\d s: judge\n$", (tmp_path / "agent.log").read_text())


def test_of_much_output_the_last_and_of_a_long_reward_file_the_beginning_is_read(
    playing: Any, tmp_path: Path
) -> None:
    code = "head -c 300000 /dev/zero | tr '\\0' x; head -c 300000 /dev/zero >&2; echo; echo 7"
    (result,) = playing(code).play(seat(1))
    assert result == SessionResult(1, "scored", 7.0)
    logged = (tmp_path / "agent.log").read_bytes().partition(b"\n")[2]
    out, err = b"x" * (KEPT_BYTES - 3) + b"\n7\n", b"\0" * KEPT_BYTES + b"\n"
    assert logged == out + err
    code = 'echo 2 > "$ASYNCRL_REWARD"; head -c 200000 /dev/zero | tr "\\0" " "'
    code += ' >> "$ASYNCRL_REWARD"; echo 3 >> "$ASYNCRL_REWARD"'
    (result,) = playing(code).play(seat(1))
    assert result == SessionResult(1, "scored", 2.0)


def test_a_program_that_closes_its_output_goes_on(playing: Any, tmp_path: Path) -> None:
    code = f"exec >&- 2>&-; touch {tmp_path}/begun; while [ ! -e {tmp_path}/go ]; do sleep 0.02; "
    found = playing(code + 'done; echo 6 > "$ASYNCRL_REWARD"')
    found.send(SessionOrders([seat(1)]))
    until((tmp_path / "begun").exists)
    (tmp_path / "go").touch()
    assert found.result() == SessionResult(1, "scored", 6.0)


def test_a_program_that_cannot_be_started_says_so(processes: None, tmp_path: Path) -> None:
    found = Playing(tmp_path / "agent.log", str(tmp_path / "none"))
    assert found.play(seat(4)) == [
        SessionResult(4, "failed", why="cannot be started: No such file or directory")
    ]
    found.close()


def test_what_a_program_leaves_behind_is_killed(playing: Any, tmp_path: Path) -> None:
    left = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 3600 >&- 2>&-' & "
    wait = f"while [ ! -s {tmp_path}/pid ]; do sleep 0.02; done; echo 1"
    assert playing(left + wait).play(seat(1)) == [SessionResult(1, "scored", 1.0)]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_other_programs_go_on_when_one_ends(playing: Any, tmp_path: Path) -> None:
    loop = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"
    found = playing(f'read t; case "$t" in *wait*) {loop};; esac; echo 1')
    found.send(SessionOrders([seat(1, "wait"), seat(2)]))
    assert found.result() == SessionResult(2, "scored", 1.0)
    (tmp_path / "go").touch()
    assert found.result() == SessionResult(1, "scored", 1.0)


def test_what_is_no_text_is_replaced_or_logged_with_a_mark(tmp_path: Path) -> None:
    assert judge_exit(1, 0, b"\xff\n2", b"", b"").reward == 2.0
    assert judge_exit(1, 2, b"", b"bad \xff", b"").why == "ended with 2: bad \ufffd"
    assert "'\ufffd'" in judge_exit(1, 0, b"", b"", b"\xff").why
    assert len(judge_exit(1, 0, b"x" * 300, b"", b"").why) < 160
    log = AgentLog(tmp_path / "agent.log")
    log.write("half \udcff", b"a", b"", b"b\n")
    log.write("next")
    assert (tmp_path / "agent.log").read_bytes() == b"--- half ?\na\nb\n--- next\n"
    assert (tmp_path / "agent.log").stat().st_mode & 0o777 == 0o600


WAITS = 'trap "{}" TERM; echo $$ > {}/new; mv {}/new {}/begun; while true; do sleep 0.02; done'


@pytest.mark.parametrize("polite_s", [3600.0, 0.05])
def test_a_program_is_asked_to_stop_once_and_killed_if_it_does_not(
    playing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polite_s: float
) -> None:
    assert agent_process.POLITE_S == 5.0
    monkeypatch.setattr(agent_process, "POLITE_S", polite_s)
    stop = f"echo stop >> {tmp_path}/asked; sleep 0.2; exit 0" if polite_s > 1 else ""
    found = playing(WAITS.format(stop, *[tmp_path] * 3))
    found.send(SessionOrders([seat(1)]))
    until((tmp_path / "begun").exists)
    found.send(SessionOrders(stop=[1, 9]))
    found.send(SessionOrders(stop=[1]))
    assert found.result() == SessionResult(1, "failed", why=STOPPED)
    assert not stop or (tmp_path / "asked").read_text() == "stop\n"
    assert re.search(rf"s1 \d+\.\d s: {STOPPED}\n", (tmp_path / "agent.log").read_text())


def test_all_programs_end_with_the_gateway(
    playing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "POLITE_S", 3600.0)
    found = playing(WAITS.format("", *[tmp_path] * 3))
    found.send(SessionOrders([seat(1)]))
    until((tmp_path / "begun").exists)
    found.close()
    assert not psutil.pid_exists(int((tmp_path / "begun").read_text()))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the process asks the kernel for by prctl."""
    found: list[tuple[int, int]] = []
    library = SimpleNamespace(prctl=lambda *option: found.append(option))
    monkeypatch.setattr(agent_process, "_libc", library)
    return found


def test_the_process_is_ready_and_ends_with_its_socket(
    processes: None, asked: list[tuple[int, int]], tmp_path: Path
) -> None:
    found = Playing(tmp_path / "agent.log", "sleep", "3600")
    found.close()
    assert asked == [(agent_process.PR_SET_PDEATHSIG, 0), (PR_SET_CHILD_SUBREAPER, 1)]
    ours, theirs = socket.socketpair()  # one that closes before the setup
    ours.sendall(b"\0\0")
    ours.close()
    agent_process.serve(theirs)
    theirs.close()


def test_a_new_process_is_prepared(asked: list[tuple[int, int]]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent_process._prepare_child()
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL
    assert asked == [(36, 1), (1, signal.SIGKILL)]
