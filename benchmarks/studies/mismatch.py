"""Compare corrections when the generator's weights are coarser than the learner's, also with lag.

    # three seeds, each with its own warm start
    python benchmarks/studies/mismatch.py --out runs/mismatch
    # which mismatch matters: no correction, one seed, several generators
    python benchmarks/studies/mismatch.py --out runs/mismatch --look
    # started without correction, continued with MIS: `asyncrl run --resume`
    python benchmarks/studies/mismatch.py --out runs/mismatch --switch
    # seed 0 again, in this process: the accuracy of the learner's own policy
    python benchmarks/studies/mismatch.py --out runs/mismatch --learner
    # with lag: 16 versions injected, every arm with and without mismatch
    python benchmarks/studies/mismatch.py --out runs/mismatch --lag 16
    # which part of log pi / mu grows with lag: real runs, with PPO on mu as the only correction
    python benchmarks/studies/mismatch.py --out runs/mismatch --split
    # only write the result of the finished runs
    python benchmarks/studies/mismatch.py --out runs/mismatch --table

`rle`, synchronous (lag 0), so that mu differs from pi_prox only by the engine's numbers: `bf16`
computes in bfloat16; `b3` has weights rounded to 3 stored mantissa bits, like fp8 e4m3, `b2` to
2, like e5m2 (generator.mantissa_bits).  The learner is fp32.  On a warm start k3 is 1e-4 for
bf16, 4e-3 for b3, 1.7e-2 for b2, 6e-2 for b1.  Arms are compared with `fp32, none`, and within
each generator with `none`; with lag they are compared with `fp32, bypass`, each arm with itself
in fp32, and within each generator with `bypass`.  Accuracies are those of the generator with its
coarse weights; `--learner` adds the accuracy of the fp32 policy at the end of finished runs, with
transformers' sampling."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import results_file, studies

from asyncrl.experiments.compare import grid, verdict
from asyncrl.records import metrics
from asyncrl.records.page_kit import clean
from asyncrl.supervise.preflight import say

ENGINES = {
    "fp32": [],
    "bf16": ["generator.dtype=bfloat16"],
    **{f"b{n}": [f"generator.mantissa_bits={n}"] for n in (5, 4, 3, 2, 1)},
}
OFF = [
    "correction.preset=''",
    "correction.level=none",
    "correction.proximal=recompute",
]
MIS = ["correction.preset=mis", "correction.proximal=recompute", "loss.surrogate=decoupled_ppo"]
BAND = ["correction.reject_lo=0.9", "correction.reject_hi=1.1"]
ARMS = {
    "none": [*OFF, "loss.surrogate=vanilla"],
    "tis": [
        "correction.preset=tis",
        "correction.proximal=recompute",
        "loss.surrogate=decoupled_ppo",
    ],
    "mis": MIS,
    "mis self-normalised": [*MIS, "correction.self_normalize=true"],
    "mis wide": [*MIS, *BAND],
    "rejection": [
        *OFF,
        "loss.surrogate=decoupled_ppo",
        "correction.reject=k3",
        "correction.reject_over=mean",
        "correction.reject_hi=0.05",
    ],
    "bypass": ["correction.proximal=behavior", "loss.surrogate=ppo"],
}
COLUMNS = {
    "start": "start",
    "end": "exact",
    "best": "best",
    "ood": "ood",
    "mismatch_mean": "k3",
    "ess_mean": "ESS",
    "weight_mean": "weight",
    "zero_mean": "zero",
    "swing": "swing",
    "grad_norm_mean": "|g|",
    "grad_norm_cv": "cv",
}


UNDER_LAG = ("none", "bypass", "tis", "mis", "rejection")
SPLIT_LAGS = (0, 4, 16)
PARTS = ("mismatch", "staleness", "update")  # of log mu - log pi_theta


def common(args: Any) -> list[str]:
    return [
        *grid.list_limit_sets(args.lag, True),
        f"learner.steps={args.steps}",
        f"learner.lr={args.lr}",
        *studies.EVALUATION,
    ]


def plan(args: Any) -> studies.Study:
    lag = f"-lag{args.lag}" if args.lag else ""
    study = studies.Study(args, "rle", f"lr{args.lr}{lag}", common(args))
    if args.look:
        study.block(
            {f"{e}, none": [*items, *ARMS["none"]] for e, items in ENGINES.items()}, seeds=1
        )
        return study
    if args.lag:
        engines = ["fp32", *(text.partition(":")[0] for text in args.engines.split(","))]
        for arm in UNDER_LAG:
            study.block({f"{e}, {arm}": [*ENGINES[e], *ARMS[arm]] for e in engines})
        return study
    study.block({"fp32, none": ARMS["none"]})
    for text in args.engines.split(","):
        engine, _, names = text.partition(":")
        study.block(
            {f"{engine}, {arm}": [*ENGINES[engine], *ARMS[arm]] for arm in names.split("+") if arm}
            or {f"{engine}, {arm}": [*ENGINES[engine], *items] for arm, items in ARMS.items()}
        )
    return study


# ---- the switch ----------------------------------------------------------------------------------


def command(argv: list[str]) -> dict[str, Any]:
    """Start a real run and return its summary; its messages go to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "run", *argv, "--json"],
        cwd=results_file.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def switch(args: Any, study: studies.Study) -> dict[str, Any]:
    """A run without correction to `--steps`, then twice as far: as it was, and with MIS.  One row a
    seed, kept in OUT/switch.json.
    """
    path = study.out / "switch.json"
    config = str(study.source)
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    engine = args.engines.split(",")[0].partition(":")[0]
    for seed in range(args.seeds):
        if args.table or seed in [r["seed"] for r in rows]:
            continue
        runs = (study.out / "switch").resolve()
        name = f"{engine}-seed{seed}"
        items = [
            *study.common,
            *ENGINES[engine],
            *ARMS["none"],
            f"runs='{runs}'",
            f"name={name}",
            f"seed={seed}",
        ]
        items += [
            f"model.path='{(study.out / 'models' / f'{study.task}-{seed}').resolve()}'",
            f"learner.checkpoint_every={args.steps}",
        ]
        for end in ("", "-none", "-mis"):
            shutil.rmtree(runs / f"{name}{end}", ignore_errors=True)
        command([config, *(x for item in items for x in ("--set", item))])
        for end, sets in (
            ("-none", []),
            ("-mis", [*MIS, *args.late.split(",")] if args.late else MIS),
        ):
            shutil.copytree(runs / name, runs / f"{name}{end}", symlinks=True)
            command(
                [
                    "--resume",
                    str(runs / f"{name}{end}"),
                    *(
                        x
                        for item in [f"learner.steps={2 * args.steps}", *sets]
                        for x in ("--set", item)
                    ),
                ]
            )
        curves = {}
        for end in ("none", "mis"):
            points = {
                r["step"]: r["eval/heldout"]
                for r in metrics.read(runs / f"{name}-{end}")
                if "eval/heldout" in r
            }
            curves[end] = [sorted(points), [points[k] for k in sorted(points)]]
        rows.append(
            {
                "seed": seed,
                "engine": engine,
                "steps": args.steps,
                "late": args.late,
                "curves": curves,
            }
        )
        say(json.dumps(rows[-1]))
        path.write_text(json.dumps(rows))
    if not rows:
        return {}
    ends = {end: [r["curves"][end][1][-1] for r in rows] for end in ("none", "mis")}
    out: dict[str, Any] = {"runs": rows, "ends": ends}
    if len(rows) > 1:
        out["mis_less_none"] = studies.shown(verdict.compare_pairs(ends["mis"], ends["none"]))
    return out


