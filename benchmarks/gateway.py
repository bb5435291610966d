"""Measure the endpoint for agents: against `vllm serve`, its overhead, and training through it.

    OMP_NUM_THREADS=1 python benchmarks/gateway.py [--quick] [--json] [--rounds N] [--parts engines
    beyond history client step larger]

Chats have 8 calls of 32 tokens, each with the whole history.  All processes together, including
the client, have two cores; alternatives run by turns.  The client is one process with raw sockets
(lib/endpoint/asker.py), so that the servers are the slow side.  The model is tiny and the same.

engines   64 sessions at once: the gateway with vLLM inside makes at least the calls a second of
          `vllm serve`, with the embedded engine twice as many.  Ours also leases and scores the
          sessions, and every token has its log-probability; `vllm serve` runs without them, and
          once with them for comparison.  Where the config refuses sessions with vLLM, that goal
          counts as not met.
beyond    1, 8 and 64 sessions, a stand-in for the generator that takes 0.1 to 0.3 s a completion:
          a call takes longer by at most 5 ms (p50) and 30 ms (p99); with one that replies at once,
          the endpoint's CPU time a call, leases and scores included: at most 1 ms.
history   the same CPU time with 100 kB before the first turn, of the calls after a session's first:
          at most 6 ms.
client    OpenAI's Python client, one call at a time: its own time against a stub that replies at
          once, and what the gateway adds to it: p50 at most 5 ms.
step      configs/calc.toml against calc_http.toml, the same warm start and learning rate 0: a step
          through HTTP takes at most 2.5 of one by environment.  The same agent is also measured
          with a plain client, as the cost of OpenAI's client is not the endpoint's.
larger    the same two with 2.6 million parameters, untrained, and batches of 64 sessions: what a
          call costs beyond the model is the same, what the model takes is more.  At most 1.2.

--quick: few calls, without vLLM, and without `step` and `larger` unless --parts names them; the
values mean nothing."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lib import contenders, rounds
from lib.endpoint import servers

CALLS = 8
PAUSE_S = 0.2  # about what an engine takes for 32 tokens of 64 sessions on these cores
MANY = (1, 8, 64)
HISTORY = 100_000  # characters
PLAIN = "calc_http, plain client"
MODEL = "model_calc"  # a run builds a warm start only in a folder of such a name
SOLVED = 0.1  # mean reward that every warm start exceeds
STEP_MOST, LARGER_MOST = 2.5, 1.2
LARGER: dict[str, Any] = {"hidden": 256, "layers": 4, "heads": 8}  # 2.6 million parameters
WITH = "vllm serve, log-probabilities"
LOGPROBS = {"logprobs": True}
Row = dict[str, dict[str, Any]]  # alternative -> what came of it, in one round


class Size(NamedTuple):
    """How much is asked in a round."""

    engines: int  # sessions
    beyond: dict[int, int]  # sessions at once -> sessions, with pauses
    at_once: int  # sessions, without
    history: int  # sessions
    client: int  # sessions
    pause_s: float
    steps: int


WHOLE = Size(256, {1: 12, 8: 64, 64: 384}, 256, 16, 25, PAUSE_S, 24)
QUICK = Size(16, {1: 1, 8: 8, 64: 64}, 16, 2, 2, PAUSE_S / 10, contenders.SKIP + 3)


# ---- asking ------------------------------------------------------------------------------------


def ask(
    server: servers.Server, *, program: str = "asker.py", calls: int = CALLS, **more: Any
) -> dict[str, Any]:
    """Run a client program against `server`, and return its measurements.

    Calls a second, milliseconds, CPU milliseconds a call of each process, and totals."""
    asked: dict[str, Any] = {
        "url": server.url,
        "key": server.key,
        "pauses": server.pauses,
        "more": server.more,
    }
    asked |= {"name": uuid.uuid4().hex, "calls": calls} | more
    before = server.cpu()
    argv = [sys.executable, str(servers.HERE / program), json.dumps(asked)]
    done = subprocess.run(argv, cwd=servers.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        why = server.gone() or "all its processes run"
        raise RuntimeError(f"{program} {server.work.name}: {done.stderr[-2000:]}{why}")
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in server.cpu().items()}
    return found(json.loads(done.stdout), spent, more["sessions"] * calls)


def found(said: dict[str, Any], spent: dict[str, float], calls: int) -> dict[str, Any]:
    """Raises ValueError when there were other calls or tokens than were asked for."""
    if said["calls"] != calls or said["tokens"] != calls * servers.TOKENS:
        raise ValueError(f"{said['calls']} calls of {said['tokens']} tokens for {calls}")
    latencies = said["latencies"]
    return {
        "calls": calls,
        "calls_per_s": calls / said["wall_s"],
        "p50_ms": 1e3 * latencies[calls // 2],
        "p99_ms": 1e3 * latencies[min(calls - 1, calls * 99 // 100)],
        "cpu_ms": {name: 1e3 * seconds / calls for name, seconds in spent.items()},
        "client_cpu_ms": 1e3 * said["cpu_s"] / calls,
    }


def by_turns(
    alternatives: Mapping[str, Callable[[], dict[str, Any]]], wanted: int, *, warm: bool
) -> list[Row]:
    """Each alternative in `wanted` quiet rounds, every other one backwards; warm: once untimed
    before.
    """
    if warm:
        for one in alternatives.values():
            one()

    def one_round(number: int) -> Row:
        names = list(alternatives)
        return {name: alternatives[name]() for name in (names if number % 2 == 0 else names[::-1])}

    return rounds.quiet(wanted, one_round)


def each(rows: list[Row], name: str, *path: str) -> list[float]:
    """One value of every round."""
    out = []
    for row in rows:
        value: Any = row[name]
        for key in path:
            value = value[key]
        out.append(float(value))
    return out


def middle(rows: list[Row], name: str, *path: str) -> float:
    return statistics.median(each(rows, name, *path))


def ratio(rows: list[Row], above: str, below: str, *path: str) -> list[float]:
    """Of every round."""
    pairs = zip(each(rows, above, *path), each(rows, below, *path), strict=True)
    return [a / b for a, b in pairs]


# ---- the parts ---------------------------------------------------------------------------------


class Bench:
    """The servers that are up, and how much is asked of them."""

    def __init__(self, work: Path, size: Size, wanted: int, *, vllm: bool) -> None:
        self.work = work
        self.size = size
        self.wanted = wanted  # rounds
        self.warm = size is WHOLE
        self.vllm = vllm
        self.model = servers.model(work / "model")
        self.up: dict[str, servers.Server] = {}

    def server(self, name: str) -> servers.Server:
        """It is started when it is first asked for."""
        if name not in self.up:
            work = self.work / name.replace(" ", "_").replace(",", "")
            makes: dict[str, Callable[[], servers.Server]] = {
                "at once": lambda: servers.Gateway(work, self.model, "drawn"),
                "paused": lambda: servers.Gateway(work, self.model, "drawn", self.size.pause_s),
                "embedded": lambda: servers.Gateway(work, self.model, "embedded"),
                "vLLM inside": lambda: servers.Gateway(work, self.model, "vllm"),
                "vllm serve": lambda: servers.Serve(work, self.model),
                "stub": lambda: servers.Stub(work),
            }
            self.up[name] = makes[name]()
        return self.up[name]

    def end(self, *names: str) -> None:
        for name in names or tuple(self.up):
            if name in self.up:
                self.up.pop(name).end()


Judged = tuple[list[dict[str, Any]], list[Row]]  # goals, all rounds


def engines(bench: Bench) -> Judged:
    how: dict[str, Any] = {"sessions": bench.size.engines, "at_once": servers.AT_ONCE}

    def asked(name: str, **more: Any) -> Callable[[], dict[str, Any]]:
        server = bench.server(name)
        words = how | ({"more": server.more | more} if more else {})
        return lambda: ask(server, **words)

    refused = servers.refused(bench.model, "vllm")
    alternatives = {"embedded": asked("embedded")}
    if bench.vllm:
        alternatives |= {"vllm serve": asked("vllm serve"), WITH: asked("vllm serve", **LOGPROBS)}
        if not refused:
            alternatives["vLLM inside"] = asked("vLLM inside")
    rows = by_turns(alternatives, bench.wanted, warm=bench.warm)
    bench.end("embedded", "vllm serve", "vLLM inside")
    return judged_engines(rows, refused), rows


def judged_engines(rows: list[Row], refused: str = "") -> list[dict[str, Any]]:
    """Judge the goals of `engines`; [] without a rival.

    refused: why there is no gateway with vLLM inside; its goal then counts as missed."""
    if "vllm serve" not in rows[0]:
        return []
    goals = []
    for name, target in (("vLLM inside", 1.0), ("embedded", 2.0)):
        figure = f"calls/s, {name} / vllm serve"
        if name not in rows[0]:
            goals.append(rounds.goal(figure, 0.0, target, at_least=True, why=refused))
            continue
        more = {
            "ours": middle(rows, name, "calls_per_s"),
            "rival": middle(rows, "vllm serve", "calls_per_s"),
            "over_log_probabilities": statistics.median(ratio(rows, name, WITH, "calls_per_s")),
            "endpoint_cpu_ms": middle(rows, name, "cpu_ms", "endpoint"),
            "rivals_cpu_ms": middle(rows, "vllm serve", "cpu_ms", "endpoint"),
        }
        more = {key: round(value, 3) for key, value in more.items()}
        each_round = ratio(rows, name, "vllm serve", "calls_per_s")
        goals.append(rounds.figure(figure, each_round, target, at_least=True, **more))
    return goals


def beyond(bench: Bench) -> Judged:
    paused, at_once = bench.server("paused"), bench.server("at once")

    def asked(server: servers.Server, **more: Any) -> Callable[[], dict[str, Any]]:
        return lambda: ask(server, **more)

    alternatives = {}
    for many, sessions in bench.size.beyond.items():
        # not all of them in step: the first calls alone would be the slowest hundredth
        ramp = {"ramp_s": bench.size.pause_s} if many > 1 else {}
        alternatives[f"{many} paused"] = asked(paused, sessions=sessions, at_once=many, **ramp)
        alternatives[f"{many} at once"] = asked(
            at_once, sessions=max(many, bench.size.at_once), at_once=many
        )
    rows = by_turns(alternatives, bench.wanted, warm=bench.warm)
    bench.end("paused")
    return judged_beyond(rows), rows


def judged_beyond(rows: list[Row]) -> list[dict[str, Any]]:
    goals = []
    for many in MANY:
        cpu = each(rows, f"{many} at once", "cpu_ms", "endpoint")
        goals.append(
            rounds.figure(f"{many} sessions: CPU ms a call", cpu, 1.0, at_least=False)
            | {
                "calls_per_s": round(
                    statistics.median(each(rows, f"{many} at once", "calls_per_s"))
                )
            }
        )
        for what, target in (("p50", 5.0), ("p99", 30.0)):
            taken = each(rows, f"{many} paused", f"{what}_ms")
            name = f"{many} sessions: {what} ms beyond the engine"
            goals.append(rounds.figure(name, taken, target, at_least=False))
    return goals


def history(bench: Bench) -> Judged:
    """A session's first call encodes all of it, later ones what is new: sessions of one call beside
    longer ones tell the two apart.
    """
    server = bench.server("at once")
    how: dict[str, Any] = {"sessions": bench.size.history, "at_once": 8, "history": HISTORY}
    alternatives = {
        "one call": lambda: ask(server, calls=1, **how),
        "nine calls": lambda: ask(server, calls=CALLS + 1, **how),
    }
    rows = by_turns(alternatives, bench.wanted, warm=bench.warm)
    return judged_history(rows), rows


def judged_history(rows: list[Row]) -> list[dict[str, Any]]:
    first = each(rows, "one call", "cpu_ms", "endpoint")
    longer = each(rows, "nine calls", "cpu_ms", "endpoint")
    later = [((CALLS + 1) * b - a) / CALLS for a, b in zip(first, longer, strict=True)]
    name = "100 kB of history: CPU ms of a later call"
    more = {"first_call": round(statistics.median(first), 3)}
    return [rounds.figure(name, later, 6.0, at_least=False, **more)]


def client(bench: Bench) -> Judged:
    def asked(server: servers.Server) -> Callable[[], dict[str, Any]]:
        return lambda: ask(server, program="openai_asker.py", sessions=bench.size.client)

    names = ("stub", "at once")
    rows = by_turns(
        {name: asked(bench.server(name)) for name in names}, bench.wanted, warm=bench.warm
    )
    return judged_client(rows), rows


def judged_client(rows: list[Row]) -> list[dict[str, Any]]:
    floor, ours = each(rows, "stub", "p50_ms"), each(rows, "at once", "p50_ms")
    more = {
        "floor_p50_ms": round(statistics.median(floor), 3),
        "floor_cpu_ms": round(middle(rows, "stub", "client_cpu_ms"), 3),
    }
    added = [a - b for a, b in zip(ours, floor, strict=True)]
    name = "openai client: p50 ms beyond its floor"
    return [rounds.figure(name, added, 5.0, at_least=False, **more)]


def make_sets(work: Path, name: str, steps: int, model: str) -> list[str]:
    """The settings of a run in `work`, whose warm start is built there."""
    sets = [f"runs={str(work / 'runs')!r}", f"name={name!r}", f"learner.steps={steps}"]
    return [*sets, f"model.path={str(work / model)!r}", contenders.STILL, *contenders.SMALL]


def a_run(bench: Bench, config: str, steps: int, *more: str, model: str = MODEL) -> dict[str, Any]:
    """Seconds a step of a run, after the first few."""
    name = f"{config}-{uuid.uuid4().hex[:6]}"
    sets = [*make_sets(bench.work, name, steps, model), *more]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", f"configs/{config}.toml", "--json"]
    cores = sorted(os.sched_getaffinity(0))
    contenders.output([*argv, *[x for s in sets for x in ("--set", s)]], cores, 1, "PASSIVE")
    lines = (bench.work / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return a_step([json.loads(line) for line in lines])


def a_step(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for row in metrics if "reward/mean" in row]
    seconds = rows[-1]["t"] - rows[contenders.SKIP]["t"]
    counted = rows[contenders.SKIP + 1 :]
    return {
        "step": seconds / len(counted),
        "length": statistics.fmean(row["answer/length"] for row in counted),
        "reward": statistics.fmean(row["reward/mean"] for row in counted),
    }


def step(bench: Bench) -> Judged:
    bench.end()  # nothing beside it
    made = a_run(bench, "calc", contenders.SKIP + 2)  # makes the warm start that all have
    if made["reward"] < SOLVED:
        raise RuntimeError(f"reward {made['reward']:.2f}: the model has no warm start")
    steps = bench.size.steps
    function = f"{servers.HERE / 'plain_agent.py'}:play"
    plain = f"agent.function={function!r}"
    alternatives = {
        "calc": lambda: a_run(bench, "calc", steps),
        "calc_http": lambda: a_run(bench, "calc_http", steps),
        PLAIN: lambda: a_run(bench, "calc_http", steps, plain),
    }
    rows = by_turns(alternatives, bench.wanted, warm=False)
    return judged_step(rows), rows


def judged_step(rows: list[Row]) -> list[dict[str, Any]]:
    taken = {name: middle(rows, name, "step") for name in rows[0]}
    more: dict[str, float] = {f"{k}_ms": round(1e3 * seconds) for k, seconds in taken.items()}
    more["length"] = round(statistics.median(ratio(rows, "calc_http", "calc", "length")), 3)
    more["plain_client"] = round(statistics.median(ratio(rows, PLAIN, "calc", "step")), 3)
    return [compared("step, through HTTP / by environment", rows, STEP_MOST, more)]


def compared(name: str, rows: list[Row], most: float, more: dict[str, float]) -> dict[str, Any]:
    """most: the goal.  more: stands beside the figure."""
    found = ratio(rows, "calc_http", "calc", "step")
    return rounds.figure(name, found, most, at_least=False, **more)


def larger(bench: Bench) -> Judged:
    from asyncrl.models.policy import build_model
    from asyncrl.tasks.calc import CalcTask

    bench.end()
    build_model(bench.work / "larger", CalcTask.symbols, **LARGER)
    steps = contenders.SKIP + (2 if bench.size is QUICK else 8)
    smaller = "learner.groups=8"

    def ours(config: str) -> Callable[[], dict[str, Any]]:
        return lambda: a_run(bench, config, steps, smaller, model="larger")

    names = ("calc", "calc_http")
    rows = by_turns({name: ours(name) for name in names}, bench.wanted, warm=False)
    return judged_larger(rows), rows


def judged_larger(rows: list[Row]) -> list[dict[str, Any]]:
    more: dict[str, float] = {f"{k}_ms": round(1e3 * middle(rows, k, "step")) for k in rows[0]}
    more["length"] = round(statistics.median(ratio(rows, "calc_http", "calc", "length")), 3)
    return [compared("step at 2.6M, through HTTP / by environment", rows, LARGER_MOST, more)]


PARTS: dict[str, Callable[[Bench], Judged]] = {
    "engines": engines,
    "beyond": beyond,
    "history": history,
    "client": client,
    "step": step,
    "larger": larger,
}


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--parts", nargs="+", default=[], choices=list(PARTS))
    args = p.parse_args()
    long = ("step", "larger")
    parts = args.parts or [name for name in PARTS if not (args.quick and name in long)]
    os.sched_setaffinity(0, rounds.idle_cores(2))
    goals: list[dict[str, Any]] = []
    details: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as work:
        size, wanted = (QUICK, 1) if args.quick else (WHOLE, args.rounds)
        vllm = not args.quick or "engines" in args.parts
        bench = Bench(Path(work), size, wanted, vllm=vllm)
        try:
            for name in parts:
                judged, details[name] = PARTS[name](bench)
                goals += judged
        finally:
            bench.end()
    what = "the endpoint, chats of 8 calls of 32 tokens, two cores, by turns"
    whole = len(parts) == len(PARTS)
    rounds.report(
        "_".join(["gateway", *([] if whole else parts)]),
        goals,
        {"what": what, "parts": details},
        args,
    )


if __name__ == "__main__":
    main()
