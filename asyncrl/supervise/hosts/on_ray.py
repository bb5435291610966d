"""Run the processes of a run on the hosts of a Ray cluster.

Ray only places, starts and watches processes: there is one placement group, one actor per bundle,
and local processes in each actor.  Trajectories and weights do not pass through Ray; sockets,
buffer and weight transport are those of any run.

```
bundle 0       buffer, learner, gateway     they share the run directory with this process
bundle 1 + N   generator-N, by `asyncrl join`: its host only needs the installed package
```

Ray never restarts an actor (`max_restarts=0`).  The kernel kills the processes of an actor that
exits, and an actor exits with the driver.  The supervisor treats a lost host as a killed process,
which it restarts by its rules in a new actor, which waits until its bundle has a host again."""

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

import asyncrl
from asyncrl.config import load, rules
from asyncrl.config.tree import Config, WiresConfig
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.contract.messages import Numbers
from asyncrl.contract.printable import Say
from asyncrl.records import atomic_write, jsonl, private, rundir
from asyncrl.records.jsonl import JsonObject
from asyncrl.supervise import join
from asyncrl.supervise.hosts import LocalProcess, ProcessHandle, ProcessLauncher, ProcessSpec
from asyncrl.transport import keys

POLL_S = 0.2  # between two polls of a host
CLOSE_S = 10.0
KEY_FILES = ("server.key", "client.key_secret")


class ProcessState(NamedTuple):
    """The state of a process as its host reports it."""

    pid: int
    code: int | None
    refusal: AsyncrlError | None
    log: bytes  # new output since the last poll, if the log is on the host's own disk


class RayHost:
    """The actor on a host, which starts and polls local processes.  No method blocks."""

    def __init__(self, directory: str) -> None:
        if os.path.isdir(directory):
            os.chdir(directory)
        self.folder = Path(tempfile.mkdtemp(prefix="asyncrl-host-"))
        self.running: dict[int, LocalProcess] = {}
        self.logs: dict[int, jsonl.GrowingFile] = {}  # logs on its own disk

    def describe_host(self, ports: int) -> JsonObject:
        """Return address, version and `ports` free ports of this host."""
        import ray

        servers = [socket.create_server(("", 0)) for _ in range(ports)]
        numbers = [server.getsockname()[1] for server in servers]
        for server in servers:
            server.close()
        return {
            "ip": ray.util.get_node_ip_address(),
            "version": asyncrl.__version__,
            "ports": numbers,
        }

    def read_file(self, path: str) -> str:
        """Read a small text file, or return "" if this host cannot read it."""
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError:
            return ""

    def start(self, incarnation: int, spec: ProcessSpec, secret: dict[str, bytes] | None) -> None:
        """Start a process.

        secret: the files of a generator's key.  The generator then joins with that key, and its log
        is on this host's own disk."""
        if secret is not None:
            key = private.create_directory(self.folder / spec.name)
            with keys.private_umask():
                for name, data in secret.items():
                    (key / name).write_bytes(data)
            command = [*spec.argv, "--keys", str(key)]
            log = self.folder / f"{spec.name}-{incarnation}.log"
            spec = spec._replace(argv=importing.make_command("asyncrl.cli", *command), log=log)
            self.logs[incarnation] = jsonl.GrowingFile(log)
        self.running[incarnation] = LocalProcess(spec)

    def poll(self, incarnation: int) -> ProcessState:
        process = self.running[incarnation]
        code, refusal = process.poll(), None
        log = self.logs[incarnation].read_new() if incarnation in self.logs else b""
        if code is not None:
            refusal = process.read_refusal()
            process.close()
            del self.running[incarnation]
        return ProcessState(process.pid, code, refusal, log)

    def signal(self, incarnation: int, number: int) -> None:
        if incarnation in self.running:
            self.running[incarnation].signal(number)

    def clean(self, run_dir: str) -> None:
        """Kill all processes and remove everything of the run from this host."""
        for process in self.running.values():
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        if Path(run_dir).is_dir():
            with contextlib.suppress(OSError, AsyncrlError):
                rundir.clean(Path(run_dir))


@dataclass
class RayHostHandle:
    """The supervisor's handle of an actor."""

    actor: Any
    gone: bool = False
    up: bool = False  # the actor has replied


