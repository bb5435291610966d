"""Join a running run as a generator, from a machine that has the package and a key.

```
join --StatusRequest--> buffer          which run is it?
     --JoinRequest----> buffer          config, this generator's name, address of the chunk server
     --files----------> chunk server    model, prompts, reward function: by digest, cached
```

After that it is a generator like any other."""

from __future__ import annotations

import os
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, ConfigError, NothingToDo, PeerUnreachable
from asyncrl.records import private, rundir
from asyncrl.supervise import live
from asyncrl.transport import file_server, keys
from asyncrl.transport.chunks import ChunkClient, reachable_address
from asyncrl.transport.file_server import FileEntry
from asyncrl.transport.sockets import PeerSocket

ASK_S = 1.0
NOTICE_S = 5.0  # between two lines about a wait

Say = Callable[[str], None]


class Trust(NamedTuple):
    """The permissions that this machine gives the run, whose config it does not control."""

    env: Sequence[str] = ()  # environment variables that the config may send elsewhere
    code: bool = False  # the run's reward function may run here


class GeneratorSetup(NamedTuple):
    """Everything that a generator needs to start."""

    config: Config
    run_dir: Path  # of this generator alone, on this machine
    number: int


def cache_dir() -> Path:
    """The default directory for fetched files."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "asyncrl"


class WaitNotice:
    """Report what `join` waits for, at most every NOTICE_S seconds."""

    def __init__(self, say: Say, patience_s: float) -> None:
        self.say, self.patience_s = say, patience_s
        self.begin = time.monotonic()
        self.due = self.begin + NOTICE_S

    def report(self, awaited: str) -> None:
        """Call it while waiting for `awaited`."""
        now = time.monotonic()
        if now >= self.due:
            self.due = now + NOTICE_S
            self.say(f"waiting for {awaited}: {now - self.begin:.0f} of {self.patience_s:g} s")


def ask(address: str, curve_dir: str, name: str, patience_s: float, say: Say) -> m.JoinReply:
    """Ask the buffer to join until the learner is ready, and return the reply.

    name: the generator's name, "" to take the one of the key.  Waits are reported through `say`.
    Raises PeerUnreachable after `patience_s` seconds, NothingToDo when the run has ended, and
    AsyncrlError when the buffer refuses."""
    until = time.monotonic() + patience_s
    late = PeerUnreachable(
        f"no buffer at {address} answered the request to join within {patience_s:g} s (--wait): is "
        "it running, with keys of the same `asyncrl keys`, and is its learner?"
    )
    notice = WaitNotice(say, patience_s)
    while (status := live.ask(address, curve_dir, ASK_S)) is None:
        notice.report(f"a buffer at {address} to answer")
        if time.monotonic() > until:
            raise late
    if status.finished:
        raise NothingToDo(f"the run at {address} has ended")
    socket = PeerSocket(address, curve_dir, name or keys.VIEWER, run=status.run)
    try:
        while time.monotonic() < until:
            socket.send(m.JoinRequest(name))
            reply = socket.recv(ASK_S)
            if isinstance(reply, m.Refusal):
                refusal = AsyncrlError(reply.reason)
                refusal.exit_code = reply.exit_code
                raise refusal
            if isinstance(reply, m.JoinReply) and reply.weights:
                return reply
            if isinstance(reply, m.JoinReply):
                time.sleep(ASK_S / 2)  # no learner yet
            notice.report(f"the learner of run {status.run} at {address}")
    finally:
        socket.close()
    raise late


def generator_number(producer: str) -> int:
    """The number in a generator's name.  Raises ConfigError for any other name."""
    if not keys.GENERATOR.fullmatch(producer):
        raise ConfigError(f"--keys: the key belongs to {producer!r}, and only generators can join")
    return int(producer.rpartition("-")[2])


def find_own_key(curve_dir: str, index: int | None) -> str:
    """The generator name to request: "" with a copied key, which has a name.

    Raises ConfigError when the directory holds no key of one generator."""
    where = Path(curve_dir)
    if index is not None:
        return f"generator-{index}"
    if curve_dir and not (where / "client.key_secret").exists():
        raise ConfigError(
            f"--keys: {where} holds no client.key_secret: name the directory of one generator "
            f"({where / 'generator-0'}, or a copy), or give --index"
        )
    return ""


