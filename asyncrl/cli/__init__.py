"""The `asyncrl` command.  Heavy imports happen inside the commands."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click
from msgspec import to_builtins

from asyncrl import __version__
from asyncrl.cli import result
from asyncrl.cli.lab import lab
from asyncrl.contract import refusal
from asyncrl.contract.errors import EXIT_CODES, AsyncrlError, ConfigError, NothingToDo
from asyncrl.contract.importing import here_last, no_garbage
from asyncrl.records import lives

# Before anything loads OpenMP: threads that wait for each other sleep.  As they come, they spin for
# milliseconds, and on cores shared with other work a warm start of half a minute took seven.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# a write fails with these, and with no file's name
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class Group(click.Group):
    """Usage and expected errors are one line on stderr with their exit code; programming errors
    keep their traceback.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        here_last()
        result.begin()
        words = kwargs.get("args") or (args[0] if args else None) or sys.argv[1:]
        as_json = "--json" in words
        try:
            return super().main(*args, **(kwargs | {"standalone_mode": False}))
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            fail("interrupted", 130, as_json)
        except click.ClickException as error:
            fail(error.format_message(), 2, as_json)
        except AsyncrlError as error:
            refusal.tell(error)
            fail(str(error), error.exit_code, as_json)
        except OSError as error:
            # of no file: a programming error, with its traceback
            if error.filename is None and error.errno not in DISK:
                raise
            fail(
                f"{error.filename or 'writing failed'}: {error.strerror}; is the disk full, or was "
                "the "
                "file removed or made read-only?",
                1,
                as_json,
            )


def fail(why: str, code: int, as_json: bool) -> NoReturn:
    """End with one line on stderr; with --json also as the last line of stdout, unless that was a
    result already.
    """
    with suppress(OSError):  # stderr may be a file on the disk that is full
        print(f"error: {why}", file=sys.stderr, flush=True)
    if as_json:
        result.put_error(why, code)
    sys.exit(code)


def options(*, source: bool = True) -> Callable[[Any], Any]:
    """CONFIG, --set and --json, which every command takes."""

    def add(f: Any) -> Any:
        f = click.option(
            "--json", "as_json", is_flag=True, help="the last line of stdout is one JSON object"
        )(f)
        f = click.option(
            "--set",
            "sets",
            multiple=True,
            metavar="KEY=VALUE",
            help="override a config key (a TOML value); repeatable",
        )(f)
        return click.argument(
            "source", metavar="CONFIG", required=source is True, type=click.Path()
        )(f)

    return add


def emit(value: dict[str, Any], as_json: bool) -> None:
    """Results go to stdout: one JSON object, or readable lines."""
    if as_json:
        result.put(value)
    else:
        for key, x in value.items():
            if not isinstance(x, dict) or len(x) < 12:
                print(f"{key:16} {x}")


def outline(s: dict[str, Any]) -> dict[str, Any]:
    """A run's summary for a reader; summary.json has all of it."""
    from asyncrl.supervise.run import within

    def share(x: float | None) -> str:
        return "-" if x is None else f"{x:.3f}"

    lag = s["lag"]
    speed = s["speed"]
    total = max(s["ledger"]["generated"], 1)
    idle = speed["idle_share"]
    ends = {k: v for k, v in s["ledger"].items() if k != "generated" and v}
    return {
        "held-out": f"{share(s['heldout_start'])} -> {share(s['heldout_end'])}{within(s)}   "
        f"out of distribution {share(s['ood_start'])} -> {share(s['ood_end'])}",
        "trained": f"{s['steps']} steps, {s['trajectories']:,} trajectories, {s['tokens']:,} "
        f"tokens in {s['wall_s']:.1f} s",
        "lag": f"mean {lag['mean']:.2f}, p95 {lag['p95']:g}, max {lag['max']:g} of "
        f"{lag['limit']} versions",
        "speed": f"generators {speed['generator_tokens_per_s']:,.0f} tokens/s "
        f"({idle['generator']:.0%} idle), "
        f"learner {speed['learner_tokens_per_s']:,.0f} tokens/s ({idle['learner']:.0%} idle)",
        "ledger": f"{s['ledger']['generated']:,} tokens generated: "
        + ", ".join(f"{k} {v / total:.1%}" for k, v in ends.items()),
    }