@dataclass
class RayProcess(ProcessHandle):
    """The supervisor's handle of a process, which it polls without blocking."""

    host: RayHostHandle
    incarnation: int
    spec: ProcessSpec
    pending: Any = None  # the call in progress: the start, then a poll
    polled: float = 0.0
    pid: int = 0
    code: int | None = None
    refusal: AsyncrlError | None = None
    killed: float = 0.0  # time of the request to kill it

    def poll(self) -> int | None:
        """Process the reply of the last poll; start another one every POLL_S seconds."""
        import ray

        if self.code is not None:
            return self.code
        try:
            if self.pending is None and time.monotonic() - self.polled > POLL_S:
                self.polled = time.monotonic()
                self.pending = self.host.actor.poll.remote(self.incarnation)
            if self.pending is not None and ray.wait([self.pending], timeout=0)[0]:
                state = ray.get(self.pending)
                self.pending, self.host.up = None, True
                if state is not None:
                    self.update_state(state)
        except ray.exceptions.ActorUnavailableError:
            self.pending = None  # a network problem; Ray raises another error if the actor is lost
        except ray.exceptions.RayError as error:
            self.drop_host(str(error).strip().splitlines()[0])
        return self.code

    def update_state(self, state: ProcessState) -> None:
        self.pid, self.code, self.refusal = state.pid, state.code, state.refusal
        if state.log:
            with self.spec.log.open("ab") as log:
                log.write(state.log)

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.kill()
        elif self.code is None and not self.host.up:  # its actor still waits for a host
            self.drop_host(f"{self.spec.name} was ended before its start")
            self.code = -number
        elif self.code is None:
            self.host.actor.signal.remote(self.incarnation, number)

    def kill(self) -> None:
        """Kill the process; drop a host with all its processes if it does not reply in CLOSE_S."""
        now = time.monotonic()
        if self.code is not None:
            return
        if not self.host.up or (self.killed and now - self.killed > CLOSE_S):
            self.drop_host(f"{self.spec.name} was killed")
        elif not self.killed:
            self.killed = now
            self.host.actor.signal.remote(self.incarnation, signal.SIGKILL)

    def drop_host(self, reason: str) -> None:
        """Kill the actor; the process is lost, and the others of its host at their next poll."""
        import ray

        self.host.gone = True
        if ray.is_initialized():  # otherwise ray.kill would start a new cluster
            with contextlib.suppress(Exception):
                ray.kill(self.host.actor)
        with self.spec.log.open("a", encoding="utf-8") as log:
            log.write(f"the host of {self.spec.name} was lost: {reason}\n")
        self.code = -signal.SIGKILL

    def read_refusal(self) -> AsyncrlError | None:
        return self.refusal

    def close(self) -> None:
        """Do nothing: this handle holds no resources."""


def list_bundles(config: Config) -> list[Numbers]:
    """Return the resources of each bundle: the learner's, then one per generator."""
    placement = config.placement
    hosts = [placement.learner, *[placement.generator] * config.generators]
    return [{"CPU": host.cpus} | ({"GPU": host.gpus} if host.gpus else {}) for host in hosts]


def format_resources(resources: Numbers, missing: str = "") -> str:
    """Format the CPUs and GPUs among resources.

    >>> format_resources({"CPU": 1.0, "memory": 5.0, "GPU": 2}), format_resources({}, "no CPU")
    ('1 CPU 2 GPU', 'no CPU')
    """
    names = (f"{n:g} {name}" for name, n in resources.items() if name in ("CPU", "GPU"))
    return " ".join(names) or missing


class RayLauncher(ProcessLauncher):
    """The launcher for a Ray cluster, built by `place_bundles`."""

    def __init__(self, config: Config, run_dir: Path, group: Any) -> None:
        self.config = config
        self.run_dir = run_dir
        self.group = group
        self.hosts: dict[int, RayHostHandle] = {}
        self.incarnations = 0

    def prepare(self) -> None:
        """Create missing keys and write the cluster's addresses into the run directory.

        Raises ConfigError when the learner's host cannot read the run directory."""
        import ray

        key_dir = Path(self.config.wires.curve_dir)
        names = ["gateway-0"] if self.config.uses_sessions else []
        names += [f"generator-{number}" for number in range(self.config.generators)]
        if not all((key_dir / name).is_dir() for name in names):
            keys.make_keys(key_dir, self.config.generators)
        path = self.run_dir / "run_id"
        if ray.get(self.ensure_host(0).actor.read_file.remote(str(path))) != path.read_text(
            encoding="utf-8"
        ):
            raise ConfigError(
                f"runs: the learner's host cannot read {self.run_dir}: put the run on a path that "
                "it shares with this machine, with --set runs=DIR"
            )
        nodes = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        hosts = {"wires": list_addresses(self.config.wires), "nodes": nodes}
        atomic_write.write(self.run_dir / "hosts.json", json.dumps(hosts))
        # the config of a resumed run still has the addresses of its last start
        atomic_write.write(self.run_dir / "config.toml", load.dump(self.config), sync=True)

    def count_slots(self) -> int:
        return len(self.group.bundle_specs) - 1

    def ensure_host(self, bundle: int) -> RayHostHandle:
        """Return the actor of a bundle, and start a new one if the last one was lost."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if bundle in self.hosts and not self.hosts[bundle].gone:
            return self.hosts[bundle]
        resources = self.group.bundle_specs[bundle]
        actor_class = ray.remote(RayHost).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=bundle
            ),
        )
        self.hosts[bundle] = RayHostHandle(actor_class.remote(os.getcwd()))
        return self.hosts[bundle]

    def start(self, spec: ProcessSpec) -> RayProcess:
        secret = None
        bundle = 0
        if spec.name.startswith("generator-"):
            number = int(spec.name.rpartition("-")[2])
            bundle = number + 1
            if bundle > self.count_slots():
                raise ConfigError(
                    f"{spec.name}: placement only has room for {self.count_slots()} generators"
                )
            config = self.config
            command = ["join", config.wires.address, "--index", str(number)]
            command += ["--wait", f"{config.watchdog.startup_s:g}"]
            spec = spec._replace(argv=command + join.list_trust_options(config))
            key_dir = Path(config.wires.curve_dir) / spec.name
            secret = {name: (key_dir / name).read_bytes() for name in KEY_FILES}
        self.incarnations += 1
        host = self.ensure_host(bundle)
        call = host.actor.start.remote(self.incarnations, spec, secret)
        return RayProcess(host, self.incarnations, spec, call)

    def close(self) -> None:
        """End every actor with its processes and free the cluster's resources."""
        import ray

        calls = [h.actor.clean.remote(str(self.run_dir)) for h in self.hosts.values() if not h.gone]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S)
        ray.util.remove_placement_group(self.group)


