"""`asyncrl lab`: one command per experiment."""

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncrl.cli import result
from asyncrl.cli.base import make_command, make_group, print_progress
from asyncrl.contract.errors import AsyncrlError


def run_experiment(name: str, out: Path, **settings: Any) -> None:
    """Measure, print and write the findings.  Raises AsyncrlError if a claim does not hold."""
    from asyncrl.records import atomic_write

    experiment = import_module(f"asyncrl.experiments.lab.{name}")
    findings = experiment.present_findings(experiment.measure(**settings, say=print_progress))
    print(findings.as_text(), file=sys.stderr if result.as_json else sys.stdout)
    out.mkdir(parents=True, exist_ok=True)
    numbers = findings.as_json()
    atomic_write.write(out / f"{name}.json", json.dumps(numbers))
    print_progress(f"numbers: {out / name}.json")
    result.put_result(numbers)
    if refuted := [text for text, holds in findings.claims if not holds]:
        raise AsyncrlError(f"lab {name}: {len(refuted)} claim(s) do not hold: {refuted[0]}")


lab = make_group(
    "lab",
    [make_command(x, partial(run_experiment, x)) for x in ("bias", "corrections", "reshape")],
)
