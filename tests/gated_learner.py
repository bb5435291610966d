"""A command of `asyncrl` whose learner stands before a batch until a file allows it: how far a run
has gone is the test's to say, whatever the speed of the machine.

    python tests/gated_learner.py FILE learner configs/demo.toml ...

FILE holds a number: batches below it may be trained."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from asyncrl.cli import main
from learner.step import LearnerCore


def gate(allowed: Path) -> None:
    plain = LearnerCore.train

    def train(self: LearnerCore, *args: Any, **more: Any) -> Any:
        while self.state.number >= int(allowed.read_text()):
            time.sleep(0.01)
        return plain(self, *args, **more)

    LearnerCore.train = train  # type: ignore[method-assign]


def allow(allowed: Path, batches: int) -> None:
    """Whole, for whoever reads it meanwhile."""
    part = allowed.with_suffix(".part")
    part.write_text(str(batches))
    part.rename(allowed)


if __name__ == "__main__":
    gate(Path(sys.argv.pop(1)))
    main()