# ---- which part grows ----------------------------------------------------------------------------


def split(args: Any, study: studies.Study) -> list[dict[str, Any]]:
    """Real runs by generator and injected lag: means of the three parts' k3 over the batches that
    have the whole lag, nats a token.  One row a run, kept in OUT/split.json.
    """
    path = study.out / "split.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for lag in SPLIT_LAGS:
        for engine in ("fp32", *(text.partition(":")[0] for text in args.engines.split(","))):
            if args.table or [engine, lag] in [[r["engine"], r["lag"]] for r in rows]:
                continue
            runs, name = (study.out / "split").resolve(), f"{engine}-lag{lag}"
            shutil.rmtree(runs / name, ignore_errors=True)
            items = [
                *study.common,
                *ENGINES[engine],
                *ARMS["bypass"],
                *grid.list_limit_sets(lag, True),
                f"runs='{runs}'",
                f"name={name}",
                f"model.path='{(study.out / 'models' / f'{study.task}-0').resolve()}'",
                f"learner.steps={args.steps + lag}",
                "record.split_every=1",
            ]
            command([str(study.source), *(x for item in items for x in ("--set", item))])
            found = [r for r in metrics.read(runs / name) if r["step"] > lag]
            rows.append(
                {"engine": engine, "lag": lag, "batches": len(found)}
                | {f"{part}_k3": part_mean(found, f"split/{part}_k3") for part in PARTS}
                | {"coverage": part_mean(found, "split/coverage")}
            )
            say(json.dumps(rows[-1]))
            path.write_text(json.dumps(rows))
    return rows


def part_mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows if name in row)


# ---- the learner's own policy --------------------------------------------------------------------