@click.version_option(__version__, prog_name="asyncrl", message="%(prog)s %(version)s")
@click.group(
    cls=Group, epilog="Exit codes: " + "; ".join(f"{k} {v}" for k, v in EXIT_CODES.items())
)
def main() -> None:
    """Asynchronous reinforcement learning of language models: run, tune, compare."""


@main.command()
@options(source=False)
@click.option("--resume", type=click.Path(path_type=Path), help="go on with this run directory")
@click.option("--dry-run", is_flag=True, help="print the resolved config and what would start")
def run(
    source: str | None, sets: tuple[str, ...], as_json: bool, resume: Path | None, dry_run: bool
) -> None:
    """Run all processes of CONFIG, supervised; or go on with a run by --resume."""
    from asyncrl.config import load as config_load
    from asyncrl.models import devices
    from asyncrl.records import rundir
    from asyncrl.supervise import run as runner

    if (source is None) == (resume is None):
        raise ConfigError("give either a CONFIG or --resume RUN_DIR")
    if resume is not None:
        config = runner.resolve_resume(resume, sets)
        run_dir = resume
    else:
        config = config_load.load(str(source), sets)
        run_dir = rundir.directory(config, str(source))
    if dry_run:
        print(config_load.dump(config))
        print(
            f"would start in {run_dir}: buffer, {', '.join(devices.placement(config))}",
            file=sys.stderr,
        )
        return
    code, summary = runner.run(config, run_dir, resume=resume is not None)
    emit(summary if as_json or not summary else outline(summary), as_json)
    sys.exit(code)


def _part(
    source: str, sets: tuple[str, ...], run_dir: Path | None, *, joins: bool
) -> tuple[Any, Path]:
    """Config and run directory of one process; whoever starts first makes the directory.

    joins: a generator, which may be on another machine than the buffer: what it makes then belongs
    to the buffer's run."""
    from asyncrl.config import load as config_load
    from asyncrl.records import rundir

    config = config_load.load(source, sets)
    where = run_dir or rundir.directory(config, source)
    if os.environ.get("ASYNCRL_SUPERVISED"):
        return config, where
    if run_dir is None and not config.name:
        raise ConfigError(
            "processes started one by one need to agree on a directory: give --run-dir DIR (or "
            "name in the config)"
        )
    if not (where / "config.toml").exists():
        run = _joined(config, where) if joins and config.wires.address.startswith("tcp://") else ""
        rundir.ensure(config, config_load.dump(config), where, run)
    found = config_load.load(where / "config.toml")
    config_load.agree(config, found, sets, where / "config.toml")
    if rundir.ended(where, found.learner.steps):
        raise NothingToDo(
            f"the run in {where} has ended, all its {found.learner.steps} steps are made: `asyncrl "
            f"run --resume {where} --set "
            "learner.steps=N` trains on"
        )
    return found, where


def _joined(config: Any, where: Path) -> str:
    """Id of the run that the buffer at wires.address serves; "" when another process makes the
    directory meanwhile.
    """
    import time

    from asyncrl.contract.errors import PeerUnreachable
    from asyncrl.supervise import live

    until = time.monotonic() + config.wires.connect_s
    while not (where / "config.toml").exists():
        if (status := live.ask(config.wires.address, config.wires.curve_dir, 1.0)) is not None:
            return status.run
        if time.monotonic() > until:
            raise PeerUnreachable(
                f"no buffer answers at {config.wires.address} after {config.wires.connect_s:g} s "
                "(wires.connect_s): is it running, "
                "and with keys of the same `asyncrl keys`?"
            )
    return ""


def _live(name: str, config: Any, where: Path, index: int) -> bool:
    """One process's life, to the run's end (True) or until it is told to end (False)."""
    if name == "buffer":
        with no_garbage():
            from buffer.service import main as start_buffer
        return start_buffer(config, where)
    if name == "learner":
        with no_garbage():
            from learner.loop import main as start_learner
        return start_learner(config, where)
    with no_garbage():
        import torch  # noqa: F401  # which its engine needs

        from actors.generator import main as start_generator
    return start_generator(config, where, index)


