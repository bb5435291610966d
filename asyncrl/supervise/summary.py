"""The summary of a run (`asyncrl run --json`), and the model card of its exported model."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.config import load
from asyncrl.config.tree import Config, TaskSource
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers
from asyncrl.contract.toml_writer import fill, read_table
from asyncrl.records import atomic_write, health_checks, jsonl, metrics
from asyncrl.records.health_checks import Rows, compute_half_interval
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import format_number

CARD: str = read_table(__file__)["card"]
# a path in the cache of the hub's client
SNAPSHOT = re.compile(r"(?:models|datasets)--([^/]+)--([^/]+)/snapshots/([0-9a-f]+)/?(.*)")
PARTIAL = (
    "the buffer could not write its summary: the numbers come from metrics.jsonl and "
    "trained.jsonl, and the ledger has only the trained tokens"
)
# as health_checks.HEALTHY_MISMATCH, of mixtures of experts without a replay of their routing
HEALTHY_EXPERTS = 0.1
# what a summary has from that of the buffer
COPIED = [
    "wall_s",
    "steps",
    "trajectories",
    "tokens",
    "heldout_start",
    "heldout_end",
    "ood_start",
    "ood_end",
    "mismatch_k3_max",
    "ledger",
    "ledger_lines",
    "lag_histogram",
    "trained_ids",
    "failures",
]


def collect_facts(config: Config) -> health_checks.RunFacts:
    """Return the facts for the health checks: the config and the model's largest usual k3."""
    keys = jsonl.read_object(Path(config.model.path) / "config.json")
    experts = {"num_experts", "num_local_experts", "n_routed_experts"} & set(keys)
    diverges = experts and not config.learner.replay_routing
    healthy = HEALTHY_EXPERTS if diverges else health_checks.HEALTHY_MISMATCH
    return health_checks.RunFacts(config, healthy)


def find_task_signs(config: Config) -> list[health_checks.Finding]:
    """Find prompts in the task's files without the answers that their reward needs."""
    from asyncrl.tasks import get_task
    from asyncrl.tasks.file import FileTask

    if config.agent.env:  # the environment gives the rewards
        return []
    try:
        task = get_task(config.task)
    except ConfigError:  # the file was removed after the run
        return []
    if not isinstance(task, FileTask) or config.reward.uses_reward_processes or not task.unanswered:
        return []
    without, prompts = task.unanswered, len(task.sets["train"])
    said = (
        f"{config.task.prompts}: {without} of {prompts} prompts have no `answer` for the task's "
        "own reward to compare with, so their reward is 0"
    )
    return [health_checks.make_finding("answers_missing", said)]


def read(config: Config, run_dir: Path) -> JsonObject:
    """Read the summary of a run that has ended, or compose that of any other run."""
    return jsonl.read_object(run_dir / "summary.json") or compose(config, run_dir)


def read_buffer_summary(run_dir: Path) -> JsonObject:
    """Read the summary that the last buffer wrote, or build a partial one."""
    return jsonl.read_object(run_dir / "buffer_summary.json") or build_partial_summary(run_dir)


def build_partial_summary(run_dir: Path) -> JsonObject:
    """Build the buffer's part of the summary from trained.jsonl and metrics.jsonl.

    Its ledger has only the line `trained`, because these files have no other."""
    from buffer import training_log

    batches = training_log.read(run_dir / "trained.jsonl")
    rows = metrics.read(run_dir)
    lags: Counter[int] = Counter()
    for batch in batches.values():
        lags.update(batch.lags)
    described = training_log.describe_lags(lags)
    tokens = described["tokens"]
    samples = sum(b.samples for b in batches.values())
    trained_line = {
        "tokens": tokens,
        "samples": samples,
        "mean_length": tokens / max(samples, 1),
        "mean_reward": health_checks.average(rows, "reward/mean") or 0.0,
    }
    mismatches = (health_checks.MISMATCH, health_checks.ONE_VERSION)
    mismatch = [k3 for name in mismatches for k3 in health_checks.list_values(rows, name)]
    return described | {
        "partial": True,
        "wall_s": max((r.get("t", 0.0) for r in rows if "reward/mean" in r), default=0.0),
        "steps": max(batches, default=-1) + 1,
        "trajectories": samples,
        **{
            f"{split}_{end}": find_evaluation(rows, split, end)
            for split in ("heldout", "ood")
            for end in ("start", "end")
        },
        "ledger": {"generated": tokens, "trained": tokens},
        "ledger_lines": {"trained": trained_line},
        "trained_ids": None,
        "failures": {},
        "mismatch_k3_max": max(mismatch, default=0.0),
        "finished": False,
    }


