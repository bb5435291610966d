import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from bad_input_kit import refused
from hosts_kit import Pretender, maker, said, supervisor
from process_kit import ENV, ROOT, RUN_SEED, as_options, run_cli
from several_hosts_kit import WAIT_S, JoinedRun, free_address, other_machine

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.contract.messages import JoinReply, RunStatus
from asyncrl.models.policy import build_model
from asyncrl.records import rundir
from asyncrl.supervise import join, live, scaling
from asyncrl.supervise import run as runner
from asyncrl.supervise.run import Supervisor
from asyncrl.tasks import get_task
from asyncrl.tasks.calc import CalcTask
from asyncrl.transport import file_server
from asyncrl.transport.chunks import CHUNK_BYTES, ChunkClient, ChunkServer
from asyncrl.transport.file_server import FileEntry, FileServer
from asyncrl.transport.keys import is_allowed, make_keys
from asyncrl.transport.sockets import BufferSocket

__all__ = ["said", "supervisor"]  # fixtures


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(os.urandom(3 * CHUNK_BYTES + 7))
    (tmp_path / "run" / "model" / "old.bin").write_text("a second copy")
    (tmp_path / "run" / "prompts.jsonl").write_text("{}\n")
    (tmp_path / "run" / "mine.py").write_text("def reward(prompt, text): return 1.0\n")
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


SETS = [
    "model.path='model'",
    "task.name='file'",
    "task.prompts='prompts.jsonl'",
    "reward.function='mine.py:reward'",
]


@pytest.fixture
def served(place: Path) -> Iterator[Callable[..., ChunkClient]]:
    ends: list[ChunkClient | ChunkServer] = []

    def serve(*sets: str) -> ChunkClient:
        config = load.load(ROOT / "configs" / "demo.toml", [*SETS, *sets])
        server = ChunkServer(
            "tcp://127.0.0.1:*", [], lambda *_: ("", b"", b""), "", FileServer(config)
        )
        client = ChunkClient(server.address, WAIT_S)
        ends.extend((client, server))
        return client

    yield serve
    for end in ends:
        end.close()


def test_files_come_by_digest_and_stay_in_the_cache(
    served: Callable[..., ChunkClient], place: Path, tmp_path: Path
) -> None:
    (place / "judge").mkdir()
    (place / "judge" / "config.json").write_text("{}")
    client = served("reward.share=true", "reward.function=''", "reward.model.path='judge'")
    assert [(e.part, e.name) for e in client.list_files()][2] == ("reward_model", "config.json")
    client = served("reward.share=true")
    entries = client.list_files()
    assert [(e.part, e.name, e.given) for e in entries] == [
        ("model", "config.json", True),
        ("model", "model.safetensors", True),
        ("prompts", "prompts.jsonl", True),
        ("reward", "mine.py", True),
    ]
    lines: list[str] = []
    where = file_server.fetch_files(client.read_file, entries[:2], tmp_path / "cache", lines.append)
    assert (where / "model.safetensors").read_bytes() == (
        place / "model" / "model.safetensors"
    ).read_bytes()
    assert (where.stat().st_mode & 0o777, len(lines)) == (0o700, 2)
    received = client.bytes_received
    again = file_server.fetch_files(client.read_file, entries[:2], where.parent, lines.append)
    assert again == where
    assert client.bytes_received == received and "from the cache" in lines[-1]
    # what was damaged there comes again
    (where / "config.json").write_text("[]")
    file_server.fetch_files(client.read_file, entries[:2], tmp_path / "cache", lines.append)
    assert (where / "config.json").read_text() == "{}" and client.bytes_received == received + 2


def test_code_that_the_run_does_not_allow_is_not_given(served: Callable[..., ChunkClient]) -> None:
    client = served()
    code = client.list_files()[-1]
    assert (code.part, code.given) == ("reward", False)
    with pytest.raises(PeerUnreachable, match=f"does not serve the file {code.digest[:12]}$"):
        list(client.read_file(code.digest, 0, code.size))
    assert client.list_files()[0].name == "config.json"  # it goes on