def part_command(name: str, doc: str) -> None:
    @click.option(
        "--run-dir",
        type=click.Path(path_type=Path),
        help="directory of the run; made by whoever starts first",
    )
    @click.option("--index", default=0, help="number of this generator")
    @options()
    def command(
        source: str, sets: tuple[str, ...], as_json: bool, run_dir: Path | None, index: int
    ) -> None:
        refusal.listen()
        config, where = _part(source, sets, run_dir, joins=name == "generator")
        # a rank of the learner's: it lives and ends with rank 0
        if int(os.environ.get("RANK", "0")) > 0:
            sys.exit(0 if _live(name, config, where, index) else lives.INTERRUPTED)
        supervised = bool(os.environ.get("ASYNCRL_SUPERVISED"))
        life = lives.Life(
            where,
            f"generator-{index}" if name == "generator" else name,
            alone=name != "learner",
            supervised=supervised,
        )
        code = 1
        why = "killed"
        try:
            code, why = (0, "") if _live(name, config, where, index) else (lives.INTERRUPTED, "")
        except KeyboardInterrupt:
            code = lives.INTERRUPTED
            why = ""
        except AsyncrlError as error:
            code = error.exit_code
            why = str(error)
            raise
        except Exception as error:
            code = 1
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            last = life.end(code, why)
            if last and not supervised:
                from asyncrl.supervise.run import close_up

                close_up(life)
            life.free()
        if as_json:
            result.put({"run_dir": str(where), "process": name})
        sys.exit(code)

    command.__doc__ = doc
    main.command(name)(command)


part_command("buffer", "The buffer process of a run.")
part_command(
    "generator", "One generator process of a run; as many as wanted, with different --index."
)
part_command("learner", "The learner process of a run.")


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True)
def keys(directory: Path, as_json: bool) -> None:
    """Make CURVE keys in DIRECTORY, for wires.curve_dir of a run on several machines."""
    from asyncrl.transport.sockets import make_keys

    give = make_keys(directory)
    if not as_json:
        print(
            f"copy {' and '.join(x.name for x in give)} to a directory on each other machine and "
            "name it there as wires.curve_dir;\n"
            f"keys in {directory / 'clients'} are let in, all others are not"
        )
    emit({"curve_dir": str(directory), "copy": [str(x) for x in give]}, as_json)


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True)
def report(run_dir: Path, as_json: bool) -> None:
    """Write RUN_DIR/report.html again."""
    from asyncrl.supervise import run_page as reports

    emit({"report": str(reports.write(run_dir))}, as_json)


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path), required=False)
@click.option(
    "--exact",
    "exact",
    is_flag=True,
    help="the self-test of exact mode instead: for a CONFIG, a RUN_DIR, or small models "
    "when none is given",
)
@click.option("--json", "as_json", is_flag=True)
def doctor(run_dir: Path | None, exact: bool, as_json: bool) -> None:
    """How a run stands: who waits for whom, since when; of one that does not run, what ended it;
    --exact: which operators agree bitwise.
    """
    from asyncrl.config import load as config_load
    from asyncrl.contract.errors import PeerUnreachable
    from asyncrl.records import rundir
    from asyncrl.supervise import doctor as doctors
    from asyncrl.supervise import live

    if exact:
        return doctor_exact(run_dir, as_json)
    if run_dir is None:
        raise ConfigError("give a RUN_DIR (or --exact for the self-test of exact mode)")
    if not (run_dir / "config.toml").exists():
        raise ConfigError(f"{run_dir}: no run directory (it has no config.toml)")
    config = config_load.load(run_dir / "config.toml")
    there = bool(config.wires.address) or lives.alive(run_dir, "buffer")
    status = (
        live.ask(rundir.buffer_address(config, run_dir), config.wires.curve_dir, 3.0)
        if there
        else None
    )
    seen = doctors.look(config, run_dir, status)
    if as_json:
        print(json.dumps(seen))
    elif status is None:
        print("\n".join(doctors.lines(config, run_dir, seen)))
    else:
        print(live.line(status))
        for who, what, on, age in status.waits:
            print(f"{who} waits {age:.1f} s for {what} (on {on})")
        for name, age in status.peers.items():
            print(f"{name}: heard {age:.1f} s ago")
        dead = [
            p
            for p in seen["processes"]
            if not p["alive"] and (p["known"] or p["name"] not in status.peers)
        ]
        print("".join(p["said"] + "\n" for p in dead), end="")
        if {p["name"] for p in dead if p["known"]} & set(doctors.missing(seen)):
            print(doctors.advice(config, run_dir, seen))
        w = config.watchdog
        print(
            f"a step is overdue after {seen['deadline_s']:.1f} s without a commit ({w.multiple:g} "
            f"medians of the run's own steps, at least {w.floor_s:g} s)"
        )
    if not seen["running"] and not seen["ended"]:
        print(
            f"error: the run in {run_dir} is not running, and has made {seen['committed']} of "
            f"{seen['steps']} steps",
            file=sys.stderr,
        )
        sys.exit(PeerUnreachable.exit_code)  # not raised: the JSON object above is the answer


