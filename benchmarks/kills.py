"""Kill generators and learner of one real run at random instants, and check every sample.

    python benchmarks/kills.py [--quick] [--json] [--kills N] [--seed S]

Proves: the run ends without an error; every planned sample was trained on once and in order (the
digest of each batch's sample ids is recomputed from the plan: tickets in order, none missing,
none twice); no token past the limit; the ledger sums.

The instants, by turns (KINDS), each with its evidence: `checkpoint`, its half-written directory
is on disk when the signal is sent; `copy`, the dead generator's pin on a weight slot is left;
`publish`, the dead learner's slot is left odd, in mid-write; `step`, the learner held its batch
and waited for nothing; `start`, the process had begun moments ago; `work`, any time.  An instant
that does not come in time is counted as `work`.  Half-delivered groups are counted afterwards:
trained groups whose samples come from more than one attempt.  --quick: four kills.

    python benchmarks/kills.py --tinker [--quick] [--json] [--kills N] [--seed S] [--seconds T]

Kills a Tinker server, its training and its sampling process at random instants under two clients.
Proves, from the files and what the clients were told: every step and every sampled sequence is
there once, with the weights that sampled it and the right lag; the ledger sums; the final weights
are those of two clients on a server that nothing killed.

    python benchmarks/kills.py --servers played|real [--quick] [--json] [--kills N] [--seed S]

Kills processes of two vLLM servers that a generator's engine has started, while weights change.
Proves: every request is answered once, with its own tokens, and each token's log-probability is
that of the version that it is said to be of.  Played servers start at once; of real ones any
process is killed, and a start takes most of a minute."""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from lib import results_file

from asyncrl.config import load
from asyncrl.records import rundir
from asyncrl.supervise import live

GROUPS = 8
SIZE = 8
KINDS = [
    ("learner", "checkpoint"),
    ("generator", "copy"),
    ("generator", "start"),
    ("learner", "step"),
    ("learner", "start"),
    ("generator", "work"),
    ("learner", "publish"),
    ("generator", "work"),
]
# a killed process is noticed at once; on a machine that stalls for a minute no other one must be
PATIENT = ("wires.connect_s=1800.0", "watchdog.floor_s=1800.0", "watchdog.startup_s=3600.0")
AWAIT_S = 20.0
AWAIT_STEPS = 5  # a run that goes on meanwhile is not to end before the last kill


