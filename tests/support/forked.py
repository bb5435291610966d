"""Real runs without their start-up: a program that has everything imported and forks buffer,
learner and generators for each run it is told of.

    python tests/support/forked.py       one JSON object a line in, one out

    {"config": TOML, "run_dir": DIR, "die": {"generator-0": 40}, "slow": {"generator-1": 0.02},
    "stop": 3}

The parts run their own `main` in processes of their own, talk over their own sockets and shared
memory, and die by SIGKILL: `die` names the engine step (generator), batch (learner) or delivery
(buffer) at which a process kills itself, in the middle of its work; the next life is started at
once, as the supervisor does.  `slow`: seconds that every engine step takes longer.  `stop`: kill
everything, for good, once that many batches are in the recording; the learner begins no more than
two beyond them.  A run directory that is there already is gone on with."""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 3600.0  # of what hangs: no bound on speed


def part(name: str, run_dir: Path, die: int, slow: float, stop: int) -> None:
    """One part's life.  die: SIGKILL itself at this engine step or batch (0: never); stop: of the
    recording (0: never)."""
    from asyncrl.config import load as config_load
    from asyncrl.contract.errors import NothingToDo

    config = config_load.load(run_dir / "config.toml")
    if name == "buffer":
        from buffer import service

        take = dying(service.BufferService.on_Delivery, die, 0.0)
        service.BufferService.on_Delivery = take
        return service.main(config, run_dir)
    if name == "learner":
        from learner import loop, step

        train = dying(step.LearnerCore.train, die, 0.0)
        step.LearnerCore.train = standing(train, stop + 2) if stop else train
        return loop.main(config, run_dir)
    from actors import generator
    from actors.engine_embedded import EmbeddedEngine
    from actors.engine_generic import GenericEngine

    for engine in (EmbeddedEngine, GenericEngine):
        engine.step = dying(engine.step, die, slow)
    # one that started when the others had made all steps is no loss, as its supervisor has it
    with contextlib.suppress(NothingToDo):
        generator.main(config, run_dir, int(name.removeprefix("generator-")))


def dying(call: Callable[..., Any], die: int, slow: float) -> Callable[..., Any]:
    """`call`, `slow` seconds slower, and SIGKILL after its `die`-th time: its result is lost."""
    made = [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        time.sleep(slow)
        made[0] += 1
        if made[0] == die:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    return wrapped


def standing(call: Callable[..., Any], most: int) -> Callable[..., Any]:
    """`call`, which comes back so often less one, and then stands still."""
    made = [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        while made[0] == most:
            time.sleep(1.0)
        return call(*args, **kwargs)

    return wrapped


def spawn(name: str, run_dir: Path, die: int, slow: float, stop: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(run_dir / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        part(name, run_dir, die, slow, stop)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def recorded(run_dir: Path) -> int:
    from asyncrl.records import stream

    return stream.read(run_dir).end if stream.list_weights(run_dir) else 0


def run(order: dict[str, Any]) -> dict[str, Any]:
    """One run to its end: {"deaths", "digest", "ledger", "attempts"}; raises if a part fails."""
    from asyncrl.config import load as config_load
    from asyncrl.records import rundir

    run_dir = Path(order["run_dir"])
    (run_dir / "orders").mkdir(parents=True, exist_ok=True)
    source = run_dir / "orders" / "config.toml"
    source.write_text(order["config"])
    config = config_load.load(source)
    if not (run_dir / "config.toml").exists():
        rundir.prepare(config_load.dump(config), run_dir)
    stop = order.get("stop", 0)
    names = ["buffer", "learner", *(f"generator-{i}" for i in range(config.generators))]
    die, slow, deaths = dict(order.get("die", {})), order.get("slow", {}), []
    live = {spawn(n, run_dir, die.pop(n, 0), slow.get(n, 0.0), stop): n for n in names}
    began, late = time.monotonic(), 0.0
    try:
        while live:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                name, code = live.pop(pid), os.waitstatus_to_exitcode(status)
                if code == -signal.SIGKILL:
                    deaths.append(name)
                    again = spawn(name, run_dir, die.pop(name, 0), slow.get(name, 0.0), stop)
                    live[again] = name
                elif code:
                    raise RuntimeError(
                        f"{name} ended with {code}: "
                        f"{(run_dir / 'logs' / f'{name}.log').read_text()[-2000:]}"
                    )
                late = late or (time.monotonic() if name == "learner" else 0.0)
                continue
            if stop and recorded(run_dir) >= stop:
                return {"deaths": deaths}
            if time.monotonic() - began > DEADLINE_S or (
                late and time.monotonic() - late > DEADLINE_S
            ):
                raise RuntimeError(f"{sorted(live.values())} did not end")
            time.sleep(0.1 if stop else 0.005)  # a recording is read from its beginning
    finally:
        for pid in live:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        rundir.clean(run_dir)
    left = json.loads((run_dir / "buffer_summary.json").read_text())
    return {
        "deaths": deaths,
        "digest": (run_dir / "weights_digest").read_text(),
        "ledger": left["ledger"],
        "lag": left["lag"],
        "ids": left["trained_ids"],
    }


def warm(model: str) -> None:
    """Import what the parts import, so that forks start at once.  No backward pass here: autograd's
    threads do not survive a fork."""
    import torch

    from asyncrl.models.policy import load_policy
    from asyncrl.models.tokenizer import load_tokenizer
    from asyncrl.records import metrics

    for name in ("actors.generator", "buffer.service", "learner.loop"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    load_policy(model)
    load_tokenizer(model)
    metrics.import_protocol()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warm(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
