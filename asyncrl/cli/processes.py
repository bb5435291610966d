"""Processes of a run: `asyncrl buffer`, `generator`, `gateway`, `learner`, `join`, `scale`, `keys`.

The supervisor starts the processes.  You can also start them by hand on several machines."""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncrl.cli import result
from asyncrl.cli.base import command, emit, make_command, print_progress
from asyncrl.config import load
from asyncrl.contract import refusal
from asyncrl.contract.errors import AsyncrlError, ConfigError, NothingToDo, PeerUnreachable
from asyncrl.contract.importing import pause_collection
from asyncrl.records import buffer_leadership, process_log, rundir

# process -> the module with its function `main`
MODULES = {
    "buffer": "buffer.service",
    "generator": "actors.generator",
    "gateway": "actors.gateway.environment_sessions",
    "learner": "learner.loop",
}


def resolve_run(
    source: str, sets: tuple[str, ...], run_dir: Path | None, *, joins: bool
) -> tuple[Any, Path]:
    """Return config and run directory of a process; the first process creates the directory.

    joins: the process is a generator, possibly on another machine than the buffer.  Its directory
    then gets the id of the buffer's run."""
    config = load.load(source, sets)
    directory = run_dir or rundir.choose_directory(config, source)
    if process_log.is_supervised():
        return config, directory
    if run_dir is None and not config.name:
        raise ConfigError(
            "processes started one by one must share a directory: give --run-dir DIR, or set "
            "`name` in the config"
        )
    if not (directory / "config.toml").exists():
        served = joins and config.wires.address.startswith("tcp://")
        run = find_joined_run(config, directory) if served else ""
        rundir.ensure(load.dump(config), directory, run)
    recorded = load.load(directory / "config.toml")
    load.require_same_config(config, recorded, sets, directory / "config.toml")
    if rundir.is_finished(directory, recorded.learner.steps):
        raise NothingToDo(
            f"the run in {directory} has ended after all its {recorded.learner.steps} steps; to "
            f"train on: asyncrl run --resume {directory} --set learner.steps=N"
        )
    return recorded, directory


def find_joined_run(config: Any, run_dir: Path) -> str:
    """Return the id of the run that the buffer at wires.address serves.

    Returns "" if another process creates the directory meanwhile.  Raises PeerUnreachable."""
    from asyncrl.supervise import live

    deadline = time.monotonic() + config.wires.connect_s
    while not (run_dir / "config.toml").exists():
        if (
            status := live.request_status(config.wires.address, config.wires.curve_dir, 1.0)
        ) is not None:
            return status.run
        if time.monotonic() > deadline:
            raise PeerUnreachable(
                f"no reply from a buffer at {config.wires.address} within "
                f"{config.wires.connect_s:g} s (wires.connect_s): is it running, and with keys "
                "from the same `asyncrl keys`?"
            )
    return ""


def move_buffer(config: Any, run_dir: Path, address: str) -> Any:
    """Return the config of a buffer that takes over the run at `address`.

    Raises ConfigError if the run has no buffer to continue."""
    from asyncrl.transport.chunks import ANYWHERE
    from asyncrl.transport.sockets import check_address

    check_address(address, config.wires.curve_dir, "--take-over")
    host, _, port = address.partition("://")[2].rpartition(":")
    if not address.startswith("tcp://") or host.strip("[]") in ANYWHERE or not port.isdecimal():
        raise ConfigError(
            f"--take-over {address}: give the address at which the other processes reach this "
            "machine, such as tcp://10.0.0.2:5555"
        )
    terms = [
        buffer_leadership.read(path)[0] for path in buffer_leadership.list_term_files(run_dir)[-1:]
    ]
    if not terms:
        raise ConfigError(
            f"--take-over: no buffer has served the run in {run_dir} yet; start it without this "
            "option"
        )
    mode = config.durability.mode
    hosts = [term.host for term in terms if term is not None]
    if mode == "memory" or (mode == "process" and hosts != [socket.gethostname()]):
        raise ConfigError(
            f"--take-over: durability.mode = {mode} keeps no journal that another host can "
            "continue from; only disk does.  Stop learner and generators and start all processes "
            "again: the run continues from its last checkpoint"
        )
    return replace(config, wires=replace(config.wires, address=address))


def run_process(name: str, config: Any, run_dir: Path, index: int, *, moved: bool = False) -> bool:
    """Run one process to the run's end (True) or until it is asked to stop (False).

    moved: the process is a buffer that takes over the run."""
    if name == "gateway" and not config.uses_sessions:
        raise ConfigError(
            "agent: the config has no sessions to serve; set agent.env, agent.tools, "
            "agent.serve, agent.command or agent.function"
        )
    with pause_collection():
        if name == "generator":
            import_module("torch")  # the engine needs it
        start: Callable[..., bool] = import_module(MODULES[name]).main
    if name != "buffer":
        return start(config, run_dir, *([] if name == "learner" else [index]))
    show = None
    if not process_log.is_supervised():
        from asyncrl.supervise.live import StatusLines

        print_progress(f"buffer: serves {run_dir} to its other processes")
        show = StatusLines().show
    return start(config, run_dir, moved=moved, show=show)


