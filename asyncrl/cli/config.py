"""`asyncrl config`: show, check or describe configs; `asyncrl task`: try a task and its reward."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from asyncrl.cli import result
from asyncrl.cli.base import options
from asyncrl.contract.errors import ConfigError


@click.group()
def config() -> None:
    """Show, check or describe configs."""


@config.command()
@options()
def show(source: str, sets: tuple[str, ...], as_json: bool) -> None:
    """The resolved config."""
    from asyncrl.config import layers, load

    loaded = load.load(source, sets, lambda said: print(said, file=sys.stderr))
    print(json.dumps(layers.read_keys(loaded)) if as_json else load.dump(loaded))


@config.command()
@options()
def check(source: str, sets: tuple[str, ...], as_json: bool) -> None:
    """Look at everything a run of CONFIG needs, a line each, and start nothing: model, tokenizer,
    template, prompts, reward (called once), packages, devices, disk, memory.

    A model of the hub (hf://ORG/NAME) is fetched.  Exit code 2 when a check fails.
    """
    from asyncrl.config import load, rules
    from asyncrl.supervise import preflight

    loaded = load.load(source, sets)
    report_findings(loaded, rules.warnings(loaded), preflight, as_json)


def report_findings(loaded: Any, warnings: list[str], preflight: Any, as_json: bool) -> None:
    """Print what the checks of a config found.  Raises ConfigError when one failed."""
    import msgspec

    found = [preflight.Finding("settings", "note", warning) for warning in warnings]
    if not as_json:
        for finding in found:
            print(preflight.line(finding))
    for finding in preflight.findings(preflight.located(loaded)):
        found.append(finding)
        if not as_json:
            print(preflight.line(finding), flush=True)
    failed = [finding.check for finding in found if finding.state == "failed"]
    if as_json:
        result.print_result({"ok": not failed, "checks": msgspec.to_builtins(found)})
    if failed:
        raise ConfigError(f"{len(failed)} check(s) failed: {', '.join(failed)}")


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
@click.option("-n", "count", default=3, help="prompts to show; sessions to play with --model")
@click.option("--model", default="", metavar="DIR", help="play sessions with this model")
def try_task(source: str, sets: tuple[str, ...], as_json: bool, count: int, model: str) -> None:
    """Show prompts of the task and what the reward function says of the right answer and of an
    empty one.

    With [agent], play a session: by hand, an answer a line of standard input (\\n in it is a line's
    end), or with --model.
    """
    from actors.rewards import judge_all
    from asyncrl.config import load
    from asyncrl.tasks import get_task

    loaded = load.load(source, sets)
    if loaded.agent.env or loaded.agent.tools:
        _play_sessions(loaded, model, count, as_json)
        return
    if model:
        raise ConfigError("--model plays sessions, and this config has no agent.env or agent.tools")
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


def _play_sessions(config: Any, model: str, count: int, as_json: bool) -> None:
    """One session by hand, or `count` with a model."""
    import msgspec

    from asyncrl.experiments import play

    if model:
        at = msgspec.structs.replace(config.model, path=model)
        config = msgspec.structs.replace(config, model=at)
    for index in range(count if model else 1):
        ticket = play.ticket_of(config, index)
        player: play.Player = (
            play.ModelPlayer(config, ticket) if model else play.HumanPlayer(config, _read_answer)
        )
        for shown in play.play(config, ticket, player):
            if as_json:
                print(json.dumps({"session": index, **msgspec.to_builtins(shown)}), flush=True)
            else:
                print(_format_turn(shown), flush=True)


def _read_answer() -> str | None:
    """The next answer by hand; the prompt goes to stderr, so that what is played can be kept."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n").replace("\\n", "\n") if line else None


def _format_turn(shown: Any) -> str:
    """A turn as a reader sees it."""
    parts = "".join(f", {name} {value:g}" for name, value in shown.parts.items())
    tokens = f" ({shown.tokens} tokens)" if shown.tokens else ""
    if shown.kind == "asked" and shown.other:
        return f"--- turn {shown.turn}, the other side{tokens}\n{shown.text}"
    if shown.kind == "asked":
        row = ", a row of its own" if shown.row else ""
        paid = f" reward {shown.reward:g}{parts}" if shown.turn > 1 else ""
        return f"--- turn {shown.turn}{tokens}{row}{paid}\n{shown.text}"
    if shown.kind == "answered":
        return f"<<<{tokens} {shown.text}" if tokens else f"<<< {shown.text}"
    return f"=== reward {shown.reward:g}{parts}: {shown.text}"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="the last line of stdout is one JSON object")
def methods(as_json: bool) -> None:
    """Published methods that `method = "NAME"` in a config sets whole, with their sources."""
    from asyncrl.cli import result
    from asyncrl.config.methods import METHODS

    if as_json:
        result.print_result(
            {"methods": {name: method._asdict() for name, method in METHODS.items()}}
        )
        return
    for name, method in METHODS.items():
        print(f"{name}: {method.summary}")
        print(f"    source: {method.source}; measured: {method.evidence}")
        print(f"    {', '.join(f'{key} = {value}' for key, value in method.keys.items())}")
    print('A config sets one by method = "NAME"; keys that it gives beside it win.')
