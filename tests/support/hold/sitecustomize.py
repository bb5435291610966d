"""On PYTHONPATH (`holding.held` puts it there), the processes of a run stand still where a test
wants them to, whatever the speed of the machine.  The product knows nothing of it.

HOLD_ANSWERS    generators stand still in the middle of their answers until the version that is on
                its way is announced.  A run's only generator then changes weights in mid-answer: it
                holds once every answer of the learner's next batch is written (tickets are served
                in order), so that the batch will be trained and its version announced.
HOLD_BATCHES    a file with a number: the learner trains the batches below it.
HOLD_LATE       a file: the clock by which a gateway ends the steps of its environments jumps when
                it is there.
LATE_IMPORTS    a file that gets a line for each module of transformers that a process imports after
                it has begun to receive from the buffer.
PRETEND_GPU     torch has a GPU (pretend_gpu.py)."""

import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

JUMP_S = 1e6


def hold_answers(module: Any) -> None:
    plain = module.Generator.decode

    def decode(self: Any) -> None:
        said, groups = self.schedule.announced, self.config.learner.groups
        held = [h.ticket.ticket for h in self.schedule.held.values() if h.ticket.kind == "train"]
        written = said is not None and bool(held) and min(held) >= groups * (said.label.number + 1)
        # requested: announcements come with answers only
        if written and self.requested_samples and any(self.engine.count_tokens().values()):
            time.sleep(0.002)
            return
        plain(self)

    module.Generator.decode = decode


def hold_batches(module: Any) -> None:
    plain, allowed = module.LearnerCore.train, Path(os.environ["HOLD_BATCHES"])

    def train(self: Any, *args: Any, **more: Any) -> Any:
        while self.state.number >= int(allowed.read_text()):
            time.sleep(0.01)
        return plain(self, *args, **more)

    module.LearnerCore.train = train


def hold_clock(module: Any) -> None:
    late = Path(os.environ["HOLD_LATE"])

    def monotonic() -> float:
        return time.monotonic() + JUMP_S * late.exists()

    module.time = SimpleNamespace(monotonic=monotonic)


class ImportLog(importlib.abc.MetaPathFinder):
    """Writes the names of transformers' modules that are imported from now on."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == "transformers":
            with Path(os.environ["LATE_IMPORTS"]).open("a") as log:
                log.write(f"{name} {sys.argv}\n")


def log_late_imports(module: Any) -> None:
    plain = module.BufferPeer.receive

    def receive(self: Any, timeout: float) -> Any:
        if not any(isinstance(finder, ImportLog) for finder in sys.meta_path):
            sys.meta_path.insert(0, ImportLog())
        return plain(self, timeout)

    module.BufferPeer.receive = receive


def give_gpu(module: Any) -> None:
    from pretend_gpu import pretend_gpu

    module.pretended_gpu = pretend_gpu()  # kept: without a reference it would end
    module.pretended_gpu.__enter__()


HOLDS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "HOLD_ANSWERS": ("actors.generator", hold_answers),
    "HOLD_BATCHES": ("learner.step", hold_batches),
    "HOLD_LATE": ("asyncrl.transport.worker_pool", hold_clock),
    "LATE_IMPORTS": ("asyncrl.transport.sockets", log_late_imports),
    "PRETEND_GPU": ("torch", give_gpu),
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds a module by the other finders, and patches it once it is there."""

    def __init__(self, wanted: str, patch: Callable[[Any], None]) -> None:
        self.wanted, self.patch = wanted, patch

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.wanted:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            self.patch(module)

        spec.loader.exec_module = exec_module
        return spec


for variable, hold in HOLDS.items():
    if variable in os.environ:
        sys.meta_path.insert(0, Finder(*hold))
