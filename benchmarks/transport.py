"""Compare the buffer with other queues, for samples from a producer to a consumer.

    OMP_NUM_THREADS=1 python benchmarks/transport.py [--quick] [--json] [--rivals raw redis ...]
        [--redis-python PYTHON] [--ray-python PYTHON] [--reverb-python PYTHON]
        [--straw-python PYTHON] [--folder DIR]

Proves: a store that loses nothing and checks everything costs little more than a queue that does
neither.  Batches of 32 x 8 samples of 64, 1k and 16k tokens, by turns:

- ours, the real process with its real store and socket, after its memory has filled, with the peer
  of benchmarks/buffer.py: `memory`, `process` and `disk` over ipc; `memory` over
  TCP, plain and with CURVE
- raw: zmq without a store, through a forwarder
- redis: streams, in memory; `redis, AOF always`: with an fsync before each reply, as `disk` has it
- ray: ray.util.queue;  reverb: its queue;  straw: straw-queue, durable

Rivals (benchmarks/lib/transport_rivals.py) transport the same samples in the same encoding, each
in a separate process with its best settings, chosen by short runs over the number of samples in a
message and of messages in a call; all have the same malloc settings.  Every batch is counted, in
samples and in bytes; the first of each is compared byte by byte.  Ray's processes are never idle:
it has separate rounds, against `memory`.  A rival that is not installed is named in the result,
and counts as a missed goal.  Reverb and straw-queue need an environment each:

    python3.11 -m venv reverb && reverb/bin/pip install 'dm-reverb[tensorflow]==0.14.0' msgspec
    python3.11 -m venv straw && straw/bin/pip install numpy msgspec
    straw/bin/pip install --no-deps straw-queue==0.1.6

Goals, in samples a second, ours over the rival's: see GOALS; and CPU time of all processes for a
durable sample of 1k tokens."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import importlib.util
import json
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import zmq
from lib import rounds
from lib.answers import disagreement

from asyncrl.models import memory
from asyncrl.records.metrics import METRICS
from asyncrl.transport import keys

HERE = Path(__file__).resolve().parent
CHILD = HERE / "lib" / "transport_child.py"
OURS = ("memory", "process", "disk", "tcp", "curve")
RIVALS = ("raw", "redis", "redis, AOF always", "ray", "reverb", "straw")
ALONE = "ray"  # with rounds of its own
PATIENCE_S = 900.0  # for a rival's reply
# malloc keeps what is freed, as in our processes (asyncrl/models/memory.py), and where all threads
# are the rival's own, they share a heap
KEEPS = {
    "MALLOC_TRIM_THRESHOLD_": str(memory.KEPT),
    "MALLOC_MMAP_THRESHOLD_": str(memory.MAPPED),
}
KEEPS_ONE = {"raw": {"MALLOC_ARENA_MAX": "1"}}
QUICK_GROUPS = 4


class Length(NamedTuple):
    """Answers of so many tokens: batches in a turn, and between checkpoints."""

    tokens: int
    batches: int
    every: int


LENGTHS = (Length(64, 10, 20), Length(1024, 10, 20), Length(16384, 2, 2))


class Goal(NamedTuple):
    """Answers a second, ours over the rival's."""

    tokens: int
    ours: str
    rival: str
    least: float
    aim: float

    @property
    def figure(self) -> str:
        return f"{self.tokens} tokens: {self.ours} / {self.rival}"


GOALS = (
    Goal(64, "memory", "raw", 0.3, 0.4),
    Goal(1024, "memory", "raw", 0.55, 0.75),
    Goal(16384, "memory", "raw", 0.28, 0.35),
    Goal(1024, "memory", "redis", 1.2, 1.5),
    Goal(1024, "memory", "ray", 3, 3),
    Goal(1024, "memory", "reverb", 10, 10),
    Goal(1024, "disk", "redis, AOF always", 3, 3),
    Goal(1024, "disk", "straw", 1, 1),
    Goal(1024, "disk", "memory", 0.35, 0.35),
    Goal(1024, "curve", "tcp", 0.4, 0.4),
)
CPU_TOKENS, CPU_US = 1024, 60.0
CPU_FIGURE = f"{CPU_TOKENS} tokens: CPU us of an answer in `disk`, all processes"
Row = dict[str, dict[str, float]]  # alternative -> wall and CPU seconds of its turn
Passes = dict[int, list[list[Row]]]  # tokens -> the rounds of each pass