def find_evaluation(rows: Rows, split: str, end: str) -> float | None:
    """Return the reward of the initial model (`end` = start) or of the last evaluation."""
    name = f"eval/{split}"
    rewards = [
        float(row[name]) for row in rows if name in row and (end == "end" or not row["step"])
    ]
    return rewards[0 if end == "start" else -1] if rewards else None


def compose(config: Config, run_dir: Path) -> JsonObject:
    """Build the summary from the files of buffer and learner.

    It has the key "partial" only if the buffer was killed."""
    totals = read_buffer_summary(run_dir)
    lines = jsonl.read(run_dir / "metrics.jsonl")
    all_rows = metrics.select_valid_rows(lines)
    last_batch: JsonObject = ([{}] + [r for r in all_rows if "reward/mean" in r])[-1]
    wall_s = max(totals["wall_s"], 1e-9)
    # up to the last commit, as the seconds; a partial ledger has only the trained tokens
    generated = sum(n for name, n in last_batch.items() if name.startswith("ledger/"))
    digest = run_dir / "weights_digest"
    current_limit = config.staleness.limit
    limits = run_dir / "limits"  # before it was resumed with another one
    earlier = limits.read_text(encoding="utf-8").split() if limits.exists() else []
    limit = max([current_limit, *map(float, earlier)])  # the bound for all its tokens
    for split in ("heldout", "ood"):
        if totals[f"{split}_start"] is None:
            totals[f"{split}_start"] = find_evaluation(all_rows, split, "start")
    bounds = health_checks.find_reward_range(health_checks.list_rewards(all_rows))
    summary = {
        "run_dir": str(run_dir),
        **{name: totals[name] for name in COPIED},
        "lag": totals["lag"]
        | {
            name: "inf" if value == math.inf else int(value)
            for name, value in (("limit", limit), ("limit_now", current_limit))
            if name == "limit" or value != limit
        },
        "speed": {
            "generator_tokens_per_s": (generated or totals["ledger"]["generated"]) / wall_s,
            "learner_tokens_per_s": totals["tokens"] / wall_s,
            "idle_share": metrics.compute_idle_shares(lines),
        },
        "weights_digest": digest.read_text(encoding="utf-8") if digest.exists() else None,
        "ledger_by_task": totals.get("ledger_by_task", {}),
        "seed": config.seed,
        "certainty": {
            split: {"n": int(n), "half": compute_half_interval(reward, n, *bounds)}
            for split in ("heldout", "ood")
            for reward, n in health_checks.list_evaluations(all_rows, split)[-1:]
        },
        "signs": [
            finding._asdict()
            for finding in (
                *find_task_signs(config),
                *health_checks.apply_rules(
                    all_rows, collect_facts(config), ended=totals["steps"] >= config.learner.steps
                ),
            )
        ],
    }
    optional = {
        "judge": find_judge_totals(all_rows),
        "partial": PARTIAL if totals.get("partial") else "",
    }
    return summary | {name: value for name, value in optional.items() if value}


def find_judge_totals(rows: Rows) -> Numbers:
    """Return the judge's counters at the end of the run, or {} without a judge.

    >>> rows = [{"judge/requests": 1.0}, {"judge/requests": 3.0, "step": 2}, {"step": 3}]
    >>> find_judge_totals(rows)
    {'requests': 3.0}
    """
    for row in reversed(rows):
        if "judge/requests" in row:
            return {
                name.removeprefix("judge/"): float(value)
                for name, value in row.items()
                if name.startswith("judge/")
            }
    return {}


def write(config: Config, run_dir: Path) -> JsonObject:
    """Write the summary to RUN/summary.json and return it."""
    summary = compose(config, run_dir)
    atomic_write.write(run_dir / "summary.json", json.dumps(summary, indent=1))
    return summary


# ---- the model card: README.md with data, settings, results, lag and ledger ----------------------


def write_model_card(run_dir: Path, model: Path, version: str) -> None:
    """Write `model`/README.md: metadata for the hub, then Markdown.

    version: of this package."""
    from huggingface_hub import ModelCardData

    config = load.load(run_dir / "config.toml")
    summary, rows = read(config, run_dir), metrics.read(run_dir)
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
    text = fill(
        CARD,
        metadata=card.to_yaml(),
        name=run_dir.name,
        base=base,
        version=version,
        summary=summary,
        sets=dict.fromkeys(
            name.removeprefix("eval/").removesuffix("_n")
            for row in rows
            for name in row
            if name.startswith("eval/") and name.endswith("_n")
        ),
        rows=rows,
        find_evaluation=find_evaluation,
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
    (model / "README.md").write_text(text, encoding="utf-8")


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
