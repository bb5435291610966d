"""`asyncrl lab`: one command per experiment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from asyncrl.cli import result
from asyncrl.cli.base import (
    PATH,
    ExampleCommand,
    ExampleGroup,
    count_option,
    json_option,
    print_progress,
)
from asyncrl.contract.errors import AsyncrlError, ConfigError


def run_experiment(experiment: Any, out: Path, as_json: bool, **settings: Any) -> None:
    """Measure, print and write the findings.  Raises AsyncrlError if a claim does not hold."""
    from asyncrl.experiments.lab import page

    findings = experiment.present_findings(experiment.measure(**settings, say=print_progress))
    print(findings.as_text(), file=sys.stderr if as_json else sys.stdout)
    html, data = page.write(out, findings)
    print_progress(f"page: {html}   numbers: {data}")
    if as_json:
        result.print_result(findings.as_json())
    if refuted := [text for text, holds in findings.claims if not holds]:
        raise AsyncrlError(
            f"lab {findings.name}: {len(refuted)} claim(s) do not hold: {refuted[0]}"
        )


def number_option(
    name: str, default: float, help_text: str, least: float = 0.0, *, above: bool = False
) -> Callable[[Any], Any]:
    """Make an option for a number from `least` (or above it), with its default in the help."""
    kind = click.FloatRange(least, min_open=above)
    return click.option(name, type=kind, default=default, show_default=True, help=help_text)


def experiment_command(name: str, length: int, seeds: int) -> Callable[[Any], Any]:
    """Make the command of an experiment, with the options common to all experiments."""

    def add(function: Any) -> Any:
        for option in (
            json_option,
            click.option(
                "--out",
                type=PATH,
                default=Path("runs/lab"),
                show_default=True,
                help=f"directory of {name}.html and {name}.json",
            ),
            count_option("--seeds", seeds, "random policies"),
            count_option("--length", length, "tokens in a completion"),
            count_option("--vocabulary", 3, "symbols", least=2),
        ):
            function = option(function)
        examples = (f"asyncrl lab {name}", f"asyncrl lab {name} --seeds 2 --out /tmp/lab")
        return lab.command(name, cls=ExampleCommand, examples=examples)(function)

    return add


@click.group(cls=ExampleGroup, examples=("asyncrl lab bias", "asyncrl lab corrections"))
def lab() -> None:
    """Test estimators against the exact gradient.

    The exact gradient is the sum over all possible completions.
    """


@experiment_command("bias", 4, 5)
@number_option("--distance", 0.05, "KL(mu || theta) of the off-policy table, in nats per token")
@number_option("--ref-kl", 0.1, "KL(ref || theta), in nats per token", 1e-4)
@count_option("--draws", 200, "batches for the sampled errors", least=10)
def bias(**settings: Any) -> None:
    """Measure bias and variance of every KL configuration."""
    from asyncrl.experiments.lab import bias as experiment

    run_experiment(experiment, **settings)


@experiment_command("corrections", 8, 5)
def corrections(**settings: Any) -> None:
    """Measure bias and variance of every correction.

    It estimates the policy gradient by distance and completion length, up to --length.
    """
    from asyncrl.experiments.lab import corrections as experiment

    run_experiment(experiment, **settings)


@experiment_command("reshape", 4, 3)
@count_option("--epochs", 16, "passes over a batch", least=2)
@count_option("--batches", 1, "successive batches, each sampled from the current policy")
@count_option("--minibatches", 1, "optimizer steps in an epoch")
@count_option("--samples", 256, "completions in a batch, in groups of 8", least=16)
@number_option("--lr-sgd", 5.0, "learning rate of SGD on the table", above=True)
@number_option("--lr-adam", 0.1, "learning rate of Adam", above=True)
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
