"""Samples of supervised training: JSONL or parquet with `prompt` and `answer`, or with `messages`.

Every assistant turn of a chat is learned after the turns before it, as the chat template writes it
up to the token that ends the turn.  Any other answer is its text and the end token, as the model
has to write it in a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.config.sft import SftData
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models.tokenizer import collect_model_stops, encode_chat_response, encode_prompt
from asyncrl.tasks import file
from asyncrl.tasks.data import rows as data_rows
from asyncrl.tasks.data.image_columns import IMAGE_COLUMNS, holds_images
from asyncrl.tasks.fit import FitExample


class PromptResponse(NamedTuple):
    """One answer with its prompt; where: file and line."""

    where: str
    prompt: Prompt
    answer: str


class PairFile(NamedTuple):
    """The examples of a file.

    skipped: rows left out because they are too long.
    ends: tokens that end an answer, of the tokenizer, the model's directory and the rows."""

    rows: list[FitExample]
    skipped: int
    ends: tuple[int, ...]


def pairs_of(where: str, sample: Any) -> Iterator[PromptResponse]:
    """Yield the answers of one sample.  Raises ConfigError that begins with `where`."""
    if not isinstance(sample, dict):
        raise ConfigError(f"{where}: needs an object with `prompt` and `answer`, or `messages`")
    if any(holds_images(sample.get(name)) for name in IMAGE_COLUMNS):
        raise ConfigError(f"{where}: has an image; supervised training reads only text")
    text, given, answer = (sample.get(key) for key in ("prompt", "messages", "answer"))
    if (text is None) == (given is None):
        raise ConfigError(f"{where}: needs either `prompt` with `answer`, or `messages`")
    if text is not None and not (isinstance(text, str) and text):
        raise ConfigError(f"{where}: `prompt` must be a text that is not empty")
    if answer is not None and not (isinstance(answer, str) and answer):
        raise ConfigError(f"{where}: `answer` must be a text that is not empty")
    if text is not None:
        if answer is None:
            raise ConfigError(f"{where}: has no `answer` to learn from")
        yield PromptResponse(where, Prompt(0, text, answer, [], {}, "train"), answer)
        return
    turns = file.turns_of(where, given)
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    places = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not places:
        raise ConfigError(f"{where}: `messages` has no assistant turn to learn from")
    for place in places:
        if not place or not turns[place]["content"]:
            raise ConfigError(
                f"{where}: turn {place + 1} of `messages` is the assistant's and "
                f"{'empty' if place else 'there is none before it'}"
            )
        before = turns[:place]
        prompt = Prompt(0, before[-1]["content"], "", before, {}, "train")
        yield PromptResponse(where, prompt, turns[place]["content"])


def read(path: str, tokenizer: Any, data: SftData, limit: int, model: str | Path) -> PairFile:
    """Read every row of the file at `path`.

    limit: maximum length of the model, in tokens.  model: its directory.  Raises ConfigError with
    file and line for a row that cannot be learned."""
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"data: {path} is not a file")
    if tokenizer.eos_token_id is None:
        raise ConfigError("model.path: its tokenizer has no end token, which answers end with")
    stops = collect_model_stops(tokenizer, model)
    ends = dict.fromkeys(stops)
    most = min(data.context, limit)
    rows: list[FitExample] = []
    skipped = 0
    for where, sample in data_rows.read_rows(source):
        for pair in pairs_of(where, sample):
            row = FitExample(_prompt(tokenizer, pair), _answer(tokenizer, pair, stops))
            if not len(row.prompt):
                raise ConfigError(f"{where}: the prompt has no token")
            if row.size <= most:
                rows.append(row)
                ends[int(row.answer[-1])] = None
            elif data.too_long == "skip":
                skipped += 1
            else:
                key = f"data.context = {most}" if most == data.context else f"the model's {most}"
                raise ConfigError(
                    f'{where}: {row.size} tokens are more than {key}; data.too_long = "skip" '
                    "leaves such rows out"
                )
    if not rows:
        raise ConfigError(f"{path}: nothing to learn from in it ({skipped} rows are too long)")
    return PairFile(rows, skipped, tuple(ends))


def _answer(tokenizer: Any, pair: PromptResponse, stops: tuple[int, ...]) -> np.ndarray:
    if not pair.prompt.messages:
        ids = [*tokenizer.encode(pair.answer, add_special_tokens=False), stops[0]]
        return np.array(ids, np.int32)
    try:
        return np.array(
            encode_chat_response(tokenizer, pair.prompt.messages, pair.answer, stops), np.int32
        )
    except Exception as error:  # a template is a program and may raise anything
        raise ConfigError(
            f"{pair.where}: the chat template fails on the answer: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error


def _prompt(tokenizer: Any, pair: PromptResponse) -> np.ndarray:
    try:
        return encode_prompt(tokenizer, pair.prompt)
    except ConfigError as error:  # the chat template's error names a prompt of a task
        why = str(error).removeprefix(f"task: {pair.prompt.split} prompt {pair.prompt.id}")
        raise ConfigError(f"{pair.where}: {why.lstrip(': ')}") from error