def doctor_exact(source: Path | None, as_json: bool) -> None:
    """`doctor --exact`: the table by operator; exit code 1 when something differs."""
    from dataclasses import asdict

    from asyncrl.config import load as config_load
    from asyncrl.supervise import exact_check

    if source is None:
        rows = exact_check.small_models()
    else:
        rows = exact_check.check(
            config_load.load(source / "config.toml" if source.is_dir() else source)
        )
    wrong = exact_check.failure(rows)
    print(exact_check.table(rows), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        emit({"equal": not wrong, "operators": [asdict(r) for r in rows]}, as_json)
    if wrong:
        raise AsyncrlError(f"exact mode does not hold on this machine: {wrong}")


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True)
def export(run_dir: Path, path: Path, as_json: bool) -> None:
    """Copy the newest trained model of RUN_DIR to PATH, as a Hugging Face directory."""
    import shutil

    from learner import checkpoint

    if path.exists():
        raise ConfigError(f"{path} exists already; choose another place")
    source = run_dir / "model"
    if not source.is_dir():
        root = run_dir / "checkpoints"
        claimed = checkpoint.epochs(root, claimed=True)
        newest = checkpoint.newest(root / f"epoch_{claimed[-1]}") if claimed else None
        if newest is None:
            raise ConfigError(f"{run_dir}: no model and no checkpoint in it")
        source = newest / "model"
    shutil.copytree(source, path)
    emit({"model": str(path), "from": str(source)}, as_json)


