"""The number of a live run's generators, asked for from another process through two small files.

```
RUN/scale.asked   {"id", "generators"}           written whole by `asyncrl scale`
RUN/scale.done    {"id", "generators", "error"}  written whole by the supervisor, which alone acts
```

A newer request takes an older one's place.  Who asks waits for the answer with its own id."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.records import atomic_write, process_log

POLL_S = 0.1
MOST = 4096  # generators; names of them that a buffer knows (buffer/sessions.py)


class ScaleRequest(NamedTuple):
    id: str
    generators: int


def read_request(run_dir: Path) -> ScaleRequest | None:
    """The newest request; None when there is none that can be read."""
    try:
        raw = json.loads((run_dir / "scale.asked").read_text(encoding="utf-8"))
        found = ScaleRequest(str(raw["id"]), int(raw["generators"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if 1 <= found.generators <= MOST else None


def answer(run_dir: Path, request: ScaleRequest, generators: int, error: str = "") -> None:
    """Say what became of it.  A directory that cannot be written leaves the asker waiting, no
    more.
    """
    said = {"id": request.id, "generators": generators, "error": error}
    try:
        atomic_write.write(run_dir / "scale.done", json.dumps(said))
    except OSError:
        pass


def forget(run_dir: Path) -> None:
    """What was asked of a supervisor before this one."""
    for name in ("scale.asked", "scale.done"):
        (run_dir / name).unlink(missing_ok=True)


def ask(run_dir: Path, generators: int, patience_s: float) -> int:
    """Ask the run's supervisor, and wait for its answer; returns the number it keeps to.

    Raises ConfigError where no supervisor is, AsyncrlError for what it refuses, PeerUnreachable."""
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"{run_dir}: no run directory (it has no config.toml)")
    if generators > MOST:
        raise ConfigError(f"{generators} generators: {MOST} at most")
    request = ScaleRequest(uuid.uuid4().hex, generators)
    until = time.monotonic() + patience_s
    path = run_dir / "scale.asked"
    path.unlink(missing_ok=True)  # an older request, answered or not: this one is newer
    while time.monotonic() < until:
        if not process_log.is_alive(run_dir, "supervisor"):
            raise ConfigError(
                f"{run_dir}: no `asyncrl run` is going on there; start one with --set "
                f"generators={generators}, or start further generators by hand"
            )
        if not path.exists():  # or taken away by a supervisor that has only begun
            part = run_dir / f"scale.{request.id}.part"
            with atomic_write.replacing(path, part=part):
                part.write_text(json.dumps(request._asdict()), encoding="utf-8")
        try:
            said = json.loads((run_dir / "scale.done").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            said = {}
        if said.get("id") == request.id:
            if said["error"]:
                raise AsyncrlError(f"{run_dir}: {said['error']}")
            return int(said["generators"])
        time.sleep(POLL_S)
    raise PeerUnreachable(
        f"the supervisor of {run_dir} has not answered within {patience_s:g} s (--wait): is it "
        "stopped, or still starting?"
    )
