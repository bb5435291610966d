"""`asyncrl lab`: one click command an experiment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from asyncrl.cli import result
from asyncrl.cli.base import PATH, print_progress
from asyncrl.contract.errors import AsyncrlError, ConfigError


def finish(found: Any, out: Path, as_json: bool) -> None:
    """Print, write, and end with an error where a claim does not hold."""
    from asyncrl.experiments.lab import page

    print(found.as_text(), file=sys.stderr if as_json else sys.stdout)
    html, data = page.write(out, found)
    print_progress(f"plots: {html}   numbers: {data}")
    if as_json:
        result.print_result(found.json())
    if wrong := [claim.text for claim in found.claims if claim.holds is False]:
        raise AsyncrlError(f"lab {found.name}: {len(wrong)} claim(s) do not hold: {wrong[0]}")


def common(name: str, vocabulary: int, length: int, seeds: int) -> Callable[[Any], Any]:
    """Options that every experiment has."""

    def add(command: Any) -> Any:
        for option in (
            click.option(
                "--json", "as_json", is_flag=True, help="the last line of stdout is one JSON object"
            ),
            click.option(
                "--out",
                type=PATH,
                default=Path("runs/lab"),
                show_default=True,
                help=f"directory of {name}.html and {name}.json",
            ),
            click.option(
                "--seeds",
                type=click.IntRange(1),
                default=seeds,
                show_default=True,
                help="random policies",
            ),
            click.option(
                "--length",
                type=click.IntRange(1),
                default=length,
                show_default=True,
                help="tokens in an answer",
            ),
            click.option(
                "--vocabulary",
                type=click.IntRange(2),
                default=vocabulary,
                show_default=True,
                help="symbols",
            ),
        ):
            command = option(command)
        return command

    return add


@click.group()
def lab() -> None:
    """Small exact experiments: estimators against the gradient that summing over every answer
    gives.
    """


@lab.command()
@common("bias", 3, 4, 5)
@click.option(
    "--distance",
    type=click.FloatRange(0),
    default=0.05,
    show_default=True,
    help="KL(mu || theta) of the off-policy table, nats a token",
)
@click.option(
    "--ref-kl",
    type=click.FloatRange(1e-4),
    default=0.1,
    show_default=True,
    help="KL(ref || theta), nats a token",
)
@click.option(
    "--draws",
    type=click.IntRange(10),
    default=200,
    show_default=True,
    help="batches for the sampled errors",
)
def bias(
    vocabulary: int,
    length: int,
    seeds: int,
    out: Path,
    as_json: bool,
    distance: float,
    ref_kl: float,
    draws: int,
) -> None:
    """Bias and variance of every KL configuration, on and off policy, against the exact
    gradient.
    """
    from asyncrl.experiments.lab import bias as experiment
    from asyncrl.experiments.lab import bias_page

    finish(
        bias_page.findings(
            experiment.measure(
                vocabulary,
                length,
                seeds,
                distance=distance,
                ref_kl=ref_kl,
                draws=draws,
                say=print_progress,
            )
        ),
        out,
        as_json,
    )


@lab.command()
@common("corrections", 3, 8, 5)
def corrections(vocabulary: int, length: int, seeds: int, out: Path, as_json: bool) -> None:
    """Bias and variance of the policy gradient under every correction, by distance and answer
    length (--length: the longest).
    """
    from asyncrl.experiments.lab import corrections as experiment
    from asyncrl.experiments.lab import corrections_page

    finish(
        corrections_page.findings(experiment.measure(vocabulary, length, seeds, print_progress)),
        out,
        as_json,
    )


@lab.command()
@common("reshape", 3, 4, 3)
@click.option("--epochs", type=click.IntRange(2), default=16, show_default=True, help="of a batch")
@click.option(
    "--batches",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="batches, one after another, each drawn from the policy it finds",
)
@click.option(
    "--minibatches",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="optimizer steps in an epoch",
)
@click.option(
    "--samples",
    type=click.IntRange(16),
    default=256,
    show_default=True,
    help="answers in a batch, in groups of 8",
)
@click.option(
    "--lr-sgd",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="learning rate of SGD on the table",
)
@click.option(
    "--lr-adam",
    type=click.FloatRange(0, min_open=True),
    default=0.1,
    show_default=True,
    help="learning rate of Adam",
)
def reshape(
    vocabulary: int,
    length: int,
    seeds: int,
    out: Path,
    as_json: bool,
    epochs: int,
    batches: int,
    minibatches: int,
    samples: int,
    lr_sgd: float,
    lr_adam: float,
) -> None:
    """Many updates on one batch: how far IS-reshape drifts beside vanilla and clip, and which
    repairs bound it.
    """
    from asyncrl.experiments.lab import reshape as experiment
    from asyncrl.experiments.lab import reshape_page

    if samples % experiment.GROUP or minibatches > samples // experiment.GROUP:
        raise ConfigError(
            f"--samples {samples} --minibatches {minibatches}: groups of {experiment.GROUP} "
            "answers, at least one in a minibatch"
        )
    rates = {"sgd": lr_sgd, "adam": lr_adam}
    finish(
        reshape_page.findings(
            experiment.measure(
                vocabulary,
                length,
                seeds,
                epochs=epochs,
                batches=batches,
                minibatches=minibatches,
                samples=samples,
                rates=rates,
                say=print_progress,
            )
        ),
        out,
        as_json,
    )
