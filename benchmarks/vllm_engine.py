"""Compare our generator with vLLM inside with bare vLLM: CPU time, weight swap and startup.

    OMP_NUM_THREADS=1 python benchmarks/vllm_engine.py [--quick] [--json] [--rounds N] [--parts
    tokens swap start]

Proves: the whole generator (tickets, seeds, spans, text, rewards, encoded deliveries) takes at
most 5 % more CPU time a token than `vllm.LLM.generate` with log-probabilities on the same
prompts; with 136 MB of weights a swap, probe included, costs at most twice a plain copy of the
weights on top of the engine's own part; a generator is ready in under 12 s.  Each side is a
separate process on the same core, completions are equally long, rounds alternate.  The generator
is the real one, except for a replaced socket.

A swap happens in the middle of 64 completions; its cost is the load, and the additional time of
the next step for the probe.  There are three readings of the engine's own part: vLLM's packing of
the matrices for its kernels, timed alone; the 22 ms that vLLM takes to pause and resume (ours
needs neither); and nothing, the whole swap against the copy.  A swap begins with the pulled bytes
in memory; `taken` adds the copy out of the ring and its checksum, to a swap of an idle engine."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from lib import rounds

# build_model's arguments, answers, tokens of each
SIZES: dict[str, tuple[dict[str, Any], int, int]] = {
    "84k": ({"hidden": 64, "layers": 2, "heads": 2}, 512, 48),
    "136 MB": ({"hidden": 512, "layers": 10, "heads": 8, "intermediate": 1536}, 64, 16),
}
SLOTS = 64
GROUP = 8
CONTEXT = 64
PAUSE_MS = 22.0  # of vLLM's own pause and resume, 20 of them a fixed sleep


class Buffer:
    """Stands at the other end of the generator's socket: grants tickets on demand, acknowledges,
    ends.  Messages are really encoded.
    """

    address = "none"

    def __init__(self, task: Any, tokens: int) -> None:
        import msgspec

        from asyncrl.contract import messages as m

        self.m = m
        self.task = task
        self.tokens = tokens
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(m.FromBuffer).decode
        self.inbox: deque[bytes] = deque()
        self.granted = self.total = self.got = self.samples = self.session = self.sequence = 0

    def count_tokens(self, ticket: int) -> int:
        return self.tokens

    def want(self, answers: int) -> None:
        self.total = self.total + answers // GROUP
        self.got = 0
        self.samples = answers

    def send(self, message: Any) -> None:
        m = self.m
        self.encode(message)
        if isinstance(message, m.TicketRequest):
            n = min(self.total - self.granted, -(-message.samples // GROUP))
            label = m.Label(1, 1)
            tickets = [
                m.Ticket(
                    t,
                    t + 1,
                    "train",
                    self.task.prompt("train", t % 64, 0),
                    list(range(GROUP)),
                    m.SamplingSettings(temperature=1.0, max_new_tokens=self.count_tokens(t)),
                    label,
                    None,
                    7,
                )
                for t in range(self.granted, self.granted + n)
            ]
            self.granted += n
            self.session = message.session
            self.sequence = message.sequence
            self.inbox.append(
                self.encode(m.TicketGrant(message.session, message.sequence, tickets, None))
            )
        elif isinstance(message, m.Delivery):
            assert all(
                s.length == self.count_tokens(s.ticket) and not s.failed for s in message.samples
            )
            self.got += len(message.samples)
            self.inbox.append(
                self.encode(
                    m.DeliveryAcks(
                        message.session,
                        [(s.ticket, s.sample, s.attempt, "accepted") for s in message.samples],
                        1 << 23,
                        None,
                    )
                )
            )
            if self.got >= self.samples:
                self.inbox.append(
                    self.encode(m.TicketGrant(self.session, self.sequence, [], None, finished=True))
                )

    def recv(self, timeout: float) -> Any:
        return self.decode(self.inbox.popleft()) if self.inbox else None

    def find_moved_buffer(self, silent: float) -> bool:
        return False  # it is always here

    def close(self) -> None:
        pass


class Ours:
    """The generator of `asyncrl generator`, its weights loaded."""

    def __init__(self, path: str, tokens: int) -> None:
        from actors import generator as g
        from actors import turn
        from asyncrl.config import load
        from asyncrl.contract.versions import Label
        from asyncrl.models import policy as models
        from asyncrl.records import rundir

        self.models = models
        self.label = Label
        run_dir = Path(path).with_name(f"run{os.getpid()}")
        sets = [
            f"model.path={path!r}",
            f"generator.slots={SLOTS}",
            f"generator.max_new_tokens={tokens}",
            f"generator.context={CONTEXT}",
            "model.device='cpu'",
            f"runs={str(run_dir.parent)!r}",
        ]
        config = load.load("configs/vllm.toml", sets)
        rundir.prepare(load.dump(config), run_dir)
        turn.collect_stop_tokens = lambda *_: ()  # every answer is of the same length
        self.generator = g.Generator(config, run_dir, 0, g.build_engine(config))
        self.engine: Any = self.generator.engine
        model = models.load_policy(path, "float32", "cpu")
        layout = models.build_manifest(model)
        self.bytes = models.count_flat_bytes(layout)
        self.source = bytearray(self.bytes)
        models.write_flat(model, memoryview(self.source))
        self.weights = models.read_flat(memoryview(self.source), layout)
        self.probe = models.compute_probe_logprobs(model).tobytes()  # as the learner publishes it
        self.path = path
        self.layout = layout
        self.version = 0
        self.swap()
        self.generator.loaded = g.LoadedWeights(Label(1, 1), "d")
        self.socket = Buffer(self.generator.turn.task, tokens)
        self.generator.socket = self.socket  # type: ignore[assignment]

    def generate(self, answers: int) -> int:
        self.socket.want(answers)
        self.generator.ending = self.generator.over = False
        self.generator.loop()
        assert self.socket.got == answers
        return answers

    def swap(self) -> None:
        """Load, and the probe's pass."""
        self.version += 1
        self.engine.load(self.weights, self.label(1, self.version), "d", self.probe)
        while self.engine.expected is not None:
            self.engine.step(1)

    def pieces(self) -> dict[str, Any]:
        """Callables, each a piece of a swap, or a plain copy of as many bytes into memory that was
        touched before.
        """
        import numpy as np
        import torch

        from actors import engine_vllm
        from actors.engine import CompletionRequest
        from asyncrl.transport import ring as weight_ring

        into = np.zeros(self.bytes, np.uint8)
        source = np.frombuffer(self.source, np.uint8)
        worker = self.engine.llm.model_executor.driver_worker.worker
        assert not isinstance(worker.asyncrl_direct, str), worker.asyncrl_direct
        reference = engine_vllm.ReferenceWeights(self.path, "float32")
        where = Path("/dev/shm") / f"asyncrl-bench-{os.getpid()}"
        ring = weight_ring.WeightRing(where, self.bytes, 2, self.layout, 1)
        digest = ring.write(
            self.label(1, 0), lambda buffer: buffer.__setitem__(slice(None), bytes(self.source))
        )
        reader = weight_ring.RingReader(where, "bench")
        shutil.rmtree(where)

        def taken() -> None:
            assert reader.read(self.label(1, 0), digest, memoryview(self.source))
            self.swap()

        def reload() -> None:
            worker.model_runner.reload_weights(weights_iterator=iter(self.weights.items()))
            engine_vllm.repack(worker.model_runner.get_model())

        direct = worker.asyncrl_direct
        packed = [
            p
            for p in direct.parts
            if p.product
            and not p.layer.weight.numel()
            and sum(self.weights[n].numel() for n in p.names) >= engine_vllm.PLAIN
        ]

        def pack() -> None:
            for p in packed:
                p.layer.cpu_linear, p.layer.weight = (
                    None,
                    torch.nn.Parameter(direct.stack(self.weights, p), requires_grad=False),
                )
                engine_vllm.pack(p.layer, remove_weight=True)

        def step() -> None:
            if not self.engine.active:  # in the round that is not timed
                prompt = np.arange(3, 11, dtype=np.int32)
                self.engine.add(
                    [
                        CompletionRequest((t, 0, 1), prompt, t, CONTEXT - 8, 1.0, 1.0, 0, (), 7)
                        for t in range(SLOTS)
                    ]
                )
                self.engine.step(1)
            self.engine.step(1)
            assert self.engine.active == SLOTS

        def amid() -> None:
            self.version += 1
            self.engine.load(self.weights, self.label(1, self.version), "d", self.probe)
            step()
            assert self.engine.expected is None

        return {
            "copy": lambda: np.copyto(into, source),
            "swap": self.swap,
            "taken": taken,
            "load": lambda: worker.asyncrl_load(self.weights),
            "reload": reload,
            "reference": lambda: reference.compute_logprobs(self.weights),
            "pack": pack,
            "step": step,
            "amid": amid,
            "end": lambda: self.engine.abort(list(self.engine.count_tokens())),
        }


