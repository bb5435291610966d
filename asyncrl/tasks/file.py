"""Prompts from files and data sets with `prompt` or `messages` (chat turns), and `answer`.

A column `image` or `images` holds a prompt's images. The reward function gets other columns in
`prompt.meta`, as text or JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract.blobs.images import digest
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks.data.image_columns import IMAGE_COLUMNS, holds_images, read_images
from asyncrl.tasks.data.rows import files_of, read_rows

# common names of a prompt in data sets
PROMPT_COLUMNS = ("question", "problem", "query", "instruction", "input", "text", "prompts")
RIGHT = 0.75  # share of correct demonstrations in a warm start
MOST_SYMBOLS = 256  # of a model whose tokens are characters


def turns_of(where: str, found: Any) -> list[dict[str, str]]:
    """Return chat turns with only role and content.  Raises ConfigError for invalid ones."""
    if not isinstance(found, list) or not all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in found
    ):
        raise ConfigError(
            f"{where}: `messages` must be a list, and each of them needs a `role` and a `content`, "
            "both text"
        )
    return [{"role": turn["role"], "content": turn["content"]} for turn in found]


def _text(value: Any) -> str:
    return (
        value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    )


def _renamed(where: str, row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Apply `task.columns` (our name -> the file's), and move chat turns in `prompt` to `messages`.

    TRL keeps chat turns in `prompt`.  Raises ConfigError for a missing column."""
    for ours, theirs in columns.items():
        if theirs not in row:
            raise ConfigError(
                f"{where}: task.columns: has no column `{theirs}`; it has "
                f"{', '.join(map(str, row))}"
            )
        value = row[theirs] if ours == "answer" else row.pop(theirs)
        row = row | {ours: value}
    if isinstance(row.get("prompt"), list) and not row.get("messages"):
        row = row | {"messages": row["prompt"], "prompt": ""}
    return row


def _prompt(
    where: str,
    row: Any,
    number: int,
    split: str,
    columns: Mapping[str, str] = {},
    folder: Path = Path(),
) -> Prompt:
    """Convert one row to a Prompt.  Raises ConfigError that begins with `where`.

    folder: of the file, which its paths of images are relative to."""
    if isinstance(row, dict):
        row = _renamed(where, dict(row), columns)
    if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or row.get("messages")):
        likely = next(
            (name for name in PROMPT_COLUMNS if isinstance(row, dict) and name in row), ""
        )
        hint = f'; is it `{likely}`? task.columns = {{ prompt = "{likely}" }}' if likely else ""
        if not isinstance(row, dict):
            hint = f"; it is of type {type(row).__name__}: write one object a line (JSONL)"
        elif row.get("prompt") is not None and not isinstance(row["prompt"], str):
            hint = f"; its `prompt` is of type {type(row['prompt']).__name__}"
        raise ConfigError(
            f"{where}: needs `prompt` (text) or `messages` (a list of {{role, content}}){hint}"
        )
    if row.get("prompt") and row.get("messages"):
        raise ConfigError(
            f"{where}: has both `prompt` and `messages`; the model reads one of them: remove the "
            "other"
        )
    turns = turns_of(where, row.get("messages") or [])
    text = row.get("prompt") or (turns[-1]["content"] if turns else "")
    if not text:
        raise ConfigError(f"{where}: the prompt is empty")
    columns_of_images = [name for name in IMAGE_COLUMNS if holds_images(row.get(name))]
    images = [
        blob for name in columns_of_images for blob in read_images(where, name, row[name], folder)
    ]
    own = ("prompt", "messages", "answer", *columns_of_images)
    meta = {str(k): _text(v) for k, v in row.items() if k not in own}
    return Prompt(
        number,
        text,
        _text(row.get("answer")),
        turns,
        meta,
        split,
        images=images,
    )


def read_prompts(path: str, split: str, columns: Mapping[str, str] = {}) -> list[Prompt]:
    """Read all prompts of a file.

    Raises ConfigError with file and line (parquet: row) for an unusable row."""
    files = files_of(path)
    if files is None:
        key = {"train": "task.prompts: ", "heldout": "task.heldout: ", "ood": "task.ood: "}
        raise ConfigError(f"{key.get(split, '')}{path} is not a file")
    rows = ((file.parent, *row) for file in files for row in read_rows(file))
    out = [
        _prompt(where, row, number, split, columns, folder)
        for number, (folder, where, row) in enumerate(rows)
    ]
    if not out:
        raise ConfigError(f"{path}: no prompts in it")
    return out


def canonical(prompt: Prompt) -> str:
    """Return the text that identifies a problem: the model's input without surrounding space.

    Images are part of it by their digests."""
    text = (
        json.dumps([[m["role"], m["content"].strip()] for m in prompt.messages])
        if prompt.messages
        else prompt.text.strip()
    )
    return "\0".join([text, *map(digest, prompt.images)])