@main.command()
@options()
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME:KEY=VALUE,...",
    help="an arm; the first is what the others are compared with; repeatable",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="seeds of each arm, from the config's on",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="the comparison's directory; an unfinished one goes on",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="real runs at a time; more than one disturbs the timings",
)
@click.option(
    "--real",
    is_flag=True,
    help="every run as processes of its own, also those that could go in a warm one",
)
@click.option("--dry-run", is_flag=True, help="print the arms and what would run")
def compare(
    source: str,
    sets: tuple[str, ...],
    as_json: bool,
    arms: tuple[str, ...],
    seeds: int,
    out: Path | None,
    jobs: int,
    real: bool,
    dry_run: bool,
) -> None:
    """Train CONFIG under several settings, fairly, and say whether they differ."""
    from asyncrl.config import load as config_load
    from asyncrl.experiments.compare import comparison as comparing
    from asyncrl.experiments.compare import page as compare_report
    from asyncrl.experiments.compare.progress import CompareProgress, print_beside, print_table
    from asyncrl.supervise.run import preflight, say

    base = config_load.load(source, sets)
    chosen = [comparing.parse_arm(a) for a in arms] or comparing.default_arms(base)
    if dry_run:
        configs = comparing.resolve(source, sets, chosen)
        warm = set() if real else comparing.warm_arms(configs)
        for name, c in configs.items():
            differs = comparing.differences(
                json.loads(json.dumps(to_builtins(base))), json.loads(json.dumps(to_builtins(c)))
            )
            print(
                f"{name}: {'; '.join(differs) or 'as configured'} "
                f"({'a warm process' if name in warm else 'real processes'})"
            )
        print(f"would make {len(chosen) * seeds} runs", file=sys.stderr)
        return
    where = out or Path(base.runs) / f"compare-{base.name or Path(source).stem}"
    comparison = comparing.Comparison(where, source, sets, chosen, seeds, say, real=real)
    for c in comparison.configs.values():
        preflight(c)
    with CompareProgress(comparison) as progress:
        cells = comparison.run(jobs, progress.tell)
    found = comparing.analyse(cells, comparison.configs)
    settings = [
        (a.name, ", ".join(comparison.sets_of(a)) or "as configured") for a in comparison.arms
    ]
    page = compare_report.write(where, where.name, cells, found, settings, base)
    if as_json:
        result.put(compare_report.clean(found))
        return
    short = {
        "arm": "arm",
        "end": "end",
        "area": "area",
        "seconds of RL": "seconds",
        "trained tok/s": "tok/s",
        "mean lag": "lag",
        "ESS": "ESS",
        "unstable": "unstable",
        "processes": "",
    }
    start = next(iter(found["arms"].values()))["heldout_start"]
    print_table(
        compare_report.HEAD,
        compare_report.rows(found),
        short,
        f"{where.name}: {seeds} seed(s), held-out accuracy from {start:.3f}",
    )
    print_beside(
        compare_report.HEAD,
        compare_report.rows(found),
        ("arm",),
        ("OOD start", "OOD end", "KL to ref"),
    )
    for v in found["verdicts"]:
        print(v["text"])
    for t in found["trade"]:
        print(t)
    say(f"report: {page}")


@main.command()
@options()
@click.option(
    "--limits",
    default="1,2,4,8",
    show_default=True,
    help="staleness limits (with --inject: lags), separated by commas",
)
@click.option(
    "--correction",
    "chosen",
    multiple=True,
    metavar="NAME or NAME:KEY=VALUE,...",
    help="repeatable; default: configured, none",
)
@click.option(
    "--inject",
    is_flag=True,
    help="inject each limit as a constant lag; without it the lag is what generators and "
    "learner make of it",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="seeds of each cell, from the config's on",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="warm processes, one core each",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="the sweep's directory; an unfinished one goes on",
)
@click.option("--no-abandon", is_flag=True, help="train collapsed runs to their end too")
@click.option("--dry-run", is_flag=True, help="print the cells and what would run")
def sweep(
    source: str,
    sets: tuple[str, ...],
    as_json: bool,
    limits: str,
    chosen: tuple[str, ...],
    inject: bool,
    seeds: int,
    workers: int,
    out: Path | None,
    no_abandon: bool,
    dry_run: bool,
) -> None:
    """Staleness limits x corrections: how stale may a sample be?  Ends with a limit to paste."""
    from asyncrl.config import load as config_load
    from asyncrl.experiments.compare import page as compare_report
    from asyncrl.experiments.compare import sweep as sweeping
    from asyncrl.experiments.compare import sweep_page
    from asyncrl.experiments.compare.comparison import design
    from asyncrl.experiments.compare.progress import SweepProgress, print_beside, print_table
    from asyncrl.experiments.compare.sweep_analysis import analyse
    from asyncrl.supervise.run import preflight, say

    corrections = [sweeping.parse_correction(x) for x in chosen or ("configured", "none")]
    what = sweeping.plan(
        source, sets, corrections, sweeping.parse_limits(limits, inject), injected=inject
    )
    if dry_run:
        for (name, limit), arm in what.cell.items():
            print(f"{name}, limit {sweeping.label(limit)}: {arm}")
        print(
            f"would make {len(what.arms) * seeds} runs, and {len(what.probes)} short ones for the "
            "speed of each limit",
            file=sys.stderr,
        )
        return
    base = config_load.load(source, sets)
    where = out or Path(base.runs) / f"sweep-{base.name or Path(source).stem}"
    made = sweeping.Sweep(where, what, seeds, say)
    for arm in dict.fromkeys(
        [sweeping.SYNC, *(what.cell[n, what.limits[-1]] for n, _ in corrections)]
    ):
        preflight(what.arms[arm])
    say(design(len(what.arms), seeds))
    with SweepProgress(made) as progress:
        made.run(workers, progress.tell, abandon=not no_abandon)
    found = analyse(made)
    told = [
        (n, sweeping.CORRECTIONS.get(n, ("", []))[0] or ", ".join(items))
        for n, items in corrections
    ]
    shape = f"{base.learner.steps} steps of {base.learner.groups} x {base.learner.group_size}"
    page = sweep_page.write(
        where,
        where.name,
        found,
        told,
        f"{'injected' if inject else 'natural'} lag, {seeds} seed(s), {shape}",
    )
    if as_json:
        result.put(compare_report.clean(found))
        return
    short = ("correction", "limit", "end", "vs sync", "interval", "ESS", "unstable", "speed")
    print_table(
        sweep_page.HEAD,
        sweep_page.rows(found),
        {h: h for h in short},
        f"{where.name}: {seeds} seed(s)",
    )
    print_beside(
        sweep_page.HEAD, sweep_page.rows(found), ("correction", "limit"), ("OOD end", "KL to ref")
    )
    print(found["suggestion"]["reason"])
    if found["suggestion"]["set"]:
        print(found["suggestion"]["set"])
    say(f"report: {page}")