def measure_accuracy(model: Any, task: Any, count: int = 512) -> float:
    """The mean reward of a completion of each held-out prompt, drawn by transformers."""
    import torch

    from asyncrl.models.tokenizer import load_transformers_tokenizer

    tokenizer = load_transformers_tokenizer(model.tokenizer_dir)
    tokenizer.padding_side = "left"
    prompts = [task.prompt("heldout", index, 0) for index in range(count)]
    texts = [prompt.text for prompt in prompts]
    encoded = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = model.hf.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=56,
        )
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    rows = drawn[:, encoded["input_ids"].shape[1] :].tolist()
    shown = (itertools.takewhile(lambda token: token not in ends, row) for row in rows)
    answers = [tokenizer.decode(list(row)) for row in shown]
    return statistics.fmean(
        float(task.reward(*pair)) for pair in zip(prompts, answers, strict=True)
    )


def learners(args: Any, study: studies.Study) -> list[dict[str, Any]]:
    """Finished runs of seed 0 made again, bitwise, and the fp32 policy that they end with; kept in
    OUT/learner.json.
    """
    from asyncrl.experiments import serial
    from asyncrl.tasks.synthetic import TASKS

    path = study.out / "learner.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for arm, names in study.arms.items():
        if (
            not args.learner
            or arm in [r["arm"] for r in rows]
            or not study.cells.get_path(names[0]).exists()
        ):
            continue
        config = study.cells.configs[names[0]]
        record = study.cells.read(names[0])
        run = serial.SerialRun(config)
        again = run.run()
        run.core.model.tokenizer_dir = config.model.path
        rows.append(
            {
                "arm": arm,
                "seed": 0,
                "generator": record["accuracy"][1][-1],
                "same_weights": again["weights_digest"] == record["weights_digest"],
                "learner": measure_accuracy(run.core.model, TASKS[study.task]()),
            }
        )
        say(json.dumps(rows[-1]))
        path.write_text(json.dumps(rows))
    return rows


def pairs(study: studies.Study) -> list[tuple[str, str]]:
    """(arm, other) that are compared beside the base."""
    rival = "bypass" if study.args.lag else "none"
    named = [(arm, *arm.split(", ")) for arm in study.arms]
    within = [(arm, f"{engine}, {rival}") for arm, engine, name in named if name != rival]
    if not study.args.lag:
        return within
    return within + [(arm, f"fp32, {name}") for arm, engine, name in named if engine != "fp32"]


def main() -> None:
    p = studies.parser(__doc__, "runs/mismatch", steps=40, groups=16)
    p.add_argument("--lr", default="5e-4")
    p.add_argument(
        "--engines",
        default="b2,bf16:none+mis",
        help=f"of {', '.join(ENGINES)}; bf16:none+mis for some of the arms",
    )
    p.add_argument("--look", action="store_true")
    p.add_argument(
        "--switch", action="store_true", help="real processes, with the first of --engines"
    )
    p.add_argument(
        "--learner", action="store_true", help="the fp32 policies of finished runs of seed 0"
    )
    p.add_argument(
        "--late", default="", help="further --set items of the late correction, separated by commas"
    )
    p.add_argument("--lag", type=int, default=0, help="versions of lag to inject")
    p.add_argument("--split", action="store_true", help="real processes, at 0, 4 and 16 of lag")
    args = p.parse_args()
    if args.quick:
        args.steps = 2
    if args.split and args.lag:
        p.error("--split injects 0, 4 and 16 versions by itself: leave --lag out")
    study = plan(args)
    if args.split:
        study.warm_starts([names[0] for names in study.arms.values()])
        rows = split(args, study)
        result = {"beside": args.beside, "steps": args.steps, "rows": rows}
        if not args.quick:
            say(str(results_file.write("mismatch_split", result)))
        if args.json:
            print(json.dumps(result))
        return
    if not args.table and not args.switch and not args.learner:
        study.run()
    own = learners(args, study)
    found = studies.analyse(study, "fp32, bypass" if args.lag else "fp32, none", pairs=pairs(study))
    if args.look:
        print("\n".join(studies.table(found, COLUMNS)))
        return
    late = switch(args, study) if args.switch or (study.out / "switch.json").exists() else {}
    if args.switch and late:
        print(json.dumps({k: clean(late[k]) for k in ("ends", "mis_less_none") if k in late}))
    if not args.switch and not args.learner:
        studies.finish(
            study,
            f"mismatch_lag{args.lag}" if args.lag else "mismatch",
            found,
            {"task": "rle", "lr": args.lr, "engines": args.engines, "lag": args.lag},
            COLUMNS,
            switch=late,
            learners=own,
        )


if __name__ == "__main__":
    main()
