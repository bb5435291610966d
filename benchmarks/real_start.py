"""Fine-tune a pretrained model on solved problems, and distill it into the original model.

    asyncrl model get smollm2 models/smollm2
    OMP_NUM_THREADS=1 python benchmarks/real_start.py models/smollm2 [--quick] [--json]

The task is that of `configs/smollm2_sort.toml`.  Proves:
- sft      `asyncrl sft` on solved problems of the training split: held-out accuracy rises beyond
           both 95 % intervals (Wilson), and the loss on unseen solved problems falls
- distill  the original model with the fine-tuned one as its teacher and no reward (`kl.preset =
           "distill"`, `loss.coefficient = 0`): the same gain, and the reverse KL to the teacher
           on the model's own samples falls to half or less
Seconds, and the accuracy on names that do not occur in training, are reported too.  --quick: two
steps of each, which proves nothing of accuracy.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import real_learns
from lib import rounds
from lib.results_file import ROOT

import asyncrl
from asyncrl.config.tree import TaskConfig
from asyncrl.tasks import get_task

CONFIG = ROOT / "configs" / "smollm2_sort.toml"
SOLVED = {"train": 960, "heldout": 64}  # rows
STEPS = 60  # of each
BATCH = 16  # rows of a supervised step
RATE = 1e-5
ENDS = 10  # batches at each end over which the KL is averaged


def write_solved(path: Path, split: str, count: int) -> None:
    """Prompts and answers, as a run of the task has them; an answer ends with its line."""
    task = get_task(TaskConfig(name="sort_names"))
    problems = [task.prompt(split, number, 0) for number in range(count)]
    rows = [{"prompt": one.text, "answer": f" {one.answer}\n"} for one in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sft(model: Path, work: Path, steps: int) -> dict[str, Any]:
    """Train on solved problems: its summary, and its wall seconds.  The model is work/sft/model."""
    for split, count in SOLVED.items():
        write_solved(work / f"{split}.jsonl", split, count)
    config = work / "sft.toml"
    config.write_text(
        f"name = 'sft'\nruns = {str(work)!r}\n[model]\npath = {str(model)!r}\n"
        f"[data]\ntrain = {str(work / 'train.jsonl')!r}\n"
        f"heldout = {str(work / 'heldout.jsonl')!r}\n"
        f"[training]\nsteps = {steps}\nbatch = {BATCH}\nlr = {RATE}\n"
        "micro_batch_tokens = 2048\nwarmup_steps = 5\n"
    )
    began = time.monotonic()
    argv = [sys.executable, "-m", "asyncrl.cli", "sft", str(config)]
    subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    seconds = time.monotonic() - began
    return json.loads((work / "sft" / "summary.json").read_text()) | {"seconds": round(seconds, 1)}


def run(name: str, model: Path, work: Path, *sets: str) -> dict[str, Any]:
    """Accuracies of a run of CONFIG by split, its wall seconds, and what is left of the KL."""
    under = work / name
    under.mkdir()
    summary, seconds = real_learns.run(CONFIG, model, under, list(sets))
    found = {"accuracy": real_learns.shares(summary), "seconds": round(seconds, 1)}
    metrics = asyncrl.load_run(under / "r").metrics
    if "loss/kl" in metrics:
        kl = metrics["loss/kl"].values.tolist()
        few = min(ENDS, len(kl))
        found["kl"] = {"first": statistics.fmean(kl[:few]), "last": statistics.fmean(kl[-few:])}
    return found


def gained(words: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A goal: from the upper bound before to the lower bound after."""
    gain = after["interval"][0] - before["interval"][1]
    return rounds.goal(f"{words}: gain beyond both intervals", gain, 0, at_least=True)


def goals(
    supervised: dict[str, Any], teacher: dict[str, Any], student: dict[str, Any]
) -> list[dict[str, Any]]:
    """Judge the goals of both parts; the teacher is the model after supervised training."""
    before = student["accuracy"]["heldout"]["start"]
    loss, kl = supervised["heldout_end"] / supervised["heldout_start"], student["kl"]
    return [
        gained("solved problems, held out", before, teacher["accuracy"]["heldout"]["start"]),
        rounds.goal("loss on problems never seen, end / start", loss, 1, at_least=False),
        gained("distilled, held out", before, student["accuracy"]["heldout"]["end"]),
        rounds.goal("reverse KL, last / first", kl["last"] / kl["first"], 0.5, at_least=False),
    ]


def main(words: list[str] | None = None) -> None:
    parser = rounds.parser(__doc__)
    parser.add_argument("model", type=Path, help="the directory that `asyncrl model get` made")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, of both runs")
    args = parser.parse_args(words)
    sets = [*(real_learns.QUICK if args.quick else ()), *args.set]
    steps = 2 if args.quick else STEPS
    model = args.model.resolve()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        supervised = sft(model, work, steps)
        taught = work / "sft" / "model"
        teacher = run("teacher", taught, work, *sets, "learner.steps=1", "learner.lr=0.0")
        student = run(
            "student",
            model,
            work,
            f"learner.steps={steps}",
            *sets,
            "kl.preset='distill'",
            "loss.coefficient=0.0",
            f"model.reference={str(taught)!r}",
        )
    result = {
        "config": CONFIG.name,
        "rate": RATE,
        "batch": BATCH,
        "steps": steps,
        "sft": supervised,
        "teacher": teacher,
        "student": student,
    }
    rounds.report("real_start", goals(supervised, teacher, student), result, args)


if __name__ == "__main__":
    main()