class FileTask:
    """A task read from files.

    Without `heldout`, a fixed tenth of the problems (at least one) is held out.  A training prompt
    that is also in `heldout` or `ood` is excluded from training.

    overlap: number of excluded prompts.
    unanswered: training prompts without an answer."""

    name = "file"
    steps = 250  # of the warm start
    unset = "give the file of prompts (task.name = file)"  # where there is none

    def __init__(
        self, prompts: str, heldout: str = "", ood: str = "", columns: Mapping[str, str] = {}
    ) -> None:
        if not prompts:
            raise ConfigError(f"task.prompts: {self.unset}")
        every = read_prompts(prompts, "train", columns)
        self.sets: dict[str, list[Prompt]] = {
            "heldout": read_prompts(heldout, "heldout", columns) if heldout else [],
            "ood": read_prompts(ood, "ood", columns) if ood else [],
        }
        kept = {canonical(file) for rows in self.sets.values() for file in rows}
        fresh = [file for file in every if canonical(file) not in kept]
        self.overlap = len(every) - len(fresh)
        if not heldout:
            problems = sorted({canonical(file) for file in fresh})
            if len(problems) < 2:
                raise ConfigError(
                    f"{prompts}: {len(problems)} prompt(s) cannot be both trained on and held out; "
                    "give task.heldout"
                )
            chosen = set(random.Random(0).sample(problems, max(1, len(problems) // 10)))
            self.sets["heldout"] = [
                msgspec.structs.replace(file, split="heldout")
                for file in fresh
                if canonical(file) in chosen
            ]
            fresh = [file for file in fresh if canonical(file) not in chosen]
        if not fresh:
            raise ConfigError(
                f"{prompts}: every prompt is also in task.heldout or task.ood; nothing is left to "
                "train on"
            )
        self.sets["train"] = fresh
        self.unanswered = sum(not file.answer for file in fresh)
        self._order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        """Training goes through the file again and again, shuffled anew by (seed, pass)."""
        rows = self.sets[split]
        if split != "train":
            return rows[index % len(rows)]
        turn, at = divmod(index, len(rows))
        if self._order[0] != (seed, turn):
            order = list(range(len(rows)))
            random.Random(f"{seed}:{turn}").shuffle(order)
            self._order = ((seed, turn), order)
        return rows[self._order[1][at]]

    def size(self, split: str) -> int | None:
        """Prompts in a fixed split; None for the endless training stream."""
        return None if split == "train" else len(self.sets[split])

    @property
    def symbols(self) -> str:
        """Every character of the prompts of all splits and of the training answers."""
        texts = [file.text for rows in self.sets.values() for file in rows]
        texts += [file.answer for file in self.sets["train"]]
        return "".join(sorted(set().union(*texts)))

    def demonstrations(self, number: int, seed: int) -> list[tuple[str, str]]:
        """n pairs (prompt, answer) of training prompts for the warm start of a tiny model; a
        quarter of the answers are those of other prompts, so that something is left to learn.

        Raises ConfigError for chats, for prompts without an answer, and for too many characters."""
        rows = self.sets["train"]
        if any(file.images for rows in self.sets.values() for file in rows):
            why = "prompts have images, which a model built for text does not read"
        elif any(file.messages for rows in self.sets.values() for file in rows):
            why = "prompts are chats (`messages`), which it has no template for"
        elif self.unanswered:
            why = f"{self.unanswered} of {len(rows)} training prompts have no answer to learn from"
        elif len(self.symbols) > MOST_SYMBOLS:
            why = f"texts have {len(self.symbols)} different characters, {MOST_SYMBOLS} at most"
        else:
            chance = random.Random(f"file:demo:{seed}")
            asked = chance.choices(rows, k=number)
            given = [file if chance.random() < RIGHT else chance.choice(rows) for file in asked]
            return [(file.text, g.answer) for file, g in zip(asked, given, strict=True)]
        raise ConfigError(
            f"model.warm_start: cannot build a tiny model: {why}; point model.path at a model of "
            "your own"
        )

    def reward(self, prompt: Prompt, text: str) -> float | dict[str, float]:
        """1 when the answer is met exactly, white space aside; give `reward.function` for anything
        else.

        A prompt without an answer gives 0: silence, which would equal it, is not what it asks for.
        """
        return float(bool(prompt.answer) and text.strip() == prompt.answer.strip())


class EnvironmentPrompts(FileTask):
    """The rows of the data sets of `agent.env`, from files that are written before the run."""

    name = "env"
    unset = "is empty; `asyncrl run` writes the rows of agent.env's data sets to files"

    def reward(self, prompt: Prompt, text: str) -> float | dict[str, float]:
        raise ValueError("task.name = env has no reward of its own: the environment pays")
