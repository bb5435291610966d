"""Run with a generator behind a slow link, which is simulated with two network namespaces.

A relay between them delays, cuts connections and limits the rate.

    nice python benchmarks/network.py [--quick] [--json] [--only NAME ...] [--connect S]

```
 near namespace              veth              far namespace, 127.0.0.1
 buffer  10.213.0.1:5555 <----------> relay <--> asyncrl join tcp://127.0.0.1:5555 --keys ...
 learner 0.0.0.0:5556    <----------> relay <--> its weights: the same host, 5556
```

Proves: over 20 ms each way, a connection cut with each 100 MB, 100 Mbit/s, and all of them, the
run completes, no token is past the limit, the ledger sums, nothing is trained twice, `asyncrl
doctor` names the link where the run waits for it, and a step takes the time that arithmetic
predicts.

The arithmetic is for one generator that generates while the learner trains, but not while it
fetches.  Seconds a step = those over the bare relay (measured before and after each link), or the
part of them in which the generator was neither idle nor fetching, where that is more
    + versions a step that crossed the link, by the relay's count of bytes, each of
          RTT                                            the first reply
          + max(bytes / rate, (chunks - 1) // 4 * RTT)   four chunks of 1 MiB are in flight
      or the time over the bare relay, where that is more
    + cuts a step, each of zmq's 50 ms, five RTT for a new connection with keys and its first
      reply, and a repeated chunk

Needs root and iproute2; exits with 3 where no namespaces can be created.  --quick: a
small model, one link with all of it, 1 Mbit/s; nothing is judged by the clock."""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from lib import rounds
from lib.network import relay
from lib.network.namespaces import NoNamespaces, Pair
from lib.network.relay import Shape

from asyncrl.records import metrics, rundir
from asyncrl.transport.chunks import AHEAD, CHUNK_BYTES
from asyncrl.transport.keys import make_keys

DELAY_S = 0.02
RATE = 100e6 / 8  # bytes/s
CUT_BYTES = 100e6
LINKS = {
    "bare": Shape(),
    "delay": Shape(delay_s=DELAY_S),
    "cuts": Shape(cut_bytes=CUT_BYTES),
    "rate": Shape(rate=RATE),
    "all": Shape(DELAY_S, RATE, CUT_BYTES),
}
QUICK = {"all": Shape(DELAY_S, 1e6 / 8, 600e3)}
MODEL = {"hidden": 256, "layers": 4, "heads": 8}
SMALL = {"hidden": 32, "kv_heads": 2}
PORT, WEIGHTS_PORT = 5555, 5556
GROUPS, SIZE, MAX_LAG = 4, 4, 2
WARM = 4  # steps that are not timed: the first version, and as many as may be written ahead
STEPS = 60
RECONNECT_S = 0.05  # until zmq connects again
HANDSHAKES = 5  # round trips of a new connection with keys, to the first answer
PATIENCE_S = 600.0
CANNOT = 3  # exit code where no namespaces can be made
ASYNCRL = [sys.executable, "-m", "asyncrl.cli"]


class Ended(Exception):
    """A process of the run is not where it should be; the text has its log."""


