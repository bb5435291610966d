"""On PYTHONPATH, the learner of a run stands still before batch HOLD_AT while the file HOLD_GATE is
there: a test that stands still itself does not find its run ended.

The product knows nothing of this."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from typing import Any

MODULE = "learner.step"


def hold(core: type[Any]) -> None:
    plain = core.train

    def train(self: Any, *words: Any, **more: Any) -> Any:
        while self.state.number >= int(os.environ["HOLD_AT"]):
            if not os.path.exists(os.environ["HOLD_GATE"]):
                break
            time.sleep(0.01)
        return plain(self, *words, **more)

    core.train = train


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
            hold(module.LearnerCore)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
