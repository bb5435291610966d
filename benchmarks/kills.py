"""kill -9 of generators and learner at random instants of one real run of three processes, and what became of every sample.

    python benchmarks/kills.py [--quick] [--json] [--kills N] [--seed S]

Proves: the run ends well; every planned sample was trained on once and in order (the digest of each batch's sample ids is computed
again here from the plan: tickets in order, none left out, none twice); no token past the limit; the ledger sums.
Among the instants: the middle of a checkpoint (its half-written directory is on disk when the signal is sent), of an optimizer step,
of a delivery, and a start.  --quick: four kills.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results_file
import xxhash

GROUPS, SIZE = 8, 8


def processes(parent: int) -> dict[str, int]:
    """learner, generator -> pid, of the children of a supervisor, read from /proc."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                ppid = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except (OSError, IndexError):
                continue
            if ppid == parent:
                found.update({part: int(entry.name) for part in ("generator", "learner") if part in words})
    return found


def committed(run_dir: Path) -> int:
    """Rows of trained.jsonl, as another program counts them: batches of the surviving history."""
    path, top = run_dir / "trained.jsonl", 0
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}"):
            row = json.loads(line)
            top = row["from"] if "from" in row else row["batch"] + 1
    return int(top)


def run(work: Path, kills: int, seed: int, *, model: str = "", config: str = "configs/demo.toml", between: tuple[float, float] = (0.1, 4.0)) -> dict[str, Any]:
    """One run with `kills` kills; returns the summary, the kills by kind, and what was found wrong."""
    r, run_dir, steps = random.Random(seed), work / "kills", 40 + 14 * kills
    sets = [f"runs={str(work)!r}", "name='kills'", f"model.path={model or str(work / 'model')!r}",
            f"learner.steps={steps}", f"learner.groups={GROUPS}", f"learner.group_size={SIZE}", "learner.checkpoint_every=3", "staleness.max_lag=2",
            f"watchdog.restarts={kills + 1}", f"seed={seed}", "evaluation.every=0", "evaluation.prompts=64", "evaluation.final_prompts=64",
            "evaluation.ood_prompts=0"]  # fmt: skip
    argv = [sys.executable, "-m", "asyncrl.cli", "run", config, "--json", *[x for s in sets for x in ("--set", s)]]
    errors = (work / "stderr").open("w")
    p = subprocess.Popen(argv, cwd=results_file.ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    done: collections.Counter[str] = collections.Counter()
    reached = 0
    for n in range(kills):
        victim, checkpoint = ("learner", "generator")[n % 2], n % 4 == 0
        reached = max(reached, committed(run_dir)) + r.randint(1, 4)
        while p.poll() is None and committed(run_dir) < min(reached, steps - 2):
            time.sleep(0.02)
        if n % 6 != 5:
            time.sleep(r.uniform(*between) if not checkpoint else 0.0)
        kind = "start" if n % 6 == 5 else "work"
        deadline = time.monotonic() + 20
        while checkpoint and p.poll() is None and time.monotonic() < deadline and not list(run_dir.glob("checkpoints/epoch_*/.number_*.part")):
            pass  # the half-written directory is there for some milliseconds only
        if checkpoint and list(run_dir.glob("checkpoints/epoch_*/.number_*.part")):
            kind = "checkpoint"
        while (pid := processes(p.pid).get(victim)) is None and p.poll() is None:
            time.sleep(0.01)  # it is between its death and its start
        if pid is not None and p.poll() is None:
            os.kill(pid, signal.SIGKILL)
            done[f"{victim}: {kind}"] += 1
    out, _ = p.communicate(timeout=600)
    errors.close()
    if p.returncode:
        return {"kills": dict(done), "wrong": [f"exit {p.returncode}: {(work / 'stderr').read_text()[-2000:]}"]}
    return {"kills": dict(done), "steps": steps, "wrong": wrong(run_dir, json.loads(out.strip().splitlines()[-1]), steps)}


def wrong(run_dir: Path, s: dict[str, Any], steps: int) -> list[str]:
    """Everything that should hold of the run and does not."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (run_dir / "trained.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows = {n: x for n, x in rows.items() if n < row["from"]} if "from" in row else rows | {row["batch"]: row}
    out = [] if set(rows) == set(range(steps)) else [f"batches {sorted(set(range(steps)) ^ set(rows))} are not trained exactly once"]
    for n, row in rows.items():
        plan = ";".join(f"{t}.{i}" for t in range(n * GROUPS, (n + 1) * GROUPS) for i in range(SIZE))
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
    p.add_argument("--model", default="", help="a warm-started model; absent: built")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as work:
        began = time.monotonic()
        found = run(Path(work), 4 if args.quick else args.kills, args.seed, model=args.model)
    found |= {"seconds": round(time.monotonic() - began, 1), "met": not found["wrong"]}
    if not args.quick:
        found["file"] = str(results_file.write("kills", {"what": "kill -9 at random instants, one run", **found}).name)
    print(json.dumps(found) if args.json else "\n".join(f"{k:8} {v}" for k, v in found.items()))
    sys.exit(0 if found["met"] else 1)


if __name__ == "__main__":
    main()