@main.command()
@options()
@click.option(
    "--from",
    "from_run",
    type=click.Path(path_type=Path),
    help="take the times from this run directory",
)
@click.option(
    "--times", "file", type=click.Path(path_type=Path), help="take times from this TOML file"
)
@click.option(
    "--time",
    "words",
    multiple=True,
    metavar="KEY=VALUE",
    help="one time, as in swap=0.5 or reward=pareto(0.2,2.5,4); repeatable",
)
@click.option(
    "--limit",
    "limits",
    type=float,
    multiple=True,
    metavar="K",
    help="what would this limit give? repeatable",
)
@click.option(
    "--more",
    type=int,
    multiple=True,
    metavar="N",
    help="what would N more generators give? repeatable",
)
@click.option(
    "--sync",
    "syncs",
    type=float,
    multiple=True,
    metavar="X",
    help="what would a weight sync X times as fast give? repeatable",
)
@click.option(
    "--generators",
    default="",
    metavar="N,N,...",
    help="simulate with each of these numbers of generators, 1 to 10000",
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(1), help="batches; the config's when absent")
@click.option("--no-evaluation", is_flag=True, help="leave out held-out evaluation")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="throughput, idle shares and lag against the limit",
)
def simulate(
    source: str,
    sets: tuple[str, ...],
    as_json: bool,
    from_run: Path | None,
    file: Path | None,
    words: tuple[str, ...],
    no_evaluation: bool,
    **given: Any,
) -> None:
    """Simulate CONFIG without a model: throughput, idle shares, lag; and what another limit,
    generator or weight sync would give.
    """
    from asyncrl.cli import simulate as command
    from asyncrl.config import load as config_load

    known, where = command.times_for(from_run, file, words)
    out = command.simulate(
        config_load.load(source, sets),
        known,
        where,
        name=f"simulate {source}",
        evaluate=not no_evaluation,
        **given,
    )
    print(json.dumps(out) if as_json else command.text(out))


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="what is changed: loss, correction, kl, stop, advantage, learner.lr, ...; repeatable",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="the replay's directory; RUN_DIR/replays/N without it",
)
@click.option(
    "--from",
    "start",
    type=click.IntRange(0),
    help="a version whose weights were recorded; the recording's first without it",
)
@click.option("--until", type=click.IntRange(1), help="stop at this version")
@click.option(
    "--eval/--no-eval", "evaluate", default=True, help="held-out accuracy where the run measured it"
)
@click.option("--json", "as_json", is_flag=True)
def replay(
    run_dir: Path,
    sets: tuple[str, ...],
    out: Path | None,
    start: int | None,
    until: int | None,
    evaluate: bool,
    as_json: bool,
) -> None:
    """Train again, offline, on the recorded stream of RUN_DIR, with another loss, correction, KL or
    early stop; show the difference.
    """
    from asyncrl.experiments.compare.page import clean
    from asyncrl.experiments.replay import replay as replaying
    from asyncrl.supervise.run import say

    found = replaying.replay(
        run_dir, sets, say, out=out, start=start, until=until, evaluate=evaluate
    )
    print(json.dumps(clean(found)) if as_json else replaying.text(found))
    say(f"report: {Path(found['replay_dir']) / 'report.html'}")
    sys.exit(1 if found["reproduced"] is False else 0)


