"""On PYTHONPATH, generators of a run stand still in the middle of their answers until the version
that is on its way is announced.

A run's only generator then changes weights in mid-answer whatever the speed of the machine: it
holds once every answer of the learner's next batch is written (tickets are served in order), so
that the batch will be trained and its version announced.

With ENVIRONMENTS_LATE, a path, it is another thing: the clock by which a gateway ends the steps of
its environments jumps when that file is there.  The product knows nothing of either."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LATE = os.environ.get("ENVIRONMENTS_LATE", "")
MODULE = "actors.gateway.drive" if LATE else "actors.generator"
JUMP_S = 1e6


def late(drive: Any) -> None:
    def monotonic() -> float:
        return time.monotonic() + JUMP_S * Path(LATE).exists()

    drive.time = SimpleNamespace(monotonic=monotonic)


def hold(generator: type[Any]) -> None:
    plain = generator.decode

    def decode(self: Any) -> None:
        said, groups = self.schedule.announced, self.config.learner.groups
        held = [h.ticket.ticket for h in self.schedule.held.values() if h.ticket.kind == "train"]
        written = said is not None and bool(held) and min(held) >= groups * (said.label.number + 1)
        # asked: announcements come with answers only
        if written and self.asked and any(self.engine.progress().values()):
            time.sleep(0.002)
            return
        plain(self)

    generator.decode = decode


class Finder(importlib.abc.MetaPathFinder):
    """Finds MODULE by the other finders, and patches it once it is there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            if LATE:
                late(module)
            else:
                hold(module.Generator)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
