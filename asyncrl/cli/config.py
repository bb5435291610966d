"""`asyncrl config`, `asyncrl task` and `asyncrl methods`: inspect settings before a run."""

import json
import sys
from itertools import chain
from typing import Any

import click
import msgspec

from asyncrl.cli import result
from asyncrl.cli.base import command, emit, make_group, print_progress
from asyncrl.config import explain, layers, load, rules, sft
from asyncrl.config.agents import VERIFIERS
from asyncrl.config.methods import METHODS
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import fill, read_table
from asyncrl.records import metrics

TEXTS: dict[str, str] = read_table(__file__)


@command
def show(source: str, sets: tuple[str, ...]) -> None:
    """Print the resolved config with the origin of each value.

    Origins are comments: file and line, --set, a method, a preset or the default.  Keys that the
    config does not read are left out.
    """

    origins: dict[str, str] = {}
    loaded = load.load(source, sets, print_progress, origins)
    emit(layers.nest(layers.read_keys(loaded)), explain.annotate(load.dump(loaded), origins))


@command
def explain_key(key: str) -> None:
    """Explain KEY: meaning, unit, values, default and readers.

    With a section as KEY, list its keys.
    """

    entries = explain.explain(key)
    kind = "explanation" if entries[0].key == key else "section"
    text = fill(TEXTS[kind], entry=entries[0], entries=entries, wrap=click.wrap_text).rstrip()
    emit({"keys": msgspec.to_builtins(entries)}, text)


@command
def diff_configs(left: str, right: str) -> None:
    """Compare two configs, each a file, a bundled config or a run.

    Shows the keys that differ after methods, presets and defaults.  Exit code 0 if there are none,
    otherwise 1.
    """

    differences = explain.compare_configs(left, right)
    lines = []
    for key, values in differences.items():
        first, second = (
            "(not read)" if value is None else load.format_value(value) for value in values
        )
        lines.append(f"{key}: {first} -> {second}")
    text = "\n".join(lines) or "the two configs are equal"
    emit({"equal": not differences, "differs": differences}, text)
    sys.exit(1 if differences else 0)


@command
def check(source: str, sets: tuple[str, ...]) -> None:
    """Check everything that a run of CONFIG needs.

    It starts no run.  It prints one line each for model, tokenizer, template, prompts, reward
    (called once), packages, devices, disk and memory.  A model of the hub (hf://ORG/NAME) is
    downloaded.  Exit code 2 if a check fails.
    """
    from asyncrl.supervise import preflight

    loaded = load.load(source, sets)
    warnings = rules.find_warnings(loaded)
    outcomes = [preflight.CheckOutcome("settings", "note", warning) for warning in warnings]
    shown = []
    for outcome in chain(outcomes, preflight.run_checks(preflight.localize(loaded))):
        shown.append(outcome)
        if not result.as_json:
            print(outcome.as_line(), flush=True)
    failed = [outcome.check for outcome in shown if outcome.state == "failed"]
    result.put_result({"ok": not failed, "checks": msgspec.to_builtins(shown)})
    if failed:
        raise ConfigError(f"{len(failed)} check(s) failed: {', '.join(failed)}")


@command
def schema(kind: str) -> None:
    """Print the JSON schema of configs, for editors."""

    described = layers.build_schema(sft.SftConfig) if kind == "sft" else load.build_schema()
    print(json.dumps(described, indent=1))


@command
def print_metrics() -> None:
    """Print every metric with its unit and meaning."""

    print(metrics.format_markdown(), end="")


@command
def reference() -> None:
    """Print every key with its default, as a page of Markdown."""

    print(explain.render_reference(), end="")


config = make_group(
    "config", [show, explain_key, diff_configs, check, schema, print_metrics, reference]
)


@command
def try_task(source: str, sets: tuple[str, ...], count: int, model: str, part: str) -> None:
    """Show prompts of the task and their rewards.

    The rewards are those of the right answer and of an empty one.  With [agent] it plays a session
    with --model or by hand: each line of standard input is an answer, and \\n in it is a line
    break.
    """
    from actors.rewards import describe_reward_source, judge_all
    from asyncrl.tasks import get_task
    from asyncrl.tasks.evaluation_sets import resolve_part_config

    loaded = load.load(source, sets)
    if part or len(loaded.agents) > 1:
        loaded = resolve_part_config(loaded, part)
    if loaded.agent.hub == VERIFIERS:
        _show_prompts(loaded, count)
        return
    if loaded.agent.env or loaded.agent.tools:
        _play_sessions(loaded, model, count)
        return
    if model:
        raise ConfigError(
            "--model: plays sessions, and this config has no agent.env or agent.tools; remove it"
        )
    tasks = get_task(loaded.task)
    prompts = [tasks.prompt("train", index, loaded.seed) for index in range(count)]
    completions = [
        (prompt, text, tokens)
        for prompt in prompts
        for text, tokens in ((prompt.answer, [0]), ("", []))
    ]
    rewards = judge_all(loaded, tasks, completions)
    for index, prompt in enumerate(prompts):
        answer_reward, empty_reward = (
            None if failure else reward
            for _, reward, _, _, failure in rewards[2 * index : 2 * index + 2]
        )
        row = {
            "prompt": prompt.text,
            "answer": prompt.answer,
            "reward_of_answer": answer_reward,
            "reward_of_nothing": empty_reward,
        }
        print(json.dumps(row))
    if failed := next((failure for *_, failure in rewards if failure), ""):
        raise ConfigError(f"{describe_reward_source(loaded.reward)}: {failed}")


def _show_prompts(config: Any, count: int) -> None:
    """Print the first prompts of an environment that plays and scores its own sessions."""
    from asyncrl.supervise.preflight import localize
    from asyncrl.tasks import get_task

    tasks = get_task(localize(config).task)
    for index in range(count):
        prompt = tasks.prompt("train", index, config.seed)
        print(json.dumps({"prompt": prompt.messages, "answer": prompt.answer, "id": prompt.id}))


def _play_sessions(config: Any, model: str, count: int) -> None:
    """Play one session by hand, or `count` sessions with a model."""
    from asyncrl.experiments import play

    if model:
        model_config = msgspec.structs.replace(config.model, path=model)
        config = msgspec.structs.replace(config, model=model_config)
    for index in range(count if model else 1):
        ticket = play.make_ticket(config, index)
        player: play.Player = (
            play.ModelPlayer(config, ticket) if model else play.HumanPlayer(config, _read_answer)
        )
        for turn in play.play(config, ticket, player):
            if result.as_json:
                print(json.dumps({"session": index, **msgspec.to_builtins(turn)}), flush=True)
            else:
                print(fill(TEXTS["turn"], turn=turn), end="", flush=True)


def _read_answer() -> str | None:
    """Read the next answer; the prompt goes to stderr, so that stdout holds only the session."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n").replace("\\n", "\n") if line else None


task = make_group("task", [try_task])


@command
def methods() -> None:
    """List the published methods, with their sources.

    `method = "NAME"` in a config chooses one.
    """

    text = fill(TEXTS["methods"], methods=METHODS).rstrip()
    emit({"methods": msgspec.to_builtins(METHODS)}, text)