@main.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option(
    "--html", type=click.Path(path_type=Path), help="also write a page with both runs' curves"
)
@click.option("--json", "as_json", is_flag=True)
def diff(run_a: Path, run_b: Path, html: Path | None, as_json: bool) -> None:
    """Two runs side by side: settings, the first step that differs and by how much; exit code 0
    when bitwise equal, else 1.
    """
    from asyncrl.experiments.replay import diff as differ

    found = differ.diff(run_a, run_b)
    if html is not None:
        differ.write(run_a, run_b, html)
    print(json.dumps(found) if as_json else differ.text(found))
    sys.exit(0 if found["equal"] else 1)


@main.command()
@click.option("--json", "as_json", is_flag=True)
def engines(as_json: bool) -> None:
    """Which engines and learner backends work on this machine; for the others, why and what to
    install.
    """
    from asyncrl.models import installed as known

    rows = known.look()
    device = known.device()
    if as_json:
        result.put({"device": device, "engines": rows})
        return
    print(f"device: {device}")
    for r in rows:
        print(
            f"{r['setting']:32} {r['version'] or '-':10} "
            f"{'works' if r['works'] else 'no: ' + r['why']}"
        )


@main.group()
def config() -> None:
    """Show, check or describe configs."""


@config.command()
@options()
def show(source: str, sets: tuple[str, ...], as_json: bool) -> None:
    """The resolved config."""
    import msgspec

    from asyncrl.config import load as config_load

    loaded = config_load.load(source, sets)
    print(json.dumps(msgspec.to_builtins(loaded)) if as_json else config_load.dump(loaded))


@config.command()
def schema() -> None:
    """The JSON schema of configs, for editors."""
    from asyncrl.config import load as config_load

    print(json.dumps(config_load.schema(), indent=1))


@config.command(name="metrics")
def metrics_table() -> None:
    """docs/metrics.md: every metric with unit and meaning."""
    from asyncrl.records import metrics

    print(metrics.markdown(), end="")


@main.group()
def task() -> None:
    """Try tasks and reward functions."""


@task.command(name="try")
@options()
@click.option("-n", default=3, help="prompts to show")
def try_task(source: str, sets: tuple[str, ...], as_json: bool, n: int) -> None:
    """Show prompts of the task and what the reward function says of the right answer and of an
    empty one.
    """
    from actors.rewards import judge_all
    from asyncrl.config import load as config_load
    from asyncrl.tasks import get_task

    loaded = config_load.load(source, sets)
    tasks = get_task(loaded.task)
    prompts = [tasks.prompt("train", i, loaded.seed) for i in range(n)]
    asked = [(p, text, tokens) for p in prompts for text, tokens in ((p.answer, [0]), ("", []))]
    found = judge_all(loaded, tasks, asked)
    for i, p in enumerate(prompts):
        right, nothing = (
            None if why else reward for _, reward, _, _, why in found[2 * i : 2 * i + 2]
        )
        print(
            json.dumps(
                {
                    "prompt": p.text,
                    "answer": p.answer,
                    "reward_of_answer": right,
                    "reward_of_nothing": nothing,
                }
            )
        )
    if failed := next((why for *_, why in found if why), ""):
        raise ConfigError(f"reward.function = {loaded.reward.function}: {failed}")


main.add_command(lab)

if __name__ == "__main__":
    main()
