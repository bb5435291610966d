"""Join a running run as a generator, from a machine that has the package and a key.

```
join --StatusRequest--> buffer          identity of the run
     --JoinRequest----> buffer          config, this generator's name, address of the chunk server
     --files----------> chunk server    model, prompts, reward function: by digest, cached
```

Then the process works like any other generator."""

import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, ConfigError, NothingToDo, PeerUnreachable
from asyncrl.contract.printable import Say
from asyncrl.records import private, rundir
from asyncrl.records.jsonl import JsonObject
from asyncrl.supervise import live
from asyncrl.transport import file_server, keys
from asyncrl.transport.chunks import ChunkClient, reachable_address
from asyncrl.transport.file_server import FileEntry
from asyncrl.transport.sockets import PeerSocket

ASK_S = 1.0
NOTICE_S = 5.0  # seconds between two lines about a wait


class Trust(NamedTuple):
    """The permissions that this machine grants the run, whose config it does not control."""

    env: Sequence[str] = ()  # environment variables that the run may send to its judges
    code: bool = False  # the run's reward function may run on this machine


class GeneratorSetup(NamedTuple):
    """Everything that a generator needs to start."""

    config: Config
    run_dir: Path  # on this machine, only for this generator
    number: int


class WaitNotice:
    """Report what `join` waits for, at most every NOTICE_S seconds."""

    def __init__(self, say: Say, patience_s: float) -> None:
        self.say, self.patience_s = say, patience_s
        self.begin = time.monotonic()
        self.due = self.begin + NOTICE_S

    def report(self, awaited: str) -> None:
        """Report the wait for `awaited` if the last report is NOTICE_S seconds old."""
        now = time.monotonic()
        if now >= self.due:
            self.due = now + NOTICE_S
            self.say(f"waiting for {awaited}: {now - self.begin:.0f} of {self.patience_s:g} s")


def request_join(
    address: str, curve_dir: str, name: str, patience_s: float, say: Say
) -> m.JoinReply:
    """Request to join until the learner is ready, and return the reply.

    name: the generator's name, or "" to use the key's.  Waits are reported through `say`.  Raises
    PeerUnreachable after `patience_s` seconds, NothingToDo if the run has ended, and AsyncrlError
    if the buffer refuses."""
    deadline = time.monotonic() + patience_s
    timeout = PeerUnreachable(
        f"no buffer at {address} answered the request to join within {patience_s:g} s (--wait): "
        "check that buffer and learner are running, with keys of the same `asyncrl keys`"
    )
    notice = WaitNotice(say, patience_s)
    while (status := live.request_status(address, curve_dir, ASK_S)) is None:
        notice.report(f"a buffer at {address} to answer")
        if time.monotonic() > deadline:
            raise timeout
    if status.finished:
        raise NothingToDo(f"the run at {address} has ended")
    connection = PeerSocket(address, curve_dir, name or keys.VIEWER, run=status.run)
    with closing(connection) as socket:
        while time.monotonic() < deadline:
            socket.send(m.JoinRequest(name))
            reply = socket.recv(ASK_S)
            if isinstance(reply, m.Refusal):
                raise AsyncrlError(reply.reason, reply.exit_code)
            if isinstance(reply, m.JoinReply) and reply.weights:
                return reply
            if isinstance(reply, m.JoinReply):
                time.sleep(ASK_S / 2)  # no learner yet
            notice.report(f"the learner of run {status.run} at {address}")
    raise timeout


def parse_generator_number(producer: str) -> int:
    """Return the number in a generator's name.  Raises ConfigError for any other name."""
    if not keys.GENERATOR.fullmatch(producer):
        raise ConfigError(f"--keys: the key belongs to {producer!r}, and only generators can join")
    return int(producer.rpartition("-")[2])


def find_own_key(curve_dir: str, index: int | None) -> str:
    """Return the generator name to request; "" with a copied key, which contains a name.

    Raises ConfigError if the directory has no key of one generator."""
    key_dir = Path(curve_dir)
    if index is not None:
        return f"generator-{index}"
    if curve_dir and not (key_dir / "client.key_secret").exists():
        raise ConfigError(
            f"--keys: {key_dir} holds no client.key_secret: name the directory of one generator "
            f"({key_dir / 'generator-0'}, or a copy), or give --index"
        )
    return ""


def list_trust_options(config: Config) -> list[str]:
    """Return the options of `asyncrl join` that this run needs on the user's own machines."""
    if config.uses_sessions:  # the gateway computes rewards
        return []
    judges = file_server.list_judges(config).values()
    keys_env = dict.fromkeys(judge.key_env for judge in judges if judge.key_env)
    env_options = [word for key in keys_env for word in ("--env", key)]
    return [*(["--trust-code"] if config.reward.share else []), *env_options]


