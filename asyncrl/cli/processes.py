"""`asyncrl buffer`, `generator`, `gateway`, `learner`: one process of a run, started by hand or
by the supervisor; and `keys`, for those on several machines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from asyncrl.cli import result
from asyncrl.cli.base import PATH, emit, options
from asyncrl.contract import refusal
from asyncrl.contract.errors import AsyncrlError, ConfigError, NothingToDo, PeerUnreachable
from asyncrl.contract.importing import collection_paused
from asyncrl.records import buffer_leadership, process_log, rundir


def resolve_run(
    source: str, sets: tuple[str, ...], run_dir: Path | None, *, joins: bool
) -> tuple[Any, Path]:
    """Config and run directory of one process; whoever starts first makes the directory.

    joins: a generator, which may be on another machine than the buffer: what it makes then belongs
    to the buffer's run."""
    from asyncrl.config import load

    config = load.load(source, sets)
    where = run_dir or rundir.directory(config, source)
    if os.environ.get("ASYNCRL_SUPERVISED"):
        return config, where
    if run_dir is None and not config.name:
        raise ConfigError(
            "processes started one by one need to agree on a directory: give --run-dir DIR (or "
            "name in the config)"
        )
    if not (where / "config.toml").exists():
        served = joins and config.wires.address.startswith("tcp://")
        rundir.ensure(config, load.dump(config), where, joined_run(config, where) if served else "")
    found = load.load(where / "config.toml")
    load.require_same_config(config, found, sets, where / "config.toml")
    if rundir.is_finished(where, found.learner.steps):
        raise NothingToDo(
            f"the run in {where} has ended, all its {found.learner.steps} steps are made: `asyncrl "
            f"run --resume {where} --set learner.steps=N` trains on"
        )
    return found, where


def joined_run(config: Any, where: Path) -> str:
    """Id of the run that the buffer at wires.address serves; "" when another process makes the
    directory meanwhile.
    """
    import time

    from asyncrl.supervise import live

    until = time.monotonic() + config.wires.connect_s
    while not (where / "config.toml").exists():
        if (status := live.ask(config.wires.address, config.wires.curve_dir, 1.0)) is not None:
            return status.run
        if time.monotonic() > until:
            raise PeerUnreachable(
                f"no buffer answers at {config.wires.address} after {config.wires.connect_s:g} s "
                "(wires.connect_s): is it running, and with keys of the same `asyncrl keys`?"
            )
    return ""


def move_buffer(config: Any, where: Path, address: str) -> Any:
    """The config of a buffer that goes on at `address`, in the place of one on another host, say.
    Raises ConfigError where there is nothing to go on from.
    """
    import socket

    import msgspec

    from asyncrl.records import buffer_leadership
    from asyncrl.transport.chunks import ANYWHERE
    from asyncrl.transport.sockets import check_address

    check_address(address, config.wires.curve_dir, "--take-over")
    host, _, port = address.partition("://")[2].rpartition(":")
    if not address.startswith("tcp://") or host.strip("[]") in ANYWHERE or not port.isdecimal():
        raise ConfigError(
            f"--take-over {address}: give the address at which the others reach this machine, as "
            "tcp://10.0.0.2:5555"
        )
    before = [buffer_leadership.read(path)[0] for path in buffer_leadership.term_files(where)[-1:]]
    if not before:
        raise ConfigError(
            f"--take-over: no buffer has served the run in {where} yet: start it without"
        )
    mode = config.durability.mode
    there = [each.host for each in before if each is not None]
    if mode == "memory" or (mode == "process" and there != [socket.gethostname()]):
        raise ConfigError(
            f"--take-over: durability.mode = {mode} keeps no journal that another host can go on "
            "from; disk does.  End learner and generators and start all again: the run goes on "
            "from its last checkpoint"
        )
    return msgspec.structs.replace(
        config, wires=msgspec.structs.replace(config.wires, address=address)
    )


