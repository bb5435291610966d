"""Processes of a run on the hosts of a Ray cluster.

Ray places, starts and watches, and does nothing else: one placement group, one actor a bundle, and
in each actor the maker of one machine.  No trajectory and no weight passes through Ray: sockets,
buffer and rings are those of any run.

```
bundle 0       buffer, learner, gateway     they share the run directory with this process
bundle 1 + N   generator-N, by `asyncrl join`: it needs nothing there but the package
```

An actor is never started again by Ray (`max_restarts=0`); its processes end with it, by the kernel,
and it ends with the driver.  A lost host is a killed process to the supervisor, which starts it
again by its rules: in a new actor, which waits until its bundle has a host again."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import asyncrl
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.records import atomic_write, private, rundir
from asyncrl.supervise import join
from asyncrl.supervise.hosts import ProcessSpec, last_lines
from asyncrl.supervise.hosts.local import LocalLauncher, LocalProcess
from asyncrl.transport import keys

LOOK_S = 0.2  # between two looks at a host
LOG_BYTES = 1 << 18  # of a log, in one look
CLOSE_S = 10.0
KEY_FILES = ("server.key", "client.key_secret")


class ProcessState(NamedTuple):
    """What a host says of one of its processes."""

    life: int
    pid: int
    code: int | None
    refusal: tuple[int, str] | None  # exit code and message
    log: bytes  # what has come since the last look, where the log is the host's own


class RayHost:
    """In an actor: the maker of its machine, asked from elsewhere.  All its methods return at
    once.
    """

    def __init__(self, where: str) -> None:
        if os.path.isdir(where):
            os.chdir(where)
        self.local = LocalLauncher()
        self.own = Path(tempfile.mkdtemp(prefix="asyncrl-host-"))
        self.running: dict[int, tuple[LocalProcess, ProcessSpec]] = {}
        self.sent: dict[int, int] = {}  # bytes of a log of its own that were told

    def describe_host(self, ports: int) -> dict[str, Any]:
        """Where this is, and as many free ports."""
        import ray

        taken = [socket.create_server(("", 0)) for _ in range(ports)]
        found = [each.getsockname()[1] for each in taken]
        for each in taken:
            each.close()
        return {
            "ip": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
            "version": asyncrl.__version__,
            "ports": found,
        }

    def reads(self, path: str) -> str:
        """A small file's text; "" when it cannot be read here."""
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError:
            return ""

    def start(self, life: int, order: ProcessSpec, secret: dict[str, bytes] | None) -> None:
        """secret: the files of a generator's key; its command then joins by it, and its log is this
        host's own.
        """
        if secret is not None:
            key = private.directory(self.own / order.name)
            with keys.private_umask():
                for name, data in secret.items():
                    (key / name).write_bytes(data)
            command = [*order.argv, "--keys", str(key)] if secret else order.argv
            log = self.own / f"{order.name}-{life}.log"
            order = order._replace(argv=importing.command("asyncrl.cli", *command), log=log)
            self.sent[life] = 0
        self.running[life] = (self.local.start(order), order)

    def poll_processes(self) -> list[ProcessState]:
        return [self._process_state(life, *found) for life, found in list(self.running.items())]

    def _process_state(self, life: int, process: LocalProcess, order: ProcessSpec) -> ProcessState:
        code = process.poll()
        log = b""
        if life in self.sent:
            with order.log.open("rb") as file:
                file.seek(self.sent[life])
                log = file.read(LOG_BYTES)
            self.sent[life] += len(log)
        if len(log) == LOG_BYTES:
            code = None  # its end is told with the end of its log
        refusal = None
        if code is not None:
            said = process.read_refusal()
            refusal = None if said is None else (said.exit_code, str(said))
            process.close()
            del self.running[life]
        return ProcessState(life, process.pid, code, refusal, log)

    def signal(self, life: int, number: int) -> None:
        if life in self.running:
            self.running[life][0].signal(number)

    def clean(self, run_dir: str) -> None:
        """The last thing: nothing of the run stays on this machine."""
        for process, _ in self.running.values():
            process.kill()
        shutil.rmtree(self.own, ignore_errors=True)
        if Path(run_dir).is_dir():
            with contextlib.suppress(OSError, AsyncrlError):
                rundir.clean(Path(run_dir))


