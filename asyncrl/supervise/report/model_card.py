"""The model card of an exported model: README.md with data, settings, results, lag and ledger."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

import asyncrl
from asyncrl.config import load
from asyncrl.config.tree import Config, TaskSource
from asyncrl.contract.toml_writer import fill, read_table
from asyncrl.records import health_checks, metrics
from asyncrl.records.page_kit import format_number
from asyncrl.supervise import summary as summaries

CARD: str = read_table(__file__)["card"]
# a path in the cache of the hub's client
SNAPSHOT = re.compile(r"(?:models|datasets)--([^/]+)--([^/]+)/snapshots/([0-9a-f]+)/?(.*)")


def write(run_dir: Path, model: Path) -> None:
    """Write `model`/README.md, the model card of a run's exported model."""
    config = load.load(run_dir / "config.toml")
    (model / "README.md").write_text(render(config, run_dir), encoding="utf-8")


def render(config: Config, run_dir: Path) -> str:
    """Return the text of the card: metadata for the hub, then Markdown."""
    from huggingface_hub import ModelCardData

    summary, rows = summaries.read(config, run_dir), metrics.read(run_dir)
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
    return fill(
        CARD,
        metadata=card.to_yaml(),
        name=run_dir.name,
        base=base,
        version=asyncrl.__version__,
        summary=summary,
        sets=dict.fromkeys(
            name.removeprefix("eval/").removesuffix("_n")
            for row in rows
            for name in row
            if name.startswith("eval/") and name.endswith("_n")
        ),
        rows=rows,
        find_evaluation=summaries.find_evaluation,
        list_evaluations=health_checks.list_evaluations,
        number=format_number,
        sources=_list_sources(config),
        format_hub_name=format_hub_name,
        config=config,
        sections={
            name: msgspec.to_builtins(getattr(config, name))
            for name in ("advantage", "correction", "loss")
        },
        text=(run_dir / "config.toml").read_text(encoding="utf-8").strip(),
    )


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