class Bare:
    """vLLM by itself, as its documentation uses it offline, with the log-probabilities that
    training needs.
    """

    def __init__(self, path: str, tokens: int) -> None:
        from actors import engine_vllm
        from asyncrl.models.tokenizer import encode_prompt, load_tokenizer
        from asyncrl.tasks.synthetic import TASKS

        for name, value in (engine_vllm.SETTINGS | engine_vllm.CPU_SETTINGS).items():
            os.environ.setdefault(name, value)
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            model=path,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=SLOTS,
            kv_cache_memory_bytes=512 << 20,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
        )
        self.how = SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        tokenizer = load_tokenizer(path)
        task = TASKS["sort"]()
        self.prompts = [
            encode_prompt(tokenizer, task.prompt("train", i, 0)).tolist() for i in range(64)
        ]
        self.tokens = tokens

    def generate(self, answers: int) -> int:
        prompts = [{"prompt_token_ids": self.prompts[(i // GROUP) % 64]} for i in range(answers)]
        out = self.llm.generate(prompts, self.how, use_tqdm=False)  # type: ignore[arg-type]
        assert all(
            len(o.outputs[0].token_ids) == self.tokens and o.outputs[0].logprobs for o in out
        )
        return len(out)


def worker(kind: str, path: str, tokens: int) -> None:
    """Serve commands on stdin; every answer is one JSON line on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    made: Any = Ours(path, tokens) if kind == "ours" else Bare(path, tokens)

    def say(x: Any) -> None:
        print(json.dumps(x), file=out, flush=True)

    say({"cpu": time.process_time()})
    pieces = made.pieces() if kind == "ours" else {}
    for line in sys.stdin:
        what, _, n = line.strip().partition("=")
        run = (lambda n=n: made.generate(int(n))) if what == "generate" else pieces[what]
        wall = time.perf_counter()
        cpu = time.process_time()
        run()
        say([time.perf_counter() - wall, time.process_time() - cpu])
    os._exit(0)


class Worker:
    """One of them, in a process of its own."""

    def __init__(self, kind: str, path: Path, tokens: int) -> None:
        began = time.perf_counter()
        argv = [
            sys.executable,
            str(Path(__file__)),
            "--worker",
            kind,
            "--model",
            str(path),
            "--tokens",
            str(tokens),
        ]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=rounds.results_file.ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        self.cpu = self._read()["cpu"]
        self.wall = time.perf_counter() - began

    def _read(self) -> Any:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a worker has ended:\n{self.process.stderr.read()[-3000:]}")
        return json.loads(line)

    def ask(self, what: str) -> tuple[float, float]:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        wall, cpu = self._read()
        return wall, cpu

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def turns(workers: dict[str, Worker], asks: dict[str, tuple[str, str]], n: int) -> rounds.Times:
    """asks: alternative -> (worker, command); once untimed, then n quiet rounds, every other one
    backwards.
    """

    def one_round(number: int) -> dict[str, tuple[float, float]]:
        order = list(asks) if number % 2 else list(reversed(asks))
        return {name: workers[asks[name][0]].ask(asks[name][1]) for name in order}

    one_round(1)
    rows = rounds.quiet(n, one_round)
    return {name: [row[name] for row in rows] for name in asks}


def begun(path: Path) -> dict[str, tuple[float, float]]:
    """Seconds, wall and CPU, until each side can write its first answer."""
    out = {}
    for kind in ("ours", "bare"):
        started = Worker(kind, path, SIZES["84k"][2])
        out[kind] = started.wall, started.cpu
        started.end()
    return out


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument(
        "--parts",
        nargs="+",
        default=["tokens", "swap", "start"],
        choices=["tokens", "swap", "start"],
    )
    p.add_argument("--worker", choices=["ours", "bare"], help="for its own use")
    p.add_argument("--model")
    p.add_argument("--tokens", type=int)
    args = p.parse_args()
    if args.worker:
        return worker(args.worker, args.model, args.tokens)
    from asyncrl.models import policy as models
    from asyncrl.tasks.synthetic import TASKS

    rounds.one_core()
    goals: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "what": "the generator with vLLM inside against vllm.LLM.generate with logprobs, one "
        "core, by turns; [wall, CPU] seconds"
    }
    with tempfile.TemporaryDirectory() as work:
        for size, (shape, answers, tokens) in SIZES.items():
            if args.quick and size != "84k":
                continue
            path = Path(work) / size.replace(" ", "_")
            models.build_model(path, TASKS["sort"]().symbols, **shape)
            workers = {kind: Worker(kind, path, tokens) for kind in ("bare", "ours")}
            if "tokens" in args.parts:
                asks = {kind: (kind, f"generate={answers}") for kind in workers}
                times = turns(workers, asks, 2 if args.quick else args.rounds)
                ratio = statistics.median(
                    o[1] / b[1] for o, b in zip(times["ours"], times["bare"], strict=True)
                )
                each = {
                    k: round(1e6 * rounds.median(times, k, 1) / (answers * tokens), 2)
                    for k in times
                }
                goals.append(
                    rounds.goal(
                        f"{size}: CPU time a token, ours / bare vLLM",
                        ratio,
                        1.05,
                        at_least=False,
                        us_a_token=each,
                    )
                )
                result[f"tokens {size}"] = {
                    "answers": answers,
                    "tokens_each": tokens,
                    "times": times,
                }
            if "swap" in args.parts and size != "84k":
                times = turns(
                    workers,
                    {k: ("ours", k) for k in ("step", "pack", "copy", "amid")},
                    2 * args.rounds,
                )
                workers["ours"].ask("end")
                times |= turns(
                    workers, {k: ("ours", k) for k in ("load", "swap", "taken")}, args.rounds
                )
                # what a swap was made of before
                times |= turns(
                    workers, {k: ("ours", k) for k in ("reload", "reference")}, args.rounds
                )
                ms = {k: round(1e3 * rounds.median(times, k, 1), 1) for k in times}
                seconds = [[t[1] for t in times[k]] for k in ("amid", "step", "copy", "pack")]
                for what in ("swap - vLLM's packing", f"swap - {PAUSE_MS:g} ms", "swap"):
                    own = [
                        p if "packing" in what else PAUSE_MS / 1e3 if "ms" in what else 0.0
                        for p in seconds[3]
                    ]
                    ratio = statistics.median(
                        (a - s - o) / c for a, s, c, o in zip(*seconds[:3], own, strict=True)
                    )
                    goals.append(
                        rounds.goal(
                            f"{size}: ({what}) / copy, CPU", ratio, 2.0, at_least=False, ms=ms
                        )
                    )
                result["swap"] = {"pause_ms": PAUSE_MS, "times": times}
            for w in workers.values():
                w.end()
        if "start" in args.parts:
            path = Path(work) / "84k"
            rows = rounds.quiet(1 if args.quick else args.rounds, lambda _: begun(path))
            starts = {kind: [row[kind] for row in rows] for kind in ("ours", "bare")}
            cpu = {k: round(rounds.median(starts, k, 1), 2) for k in starts}
            goals.append(
                rounds.goal(
                    "84k: seconds from nothing to ready, wall",
                    rounds.median(starts, "ours"),
                    12.0,
                    at_least=False,
                    cpu_s=cpu,
                )
            )
            result["start"] = starts
    rounds.report(
        "_".join(["vllm_engine", *(args.parts if len(args.parts) < 3 else [])]), goals, result, args
    )


if __name__ == "__main__":
    main()
