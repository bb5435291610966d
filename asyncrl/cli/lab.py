"""`asyncrl lab`: one command per experiment."""

import json
import sys
from pathlib import Path
from typing import Any

from asyncrl.cli import result
from asyncrl.cli.base import command, make_group, print_progress
from asyncrl.contract.errors import AsyncrlError, ConfigError


def run_experiment(experiment: Any, out: Path, as_json: bool, **settings: Any) -> None:
    """Measure, print and write the findings.  Raises AsyncrlError if a claim does not hold."""
    from asyncrl.records import atomic_write

    findings = experiment.present_findings(experiment.measure(**settings, say=print_progress))
    print(findings.as_text(), file=sys.stderr if as_json else sys.stdout)
    out.mkdir(parents=True, exist_ok=True)
    numbers = findings.as_json()
    atomic_write.write(out / f"{findings.name}.json", json.dumps(numbers))
    print_progress(f"numbers: {out / findings.name}.json")
    if as_json:
        result.print_result(numbers)
    if refuted := [text for text, holds in findings.claims if not holds]:
        raise AsyncrlError(
            f"lab {findings.name}: {len(refuted)} claim(s) do not hold: {refuted[0]}"
        )


@command
def bias(**settings: Any) -> None:
    """Measure bias and variance of every KL configuration."""
    from asyncrl.experiments.lab import bias as experiment

    run_experiment(experiment, **settings)


@command
def corrections(**settings: Any) -> None:
    """Measure bias and variance of every correction.

    It estimates the policy gradient by distance and completion length, up to --length.
    """
    from asyncrl.experiments.lab import corrections as experiment

    run_experiment(experiment, **settings)


@command
def reshape(samples: int, minibatches: int, lr_sgd: float, lr_adam: float, **settings: Any) -> None:
    """Measure how far IS-reshape drifts over many updates.

    Shows the repairs that bound the drift, and compares it with vanilla and clip.
    """
    from asyncrl.experiments.lab import reshape as experiment

    if samples % experiment.GROUP or minibatches > samples // experiment.GROUP:
        raise ConfigError(
            f"--samples {samples} --minibatches {minibatches}: groups of {experiment.GROUP} "
            "completions, with at least one group in a minibatch"
        )
    rates = {"sgd": lr_sgd, "adam": lr_adam}
    run_experiment(experiment, samples=samples, minibatches=minibatches, rates=rates, **settings)


lab = make_group("lab", [bias, corrections, reshape])