def entry(data: bytes, name: str) -> FileEntry:
    return FileEntry("model", name, len(data), hashlib.sha256(data).hexdigest(), True)


def test_the_config_of_a_joined_generator(place: Path, tmp_path: Path) -> None:
    config = load.load(ROOT / "configs" / "demo.toml", [*SETS, "staleness.max_lag=0"])
    files = [entry(b"", "config.json"), msgspec.structs.replace(entry(b"", "p"), part="prompts")]
    reward = msgspec.structs.replace(entry(b"", "mine.py"), part="reward")
    folders = {"model": tmp_path / "m", "prompts": tmp_path / "p", "reward": tmp_path / "r"}
    told = JoinReply("r", "generator-3", load.dump(config), "tcp://127.0.0.1:2")
    found = join.localize_config(told, "tcp://127.0.0.1:1", "keys", folders, [*files, reward])
    assert found.model.path == str(tmp_path / "m")
    assert found.task.prompts == str(tmp_path / "p" / "p")
    assert found.reward.function == f"{tmp_path / 'r' / 'mine.py'}:reward"
    assert (found.wires.address, found.wires.curve_dir) == ("tcp://127.0.0.1:1", "keys")
    assert found.generators == 2  # or it would take every ticket there is, at a limit of 0
    assert msgspec.structs.replace(found, generators=1).learner == config.learner
    judged = load.load(ROOT / "configs" / "demo.toml", ["reward.model.path='judge'"])
    told = msgspec.structs.replace(told, config=load.dump(judged))
    folders = {"model": tmp_path / "m", "reward_model": tmp_path / "j"}
    found = join.localize_config(told, "tcp://127.0.0.1:1", "keys", folders, files)
    assert found.reward.model.path == str(tmp_path / "j")


def test_a_mixture_brings_the_files_of_its_parts(
    served: Callable[..., ChunkClient], place: Path, tmp_path: Path
) -> None:
    (place / "more.jsonl").write_text("{}\n")
    (place / "own.py").write_text("def reward(prompt, text): return 0.0\n")
    (place / "grade.txt").write_text("{answer}")
    (place / "scorer").mkdir()
    (place / "scorer" / "config.json").write_text("{}")
    judge = "{url='http://10.0.0.9/v1', model='x', key_env='KEY', template='grade.txt'}"
    sets = [
        "model.path='model'",
        "task.name='mixture'",
        "task.mixture=[{name='file', label='a', prompts='prompts.jsonl', reward='own.py:reward'}, "
        "{name='file', label='b', prompts='prompts.jsonl', heldout='more.jsonl', "
        f"judge={judge}}}, {{name='sort', reward_model={{path='scorer'}}}}]",
        "reward.share=true",
        "task.prompts=''",
        "reward.function=''",
    ]
    client = served(*sets)
    assert [(e.part, e.name) for e in client.list_files()[2:]] == [
        ("mixture.sort.reward_model", "config.json"),
        ("mixture.a.prompts", "prompts.jsonl"),
        ("mixture.b.prompts", "prompts.jsonl"),
        ("mixture.b.heldout", "more.jsonl"),
        ("mixture.b.template", "grade.txt"),
        ("mixture.a.reward", "own.py"),
    ]
    config = load.load(ROOT / "configs" / "demo.toml", sets)
    assert join.list_trust_options(config) == ["--trust-code", "--env", "KEY"]
    told = JoinReply("r", "generator-3", load.dump(config), "tcp://127.0.0.1:2")
    cache, lines = tmp_path / "cache", list[str]()
    trust = join.Trust(("KEY",), code=True)
    folders, files = join.fetch_run_files(client, told.config, cache, lines.append, trust)
    found = join.localize_config(told, "tcp://127.0.0.1:1", "", folders, files, trust)
    first, second, third = found.task.mixture
    assert Path(first.prompts).read_text() == "{}\n" and Path(first.prompts).is_relative_to(cache)
    assert first.reward == f"{folders['mixture.a.reward'] / 'own.py'}:reward"
    assert Path(second.heldout).is_relative_to(cache) and second.reward == ""
    assert Path(second.judge.template).read_text() == "{answer}"
    assert third.reward_model.path == str(folders["mixture.sort.reward_model"])
    assert "task.mixture.a.reward = own.py:reward: running the run's code" in lines[-1]
    with pytest.raises(ConfigError, match=r"'KEY' .*\(task\.mixture\.b\.judge\.key_env\)"):
        join.localize_config(told, "tcp://127.0.0.1:1", "", folders, files)
    (place / "own.py").unlink()
    with pytest.raises(ConfigError, match=r"task\.mixture\.a\.reward = 'own.py:reward': the run o"):
        join.fetch_run_files(client, told.config, cache, lines.append)