def fetch_s(shape: Shape, size: int) -> float:
    """Seconds of the link for a version of `size` bytes, cuts apart.

    >>> round(fetch_s(Shape(rate=12.5e6), 10_000_000), 2)
    0.8
    >>> round(fetch_s(Shape(delay_s=0.02), 10_000_000), 2)
    0.12
    """
    trip = 2 * shape.delay_s
    chunks = -(-size // CHUNK_BYTES)
    line = size / shape.rate if shape.rate else 0.0
    return trip + max(line, (chunks - 1) // AHEAD * trip)


def cut_s(shape: Shape, size: int) -> float:
    """Seconds a version that cuts cost.

    >>> round(cut_s(Shape(delay_s=0.02, cut_bytes=100e6), 50_000_000), 3)
    0.125
    """
    again = CHUNK_BYTES / shape.rate if shape.rate else 0.0
    each = RECONNECT_S + HANDSHAKES * 2 * shape.delay_s + again
    return size / shape.cut_bytes * each if shape.cut_bytes else 0.0


def listening(pid: int, port: int) -> bool:
    """Whether a process in that process's namespace listens at the port."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in map(str.split, lines))


def steps_made(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in metrics.read(run_dir) if "reward/mean" in row]


class Run:
    """One run over one link."""

    def __init__(self, pair: Pair, work: Path, shape: Shape, sets: list[str]) -> None:
        self.pair, self.work, self.shape = pair, work, shape
        self.run_dir = work / "run"
        self.counts = work / "counts.json"
        words = [word for each in sets for word in ("--set", each)]
        demo = str(rounds.results_file.ROOT / "configs" / "demo.toml")
        self.words = [demo, "--run-dir", str(self.run_dir), *words]
        self.said = ""

    def start(self, side: str, name: str, argv: list[str]) -> Any:
        return self.pair.start(side, argv, self.work / f"{name}.log", self.work)

    def wait(self, what: Callable[[], bool], *processes: Any) -> None:
        """Until `what`; raises Ended when a process ends before, or nothing comes of it."""
        until = time.monotonic() + PATIENCE_S
        while not what():
            ended = [process for process in processes if process.poll() is not None]
            if ended or time.monotonic() > until:
                logs = [f"{p.name}: {p.read_text()[-2000:]}" for p in self.work.glob("*.log")]
                raise Ended(f"{len(ended)} processes have ended early, or none\n" + "\n".join(logs))
            time.sleep(0.1)

    def doctor(self) -> dict[str, Any]:
        argv = [*ASYNCRL, "doctor", str(self.run_dir), "--json"]
        process = self.start(self.pair.near, "doctor", argv)
        process.wait()
        self.pair.end(process)
        return json.loads((self.work / "doctor.log").read_text().splitlines()[0])

    def go(self, steps: int, size: int) -> dict[str, Any]:
        """The whole of it."""
        near, far = self.pair.near, self.pair.far
        shaped = relay.Order(
            [(port, self.pair.near_host, port) for port in (PORT, WEIGHTS_PORT)],
            self.shape,
            str(self.counts),
        )
        argv = [sys.executable, relay.__file__, msgspec.json.encode(shaped).decode()]
        way = self.start(far, "relay", argv)
        buffer = self.start(near, "buffer", [*ASYNCRL, "buffer", *self.words])
        # a learner gives a buffer that has never answered up after wires.connect_s
        self.wait(lambda: listening(buffer.pid, PORT), buffer, way)
        learner = self.start(near, "learner", [*ASYNCRL, "learner", *self.words])
        self.wait(lambda: listening(learner.pid, WEIGHTS_PORT), learner, buffer, way)
        join = [*ASYNCRL, "join", f"tcp://127.0.0.1:{PORT}", "--cache", str(self.work / "cache")]
        keys = ["--keys", str(self.work / "keys" / "generator-1"), "--wait", "60"]
        joined = self.start(far, "join", [*join, *keys])
        mid = steps // 2 + WARM // 2
        self.wait(lambda: len(steps_made(self.run_dir)) >= mid, joined, learner, buffer, way)
        self.said = self.doctor()["link"]
        processes = (joined, learner, buffer)
        # one may end while others still write
        self.wait(lambda: all(process.poll() is not None for process in processes), way)
        codes = [process.returncode for process in processes]
        self.pair.end(*processes, way)
        if any(codes):
            raise Ended(f"exit codes {codes}: {(self.work / 'join.log').read_text()[-2000:]}")
        return self.found(steps, size)

    def found(self, steps: int, size: int) -> dict[str, Any]:
        """Return the measurements of a run with weights of `size` bytes."""
        rows = steps_made(self.run_dir)
        relayed = json.loads(self.counts.read_text())
        timed = [row["t"] for row in rows[WARM - 1 :]]
        seconds = (timed[-1] - timed[0]) / (len(timed) - 1)
        idle = metrics.compute_idle_shares(rows[WARM:])["generator"]
        links = {
            name: round(statistics.median(row[name] for row in rows if name in row), 4)
            for name in ("link/fetch_share", "link/fetch_mb_per_s", "link/ack_s")
            if any(name in row for row in rows)
        }
        return {
            "steps": len(rows),
            "seconds_a_step": round(seconds, 4),
            "busy_s": round(seconds * (1 - idle), 4),  # of it, the generator's
            "wrong": self.wrong(steps),
            "doctor": self.said,
            "doctor_afterwards": self.doctor()["link"],
            "relay": relayed,
            # those of the weights are nearly all bytes that come down; the model's files came first
            "versions_a_step": round((relayed["down"] / size - 1) / len(rows), 3),
            **links,
        }

    def wrong(self, steps: int) -> list[str]:
        """Everything that should hold of the run and does not, by its files alone."""
        summary = json.loads((self.run_dir / "buffer_summary.json").read_text())
        lines = [
            json.loads(line) for line in (self.run_dir / "trained.jsonl").read_text().splitlines()
        ]
        out = []
        if [row["batch"] for row in lines] != list(range(steps)):
            out.append(f"trained batches: {[row.get('batch') for row in lines]}")
        if summary["trajectories"] != steps * GROUPS * SIZE:
            out.append(f"{summary['trajectories']} trajectories of {steps * GROUPS * SIZE}")
        lag = max(int(lag) for row in lines for lag in row["lags"])
        if lag > MAX_LAG:
            out.append(f"lag {lag}, limit {MAX_LAG}")
        ledger = summary["ledger"]
        if sum(ledger.values()) != 2 * ledger["generated"] or not ledger["generated"]:
            out.append(f"the ledger does not sum: {ledger}")
        return out


def measure(
    pair: Pair, work: Path, shape: Shape, quick: bool, connect_s: float
) -> tuple[dict[str, Any], int]:
    """Run once; returns the measurements, and the size of the weights in bytes."""
    from asyncrl.config import load
    from asyncrl.models import policy
    from asyncrl.tasks.synthetic import TASKS

    demo = load.load(rounds.results_file.ROOT / "configs" / "demo.toml")
    shapes: dict[str, Any] = SMALL if quick else MODEL
    model = policy.build_model(work / "model", TASKS[demo.task.name]().symbols, **shapes)
    size = policy.count_flat_bytes(policy.build_manifest(model))
    make_keys(work / "keys", 2)
    steps = 10 if quick else STEPS
    sets = [
        f"model.path={str(work / 'model')!r}",
        "model.warm_start=false",
        f"wires.address='tcp://{pair.near_host}:{PORT}'",
        f"wires.weights_address='tcp://0.0.0.0:{WEIGHTS_PORT}'",
        f"wires.curve_dir={str(work / 'keys')!r}",
        f"wires.connect_s={connect_s}",
        "weights.transport='tcp'",  # the host's name is the same on both sides
        f"learner.steps={steps}",
        f"learner.groups={GROUPS}",
        f"learner.group_size={SIZE}",
        "learner.checkpoint_every=1000",
        f"staleness.max_lag={MAX_LAG}",
        f"generator.slots={GROUPS * SIZE}",
        "evaluation.every=0",
        "evaluation.prompts=1",
        "evaluation.final_prompts=1",
        "evaluation.ood_prompts=0",
        "record.split_every=0",
        "record.reference_kl_every=0",
    ]
    run = Run(pair, work, shape, sets)
    try:
        return run.go(steps, size), size
    finally:
        pair.end(*list(pair.processes))
        if run.run_dir.exists():
            rundir.clean(run.run_dir)


def reckoned(
    run: dict[str, Any], bare: list[dict[str, Any]], shape: Shape, size: int
) -> tuple[float, str]:
    """Seconds a step by the arithmetic, and its parts in words."""
    own, busy, share, versions = (
        statistics.mean(each[what] for each in bare)
        for what in ("seconds_a_step", "busy_s", "link/fetch_share", "versions_a_step")
    )
    work = busy - share * own
    link = run["versions_a_step"] * max(share * own / versions, fetch_s(shape, size))
    cuts = run["versions_a_step"] * cut_s(shape, size)
    text = f"{own:.3f}, or {work:.3f} work + {link:.3f} link + {cuts:.3f} cuts"
    return max(own, work + link + cuts), text


def judged(
    runs: dict[str, list[dict[str, Any]]], links: dict[str, Shape], size: int
) -> list[dict[str, Any]]:
    """The table: what each link's run kept and said, and its time by the arithmetic."""
    bare = runs.get("bare", [])
    goals = []
    beside = {name: bare[i : i + 2] for i, name in enumerate(x for x in runs if x != "bare")}
    for name, found in runs.items():
        wrong = [word for run in found for word in run["wrong"]]
        goals.append(rounds.goal(f"{name}: wrong", len(wrong), 0, at_least=False, what=wrong))
        run, shape = found[0], links[name]
        share = run.get("link/fetch_share", 0.0)
        if shape.rate:
            goals.append(
                rounds.goal(
                    f"{name}: doctor names the link",
                    float("the link holds" in run["doctor"]),
                    1,
                    at_least=True,
                    fetch_share=share,
                )
            )
        if bare and name != "bare":
            seconds, parts = reckoned(run, beside[name], shape, size)
            ratio = seconds / run["seconds_a_step"]
            goals.append(
                {
                    "figure": f"{name}: steps/s over the arithmetic's",
                    "value": round(ratio, 3),
                    "goal": "0.7 to 1.3",
                    "met": 0.7 <= ratio <= 1.3,
                    "measured_s": run["seconds_a_step"],
                    "reckoned": parts,
                }
            )
    return goals


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--only", nargs="+", choices=list(LINKS), help="these links, and the bare one")
    p.add_argument("--connect", type=float, default=10.0, help="wires.connect_s of the runs")
    args = p.parse_args()

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)  # also where the parent process ignored it
    links = QUICK if args.quick else LINKS
    slow = [name for name in links if name != "bare" and name in (args.only or links)]
    order = slow if args.quick else ["bare", *(each for name in slow for each in (name, "bare"))]
    runs: dict[str, list[dict[str, Any]]] = {}
    size = 0
    pair = None
    try:
        pair = Pair()
        for name in order:
            watch = rounds.Watch()
            with tempfile.TemporaryDirectory() as work:
                found, size = measure(pair, Path(work), links[name], args.quick, args.connect)
            runs.setdefault(name, []).append(found)
            others, wall = watch.foreign()
            beside = others > rounds.FOREIGN * wall
            row = {"seconds": round(wall, 1), "foreign_cores": round(others / wall, 3)}
            rounds.MADE.append(row | {"beside_other_work": beside, "counted": True})
            print(f"{name}, {wall:.0f} s: {found}", file=sys.stderr, flush=True)
    except NoNamespaces as error:
        print(f"no network namespaces here: {error}", file=sys.stderr)
        sys.exit(CANNOT)
    except Ended as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this takes a moment, and is the end
        if pair is not None:
            pair.close()
    goals = judged(runs, links, size)
    what = "a generator behind a link that delays, cuts and is narrow"
    details = {"bytes": size, "connect_s": args.connect, "runs": runs}
    rounds.report("network", goals, {"what": what, **details}, args)
    sys.exit(0 if all(goal["met"] for goal in goals) else 1)


if __name__ == "__main__":
    main()
