"""Prompts of one's own: JSONL or parquet with `prompt` (text) or `messages` (chat turns), and `answer`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.messages import Prompt


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for n, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}:{n}", json.loads(line)
            except json.JSONDecodeError as e:
                raise ConfigError(f"{path}:{n}: not JSON: {e.msg} at column {e.colno}") from e


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet as pq
    except ImportError as e:
        raise ConfigError(f"{path}: parquet needs pyarrow: pip install 'asyncrl[parquet]'") from e
    for n, row in enumerate(pq.read_table(path).to_pylist(), 1):
        yield f"{path}: row {n}", row


def read_prompts(path: str, split: str) -> list[Prompt]:
    """All prompts of a file.  Raises ConfigError with file and line for what cannot be used."""
    p = Path(path)
    if not p.is_file():
        raise ConfigError(f"task.prompts: {path} does not exist" if split == "train" else f"task.{split}: {path} does not exist")
    out: list[Prompt] = []
    for where, row in _parquet(p) if p.suffix == ".parquet" else _jsonl(p):
        if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or isinstance(row.get("messages"), list)):
            raise ConfigError(f"{where}: needs `prompt` (text) or `messages` (a list of {{role, content}})")
        messages = row.get("messages") or []
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
            raise ConfigError(f"{where}: each of `messages` needs a `role` and a `content`, both text")
        meta = {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items() if k not in ("prompt", "messages", "answer")}
        text = row.get("prompt") or (messages[-1]["content"] if messages else "")
        out.append(Prompt(len(out), text, str(row.get("answer", "")), [{"role": m["role"], "content": m["content"]} for m in messages], meta, split))
    if not out:
        raise ConfigError(f"{path}: no prompts in it")
    return out


class FileTask:
    """A task read from files.  Without `heldout`, a fixed tenth of the prompts (at least one) is held out."""

    name = "file"

    def __init__(self, prompts: str, heldout: str = "", ood: str = "") -> None:
        if not prompts:
            raise ConfigError("task.prompts: give the file of prompts (task.name = file)")
        every = read_prompts(prompts, "train")
        self.sets: dict[str, list[Prompt]] = {"ood": read_prompts(ood, "ood") if ood else []}
        if heldout:
            self.sets |= {"train": every, "heldout": read_prompts(heldout, "heldout")}
        else:
            order = list(range(len(every)))
            random.Random(0).shuffle(order)
            cut = max(1, len(every) // 10)
            if len(every) < 2:
                raise ConfigError(f"{prompts}: one prompt cannot be both trained on and held out; give task.heldout")
            self.sets |= {"heldout": [every[i] for i in sorted(order[:cut])], "train": [every[i] for i in sorted(order[cut:])]}

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        """Training goes through the file again and again, shuffled anew by (seed, pass)."""
        rows = self.sets[split]
        if split != "train":
            return rows[index % len(rows)]
        turn, at = divmod(index, len(rows))
        order = list(range(len(rows)))
        random.Random(f"{seed}:{turn}").shuffle(order)
        return rows[order[at]]

    def size(self, split: str) -> int | None:
        return None if split == "train" else len(self.sets[split])

    def reward(self, prompt: Prompt, text: str) -> float | dict[str, float]:
        """1 when the answer is met exactly, white space aside; give `reward.function` for anything else."""
        return float(text.strip() == prompt.answer.strip())