def run_recorded(name: str, config: Any, run_dir: Path, index: int, *, moved: bool = False) -> int:
    """Run one process, record its start and end in the run directory, and return its exit code."""
    supervised = process_log.is_supervised()
    if moved:
        # the buffer hangs or its host is lost: the next one locks new files
        for lock in buffer_leadership.LOCKS:
            (run_dir / lock).unlink(missing_ok=True)
    incarnation = process_log.ProcessIncarnation(
        run_dir,
        f"{name}-{index}" if name in ("generator", "gateway") else name,
        alone=name != "learner",
        supervised=supervised,
    )
    memory = rundir.hold_memory(run_dir)  # closed in every case
    if name == "buffer" and (swept := rundir.sweep_memory()):
        print_progress(f"removed the shared memory of {len(swept)} killed run(s)")
    code = 1
    reason = "killed"
    try:
        completed = run_process(name, config, run_dir, index, moved=moved)
        code, reason = (0 if completed else process_log.INTERRUPTED), ""
    except KeyboardInterrupt:
        code, reason = process_log.INTERRUPTED, ""
    except AsyncrlError as error:
        code, reason = error.exit_code, str(error)
        raise
    except Exception as error:
        code, reason = 1, f"{type(error).__name__}: {error}"
        raise
    finally:
        memory.close()
        if incarnation.end(code, reason) and not supervised:
            from asyncrl.supervise.run import conclude_unsupervised

            conclude_unsupervised(incarnation)
        incarnation.release()
    return code


def start_process(
    name: str,
    source: str,
    sets: tuple[str, ...],
    run_dir: Path | None,
    index: int,
    take_over: str = "",
) -> None:
    """Start a process of a run."""
    refusal.take_pipe()
    config, directory = resolve_run(source, sets, run_dir, joins=name == "generator")
    if take_over:
        config = move_buffer(config, directory, take_over)
    # a further rank of the learner starts and ends with rank 0
    if int(os.environ.get("RANK", "0")) > 0:
        sys.exit(0 if run_process(name, config, directory, index) else process_log.INTERRUPTED)
    code = run_recorded(name, config, directory, index, moved=bool(take_over))
    result.put_result({"run_dir": str(directory), "process": name})
    sys.exit(code)


buffer, generator, gateway, learner = (
    make_command(name, partial(start_process, name)) for name in MODULES
)


@command
def keys(directory: Path, generators: int) -> None:
    """Create CURVE keys in DIRECTORY for a run on several machines.

    Each role gets its own key; see wires.curve_dir.
    """
    from asyncrl.transport.keys import make_keys

    copies = make_keys(directory, generators)
    if not result.as_json:
        print(
            f"copy one of {', '.join(key.name for key in copies)} to the machine of that "
            "generator, and set wires.curve_dir there to the copy;\n"
            f"only keys in {directory / 'clients'} are accepted: to exclude one, remove its file "
            "and restart the buffer"
        )
    emit({"curve_dir": str(directory), "copy": [str(key) for key in copies]})


@command
def join(
    address: str,
    keys: Path | None,
    index: int | None,
    cache: Path | None,
    wait: float,
    env: tuple[str, ...],
    trust_code: bool,
) -> None:
    """Make this machine a generator of a running run.

    The address is that of the run's buffer.  Config, model and prompts come from the run, so it
    uses this machine's processor and network.  It gets environment variables only with --env and
    runs its own code only with --trust-code.  Ctrl-C leaves the run and returns unfinished work.
    """
    from asyncrl.supervise import join as joining

    refusal.take_pipe()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    place = joining.prepare(
        address,
        str(keys.resolve()) if keys else "",
        index=index,
        cache=(cache or Path(base) / "asyncrl").resolve(),
        patience_s=wait,
        say=print_progress,
        trust=joining.Trust(env, trust_code),
    )
    try:
        code = run_recorded("generator", place.config, place.run_dir, place.number)
    finally:
        rundir.clean(place.run_dir)
    if code in (0, process_log.INTERRUPTED):
        shutil.rmtree(place.run_dir, ignore_errors=True)
    result.put_result({"address": address, "generator": place.number})
    sys.exit(code)


@command
def scale(run_dir: Path, generators: int, wait: float) -> None:
    """Change the number of generators of the run in RUN_DIR.

    Generators that joined are not counted.  A generator that is removed returns its unfinished
    work.
    """
    from asyncrl.supervise import scaling

    emit({"generators": scaling.request_scale(run_dir, generators, wait)})