@dataclass
class RayProcess:
    """A process of a host, as far as that has said."""

    host: RayHostHandle
    life: int
    order: ProcessSpec
    pid: int = 0
    code: int | None = None
    refusal: AsyncrlError | None = None
    killed: float = 0.0  # when that was first asked for
    kill_next: float = 0.0

    def poll(self) -> int | None:
        if self.code is None:
            self.host.poll()
        return self.code

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.kill()
        elif self.code is None and not self.host.up:  # it still waits for a host
            self.host.drop(f"{self.order.name} was ended before it began")
            self.code = -number
        elif self.code is None:
            self.host.actor.signal.remote(self.life, number)

    def kill(self) -> None:
        """A host that does not do it in time ends with all that runs there."""
        now = time.monotonic()
        self.killed = self.killed or now
        if self.code is None and (not self.host.up or now - self.killed > CLOSE_S):
            self.host.drop(f"{self.order.name} was killed")
        elif self.code is None and now > self.kill_next:
            self.kill_next = now + 1.0
            self.host.actor.signal.remote(self.life, signal.SIGKILL)

    def read_refusal(self) -> AsyncrlError | None:
        return self.refusal

    def tail(self, lines: int) -> list[str]:
        return last_lines(self.order.log, lines)

    def close(self) -> None:
        """Nothing is held."""

    def update_state(self, said: ProcessState) -> None:
        self.pid = said.pid
        if said.log:
            with self.order.log.open("ab") as log:
                log.write(said.log)
        if said.code is not None:
            self.code = said.code
            if said.refusal is not None:
                self.refusal = AsyncrlError(said.refusal[1])
                self.refusal.exit_code = said.refusal[0]

    def mark_lost(self, why: str) -> None:
        """Its host is gone, and it with it."""
        if self.code is None:
            with self.order.log.open("a", encoding="utf-8") as log:
                log.write(f"the host of {self.order.name} was lost: {why}\n")
            self.code = -signal.SIGKILL


@dataclass
class RayHostHandle:
    """One actor, asked again and again how its processes fare; never waited for."""

    actor: Any
    processes: dict[int, RayProcess] = field(default_factory=dict)
    gone: bool = False
    up: bool = False  # it has answered
    pending: Any = None  # the look under way
    looked: float = 0.0
    calls: list[Any] = field(default_factory=list)  # starts that have not returned

    def poll(self) -> None:
        """Take what has come; ask again when it is time."""
        import ray

        if self.gone:
            return
        try:
            ready, self.calls = ray.wait(self.calls, timeout=0) if self.calls else ([], [])
            ray.get(ready)
            if self.pending is None and time.monotonic() - self.looked > LOOK_S:
                self.looked = time.monotonic()
                self.pending = self.actor.poll_processes.remote()
            if self.pending is None or not ray.wait([self.pending], timeout=0)[0]:
                return
            found: list[ProcessState] = ray.get(self.pending)
        except ray.exceptions.ActorUnavailableError:
            self.pending = None  # the network; Ray says when it is more
            return
        except ray.exceptions.RayError as error:
            self.drop(str(error).strip().splitlines()[0])
            return
        self.pending = None
        self.up = True
        for said in found:
            if said.life in self.processes:
                self.processes[said.life].update_state(said)

    def drop(self, why: str) -> None:
        """The actor is no more, and what ran there."""
        import ray

        self.gone = True
        if ray.is_initialized():  # it would start a cluster of its own
            with contextlib.suppress(Exception):
                ray.kill(self.actor)
        for process in self.processes.values():
            process.mark_lost(why)


def bundles(config: Config) -> list[dict[str, float]]:
    """What each bundle asks for: the learner's, then one a generator."""

    def asked(part: Any) -> dict[str, float]:
        return {"CPU": part.cpus} | ({"GPU": part.gpus} if part.gpus else {})

    placement = config.placement
    return [asked(placement.learner)] + [asked(placement.generator)] * config.generators