def test_of_sessions_a_generator_needs_the_model_alone(
    served: Callable[..., ChunkClient], place: Path, tmp_path: Path
) -> None:
    sets = ["task.name='calc'", "agent.env='a.py:B'", "task.prompts=''", "reward.function=''"]
    judge = ["reward.judge.url='http://10.0.0.9/v1'", "reward.judge.model='x'"]
    client = served(*sets)
    assert {entry.part for entry in client.list_files()} == {"model"}
    config = load.load(
        ROOT / "configs" / "demo.toml",
        [*SETS, *judge, "reward.function=''", "reward.judge.key_env='KEY'", "agent.tools=['a:b']"],
    )
    told = JoinReply("r", "generator-3", load.dump(config), "tcp://127.0.0.1:2")
    folders, files = join.fetch_run_files(client, told.config, tmp_path / "cache", print)
    found = join.localize_config(told, "tcp://127.0.0.1:1", "", folders, files)
    assert found.agent.tools == ["a:b"] and join.list_trust_options(config) == []


def test_a_variable_of_the_joiner_goes_where_the_run_says_only_by_its_word(tmp_path: Path) -> None:
    judge = ["reward.judge.url='http://10.0.0.9/v1'", "reward.judge.model='x'"]
    asks = load.load(ROOT / "configs" / "demo.toml", [*judge, "reward.judge.key_env='AWS_KEY'"])
    told = JoinReply("r", "generator-3", load.dump(asks), "tcp://127.0.0.1:2")
    args = (told, "tcp://127.0.0.1:1", "", {"model": tmp_path}, [entry(b"", "config.json")])
    for env in ((), ("AWS", "JUDGE_KEY")):
        with pytest.raises(ConfigError, match=r"'AWS_KEY' .* to 'http://10.0.0.9/v1': .* --env"):
            join.localize_config(*args, join.Trust(env, code=True))
    found = join.localize_config(*args, join.Trust(("OTHER", "AWS_KEY")))
    assert found.reward.judge.key_env == "AWS_KEY"
    # the machines of a run's own cluster are told to
    assert join.list_trust_options(asks) == ["--env", "AWS_KEY"]
    shares = load.load(ROOT / "configs" / "demo.toml", [*SETS, "reward.share=true"])
    assert join.list_trust_options(shares) == ["--trust-code"]
    assert join.list_trust_options(found) == ["--env", "AWS_KEY"]


def test_code_of_the_run_is_fetched_and_run_only_by_the_joiners_word(
    served: Callable[..., ChunkClient], place: Path, tmp_path: Path
) -> None:
    client = served("reward.share=true")
    config = load.dump(load.load(ROOT / "configs" / "demo.toml", [*SETS, "reward.share=true"]))
    code = (place / "mine.py").read_text()
    lines: list[str] = []

    def gather(trust: join.Trust) -> set[str]:
        return set(join.fetch_run_files(client, config, tmp_path / "cache", lines.append, trust)[0])

    assert gather(join.Trust()) == {"model", "prompts"}  # the same file is here
    (place / "mine.py").unlink()
    with pytest.raises(ConfigError, match=r"SHA-256 \w+\), which would run here .* --trust-code"):
        gather(join.Trust(env=("A",)))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("reward")]
    (place / "mine.py").write_text(code)
    assert gather(join.Trust(code=True)) == {"model", "prompts", "reward"}
    assert "as reward.share = true and --trust-code allow" in lines[-1]


