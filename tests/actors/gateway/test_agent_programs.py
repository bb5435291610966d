"""agent.command: programs of sessions, with the loop of their process run here."""

import ctypes
import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from process_kit import until
from pushed_kit import AgentLoop

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
)
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.messages import Prompt

STOPPED = "was stopped because its session was over"


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


@pytest.fixture(autouse=True)
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
def playing(tmp_path: Path) -> Iterator[Any]:
    """playing("shell code"): programs that are `sh -c` of it."""
    made: list[Playing] = []

    def begin(code: str, **more: Any) -> Playing:
        made.append(Playing(tmp_path / "agent.log", "sh", "-c", code, **more))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def seat(number: int, text: str = "1") -> SessionAccess:
    own: Any = {"meta": {"level": "3"}, "messages": [{"role": "user"}], "split": "eval"}
    prompt = Prompt(number, text, answer="secret", **own)
    url = f"http://127.0.0.1/s/{number}"
    return SessionAccess(number, f"s{number}", url, "key", "m", prompt, 5, 2, False, 60.0)


def test_a_program_reads_its_task_but_never_the_answer(playing: Any, tmp_path: Path) -> None:
    found = playing(f'cp "$ASYNCRL_TASK" {tmp_path}/file; cat > {tmp_path}/stdin; echo 0.5')
    assert found.play(seat(3, "ab")) == [SessionResult(3, "scored", 0.5)]
    expected = {
        "id": 3,
        "text": "ab",
        "messages": [{"role": "user"}],
        "meta": {"level": "3"},
        "split": "eval",
        "images": [],
        "session": "s3",
        "seed": 5,
        "attempt": 2,
        "first": False,
        "deadline_s": 60.0,
        "model": "m",
    }
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


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert judge_exit(1, 0, b"\xff\n2", b"", b"").reward == 2.0
    assert judge_exit(1, 2, b"", b"bad \xff", b"").why == "ended with 2: bad \ufffd"
    assert "'\ufffd'" in judge_exit(1, 0, b"", b"", b"\xff").why
    assert len(judge_exit(1, 0, b"x" * 300, b"", b"").why) < 160


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
    begin(found, tmp_path)
    (tmp_path / "go").touch()
    assert found.result() == SessionResult(1, "scored", 6.0)


def test_a_program_that_cannot_be_started_says_so(tmp_path: Path) -> None:
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


def test_a_head_that_is_no_text_is_logged_with_a_mark(tmp_path: Path) -> None:
    log = AgentLog(tmp_path / "agent.log")
    log.write("half \udcff", b"a", b"", b"b\n")
    log.write("next")
    assert (tmp_path / "agent.log").read_bytes() == b"--- half ?\na\nb\n--- next\n"
    assert (tmp_path / "agent.log").stat().st_mode & 0o777 == 0o600


WAITS = 'trap "{}" TERM; echo $$ > {}/new; mv {}/new {}/begun; while true; do sleep 0.02; done'


def begin(found: Playing, folder: Path) -> None:
    found.send(SessionOrders([seat(1)]))
    until((folder / "begun").exists)


def test_a_program_is_asked_to_stop_once(
    playing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert agent_process.POLITE_S == 5.0
    monkeypatch.setattr(agent_process, "POLITE_S", 3600.0)
    stop = f"echo stop >> {tmp_path}/asked; sleep 0.2; exit 0"
    found = playing(WAITS.format(stop, *[tmp_path] * 3))
    begin(found, tmp_path)
    found.send(SessionOrders(stop=[1, 9]))
    found.send(SessionOrders(stop=[1]))
    assert found.result() == SessionResult(1, "failed", why=STOPPED)
    assert (tmp_path / "asked").read_text() == "stop\n"


def test_a_program_that_does_not_stop_is_killed(
    playing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "POLITE_S", 0.05)
    found = playing(WAITS.format("", *[tmp_path] * 3))
    begin(found, tmp_path)
    found.send(SessionOrders(stop=[1]))
    assert found.result() == SessionResult(1, "failed", why=STOPPED)
    assert re.search(rf"s1 \d+\.\d s: {STOPPED}\n", (tmp_path / "agent.log").read_text())


def test_all_programs_end_with_the_gateway(
    playing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "POLITE_S", 3600.0)
    found = playing(WAITS.format("", *[tmp_path] * 3))
    begin(found, tmp_path)
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
    asked: list[tuple[int, int]], tmp_path: Path
) -> None:
    found = Playing(tmp_path / "agent.log", "sleep", "3600")
    found.close()
    assert asked == [(agent_process.PR_SET_PDEATHSIG, 0), (PR_SET_CHILD_SUBREAPER, 1)]


def test_a_socket_that_closes_before_the_setup_ends_the_process() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\0\0")
    ours.close()
    agent_process.serve(theirs)
    theirs.close()


def test_a_new_process_is_prepared(asked: list[tuple[int, int]]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent_process._prepare_child()
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL
    assert asked == [(36, 1), (1, signal.SIGKILL)]
