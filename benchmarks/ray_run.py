"""Run the demo on a Ray cluster to its final accuracy, and lose one host during the run.

    OMP_NUM_THREADS=1 python benchmarks/ray_run.py [--quick] [--json] [--lose STEP] [--seed N]

A cluster of three raylets on this machine (ray.cluster_utils): buffer and learner on one, a
generator on each of the others.  After STEP batches a raylet that has a generator is killed, and
another joins.  Proves: the run ends by itself with exit code 0; held-out accuracy is at least
0.80 (n = 1024, temperature 1, final weights); every batch was trained on, in order, no ticket in
two of them, no token past the limit; the ledger sums.  --quick: 12 steps, which proves nothing of
accuracy."""

from __future__ import annotations

import os
import secrets

# Ray reads these when it is imported
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib import rounds
from lib.results_file import ROOT

from asyncrl.config import load

QUICK, GOAL = 12, 0.80
OBJECTS = 80 << 20  # bytes of each raylet's object store, which nothing of a run goes through
CONFIG = ROOT / "configs" / "demo.toml"


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
    ]


def wrong(run_dir: Path, steps: int, groups: int, limit: float) -> list[str]:
    """Everything that should hold of the run's files and does not.  A batch whose learner or buffer
    died may stand there twice: its last row counts.
    """
    by_batch = {row["batch"]: row for row in lines(run_dir / "trained.jsonl")}
    out = []
    if list(by_batch) != list(range(steps)):
        out.append(f"trained batches: {list(by_batch)}")
    tickets = [
        ticket
        for row in by_batch.values()
        for begin, end in row["tickets"]
        for ticket in range(begin, end + 1)
    ]
    if len(tickets) != len(set(tickets)) or len(tickets) != steps * groups:
        out.append(f"{len(tickets)} tickets trained, {len(set(tickets))} different")
    lag = max((int(lag) for row in by_batch.values() for lag in row["lags"]), default=0)
    if lag > limit:
        out.append(f"lag {lag}, limit {limit}")
    ledger = json.loads((run_dir / "summary.json").read_text())["ledger"]
    if sum(ledger.values()) != 2 * ledger["generated"] or not ledger["generated"]:
        out.append(f"the ledger does not sum: {ledger}")
    return out


class Lost:
    """A cluster that loses a host with a generator when the run has made so many batches."""

    def __init__(self, cluster: Any, run_dir: Path, after: int) -> None:
        self.cluster, self.run_dir, self.after = cluster, run_dir, after
        self.name = ""
        self.at = -1

    def look(self) -> None:
        made = len(lines(self.run_dir / "trained.jsonl"))
        if self.name or made < self.after:
            return
        nodes = json.loads((self.run_dir / "hosts.json").read_text())["nodes"]
        # neither the head nor the learner's
        workers = {node.node_id: node for node in self.cluster.worker_nodes}
        number = next(n for n in (0, 1) if nodes[str(n + 1)] in workers)
        self.cluster.remove_node(workers[nodes[str(number + 1)]], allow_graceful=False)
        self.name, self.at = f"generator-{number}", made
        self.cluster.add_node(num_cpus=1, object_store_memory=OBJECTS)
        print(f"the host of {self.name} was killed after batch {made - 1}", file=sys.stderr)


def measure(work: Path, steps: int, lose: int, seed: int) -> dict[str, Any]:
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": OBJECTS}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECTS)
        sets = [
            f"seed={seed}",
            f"learner.steps={steps}",
            f"model.path={str(work / 'model')!r}",
            f"runs={str(work)!r}",
            "name='r'",
            "placement.generator.count=2",
            "placement.strategy='STRICT_SPREAD'",
        ]
        config = load.load(CONFIG, sets)
        argv = [sys.executable, "-m", "asyncrl.cli", "run", str(CONFIG), "--on", "ray", "--json"]
        argv += [word for each in sets for word in ("--set", each)]
        log = work / "log"
        environment = os.environ | {"RAY_ADDRESS": cluster.address}
        run = subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log.open("w"), text=True
        )
        lost = Lost(cluster, work / "r", lose)
        try:
            while run.poll() is None:
                lost.look()
                time.sleep(0.2)
            out = run.stdout.read() if run.stdout is not None else ""
        finally:
            run.kill()
            run.wait()
    finally:
        cluster.shutdown()
    if run.returncode or not lost.name:
        sys.exit(f"ended with {run.returncode}, lost {lost.name!r}:\n{log.read_text()[-4000:]}")
    limit = config.staleness.max_lag
    assert isinstance(limit, int | float), "a constant limit"
    summary = json.loads(out.strip().splitlines()[-1])
    kept = ("heldout_start", "heldout_end", "wall_s", "steps", "lag", "ledger")
    return {
        "run": {name: summary[name] for name in kept},
        "lost": {"name": lost.name, "batches_before": lost.at},
        "wrong": wrong(work / "r", steps, config.learner.groups, limit),
    }


def main() -> None:
    parser = rounds.parser(__doc__)
    parser.add_argument("--lose", type=int, default=0, help="batches before it; a third of them")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    steps = QUICK if args.quick else load.load(CONFIG).learner.steps
    with tempfile.TemporaryDirectory() as work:
        found = measure(Path(work), steps, args.lose or steps // 3, args.seed)
    goals = [rounds.goal("what does not hold", len(found["wrong"]), 0, at_least=False)]
    if not args.quick:
        goals.append(
            rounds.goal("held-out accuracy", found["run"]["heldout_end"], GOAL, at_least=True)
        )
    print(json.dumps(found["run"], indent=1), file=sys.stderr)
    rounds.report("ray_run", goals, found, args)


if __name__ == "__main__":
    main()