def test_who_joins_is_told_what_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "ASK_S", 0.05)
    monkeypatch.setattr(join, "NOTICE_S", 0.0)
    lines: list[str] = []
    address = free_address()
    with pytest.raises(PeerUnreachable, match="answered the request to join within"):
        join.request_join(address, "", "generator-0", 0.1, lines.append)
    assert lines[0].startswith(f"waiting for a buffer at {address} to answer: ")
    status = RunStatus("r", 0, 10, 1, {}, {}, [], {}, False)
    monkeypatch.setattr(live, "request_status", lambda *args: status)
    lines.clear()
    with pytest.raises(PeerUnreachable):
        join.request_join(address, "", "generator-0", 0.1, lines.append)
    assert lines[0].startswith(f"waiting for the learner of run r at {address}: ")


def test_which_key_and_which_number(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1)
    assert join.find_own_key(str(tmp_path / "keys" / "generator-0"), None) == ""
    assert join.find_own_key(str(tmp_path / "keys"), 3) == "generator-3"
    assert join.find_own_key("", None) == ""
    with pytest.raises(ConfigError, match=r"holds no client\.key_secret"):
        join.find_own_key(str(tmp_path / "keys"), None)
    assert join.parse_generator_number("generator-12") == 12
    with pytest.raises(ConfigError, match="only generators can join"):
        join.parse_generator_number("viewer")


def names(s: Supervisor) -> list[str]:
    return [c.name for c in s.children if c.name.startswith("generator")]


def test_generators_come_and_leave_without_loss(supervisor: Supervisor, said: list[str]) -> None:
    supervisor.status = RunStatus("r", 1, 9, 1, {}, {}, [], {"generator-2": 0.1}, False)
    assert supervisor.resize(4) == ""
    # 2 has joined by itself
    assert names(supervisor) == ["generator-0", "generator-1", "generator-3", "generator-4"]
    assert supervisor.resize(1) == ""
    leaving = ["generator-1", "generator-3", "generator-4"]
    assert maker(supervisor).events == [f"{name} SIGTERM" for name in leaving]
    assert not supervisor.poll() and names(supervisor) == ["generator-0"]
    assert [line for line in said if "left" in line] == [f"{name} has left" for name in leaving]
    # the numbers are free again, and a crash is one as before
    assert supervisor.resize(2) == "" and names(supervisor) == ["generator-0", "generator-1"]
    maker(supervisor).newest("generator-1").code = 1
    supervisor.poll()
    assert maker(supervisor).newest("generator-1").code is None


def test_who_stays_is_killed(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "END_S", -1.0)
    maker(supervisor).newest("generator-1").deaf = True
    supervisor.resize(1)
    # its name is taken until it has gone
    supervisor.resize(2)
    assert names(supervisor) == ["generator-0", "generator-1", "generator-2"]
    supervisor.poll()
    assert maker(supervisor).events[-1] == "generator-1 killed"
    supervisor.poll()
    assert names(supervisor) == ["generator-0", "generator-2"]