def localize_config(
    reply: m.JoinReply,
    address: str,
    curve_dir: str,
    folders: dict[str, Path],
    files: list[FileEntry],
    trust: Trust = Trust(),
) -> Config:
    """Adapt the run's config to this machine: every path points into the cache.

    Raises ConfigError for an environment variable that `trust` does not allow."""
    table: JsonObject = tomllib.loads(reply.config)
    mixture = load.convert(table, f"the config of the run at {address}").task.mixture
    sections = {
        f"mixture.{part.title}.": section
        for part, section in zip(mixture, table["task"].get("mixture", ()), strict=True)
    }
    table["model"]["path"] = str(folders["model"])

    def point_to_file(part: str, section: JsonObject, key: str) -> None:
        """Set a key to the path of the fetched file of a part."""
        if part in folders:
            fetched = folders[part] / next(entry.name for entry in files if entry.part == part)
            attribute = section[key].rpartition(":")[2] if part.endswith("reward") else ""
            section[key] = f"{fetched}:{attribute}" if attribute else str(fetched)

    reward = table["reward"]
    places = [("", table["task"], reward, "function", reward.get("model"))]
    places += [
        (prefix, section, section, "reward", section.get("reward_model"))
        for prefix, section in sections.items()
    ]
    for prefix, task, section, function, model in places:
        for key in file_server.PROMPTS:
            point_to_file(f"{prefix}{key}", task, key)
        point_to_file(f"{prefix}reward", section, function)
        point_to_file(f"{prefix}template", section.get("judge"), "template")
        if f"{prefix}reward_model" in folders:
            model["path"] = str(folders[f"{prefix}reward_model"])
    table["wires"]["address"] = address
    table["wires"]["curve_dir"] = curve_dir
    # at least two, because a single generator leases all tickets
    table["generators"] = max(2, table.get("generators", 1))
    config = load.convert(table, f"the config of the run at {address}")
    for prefix, judge in {} if config.uses_sessions else file_server.list_judges(config).items():
        if judge.key_env and judge.key_env not in trust.env:
            key = f"task.{prefix}judge" if prefix else "reward.judge"
            raise ConfigError(
                f"the run at {address} asks for the variable {judge.key_env!a} of this machine's "
                f"environment ({key}.key_env), to send it to {judge.url!a}: allow that with "
                f"--env {judge.key_env!a}"
            )
    return config


def fetch_run_files(
    client: ChunkClient, config: str, cache: Path, say: Say, trust: Trust = Trust()
) -> tuple[dict[str, Path], list[FileEntry]]:
    """Fetch every file of the run into the cache, its code only if `trust` allows it.

    Return the folder of each part, and the files.  Raises ConfigError for code that is neither
    trusted nor on this machine."""
    files = client.list_files()
    folders = {}
    for part in dict.fromkeys(entry.part for entry in files):
        entries = [entry for entry in files if entry.part == part]
        if all(entry.given for entry in entries) and (not part.endswith("reward") or trust.code):
            folders[str(part)] = file_server.fetch_files(client.read_file, entries, cache, say)
    if "model" not in folders:
        raise PeerUnreachable(f"the learner at {client.address} offers no model")
    run_config = load.convert(tomllib.loads(config), f"the config of the run at {client.address}")
    functions = {} if run_config.uses_sessions else file_server.list_reward_functions(run_config)
    for part, function in functions.items():
        code = next((entry for entry in files if entry.part == part), None)
        admit_code(part, function, code, fetched=part in folders, say=say)
    return folders, files


def admit_code(
    part: str, function: str, code: FileEntry | None, *, fetched: bool, say: Say
) -> None:
    """Report which code of a reward function runs on this machine.

    Raises ConfigError for code that is neither trusted nor on this machine."""
    key = {"reward": "reward.function"}.get(part, part if "reward." in part[:7] else f"task.{part}")
    if fetched and code is not None:
        say(
            f"{key} = {function}: running the run's code ({code.name}, SHA-256 "
            f"{code.digest[:16]}) here, as reward.share = true and --trust-code allow"
        )
        return
    try:
        file_server.check_local_code(function, code, key)
    except ConfigError as error:
        if code is None or not code.given:
            raise
        raise ConfigError(
            f"{key} = {function!a}: the run offers its code ({code.name!a}, SHA-256 "
            f"{code.digest[:16]}), which would run here with your rights: allow that with "
            "--trust-code, or copy the file here"
        ) from error
    say(f"{key} = {function}: using the copy on this machine")


def prepare(
    address: str,
    curve_dir: str,
    *,
    index: int | None,
    cache: Path,
    patience_s: float,
    say: Say,
    trust: Trust = Trust(),
) -> GeneratorSetup:
    """Prepare everything that a generator needs to start.  Raises AsyncrlError."""
    reply = request_join(address, curve_dir, find_own_key(curve_dir, index), patience_s, say)
    weights = reachable_address(reply.weights, address)
    with closing(ChunkClient(weights, patience_s, curve_dir, reply.producer)) as client:
        folders, files = fetch_run_files(client, reply.config, cache, say, trust)
    config = localize_config(reply, address, curve_dir, folders, files, trust)
    for judge in [] if config.uses_sessions else file_server.list_judges(config).values():
        say(f"judge.url = {judge.url!a}: this machine sends prompts and answers there")
    runs = private.create_directory(private.create_directory(cache) / "runs")
    run_dir = Path(tempfile.mkdtemp(prefix=f"{reply.run}-{reply.producer}-", dir=runs))
    rundir.ensure(load.dump(config), run_dir, reply.run)
    say(f"joining run {reply.run} at {address} as {reply.producer}")
    return GeneratorSetup(config, run_dir, parse_generator_number(reply.producer))
