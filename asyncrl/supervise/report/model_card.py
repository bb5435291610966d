"""The model card of an exported model: README.md with data, settings, results, lag and ledger."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import asyncrl
from asyncrl.config import load
from asyncrl.config.tree import Config, TaskSource
from asyncrl.records import health_checks, metrics
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import format_number
from asyncrl.supervise import summary as summaries

# a path in the cache of the hub's client
SNAPSHOT = re.compile(r"(?:models|datasets)--([^/]+)--([^/]+)/snapshots/([0-9a-f]+)/?(.*)")


def write(run_dir: Path, model: Path) -> None:
    """Write `model`/README.md, the model card of a run's exported model."""
    config = load.load(run_dir / "config.toml")
    (model / "README.md").write_text(render(config, run_dir), encoding="utf-8")


def render(config: Config, run_dir: Path) -> str:
    """Return the text of the card: metadata for the hub, then Markdown."""
    from huggingface_hub import ModelCardData

    summary = summaries.read(config, run_dir)
    base = format_hub_name(config.model.path)
    prompts = (task.prompts for _, task, _ in _list_sources(config))
    data = dict.fromkeys(format_hub_name(path) for path in prompts if SNAPSHOT.search(path))
    card = ModelCardData(
        base_model=base.partition("@")[0] if "/" in base else None,
        datasets=[name.partition("@")[0] for name in data] or None,
        library_name="peft"
        if config.lora.rank and config.export.lora == "adapter"
        else "transformers",
        pipeline_tag="text-generation",
        tags=["asyncrl", "reinforcement-learning", config.loss.surrogate],
    )
    lag = summary["lag"]
    generated = max(summary["ledger"]["generated"], 1)
    ledger = [
        (name, f"{tokens:,.0f}", f"{tokens / generated:.2%}")
        for name, tokens in summary["ledger"].items()
        if tokens
    ]
    blocks = [
        f"---\n{card.to_yaml()}\n---",
        f"# {run_dir.name}",
        f"`{base}` after {summary['steps']:,} steps of reinforcement learning, with asyncrl "
        f"{asyncrl.__version__}.",
        "## Results",
        _format_table(("held-out set", "before", "after", "n"), list_results(run_dir, summary)),
        "Mean reward with the half of a 95 % interval over prompts. Before and after are the first "
        "and the last evaluation of the run.",
        "## Data",
        _format_table(("task", "prompts", "held out", "reward"), list_tasks(config)),
        "## Settings",
        _format_table(("key", "value"), list_settings(config)),
        "## Staleness",
        f"A token was trained at most {lag['max']} versions after the policy that sampled it "
        f"(limit {lag['limit']}), {lag['mean']:.2f} in the mean, {lag['p95']:g} at the 95th "
        "percentile.",
        "## Ledger",
        "Where every generated token ended:",
        _format_table(("line", "tokens", "share"), ledger),
        "## Config",
        f"```toml\n{(run_dir / 'config.toml').read_text(encoding='utf-8').strip()}\n```",
    ]
    return "\n\n".join(blocks) + "\n"


def format_hub_name(path: str) -> str:
    """Return ORG/NAME@REVISION of a path in the hub's cache, and any other path's last part.

    >>> format_hub_name("/home/x/hub/models--org--name/snapshots/0123abcd")
    'org/name@0123abcd'
    >>> format_hub_name("models/sort")
    'sort'
    """
    match = SNAPSHOT.search(path)
    if match is None:
        return Path(path).name
    owner, name, revision, inside = match.groups()
    return f"{owner}/{name}@{revision[:12]}" + (f"/{inside}" if inside else "")


def _list_sources(config: Config) -> Iterator[tuple[str, TaskSource, str]]:
    """Yield (title, task, reward) of the task, or of each part of a mixture."""
    reward = config.reward
    judge = reward.function or ", ".join(reward.functions)
    judge = judge or reward.judge.model or reward.model.path or config.agent.env
    agents = config.agents
    if not config.task.mixture:
        yield config.task.name, config.task, judge
    for part in config.task.mixture:
        env = agents[part.title].env if part.title in agents else ""
        yield part.title, part, part.reward or env or judge


def list_tasks(config: Config) -> list[tuple[str, ...]]:
    """Return a row for each task: title, prompts, held-out prompts, reward."""
    return [
        (
            title,
            f"`{format_hub_name(task.prompts)}`" if task.prompts else f"generated (`{task.name}`)",
            f"`{format_hub_name(task.heldout)}`" if task.heldout else "a part of them",
            f"`{reward}`" if reward else "the task's own",
        )
        for title, task, reward in _list_sources(config)
    ]


def list_results(run_dir: Path, summary: JsonObject) -> list[tuple[str, ...]]:
    """Return a row for each held-out set: name, first and last reward, number of prompts."""
    rows = metrics.read(run_dir)
    names = dict.fromkeys(
        name.removeprefix("eval/").removesuffix("_n")
        for row in rows
        for name in row
        if name.startswith("eval/") and name.endswith("_n")
    )
    results: list[tuple[str, ...]] = []
    for name in names:
        start = summaries.find_evaluation(rows, name, "start")
        reward, prompts = health_checks.list_evaluations(rows, name)[-1]
        half = summary["certainty"].get(name, {}).get("half")
        results.append(
            (
                name,
                format_number(start, ".3f"),
                f"{reward:.3f}" + ("" if half is None else f" +-{half:.3f}"),
                f"{prompts:,.0f}",
            )
        )
    return results


def list_settings(config: Config) -> list[tuple[str, str]]:
    """Return the settings that define the method, by their keys."""
    learner = config.learner
    sections = ("advantage", "correction", "loss")
    values = {
        "learner": f"{learner.steps} steps of {learner.groups} x {learner.group_size}, "
        f"{learner.epochs} x {learner.minibatches} updates a batch",
        "learner.lr": f"{learner.lr:g} ({learner.schedule})",
        "lora.rank": str(config.lora.rank) if config.lora.rank else "",
        "staleness.max_lag": f"{config.staleness.limit:g} ({config.staleness.on_exceed})",
        **{
            section: ", ".join(
                f"{key} = {value}"
                for key, value in msgspec.to_builtins(getattr(config, section)).items()
                if value not in (None, "", {}, [], False)
            )
            for section in sections
        },
        "kl": ", ".join(
            f"{name} {term.coefficient:g}"
            for name, term in (("reward", config.kl.reward), ("loss", config.kl.loss))
            if term.coefficient
        ),
        "generator": f"{config.generator.engine}, temperature {config.generator.temperature:g}, "
        f"at most {config.generator.max_new_tokens} tokens",
        "seed": str(config.seed),
    }
    return [(f"`{key}`", value) for key, value in values.items() if value]


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)