def test_a_run_that_ends_or_has_no_keys_starts_no_more(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys", 3)
    wires = msgspec.structs.replace(supervisor.config.wires, curve_dir=str(tmp_path / "keys"))
    supervisor.config = msgspec.structs.replace(supervisor.config, wires=wires)
    assert "no key for generator-3" in supervisor.resize(4)
    assert names(supervisor) == ["generator-0", "generator-1"] and not supervisor.resize(3)
    maker(supervisor).places = 3
    assert "the cluster has room for 3 generators" in supervisor.resize(4)
    assert supervisor.resize(3) == ""
    supervisor.interrupts = 1
    assert supervisor.resize(1) == "the run is ending"


def test_a_request_is_answered_once_and_by_its_id(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="no `asyncrl run` is active"):
        scaling.request_scale(tmp_path, 3, 5.0)
    lock = rundir.RunLock(tmp_path)
    turns = []

    def turn(_seconds: float) -> None:
        turns.append(1)
        supervisor.scale()

    monkeypatch.setattr(scaling.time, "sleep", turn)
    assert scaling.request_scale(tmp_path, 3, WAIT_S) == 3 and len(names(supervisor)) == 3
    assert scaling.request_scale(tmp_path, 2, WAIT_S) == 2 and len(turns) == 2
    supervisor.interrupts = 1
    with pytest.raises(AsyncrlError, match="the run is ending"):
        scaling.request_scale(tmp_path, 3, WAIT_S)
    monkeypatch.setattr(scaling.time, "sleep", lambda _: scaling.forget(tmp_path))
    with pytest.raises(PeerUnreachable, match="has not answered within"):
        scaling.request_scale(tmp_path, 3, 0.2)
    lock.close()
    for text in ("{", "[]", '{"id": "a"}', '{"id": "a", "generators": 0}'):
        (tmp_path / "scale.asked").write_text(text)
        assert scaling.read_request(tmp_path) is None
    assert isinstance(supervisor.launcher, Pretender)


@pytest.mark.slow
def test_a_machine_with_keys_alone_joins_and_is_scaled(tmp_path: Path, small_model: Path) -> None:
    joined = JoinedRun(tmp_path)
    task = get_task(load.load(ROOT / "configs" / "demo.toml").task)
    rows = [task.prompt("train", index, 0) for index in range(64)]
    (joined.here / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": row.text, "answer": row.answer}) + "\n" for row in rows)
    )
    mine = "def reward(prompt, text):\n    return len(text) % 5 / 4\n"
    (joined.here / "mine.py").write_text(mine)
    plain_words = (
        "task.name='file' task.prompts='prompts.jsonl' reward.function='mine.py:reward' "
        "reward.share=true reward.workers=1 reward.deadline_s=600 generator.max_new_tokens=12 "
        "generator.slots=8"
    )
    sets = [f"model.path={str(small_model)!r}", *plain_words.split()]
    joined.play(str(ROOT / "configs" / "demo.toml"), sets, "--trust-code", batches=12)
    assert "running the run's code (mine.py, SHA-256" in joined.log(joined.there)
    shared = "reward.share: machines that join this run receive the file of mine.py:reward"
    assert shared in joined.log(joined.here)
    cache = joined.there / "cache"
    kept = sorted(p.name.partition("-")[0] for p in cache.iterdir() if p.is_dir())
    assert kept == ["model", "prompts", "reward", "runs"] and not list((cache / "runs").iterdir())


def test_a_gateways_key_and_a_generators_key_let_each_speak_for_itself() -> None:
    report = m.ServingReport(m.PROTOCOL, "r", "generator-1", 7, 8, [], 0)
    result = m.CallResult(5, b"", b"", [], "stop")
    assert is_allowed("generator-1", report) and is_allowed("generator-1", result)
    assert not is_allowed("generator-2", report)
    hello = m.GeneratorHello(m.PROTOCOL, "r", "gateway-0", 7, 8, "host", 9)
    assert is_allowed("gateway-0", hello) and not is_allowed("gateway-1", hello)
    assert not is_allowed("generator-0", hello)
    for name in ("gateway-0", "learner", "viewer"):
        assert not is_allowed(name, result) and not is_allowed(name, report)


@pytest.mark.slow
def test_a_generator_of_another_machine_serves_sessions(tmp_path: Path) -> None:
    joined = JoinedRun(tmp_path)
    build_model(joined.here / "m", CalcTask.symbols, hidden=32, layers=1)
    sets = [
        f"seed={RUN_SEED}",
        "model.path='m'",
        "model.warm_start=false",
        f"wires.gateway_address={free_address()!r}",
        "agent.step_s=3600.0",
    ]
    joined.play("calc", sets, batches=6)


SMALL_TEXT = (
    "learner.steps=3 learner.groups=4 learner.group_size=4 evaluation.prompts=4 "
    "evaluation.final_prompts=4 evaluation.ood_prompts=0 learner.checkpoint_every=100 "
    "weights.transport='tcp' wires.connect_s=600"
)
SMALL = [*SMALL_TEXT.split()]


def test_a_generator_elsewhere_joins_over_tcp_with_keys(tmp_path: Path, sort_model: Path) -> None:
    made = run_cli("keys", str(tmp_path / "keys"), "--json").check()
    copied = other_machine(tmp_path / "keys", tmp_path / "copied")
    assert [Path(x).name for x in made.json["copy"]] == [f"generator-{n}" for n in range(4)]
    address, weights = free_address(), free_address()

    def start(part: str, where: str, keys: Path) -> subprocess.Popen[str]:
        sets = [
            *SMALL,
            f"model.path={str(sort_model)!r}",
            f"wires.address={address!r}",
            f"wires.weights_address={weights!r}",
            f"wires.curve_dir={str(keys)!r}",
        ]
        argv = [sys.executable, "-m", "asyncrl.cli", part, "configs/demo.toml", *as_options(sets)]
        argv += ["--run-dir", str(tmp_path / where)]
        log = (tmp_path / f"{part}.log").open("w")
        return subprocess.Popen(argv, cwd=ROOT, env=ENV, stderr=log, text=True)

    # first: it waits for the buffer to say which run it is
    generator = start("generator", "there", copied)
    parts = {"generator": generator} | {
        part: start(part, "here", tmp_path / "keys") for part in ("buffer", "learner")
    }
    try:
        codes = {name: p.wait(timeout=600) for name, p in parts.items()}
    finally:
        for p in parts.values():
            p.kill()
    assert codes == dict.fromkeys(parts, 0), {
        name: (tmp_path / f"{name}.log").read_text()[-2000:] for name in parts
    }
    assert rundir.read_run_id(tmp_path / "there") == rundir.read_run_id(tmp_path / "here")
    summary = json.loads((tmp_path / "here" / "buffer_summary.json").read_text())
    assert summary["finished"] and summary["steps"] == 3 and summary["trajectories"] == 3 * 16
    assert not (tmp_path / "there" / "model").exists()
    assert (tmp_path / "here" / "model" / "model.safetensors").exists()
    for where in ("here", "there"):
        rundir.clean(tmp_path / where)


def test_only_keys_on_the_list_are_let_in(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    make_keys(mine)
    make_keys(other)
    stranger = other_machine(other, tmp_path / "stranger")
    # knows whom to ask, is not on the list
    (stranger / "server.key").write_bytes((mine / "server.key").read_bytes())
    buffer, end = BufferSocket("tcp://127.0.0.1:*", str(mine)), threading.Event()

    def serve() -> None:
        while not end.is_set():
            if (got := buffer.recv(0.05)) is not None:
                buffer.send(got[0], RunStatus("r", 0, 1, 1, {}, {}, [], {}, False, "", 0))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        values = live.request_status(
            buffer.address, str(other_machine(mine, tmp_path / "friend")), 600.0
        )
        assert values is not None
        assert live.request_status(buffer.address, str(stranger), 1.0) is None
        assert live.request_status(buffer.address, "", 1.0) is None
    finally:
        end.set()
        thread.join()
        buffer.close()


def test_keys_are_made_once_and_missing_ones_named(tmp_path: Path, sort_model: Path) -> None:
    make_keys(tmp_path / "keys")
    before = (tmp_path / "keys" / "server.key_secret").read_bytes()
    with pytest.raises(ConfigError, match="already has keys"):
        make_keys(tmp_path / "keys")
    assert (tmp_path / "keys" / "server.key_secret").read_bytes() == before
    where = str(tmp_path / "empty")
    sets = [
        f"wires.curve_dir={where!r}",
        f"model.path={str(sort_model)!r}",
        "wires.address='tcp://127.0.0.1:5999'",
    ]
    done = run_cli("buffer", "configs/demo.toml", "--run-dir", str(tmp_path / "r"), sets=sets)
    refused(done, 2, "wires.curve_dir", "server.key_secret is missing", f"asyncrl keys {where}")


def test_a_generator_that_finds_no_buffer_says_where_it_looked(tmp_path: Path) -> None:
    address = free_address()
    sets = [f"wires.address={address!r}", "wires.connect_s=1"]
    done = run_cli("generator", "configs/demo.toml", "--run-dir", str(tmp_path / "r"), sets=sets)
    refused(done, 4, f"no reply from a buffer at {address} within 1 s", "wires.connect_s")
    assert not (tmp_path / "r").exists()
