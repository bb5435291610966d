"""Run the three experiments of `asyncrl lab` at their defaults, as committed results.

    OMP_NUM_THREADS=1 python benchmarks/studies/lab.py [--only bias] [--quick] [--json]

`reshape` also runs over five batches (80 steps).  Proves: the verdicts that lab states beforehand
hold (bias and variance by enumeration, no timing).  It takes about four minutes of one core."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import results_file, rounds

from asyncrl.cli.base import print_progress
from asyncrl.experiments.lab import bias, corrections, reshape
from asyncrl.experiments.lab.findings import LabFindings

RATES = (5.0, 0.1)  # of sgd and adam


def run(name: str, quick: bool) -> LabFindings:
    if name == "bias":
        return bias.present_findings(
            bias.measure(
                *((2, 3, 2) if quick else (3, 4, 5)),
                0.05,
                0.1,
                60 if quick else 200,
                print_progress,
            )
        )
    if name == "corrections":
        return corrections.present_findings(
            corrections.measure(*((2, 4, 2) if quick else (3, 8, 5)), print_progress)
        )
    batches = 5 if name == "reshape_5_batches" else 1
    return reshape.present_findings(
        reshape.measure(
            3,
            3 if quick else 4,
            1 if quick else 3,
            16,
            batches,
            1,
            128 if quick else 256,
            *RATES,
            print_progress,
        )
    )


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--only", choices=["bias", "corrections", "reshape", "reshape_5_batches"])
    args = p.parse_args()
    names = (
        [args.only]
        if args.only
        else ["bias", "corrections", "reshape", *([] if args.quick else ["reshape_5_batches"])]
    )
    out = {}
    wrong = 0
    for name in names:
        found = run(name, args.quick)
        out[name] = {"setting": found.setting} | found.as_json()
        wrong += sum(not holds for _, holds in found.claims)
        print(
            found.setting,
            *(f"  {'holds' if x else 'DOES NOT HOLD'}: {text}" for text, x in found.claims),
            sep="\n",
            file=sys.stderr if args.json else sys.stdout,
        )
        if not args.quick:
            print_progress(
                str(results_file.write(f"lab_{name}", {"beside": args.beside} | out[name]))
            )
    if args.json:
        print(
            json.dumps({n: {"verdict": x["verdict"]} for n, x in out.items()} | {"met": not wrong})
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