def processes(parent: int, parts: tuple[str, ...] = ("generator", "learner")) -> dict[str, int]:
    """Of `parts` -> pid, of the children of a supervisor, read from /proc."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                ppid = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except (OSError, IndexError):
                continue
            if ppid == parent:
                found.update({part: int(entry.name) for part in parts if part in words})
    return found


def committed(run_dir: Path) -> int:
    """Rows of trained.jsonl, as another program counts them: batches of the surviving history."""
    path = run_dir / "trained.jsonl"
    top = 0
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}"):
            row = json.loads(line)
            top = row["from"] if "from" in row else row["batch"] + 1
    return int(top)


def status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def reached_instant(kind: str, run_dir: Path) -> bool:
    """Is the run in the middle of what `kind` names?  Read from outside, as files and the buffer's
    status show it.
    """
    if kind == "checkpoint":
        return bool(list(run_dir.glob("checkpoints/epoch_*/.number_*.part")))
    if kind == "step":
        status = live.request_status(
            rundir.get_buffer_address(load.load(run_dir / "config.toml"), run_dir), "", 0.5
        )
        return (
            status is not None
            and "learner" in status.peers
            and all(who != "learner" for who, *_ in status.waits)
        )
    name = "pin_generator-0" if kind == "copy" else "slot_*"
    rings = sorted(
        rundir.get_shm_dir(run_dir).glob("epoch_*"),
        key=lambda d: int(d.name.removeprefix("epoch_")),
    )
    for path in rings[-1].glob(name) if rings else ():
        try:
            with path.open("rb") as f:
                # a pin's slot, -1 when none; a slot's sequence, odd while it is written
                (value,) = struct.unpack("<q", f.read(8))
        except (OSError, struct.error):
            continue
        if (kind == "copy" and value >= 0) or (kind == "publish" and value & 1):
            return True
    return False


def run(
    work: Path,
    kills: int,
    seed: int,
    *,
    model: str = "",
    config: str = "configs/demo.toml",
    between: tuple[float, float] = (0.1, 4.0),
) -> dict[str, Any]:
    """One run with `kills` kills; returns the summary, the kills by kind, and what was found
    wrong.
    """
    r = random.Random(seed)
    run_dir = work / "kills"
    steps = 40 + 14 * kills
    sets = [
        f"runs={str(work)!r}",
        "name='kills'",
        f"model.path={model or str(work / 'model')!r}",
        f"learner.steps={steps}",
        f"learner.groups={GROUPS}",
        f"learner.group_size={SIZE}",
        "learner.checkpoint_every=3",
        "staleness.max_lag=2",
        f"watchdog.restarts={kills + 1}",
        *PATIENT,
        f"seed={seed}",
        "evaluation.every=0",
        "record.samples_every=1",
        "record.samples=0",
        "evaluation.prompts=64",
        "evaluation.final_prompts=64",
        "evaluation.ood_prompts=0",
    ]
    argv = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "run",
        config,
        "--json",
        *[x for s in sets for x in ("--set", s)],
    ]
    errors = (work / "stderr").open("w")
    p = subprocess.Popen(
        argv,
        cwd=results_file.ROOT,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    done: collections.Counter[str] = collections.Counter()

    def patient(seconds: float) -> Iterator[None]:
        """Again and again, as long as that, while the run goes on and has not made many steps."""
        until, most = time.monotonic() + seconds, committed(run_dir) + AWAIT_STEPS
        while p.poll() is None and time.monotonic() < until and committed(run_dir) < most:
            yield

    reached = 0
    dead = 0
    for n in range(kills):
        victim, kind = KINDS[n % len(KINDS)]
        if kind == "start":  # the one that died last, a moment after it comes back
            while processes(p.pid).get(victim, dead) == dead and p.poll() is None:
                time.sleep(0.01)
            for _ in patient(r.uniform(0.0, between[1])):
                time.sleep(0.01)
        else:
            reached = max(reached, committed(run_dir)) + r.randint(1, 4)
            while p.poll() is None and committed(run_dir) < min(reached, steps - 2):
                time.sleep(0.02)
            for _ in patient(r.uniform(*between) if kind == "work" else 0.0):
                time.sleep(0.01)
        while (pid := processes(p.pid).get(victim)) is None and p.poll() is None:
            time.sleep(0.01)  # it is between its death and its start
        came = kind in ("work", "start")
        for _ in patient(0.0 if came else AWAIT_S):
            if came := reached_instant(kind, run_dir):
                break
        if pid is None or p.poll() is not None:
            break
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        dead = pid
        if kind in ("copy", "publish"):  # what it left is the evidence
            while (
                Path(f"/proc/{pid}").exists()
                and processes(p.pid).get(victim) == pid
                and "State:\tZ" not in status_of(pid)
            ):
                time.sleep(0.001)
            came = reached_instant(kind, run_dir)
        done[f"{victim}: {kind if came else 'work'}"] += 1
    out, _ = p.communicate(timeout=7200)
    errors.close()
    if p.returncode:
        return {
            "kills": dict(done),
            "wrong": [f"exit {p.returncode}: {(work / 'stderr').read_text()[-2000:]}"],
        }
    return {
        "kills": dict(done),
        "half_delivered": half_delivered(run_dir),
        "steps": steps,
        "wrong": wrong(run_dir, json.loads(out.strip().splitlines()[-1]), steps),
    }


def half_delivered(run_dir: Path) -> int:
    """Trained groups whose samples come from more than one attempt: a part was delivered before a
    lease ended, the rest after.
    """
    attempts: dict[tuple[int, int], set[int]] = {}
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        attempts.setdefault((row["batch"], row["ticket"]), set()).add(row["attempt"])
    return sum(len(x) > 1 for x in attempts.values())


def wrong(run_dir: Path, s: dict[str, Any], steps: int) -> list[str]:
    """Everything that should hold of the run and does not."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (run_dir / "trained.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows = (
            {n: x for n, x in rows.items() if n < row["from"]}
            if "from" in row
            else rows | {row["batch"]: row}
        )
    out = (
        []
        if set(rows) == set(range(steps))
        else [f"batches {sorted(set(range(steps)) ^ set(rows))} are not trained exactly once"]
    )
    for n, row in rows.items():
        plan = ";".join(
            f"{t}.{i}" for t in range(n * GROUPS, (n + 1) * GROUPS) for i in range(SIZE)
        )
        if row["ids"] != xxhash.xxh3_64_hexdigest(plan.encode()):
            out.append(f"batch {n} is not the planned one")
        if max(map(int, row["lags"])) > s["lag"]["limit"]:
            out.append(f"batch {n} holds lag {max(row['lags'])}, limit {s['lag']['limit']}")
    ledger = s["ledger"]
    if sum(v for k, v in ledger.items() if k != "generated") != ledger["generated"]:
        out.append(f"the ledger does not sum: {ledger}")
    if s["trajectories"] != steps * GROUPS * SIZE:
        out.append(f"{s['trajectories']} trajectories, planned {steps * GROUPS * SIZE}")
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--quick", action="store_true")
    p.add_argument("--json", action="store_true")
    p.add_argument("--kills", type=int, default=24)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tinker", action="store_true", help="kill a Tinker server's processes")
    p.add_argument("--servers", choices=["played", "real"], help="kill vLLM's servers")
    p.add_argument(
        "--seconds", type=float, default=7200.0, help="of kills, with --tinker or --servers at most"
    )
    p.add_argument("--model", default="", help="a warm-started model; absent: built")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as work:
        began = time.monotonic()
        kills = 4 if args.quick else args.kills
        if args.tinker:
            # processes begin with everything imported, so that most of the time is work
            sys.path.append(str(results_file.ROOT / "tests" / "support"))
            import warm_python
            from lib.chaos import tinker

            warm_python.install()
            warm_python.WarmPopen.cold = False
            found = tinker.run(Path(work), kills, args.seed, args.seconds)
        elif args.servers:
            from lib.chaos import vllm_servers

            real = args.servers == "real"
            found = vllm_servers.run(Path(work), kills, args.seed, real=real, seconds=args.seconds)
        else:
            found = run(Path(work), kills, args.seed, model=args.model)
    found |= {"seconds": round(time.monotonic() - began, 1), "met": not found["wrong"]}
    if not args.quick:
        found["file"] = str(
            results_file.write(
                f"{args.servers}_server_kills"
                if args.servers
                else "tinker_kills"
                if args.tinker
                else "kills",
                {"what": "kill -9 at random instants", **found},
            ).name
        )
    print(json.dumps(found) if args.json else "\n".join(f"{k:8} {v}" for k, v in found.items()))
    sys.exit(0 if found["met"] else 1)


if __name__ == "__main__":
    main()
