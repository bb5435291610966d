"""Change the number of a live run's generators from another process, through two small files.

```
RUN/scale.asked   {"id", "generators"}           written by `asyncrl scale`
RUN/scale.done    {"id", "generators", "error"}  written by the supervisor, which carries it out
```

Both are written by rename.  A newer request replaces an older one.  `asyncrl scale` waits for the
reply with its own id."""

import time
import uuid
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.records import atomic_write, jsonl, process_log, rundir

POLL_S = 0.1
MOST = 4096  # most generators that a buffer accepts by name (buffer/sessions.py)


class ScaleRequest(msgspec.Struct):
    id: str
    generators: Annotated[int, Meta(ge=1, le=MOST)]


def read_request(run_dir: Path) -> ScaleRequest | None:
    """Read the newest request; None if it is missing or damaged."""
    try:
        return msgspec.json.decode((run_dir / "scale.asked").read_bytes(), type=ScaleRequest)
    except (OSError, msgspec.MsgspecError):
        return None


def forget(run_dir: Path) -> None:
    """Remove requests and replies of an earlier supervisor."""
    for name in ("scale.asked", "scale.done"):
        (run_dir / name).unlink(missing_ok=True)


def request_scale(run_dir: Path, generators: int, patience_s: float) -> int:
    """Request `generators` from the run's supervisor, wait for its reply and return the new number.

    Raises ConfigError without a supervisor, AsyncrlError if it refuses, and PeerUnreachable if it
    does not reply within `patience_s` seconds."""
    rundir.require_run(run_dir)
    if generators > MOST:
        raise ConfigError(f"{generators} generators: at most {MOST} are allowed")
    request = ScaleRequest(uuid.uuid4().hex, generators)
    deadline = time.monotonic() + patience_s
    path = run_dir / "scale.asked"
    path.unlink(missing_ok=True)  # this request replaces an older one, answered or not
    while time.monotonic() < deadline:
        if not process_log.is_alive(run_dir, "supervisor"):
            raise ConfigError(
                f"{run_dir}: no `asyncrl run` is active there; start one with --set "
                f"generators={generators}, or start more generators by hand"
            )
        if not path.exists():  # not written yet, or removed by a supervisor that just started
            temporary = run_dir / f"scale.{request.id}.part"
            with atomic_write.replace(path, part=temporary):
                temporary.write_bytes(msgspec.json.encode(request))
        reply = jsonl.read_object(run_dir / "scale.done")
        if reply.get("id") == request.id:
            if reply["error"]:
                raise AsyncrlError(f"{run_dir}: {reply['error']}")
            return int(reply["generators"])
        time.sleep(POLL_S)
    raise PeerUnreachable(
        f"the supervisor of {run_dir} has not answered within {patience_s:g} s (--wait): check "
        "whether it is suspended or still starting"
    )
