"""Compare the peak memory of learner and generator with arithmetic, for three model sizes.

84k, 2.6M and 135M parameters, in float32 and bfloat16 on a CPU.

    asyncrl model get smollm2 models/smollm2
    OMP_NUM_THREADS=1 python benchmarks/memory_sizes.py models/smollm2 [--quick] [--json]
        [--sizes 84k 2.6M 135M]

Proves: neither holds more at its peak (VmHWM) than MOST times what
benchmarks/lib/memory_arithmetic says, including a bare process.  Each runs alone in a process and
works as in a run: the learner trains two batches of 8 x 8 completions and publishes; the
generator pulls twice and generates in 16 rows.  The learner's ring counts as its memory, as it
does for the system.  Memory does not depend on other load of the machine."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from lib import rounds
from lib.learner_batch import batch, config
from lib.memory_arithmetic import PROGRAM, SHAPES, Micro, generator, learner, ring

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.versions import Label
from asyncrl.models import memory, policy
from asyncrl.records import rundir

MOST = 1.2
SIZES = ("84k", "2.6M", "135M")
DTYPES = ("float32", "bfloat16")
MODELS = {
    "84k": {"hidden": 64, "layers": 2, "heads": 4},
    "2.6M": {"hidden": 256, "layers": 4, "heads": 8},
}
SLOTS, CONTEXT, MICRO, PROMPT = 16, 128, 1024, 40


def settings(path: Path, dtype: str) -> Config:
    return config(
        path,
        model={"path": str(path), "device": "cpu", "dtype": dtype},
        generator={"slots": SLOTS, "context": CONTEXT, "max_new_tokens": 64},
        learner={"steps": 10**6, "lr": 0.0, "micro_batch_tokens": MICRO},
        record={"reference_kl_every": 0, "split_every": 0},
    )


def status(name: str) -> int:
    """Bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def publisher(core: Any, conf: Config, run_dir: Path) -> Any:
    from learner.publisher import Publisher

    rundir.ensure(load.dump(conf), run_dir)
    return Publisher(conf, run_dir, 1, core)


def learns(path: Path, dtype: str, work: Path) -> None:
    from learner.step import LearnerCore

    conf = settings(path, dtype)
    core = LearnerCore(conf, path)
    ring_of = publisher(core, conf, work / "learner")
    b = batch(8, 8, PROMPT, policy.load_text_config(path).vocab_size)
    for number in range(2):
        core.train(msgspec.structs.replace(b, number=number))
        ring_of.publish(number + 1)
    said = {"peak": status("VmHWM"), "shared": status("RssShmem")}
    ring_of.close()
    rundir.clean(work / "learner")
    print(json.dumps(said))


def publishes(path: Path, dtype: str, work: Path) -> None:
    """Two versions for the generator, which stay when this process ends."""
    from learner.backend import TorchBackend

    conf = settings(path, dtype)
    model = policy.load_policy(path, dtype, "cpu")
    core: Any = SimpleNamespace(
        config=conf,
        model=model,
        layout=policy.build_manifest(model),
        backend=TorchBackend(conf, model),
    )
    ring_of = publisher(core, conf, work / "generator")
    digests = [ring_of.publish(number) for number in (1, 2)]
    print(json.dumps({"source": msgspec.to_builtins(ring_of.source), "digests": digests}))


