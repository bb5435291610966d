"""Compare a generator whose requests go to two vLLM servers with one that decodes by itself.

    OMP_NUM_THREADS=1 python benchmarks/serve.py [--quick] [--json] [--rounds N] [--size 84k 2.6M]

Proves, with 256 completions at a time of 16 to 56 tokens and new weights after every 256: an
update pauses a server for at most 5 % of the time that 256 completions take; the generator's
process takes at most 15 % of the CPU time of one with the embedded engine, for the same tickets,
tokens, rewards and encoded deliveries.  Also the ratio to that process without its engine's calls.

Both are the real generator in a process of its own, but for a replaced socket; a round asks both
for the same completions, by turns.  A pause lasts from the engine's answer to the pause to its
answer to the call that ends it, as the server says."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import vllm_engine
from lib import rounds

SIZES: dict[str, dict[str, Any]] = {
    "84k": {"hidden": 64, "layers": 2, "heads": 2},
    "2.6M": {"hidden": 256, "layers": 4, "heads": 8},
}
SETS = {
    "embedded": ["generator.engine='embedded'"],
    "served": ["generator.engine='vllm-serve'", "generator.own_servers=2"],
}
STEP = 256  # completions between two versions
CALLS = ("add", "step", "load", "abort", "count_tokens")  # of an engine


class Tickets(vllm_engine.Buffer):
    """Grants tickets whose completions have different lengths."""

    def count_tokens(self, ticket: int) -> int:
        return 16 + ticket * 7 % 41


class Side:
    """A generator, its weights loaded, and the time of its engine's calls and of pauses."""

    def __init__(self, kind: str, path: str) -> None:
        from actors import generator as g
        from actors import turn
        from asyncrl.config import load
        from asyncrl.contract.versions import Label
        from asyncrl.models import policy
        from asyncrl.records import rundir

        run_dir = Path(path).with_name(f"run_{kind}")
        sets = [*SETS[kind], f"model.path={path!r}", "model.device='cpu'", "generators=1"]
        config = load.load("configs/demo.toml", [*sets, f"runs={str(run_dir.parent)!r}"])
        rundir.prepare(load.dump(config), run_dir)
        turn.collect_stop_tokens = lambda *_: ()  # lengths are the tickets'
        self.generator = g.Generator(config, run_dir, 0, g.build_engine(config))
        self.engine: Any = self.generator.engine
        model = policy.load_policy(path, "float32", "cpu")
        layout = policy.build_manifest(model)
        buffer = memoryview(bytearray(policy.count_flat_bytes(layout)))
        policy.write_flat(model, buffer)
        self.weights = policy.read_flat(buffer, layout)
        self.probe = policy.compute_probe_logprobs(model).tobytes()
        self.label, self.version = Label, 0
        self.engine_s = 0.0
        self.pauses: list[float] = []
        for name in CALLS:
            setattr(self.engine, name, self.count_time(getattr(self.engine, name)))
        if kind == "served":
            served: Any = self.engine
            served._call = self.watch_pauses(served._call)
        self.load()
        self.generator.loaded = g.LoadedWeights(Label(1, 1), "d")
        self.generator.swap = self.swap  # type: ignore[method-assign]
        self.socket = Tickets(self.generator.turn.task, 0)
        self.generator.socket = self.socket  # type: ignore[assignment]

    def count_time(self, call: Any) -> Any:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                self.engine_s += time.thread_time() - began

        return timed

    def watch_pauses(self, call: Any) -> Any:
        async def watched(server: Any, path: str, body: Any = None) -> Any:
            answer = await call(server, path, body)
            if isinstance(answer, dict) and "paused_s" in answer:
                self.pauses.append(answer["paused_s"])
            return answer

        return watched

    def load(self) -> None:
        self.version += 1
        self.engine.load(self.weights, self.label(1, self.version), "d", self.probe)

    def swap(self) -> None:
        if self.socket.got >= self.due:
            self.due += STEP
            self.load()

    def generate(self, count: int) -> dict[str, float]:
        """Generate so many completions, with a new version after every STEP of them."""
        self.socket.want(count)
        self.due, self.engine_s = STEP, 0.0
        self.pauses.clear()
        self.generator.ending = self.generator.over = False
        wall, cpu = time.monotonic(), time.process_time()
        self.generator.loop()
        return {
            "wall": time.monotonic() - wall,
            "cpu": time.process_time() - cpu,
            "engine": self.engine_s,
            "pause": statistics.fmean(self.pauses or [0.0]),  # of a server in an update
        }


def serve(kind: str, path: str) -> None:
    """Answer each number of completions on stdin by a line of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = Side(kind, path)
    for line in sys.stdin:
        print(json.dumps(side.generate(int(line))), file=out, flush=True)
    side.generator.close()
    os._exit(0)


class Worker:
    """A side in a process of its own."""

    def __init__(self, kind: str, path: Path) -> None:
        argv = [sys.executable, str(Path(__file__)), "--worker", kind, "--model", str(path)]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=rounds.results_file.ROOT,
        )
        self.ask(STEP)  # untimed

    def ask(self, count: int) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(count, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the generator has ended with {self.process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--size", nargs="+", default=["2.6M"], choices=list(SIZES))
    p.add_argument("--worker", choices=list(SETS), help="for its own use")
    p.add_argument("--model")
    args = p.parse_args()
    if args.worker:
        return serve(args.worker, args.model)
    from asyncrl.models import policy
    from asyncrl.tasks.synthetic import TASKS

    count = STEP * (2 if args.quick else 6)
    goals: list[dict[str, Any]] = []
    result: dict[str, Any] = {"completions": count}
    with tempfile.TemporaryDirectory() as work:
        for size in args.size:
            path = Path(work) / size
            policy.build_model(path, TASKS["sort"]().symbols, **SIZES[size])
            workers = {kind: Worker(kind, path) for kind in SETS}

            def one_round(number: int, workers: dict[str, Worker] = workers) -> dict[str, Any]:
                order = list(workers) if number % 2 else list(reversed(workers))
                return {kind: workers[kind].ask(count) for kind in order}

            rows = rounds.quiet(1 if args.quick else args.rounds, one_round)
            for worker in workers.values():
                worker.end()
            pairs = [(row["served"], row["embedded"]) for row in rows]
            paused = [s["pause"] / s["wall"] * count / STEP for s, _ in pairs]
            cpu = [s["cpu"] / e["cpu"] for s, e in pairs]
            rest = [s["cpu"] / (e["cpu"] - e["engine"]) for s, e in pairs]
            ms: dict[str, dict[str, float]] = {kind: {} for kind in SETS}
            for kind, found in ms.items():
                for name in rows[0][kind]:
                    value = statistics.median(row[kind][name] for row in rows)
                    found[name] = round(1e3 * value * (1 if name == "pause" else STEP / count))
            goals += [
                rounds.figure(
                    f"{size}: pause of a server, of a step", paused, 0.05, at_least=False
                ),
                rounds.figure(
                    f"{size}: CPU of the thin generator, of one that decodes",
                    cpu,
                    0.15,
                    at_least=False,
                    of_it_without_its_engine=round(statistics.median(rest), 3),
                    ms_a_step=ms,
                ),
            ]
            result[size] = rows
    rounds.report("serve", goals, result, args)


if __name__ == "__main__":
    main()