def describe_resources(wanted: list[dict[str, float]], hosts: list[dict[str, float]]) -> str:
    """What was wanted and what there is, for the error.

    >>> describe_resources([{"CPU": 1}, {"CPU": 2, "GPU": 1}], [{"CPU": 1.0, "memory": 5.0}])
    'wanted: 1 CPU; 2 CPU 1 GPU; hosts: 1 CPU'
    """

    def format_resources(resources: dict[str, float]) -> str:
        return " ".join(f"{n:g} {name}" for name, n in resources.items() if name in ("CPU", "GPU"))

    said = [format_resources(each) or "no CPU" for each in hosts]
    return f"wanted: {'; '.join(map(format_resources, wanted))}; hosts: {'; '.join(said) or 'none'}"


class RayLauncher:
    """The maker of a Ray cluster.  `place_bundles` makes it."""

    def __init__(self, config: Config, run_dir: Path, group: Any) -> None:
        self.config = config
        self.run_dir = run_dir
        self.group = group
        self.hosts: dict[int, RayHostHandle] = {}
        self.lives = 0

    def prepare(self) -> None:
        """Keys for all; the learner's host sees the run directory.  Raises ConfigError."""
        import ray

        where = Path(self.config.wires.curve_dir)
        names = [f"generator-{number}" for number in range(self.config.generators)]
        if not all((where / name).is_dir() for name in names):
            keys.make_keys(where, self.config.generators)
        path = self.run_dir / "run_id"
        if ray.get(self.host(0).actor.reads.remote(str(path))) != path.read_text(encoding="utf-8"):
            raise ConfigError(
                f"runs: the learner's host does not see {self.run_dir}: put it on a path that it "
                "shares with this machine, by --set runs=DIR"
            )
        wires = self.config.wires
        nodes = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        said = {"wires": [wires.address, wires.weights_address], "nodes": nodes}
        atomic_write.write(self.run_dir / "hosts.json", json.dumps(said))
        # a run that goes on has the addresses of its life before
        atomic_write.write(self.run_dir / "config.toml", load.dump(self.config), sync=True)

    def free_slots(self) -> int:
        return len(self.group.bundle_specs) - 1

    def host(self, bundle: int) -> RayHostHandle:
        """The actor of a bundle; a new one where there is none any more."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if bundle in self.hosts and not self.hosts[bundle].gone:
            return self.hosts[bundle]
        asked = self.group.bundle_specs[bundle]
        kind = ray.remote(RayHost).options(
            num_cpus=asked.get("CPU", 0),
            num_gpus=asked.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=bundle
            ),
        )
        self.hosts[bundle] = RayHostHandle(kind.remote(os.getcwd()))
        return self.hosts[bundle]

    def start(self, order: ProcessSpec) -> RayProcess:
        secret = None
        bundle = 0
        if order.name.startswith("generator-"):
            number = int(order.name.rpartition("-")[2])
            bundle = number + 1
            if bundle > self.free_slots():
                raise ConfigError(f"{order.name} has no place: placement has {self.free_slots()}")
            patience = self.config.watchdog.startup_s
            command = ["join", self.config.wires.address, "--index", str(number)]
            command += ["--wait", f"{patience:g}", *join.trusting(self.config)]
            order = order._replace(argv=command)
            own = Path(self.config.wires.curve_dir) / order.name
            secret = {name: (own / name).read_bytes() for name in KEY_FILES}
        self.lives += 1
        host = self.host(bundle)
        process = host.processes[self.lives] = RayProcess(host, self.lives, order)
        host.calls.append(host.actor.start.remote(self.lives, order, secret))
        return process

    def close(self) -> None:
        """Every actor ends, and with it what it had started; the cluster is free again."""
        import ray

        calls = [h.actor.clean.remote(str(self.run_dir)) for h in self.hosts.values() if not h.gone]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S)
        ray.util.remove_placement_group(self.group)


def cluster_config(config: Config) -> Config:
    """The config as a cluster runs it.  Raises ConfigError for what it cannot."""
    if config.agent.uses_sessions:
        raise ConfigError("--on ray: sessions of agents ([agent]) run on one machine")
    if (how := config.weights.transport) not in ("auto", "tcp"):
        raise ConfigError(f"--on ray: weights.transport = {how} does not leave a machine; use auto")
    count = config.placement.generator.count or config.generators
    return msgspec.structs.replace(config, generators=count)


def previous_addresses(run_dir: Path) -> list[str]:
    """The addresses that this run's life before was given here; empty when there are none."""
    try:
        return list(json.loads((run_dir / "hosts.json").read_text(encoding="utf-8"))["wires"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


@contextlib.contextmanager
def placed_on_cluster(
    config: Config, run_dir: Path, on: str, say: Callable[[str], None]
) -> Iterator[tuple[Config, RayLauncher]]:
    """`place_bundles` on the cluster that `on` names; at the end everything there is given back."""
    import_ray(on)
    require_kept_directory(run_dir)
    import ray

    connect(on)
    try:
        config, maker = place_bundles(config, run_dir, on, say)
        try:
            yield config, maker
        finally:
            maker.close()
    finally:
        ray.shutdown()


def require_kept_directory(run_dir: Path) -> None:
    """Raises ConfigError for a run in a place that is Ray's to remove."""
    if "working_dir_files" in run_dir.parts:
        raise ConfigError(
            f"runs: {run_dir} is in the copy of a working directory that Ray has made for this "
            "job, and removes: put the run on a path that all hosts share, by --set runs=DIR"
        )


def import_ray(on: str) -> None:
    """Raises ConfigError when it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"--on {on}: Ray is not installed: pip install 'asyncrl[ray]'")


def connect(on: str) -> None:
    """To the cluster that `--on` names: ray (RAY_ADDRESS, or the one of this machine) or
    ray://HOST:PORT, its own address.  Raises ConfigError, PeerUnreachable.
    """
    import ray

    address = on.partition("://")[2] or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise PeerUnreachable(
            f"--on {on}: no Ray cluster answers at {address}: {str(error).splitlines()[0]}; start "
            "one by `ray start --head`, and run this on one of its machines"
        ) from error


def place_bundles(
    config: Config, run_dir: Path, on: str, say: Callable[[str], None]
) -> tuple[Config, RayLauncher]:
    """Find a host for every bundle.  Returns the config with the addresses that follow from where
    the buffer is, and the maker.

    Raises PeerUnreachable with what is wanted and what is there, when the group is not placed
    within `placement.deadline_s`; ConfigError."""
    import ray

    group = ray.util.placement_group(bundles(config), strategy=config.placement.strategy)
    say(f"ray: {len(group.bundle_specs)} bundles, {config.placement.strategy}")
    if not group.wait(config.placement.deadline_s):
        free = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        left = {k: n for k, n in ray.available_resources().items() if k in ("CPU", "GPU")}
        ray.util.remove_placement_group(group)
        raise PeerUnreachable(
            f"--on {on}: not placed within {config.placement.deadline_s:g} s "
            f"(placement.deadline_s), {config.placement.strategy}; "
            f"{describe_resources(bundles(config), free)}; free in all: "
            f"{' '.join(f'{n:g} {name}' for name, n in left.items()) or 'nothing'}"
        )
    maker = RayLauncher(config, run_dir, group)
    first = maker.host(0)
    about = ray.get(first.actor.describe_host.remote(2), timeout=config.placement.deadline_s)
    first.up = True
    if about["version"] != asyncrl.__version__:
        raise ConfigError(
            f"--on {on}: {about['ip']} has asyncrl {about['version']}, this machine "
            f"{asyncrl.__version__}: install the same on all hosts"
        )
    wires = config.wires
    if previous_addresses(run_dir) == [
        wires.address,
        wires.weights_address,
    ]:  # by this, not by hand
        wires = msgspec.structs.replace(wires, address="", weights_address="")
    buffer, weights = (f"tcp://{about['ip']}:{port}" for port in about["ports"])
    curve_dir = wires.curve_dir or str((run_dir / "keys").resolve())
    config = msgspec.structs.replace(
        config,
        wires=msgspec.structs.replace(
            wires,
            address=wires.address or buffer,
            weights_address=wires.weights_address or weights,
            curve_dir=curve_dir,
        ),
    )
    maker.config = config
    say(f"ray: buffer and learner on {about['ip']}")
    return config, maker