def run_process(name: str, config: Any, where: Path, index: int, *, moved: bool = False) -> bool:
    """One process's life, to the run's end (True) or until it is told to end (False); moved: a
    buffer that takes the run over.
    """
    if name == "buffer":
        with collection_paused():
            from buffer.service import main as start_buffer
        return start_buffer(config, where, moved=moved)
    if name == "learner":
        with collection_paused():
            from learner.loop import main as start_learner
        return start_learner(config, where)
    if name == "gateway":
        if not config.agent.uses_sessions:
            raise ConfigError(
                "agent: the config has no sessions to serve; set agent.env, agent.tools, "
                "agent.serve, agent.command or agent.function"
            )
        with collection_paused():
            from actors.gateway.service import main as start_gateway
        return start_gateway(config, where, index)
    with collection_paused():
        import torch  # noqa: F401  # which its engine needs

        from actors.generator import main as start_generator
    return start_generator(config, where, index)


def run_recorded(name: str, config: Any, where: Path, index: int, *, moved: bool = False) -> int:
    """The same, with its beginning and end on record in the run directory.  Returns the exit
    code.
    """
    supervised = bool(os.environ.get("ASYNCRL_SUPERVISED"))
    if moved:
        buffer_leadership.displace(where)
    life = process_log.ProcessIncarnation(
        where,
        f"{name}-{index}" if name in ("generator", "gateway") else name,
        alone=name != "learner",
        supervised=supervised,
    )
    memory = rundir.hold_memory(where)  # closed by its end, whatever that is
    if name == "buffer" and (swept := rundir.sweep_memory()):
        print(f"removed the shared memory of {len(swept)} killed run(s)", file=sys.stderr)
    code = 1
    why = "killed"
    try:
        well = run_process(name, config, where, index, moved=moved)
        code, why = (0 if well else process_log.INTERRUPTED), ""
    except KeyboardInterrupt:
        code, why = process_log.INTERRUPTED, ""
    except AsyncrlError as error:
        code, why = error.exit_code, str(error)
        raise
    except Exception as error:
        code, why = 1, f"{type(error).__name__}: {error}"
        raise
    finally:
        memory.close()
        last = life.end(code, why)
        if last and not supervised:
            from asyncrl.supervise.run import close_up

            close_up(life)
        life.release()
    return code


def process(
    name: str, doc: str, more: Callable[[Any], Any] = lambda command: command
) -> click.Command:
    """The command of one kind of process; more: options of its own."""

    @click.option("--run-dir", type=PATH, help="directory of the run; made by whoever starts first")
    @click.option("--index", default=0, help="number of this generator")
    @options()
    def command(
        source: str,
        sets: tuple[str, ...],
        as_json: bool,
        run_dir: Path | None,
        index: int,
        take_over: str = "",
    ) -> None:
        refusal.listen()
        config, where = resolve_run(source, sets, run_dir, joins=name == "generator")
        if take_over:
            config = move_buffer(config, where, take_over)
        # a rank of the learner's: it lives and ends with rank 0
        if int(os.environ.get("RANK", "0")) > 0:
            sys.exit(0 if run_process(name, config, where, index) else process_log.INTERRUPTED)
        code = run_recorded(name, config, where, index, moved=bool(take_over))
        if as_json:
            result.print_result({"run_dir": str(where), "process": name})
        sys.exit(code)

    command.__doc__ = doc
    return click.command(name)(more(command))


buffer = process(
    "buffer",
    "The buffer process of a run.",
    click.option(
        "--take-over",
        default="",
        metavar="ADDRESS",
        help="go on at this address of this machine, in the place of a buffer that is lost or "
        "stands still",
    ),
)
generator = process(
    "generator", "One generator process of a run; as many as wanted, with different --index."
)
gateway = process("gateway", "The gateway process of a run whose samples are sessions ([agent]).")
learner = process("learner", "The learner process of a run.")


@click.command()
@click.argument("directory", type=PATH)
@click.option("--generators", default=4, help="how many generators get a key; more may be added")
@click.option("--json", "as_json", is_flag=True)
def keys(directory: Path, generators: int, as_json: bool) -> None:
    """Make CURVE keys in DIRECTORY, one for each role, for wires.curve_dir of a run on several
    machines.
    """
    from asyncrl.transport.keys import make_keys

    give = make_keys(directory, generators)
    if not as_json:
        print(
            f"copy one of {', '.join(key.name for key in give)} to the machine of that generator, "
            "and name the copy there as wires.curve_dir;\n"
            f"keys in {directory / 'clients'} are let in, all others are not: remove a file there "
            "and start the buffer again to lock one out"
        )
    emit({"curve_dir": str(directory), "copy": [str(key) for key in give]}, as_json)