def writes(path: Path, dtype: str, work: Path, source: dict[str, Any]) -> None:
    from actors.engine import CompletionRequest
    from actors.engine_embedded import make_engine
    from actors.generator import WeightsReceiver
    from asyncrl.contract.messages import WeightsSource

    conf = settings(path, dtype)
    engine = make_engine(conf)
    receiver = WeightsReceiver(conf, "generator-0")
    b = batch(8, 8, PROMPT, policy.load_text_config(path).vocab_size)
    place = msgspec.convert(source["source"], WeightsSource)
    for number, digest in enumerate(source["digests"], 1):
        pulled = receiver.pull(place, Label(1, number), digest)
        assert pulled is not None
        engine.load(pulled.tensors, Label(1, number), digest)
        for at, sample in enumerate(b.samples[: 2 * SLOTS]):
            ids = torch.frombuffer(bytearray(sample.prompt_tokens), dtype=torch.int32).numpy()
            engine.add(
                [CompletionRequest((at // 8, at, number), ids, at // 8, 24, 1.0, 1.0, 0, (), 7)]
            )
        while engine.active:
            engine.step()
    receiver.close()
    print(json.dumps({"peak": status("VmHWM"), "shared": status("RssShmem")}))


def child(who: str, path: Path, dtype: str, work: Path, *more: str) -> dict[str, Any]:
    argv = [sys.executable, __file__, "--child", who, str(path), dtype, str(work), *more]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{who} of {path} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def expected(name: str, who: str, dtype: str) -> dict[str, int]:
    """The parts by arithmetic; shared memory counts for the process that touches it."""
    shape = SHAPES[name]
    if who == "learner":
        # MICRO tokens of that batch: two thirds of its answers
        parts = learner(shape, dtype, Micro(5, PROMPT, 36, 24, 56))
        return parts | {"ring": ring(shape, dtype), "program": PROGRAM}
    pages = ring(shape, dtype) // 2  # of the two versions that were read
    return generator(shape, dtype, SLOTS, CONTEXT) | {"ring": pages, "program": PROGRAM}


def measure(name: str, path: Path, dtype: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as tmp:
        work = Path(tmp)
        found = {"learner": child("learner", path, dtype, work)}
        source = child("publisher", path, dtype, work)
        try:
            found["generator"] = child("generator", path, dtype, work, json.dumps(source))
        finally:
            rundir.clean(work / "generator")
    goals = []
    for who, said in found.items():
        parts = expected(name, who, dtype)
        said |= {"arithmetic": sum(parts.values()), "parts": parts}
        goals.append(
            rounds.goal(
                f"{name}, {dtype}: {who}'s peak / arithmetic",
                said["peak"] / said["arithmetic"],
                MOST,
                at_least=False,
                mib=round(said["peak"] / 2**20),
            )
        )
        print(f"{name}, {dtype}: {who} {said['peak'] >> 20} MiB", file=sys.stderr)
    return goals, found


def main() -> None:
    p: argparse.ArgumentParser = rounds.parser(__doc__)
    p.add_argument("model", type=Path, nargs="?", help="the directory of the one with 135M")
    p.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    p.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    p.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = p.parse_args()
    torch.set_num_threads(1)
    if args.child:
        memory.keep_freed()
        who, path, dtype, work, *more = args.child
        if who == "generator":
            return writes(Path(path), dtype, Path(work), json.loads(more[0]))
        return {"learner": learns, "publisher": publishes}[who](Path(path), dtype, Path(work))
    sizes = args.sizes[:1] if args.quick else args.sizes
    if "135M" in sizes and not args.model:
        p.error("name the model's directory, or leave 135M out of --sizes")
    goals = []
    result: dict[str, Any] = {"what": "peak memory of a learner and a generator, VmHWM"}
    with tempfile.TemporaryDirectory() as tmp:
        for name in sizes:
            path = args.model.resolve() if name == "135M" else Path(tmp) / name
            if name in MODELS:
                shape: dict[str, Any] = MODELS[name]
                policy.build_model(path, "0123456789abcdefghij", **shape)
            for dtype in args.dtypes[:1] if args.quick else args.dtypes:
                found, result[f"{name}, {dtype}"] = measure(name, path, dtype)
                goals += found
    extra = args.sizes if len(args.sizes) < len(SIZES) else []
    extra = extra + (args.dtypes if len(args.dtypes) < len(DTYPES) else [])
    rounds.report("_".join(["memory_sizes", *extra]), goals, result, args)


if __name__ == "__main__":
    main()