def trusting(config: Config) -> list[str]:
    """The options of `asyncrl join` that this run needs, for the user's own machines."""
    if config.uses_sessions:  # the gateway judges
        return []
    judges = file_server.judges(config).values()
    keys_env = dict.fromkeys(judge.key_env for judge in judges if judge.key_env)
    named = [word for key in keys_env for word in ("--env", key)]
    return [*(["--trust-code"] if config.reward.share else []), *named]


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
    raw: dict[str, Any] = tomllib.loads(reply.config)
    parts = load.convert(raw, f"the config of the run at {address}").task.mixture
    sections = {f"mixture.{part.title}.": raw["task"]["mixture"][i] for i, part in enumerate(parts)}
    raw["model"]["path"] = str(folders["model"])
    models = {"reward_model": raw["reward"].get("model")}
    models |= {f"{x}reward_model": part.get("reward_model") for x, part in sections.items()}
    for name, model in models.items():
        if name in folders:
            model["path"] = str(folders[name])

    def place(part: str, section: dict[str, Any], key: str) -> None:
        """Point a key to the fetched file of a part."""
        if part in folders:
            fetched = folders[part] / next(entry.name for entry in files if entry.part == part)
            attribute = section[key].rpartition(":")[2] if part.endswith("reward") else ""
            section[key] = f"{fetched}:{attribute}" if attribute else str(fetched)

    for prefix, task in {"": raw["task"], **sections}.items():
        for key in file_server.PROMPTS:
            place(f"{prefix}{key}", task, key)
    for prefix, part in sections.items():
        place(f"{prefix}reward", part, "reward")
        place(f"{prefix}template", part.get("judge"), "template")
    place("template", raw["reward"].get("judge"), "template")
    place("reward", raw["reward"], "function")
    raw["wires"]["address"] = address
    raw["wires"]["curve_dir"] = curve_dir
    # at least two: a generator that is alone takes all tickets
    raw["generators"] = max(2, raw.get("generators", 1))
    config = load.convert(raw, f"the config of the run at {address}")
    for prefix, judge in {} if config.uses_sessions else file_server.judges(config).items():
        if judge.key_env and judge.key_env not in trust.env:
            key = f"task.{prefix}judge" if prefix else "reward.judge"
            raise ConfigError(
                f"the run at {address} asks for the variable {judge.key_env!a} of this machine's "
                f"environment ({key}.key_env), to send it to {judge.url!a}: allow that with "
                f"--env {judge.key_env!a}"
            )
    return config


def gather(
    client: ChunkClient, config: str, cache: Path, say: Say, trust: Trust = Trust()
) -> tuple[dict[str, Path], list[FileEntry]]:
    """Fetch every file of the run into the cache; its code only where `trust` allows that.

    Returns the folder of each part, and the files.  Raises ConfigError for code that is neither
    trusted nor on this machine."""
    files = client.listing()
    folders = {}
    for part in dict.fromkeys(entry.part for entry in files):
        entries = [entry for entry in files if entry.part == part]
        if all(entry.given for entry in entries) and (not part.endswith("reward") or trust.code):
            folders[str(part)] = file_server.fetch_files(client, entries, cache, say)
    if "model" not in folders:
        raise PeerUnreachable(f"the learner at {client.address} offers no model")
    theirs = load.convert(tomllib.loads(config), f"the config of the run at {client.address}")
    functions = {} if theirs.uses_sessions else file_server.reward_functions(theirs)
    for part, function in functions.items():
        code = next((entry for entry in files if entry.part == part), None)
        admit_code(part, function, code, fetched=part in folders, say=say)
    return folders, files


def admit_code(
    part: str, function: str, code: FileEntry | None, *, fetched: bool, say: Say
) -> None:
    """Report which code of a reward runs here.

    Raises ConfigError for code that is neither trusted nor on this machine."""
    key = "reward.function" if part == "reward" else f"task.{part}"
    if fetched and code is not None:
        say(
            f"{key} = {function}: running the run's code ({code.name}, SHA-256 "
            f"{code.digest[:16]}) here, as reward.share = true and --trust-code allow"
        )
        return
    try:
        file_server.local_code(function, code, key)
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
    """Do everything up to a generator's start.  Raises AsyncrlError."""
    reply = ask(address, curve_dir, find_own_key(curve_dir, index), patience_s, say)
    weights = reachable_address(reply.weights, address)
    client = ChunkClient(weights, patience_s, curve_dir, reply.producer)
    try:
        folders, files = gather(client, reply.config, cache, say, trust)
    finally:
        client.close()
    config = localize_config(reply, address, curve_dir, folders, files, trust)
    for judge in [] if config.uses_sessions else file_server.judges(config).values():
        say(f"judge.url = {judge.url!a}: this machine sends prompts and answers there")
    runs = private.directory(private.directory(cache) / "runs")
    run_dir = Path(tempfile.mkdtemp(prefix=f"{reply.run}-{reply.producer}-", dir=runs))
    rundir.ensure(config, load.dump(config), run_dir, reply.run)
    say(f"joining run {reply.run} at {address} as {reply.producer}")
    return GeneratorSetup(config, run_dir, generator_number(reply.producer))