def adapt_config(config: Config) -> Config:
    """Adapt the config to a cluster.  Raises ConfigError for settings that need one machine."""
    for problem in rules.apply_table("hosts", config):
        raise ConfigError(f"--on ray: {problem}")
    count = config.placement.generator.count or config.generators
    return replace(config, generators=count)


def list_addresses(wires: WiresConfig) -> list[str]:
    """Return the addresses of the buffer, the weights and, with sessions, the gateway."""
    gateway = [wires.gateway_address] if wires.gateway_address else []
    return [wires.address, wires.weights_address, *gateway]


@contextlib.contextmanager
def place_on_cluster(
    config: Config, run_dir: Path, on: str, say: Say
) -> Iterator[tuple[Config, RayLauncher]]:
    """Place bundles on the cluster that `on` names and free them at the end."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"--on {on}: Ray is not installed: pip install 'asyncrl[ray]'")
    if "working_dir_files" in run_dir.parts:
        raise ConfigError(
            f"runs: {run_dir} is in a copy of the working directory that Ray removes after this "
            "job: put the run on a path that all hosts share, with --set runs=DIR"
        )
    import ray

    connect(on)
    try:
        config, launcher = place_bundles(config, run_dir, on, say)
        with contextlib.closing(launcher):
            yield config, launcher
    finally:
        ray.shutdown()


def connect(on: str) -> None:
    """Connect to the cluster that `--on` names.

    on: `ray` (the cluster at RAY_ADDRESS, else this machine's) or `ray://HOST:PORT`.  Raises
    PeerUnreachable."""
    import ray

    address = on.partition("://")[2] or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise PeerUnreachable(
            f"--on {on}: no Ray cluster answers at {address}: {str(error).splitlines()[0]}; start "
            "one by `ray start --head`, and run this on one of its machines"
        ) from error


def place_bundles(config: Config, run_dir: Path, on: str, say: Say) -> tuple[Config, RayLauncher]:
    """Find a host for every bundle; return the config with the addresses, and a launcher.

    Raises PeerUnreachable with requested and available resources when the group is not placed
    within `placement.deadline_s`, and ConfigError when a host has another version of asyncrl."""
    import ray

    group = ray.util.placement_group(list_bundles(config), strategy=config.placement.strategy)
    say(f"ray: {len(group.bundle_specs)} bundles, {config.placement.strategy}")
    if not group.wait(config.placement.deadline_s):
        hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free = format_resources(ray.available_resources(), "nothing")
        ray.util.remove_placement_group(group)
        raise PeerUnreachable(
            f"--on {on}: not placed within {config.placement.deadline_s:g} s "
            f"(placement.deadline_s), {config.placement.strategy}; "
            f"wanted: {'; '.join(map(format_resources, list_bundles(config)))}; hosts: "
            f"{'; '.join(format_resources(host, 'no CPU') for host in hosts) or 'none'}; "
            f"free in all: {free}"
        )
    launcher = RayLauncher(config, run_dir, group)
    learner_host = launcher.ensure_host(0)
    description = ray.get(
        learner_host.actor.describe_host.remote(3), timeout=config.placement.deadline_s
    )
    learner_host.up = True
    if description["version"] != asyncrl.__version__:
        raise ConfigError(
            f"--on {on}: {description['ip']} has asyncrl {description['version']}, this machine "
            f"{asyncrl.__version__}: install the same on all hosts"
        )
    wires = config.wires
    # replace addresses of an earlier start, but keep those that the user set
    if jsonl.read_object(run_dir / "hosts.json").get("wires") == list_addresses(wires):
        wires = replace(wires, address="", weights_address="", gateway_address="")
    buffer, weights, gateway = (
        f"tcp://{description['ip']}:{port}" for port in description["ports"]
    )
    config = replace(
        config,
        wires=replace(
            wires,
            address=wires.address or buffer,
            weights_address=wires.weights_address or weights,
            gateway_address=wires.gateway_address or (gateway if config.uses_sessions else ""),
            curve_dir=wires.curve_dir or str((run_dir / "keys").resolve()),
        ),
    )
    launcher.config = config
    processes = "buffer, learner and gateway" if config.uses_sessions else "buffer and learner"
    say(f"ray: {processes} on {description['ip']}")
    return config, launcher