def bench_buffer() -> Any:
    """benchmarks/buffer.py, under a name that hides no package."""
    spec = importlib.util.spec_from_file_location("bench_buffer", HERE / "buffer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ours:
    """A buffer process; this process plays generator and learner."""

    def __init__(self, buffer: Any, name: str, folder: Path, length: Length, **more: Any) -> None:
        mode = name if name in ("memory", "process", "disk") else "memory"
        if mode != name:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                more["address"] = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        if name == "curve":
            more["curve_dir"] = str(folder / "keys")
            keys.make_keys(folder / "keys", generators=1)
        steps, values = more.pop("steps"), more.pop("values")
        self.buffer = buffer.Buffer(
            folder,
            mode,
            steps,
            values,
            tokens=length.tokens,
            every=length.every,
            name=name,
            **more,
        )
        self.each = self.buffer.groups * buffer.SIZE
        self.asked = 0

    def batches(self, count: int) -> None:
        self.buffer.batches(count)
        self.asked += count

    def check(self) -> dict[str, Any]:
        """Raises RuntimeError unless every answer came, and the last batch as it went."""
        wrong = disagreement(self.buffer.batch.samples, self.each, self.buffer.tokens)
        if wrong or self.buffer.taken != self.asked * self.each:
            raise RuntimeError(wrong or f"{self.buffer.taken} answers of {self.asked} batches")
        journal = self.buffer.dir.glob("**/journal/*.log")
        return {
            "taken": self.buffer.taken,
            "encrypted": self.buffer.socket.socket.getsockopt(zmq.MECHANISM) == zmq.CURVE,
            "journal_bytes": sum(part.stat().st_size for part in journal),
        }

    def cpu(self) -> float:
        return time.process_time() + rounds.cpu_of(self.buffer.process.pid)

    def end(self) -> None:
        self.buffer.end()


class Missing(Exception):
    """A rival that is not there, or does not work here."""


class Child:
    """A rival in a process of its own (benchmarks/lib/transport_child.py)."""

    def __init__(self, name: str, python: str, folder: Path, length: Length, groups: int) -> None:
        self.name = name
        self.log = folder / f"{name.replace(', ', '_').replace(' ', '_')}.log"
        argv = [python, str(CHILD), name, str(folder), str(length.tokens), str(groups)]
        more = KEEPS | KEEPS_ONE.get(name, {})
        more |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        try:
            self.process = subprocess.Popen(
                argv,
                cwd=rounds.results_file.ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log.open("w"),
                text=True,
                env=os.environ | more,
            )
        except OSError as error:
            raise Missing(str(error)) from error
        try:
            said = self.reply()
        except RuntimeError as error:
            self.end()
            raise Missing(str(error)) from error
        if "missing" in said:
            self.end()
            raise Missing(f"{python}: {said['missing']}")
        self.version, self.settings = said["version"], said["settings"]

    def reply(self) -> dict[str, Any]:
        """Raises RuntimeError where none comes."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            tail = self.log.read_text().strip().splitlines()[-1:] or ["it ended without a word"]
            why = tail[0] if ready else f"no reply in {PATIENCE_S:g} s"
            raise RuntimeError(f"{self.name}: {why}")
        return dict(json.loads(line))

    def say(self, *words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `reply` says why
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.flush()
        return self.reply()

    def batches(self, count: int) -> None:
        self.say("batches", count)

    def check(self) -> dict[str, Any]:
        return self.say("check")

    def cpu(self) -> float:
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        return rounds.cpu_of(self.process.pid) + sum(rounds.cpu_of(member.pid) for member in family)

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate('["end"]\n', timeout=60)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def choose(self, *, quick: bool) -> dict[str, Any]:
        """Its fastest settings, from a short run of each."""
        ms = {}
        tried = self.settings[:1] if quick else self.settings
        for frame, together in tried:
            self.say("set", frame, together)
            self.batches(1)
            began = time.perf_counter()
            self.batches(1 if quick else 3)
            ms[frame, together] = 1e3 * (time.perf_counter() - began)
        frame, together = min(ms, key=lambda setting: ms[setting])
        self.say("set", frame, together)
        found = {f"{f} answers a message, {t or 'all'} together": ms[f, t] for f, t in ms}
        chosen = {"frame": frame, "together": together, "version": self.version}
        return chosen | {"ms": {name: round(value, 1) for name, value in found.items()}}


def turns(alternatives: Mapping[str, Any], n_rounds: int, length: Length, count: int) -> list[Row]:
    """Each once untimed and compared byte by byte, then in rounds by turns."""
    for one in alternatives.values():
        one.batches(1)
        one.check()

    def one_round(number: int) -> Row:
        row = {}
        for name in list(alternatives) if number % 2 == 0 else reversed(list(alternatives)):
            cpu = alternatives[name].cpu()
            began = time.perf_counter()
            alternatives[name].batches(count)
            wall = time.perf_counter() - began
            row[name] = {"wall": wall, "cpu": alternatives[name].cpu() - cpu}
        said = ", ".join(f"{name} {1e3 * turn['wall']:.0f} ms" for name, turn in row.items())
        print(f"{length.tokens} tokens, round {number}: {said}", file=sys.stderr)
        return row

    return rounds.quiet(n_rounds, one_round)


def ratios(passes: list[list[Row]], ours: str, rival: str) -> list[float]:
    """Of each round of the pass that has both: the rival's time over ours."""
    for rows in passes:
        if rows and ours in rows[0] and rival in rows[0]:
            return [row[rival]["wall"] / row[ours]["wall"] for row in rows]
    return []


def judged(
    passes: Passes, answers: Mapping[int, int], missing: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The goals that were measured, and those that were not.  answers: of a turn, by tokens."""
    goals, without = [], []
    for each in GOALS:
        found = ratios(passes.get(each.tokens, []), each.ours, each.rival)
        if found:
            goals.append(rounds.figure(each.figure, found, each.least, at_least=True, aim=each.aim))
            continue
        why = missing.get(each.rival, "no round")
        without.append(
            {
                "figure": each.figure,
                "value": f"not measured: {why}",
                "goal": f">= {each.least:g}",
                "met": False,
            }
        )
    us = [
        1e6 * row["disk"]["cpu"] / answers[CPU_TOKENS]
        for rows in passes.get(CPU_TOKENS, [])
        for row in rows
        if "disk" in row
    ]
    goals.append(rounds.figure(CPU_FIGURE, us, CPU_US, at_least=False))
    return goals, without


def medians(passes: Passes, answers: Mapping[int, int]) -> dict[str, Any]:
    """Answers a second and CPU us of an answer, all processes, of every alternative."""
    out: dict[str, Any] = {}
    for tokens, of_length in passes.items():
        for rows in of_length:
            for name in rows[0] if rows else ():
                wall, cpu = (
                    statistics.median(row[name][what] for row in rows) for what in ("wall", "cpu")
                )
                found = {
                    "answers_per_s": round(answers[tokens] / wall),
                    "cpu_us": round(1e6 * cpu / answers[tokens], 1),
                }
                # `memory` is in both passes: of the first
                out.setdefault(str(tokens), {}).setdefault(name, found)
    return out


def disk(folder: Path) -> dict[str, Any]:
    """The file system that everything durable is written to, and what an fsync of 4 KiB takes."""
    places = [
        part
        for part in psutil.disk_partitions(all=True)
        if folder.resolve().is_relative_to(part.mountpoint)
    ]
    kind = max(places, key=lambda part: len(part.mountpoint)).fstype if places else "?"
    took = []
    with (folder / "probe").open("wb") as file:
        for _ in range(20):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            took.append(1e3 * (time.perf_counter() - began))
    return {"filesystem": kind, "fsync_ms": round(statistics.median(took), 3)}


class Measured:
    """All lengths, one after the other; what is gathered on the way."""

    def __init__(self, args: Any, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.module = bench_buffer()
        self.groups = QUICK_GROUPS if args.quick else self.module.GROUPS
        self.n_rounds = 1 if args.quick else args.rounds
        # what a learner's step says; the quick run spares itself torch
        some = dict.fromkeys(list(METRICS)[:66], 0.5)
        self.values = some if args.quick else self.module.metrics_of_a_step(folder)
        self.missing = {name: "left out by --rivals" for name in RIVALS if name not in args.rivals}
        self.chosen: dict[str, dict[str, Any]] = {}
        self.checked: dict[str, dict[str, Any]] = {}
        self.passes: Passes = {}
        self.answers: dict[int, int] = {}

    def rival(self, name: str, length: Length, folder: Path) -> Child | None:
        """It, with its best settings; None where it is missing."""
        if name in self.missing:
            return None
        kind = name.split(",")[0]
        python = getattr(self.args, f"{kind}_python", sys.executable)
        try:
            child = Child(name, python, folder, length, self.groups)
        except Missing as error:
            return self.lacking(name, error)
        try:
            self.chosen.setdefault(name, {})[str(length.tokens)] = child.choose(
                quick=self.args.quick
            )
        except RuntimeError as error:
            child.end()
            return self.lacking(name, error)
        return child

    def lacking(self, name: str, why: Exception) -> None:
        self.missing[name] = str(why)
        print(f"{name} is not measured: {why}", file=sys.stderr)

    def ours(self, name: str, length: Length, folder: Path) -> Ours:
        turn = self.answers[length.tokens] // (self.groups * self.module.SIZE)
        steps = 2 * (rounds.TRIES * self.n_rounds * turn + 1) + self.module.AHEAD + 1
        steps += self.settled(length)
        more = {"groups": self.groups, "steps": steps, "values": self.values}
        return Ours(self.module, name, folder, length, **more)

    def settled(self, length: Length) -> int:
        """Batches until the buffer holds as much as it ever will, which is what the checkpoints
        kept can come back to; rivals have had their short runs.
        """
        return 0 if self.args.quick else self.module.KEPT * length.every + self.module.AHEAD

    def length(self, length: Length) -> None:
        """Both passes of one length."""
        count = 1 if self.args.quick else length.batches
        self.answers[length.tokens] = count * self.groups * self.module.SIZE
        folder = self.folder / str(length.tokens)
        folder.mkdir()
        with contextlib.ExitStack() as ends:
            present: dict[str, Any] = {}
            for name in OURS:
                present[name] = self.ours(name, length, folder)
                ends.callback(present[name].end)
                present[name].buffer.begin()
                present[name].batches(self.settled(length))
            for name in RIVALS:
                if name != ALONE and (child := self.rival(name, length, folder)) is not None:
                    ends.callback(child.end)
                    present[name] = child
            passes = [turns(present, self.n_rounds, length, count)]
            if (alone := self.rival(ALONE, length, folder)) is not None:
                ends.callback(alone.end)
                present[ALONE] = alone
                pair = {"memory": present["memory"], ALONE: alone}
                passes.append(turns(pair, self.n_rounds, length, count))
            self.passes[length.tokens] = passes
            self.checked[str(length.tokens)] = {k: one.check() for k, one in present.items()}
        shutil.rmtree(folder, ignore_errors=True)


def parsed() -> Any:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=RIVALS, metavar="NAME")
    p.add_argument("--folder", type=Path, help="on the disk that is meant; absent: the temporary")
    for name in ("redis", "ray", "reverb", "straw"):
        p.add_argument(
            f"--{name}-python", default=sys.executable, help=f"a Python with {name}; absent: this"
        )
    return p.parse_args()


def main() -> None:
    args = parsed()
    memory.keep_freed()  # as a generator and a learner do; the rivals have it too: KEEPS
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        where = disk(Path(work))
        if where["filesystem"] in ("tmpfs", "ramfs") and not args.quick:
            sys.exit(f"{work} is on {where['filesystem']}, not on a disk: give --folder")
        measured = Measured(args, Path(work))
        for length in LENGTHS:
            measured.length(length)
    goals, without = judged(measured.passes, measured.answers, measured.missing)
    for row in without:
        print(f"{row['figure']}: {row['value']}", file=sys.stderr)
    result: dict[str, Any] = {
        "what": f"{measured.groups} x 8 answers a batch, producer to consumer",
        "missing": measured.missing,
        "disk": where,
        "settings": measured.chosen,
        "checked": measured.checked,
        "medians": medians(measured.passes, measured.answers),
        "turns": measured.passes,
    }
    if without:
        result |= {"goals": goals + without, "met": False}
    rounds.report("transport", goals, result, args)


if __name__ == "__main__":
    main()
