"""`asyncrl config`: show, check or describe configs; `asyncrl task`: try a task and its reward."""

from __future__ import annotations

import json

import click

from asyncrl.cli.base import options
from asyncrl.contract.errors import ConfigError


@click.group()
def config() -> None:
    """Show, check or describe configs."""


@config.command()
@options()
def show(source: str, sets: tuple[str, ...], as_json: bool) -> None:
    """The resolved config."""
    import msgspec

    from asyncrl.config import load

    loaded = load.load(source, sets)
    print(json.dumps(msgspec.to_builtins(loaded)) if as_json else load.dump(loaded))


@config.command()
@click.option("--of", "kind", type=click.Choice(["run", "sft"]), default="run")
def schema(kind: str) -> None:
    """The JSON schema of configs, for editors."""
    from asyncrl.config import load, sft

    print(json.dumps(sft.schema() if kind == "sft" else load.schema(), indent=1))


@config.command(name="metrics")
def metrics_table() -> None:
    """docs/metrics.md: every metric with unit and meaning."""
    from asyncrl.records import metrics

    print(metrics.markdown(), end="")


@click.group()
def task() -> None:
    """Try tasks and reward functions."""


@task.command(name="try")
@options()
@click.option("-n", "count", default=3, help="prompts to show")
def try_task(source: str, sets: tuple[str, ...], as_json: bool, count: int) -> None:
    """Show prompts of the task and what the reward function says of the right answer and of an
    empty one.
    """
    from actors.rewards import judge_all
    from asyncrl.config import load
    from asyncrl.tasks import get_task

    loaded = load.load(source, sets)
    tasks = get_task(loaded.task)
    prompts = [tasks.prompt("train", index, loaded.seed) for index in range(count)]
    asked = [
        (prompt, text, tokens)
        for prompt in prompts
        for text, tokens in ((prompt.answer, [0]), ("", []))
    ]
    found = judge_all(loaded, tasks, asked)
    for index, prompt in enumerate(prompts):
        right, nothing = (
            None if why else reward for _, reward, _, _, why in found[2 * index : 2 * index + 2]
        )
        print(
            json.dumps(
                {
                    "prompt": prompt.text,
                    "answer": prompt.answer,
                    "reward_of_answer": right,
                    "reward_of_nothing": nothing,
                }
            )
        )
    if failed := next((why for *_, why in found if why), ""):
        raise ConfigError(f"reward.function = {loaded.reward.function}: {failed}")
