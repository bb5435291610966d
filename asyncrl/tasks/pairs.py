"""Samples of supervised training: JSONL or parquet with `prompt` and `answer`, or with `messages`.

Every assistant turn of a chat is one example, with the turns before it as the prompt. Its answer is
the chat template's text up to the token that ends the turn.  Any other answer is its text and the
end token, as the model has to write it in a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.config.sft import SftData
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import TEMPLATE_COLUMNS, Prompt
from asyncrl.models.tokenizer import collect_model_stops, encode_chat_response, encode_prompt
from asyncrl.tasks import file
from asyncrl.tasks.data import rows as data_rows
from asyncrl.tasks.data.image_columns import IMAGE_COLUMNS, holds_images
from asyncrl.tasks.fit import FitExample


class PromptResponse(NamedTuple):
    """An answer with its prompt; where: file and line."""

    where: str
    prompt: Prompt
    answer: str


class PairFile(NamedTuple):
    """The examples of a file.

    skipped: number of rows that were left out because they are too long.
    ends: tokens that end an answer, from the tokenizer, the model's directory and the rows."""

    rows: list[FitExample]
    skipped: int
    ends: tuple[int, ...]


def parse_pairs(where: str, sample: Any) -> Iterator[PromptResponse]:
    """Yield the answers of one sample.  Raises ConfigError that starts with `where`."""
    if not isinstance(sample, dict):
        raise ConfigError(f"{where}: needs an object with `prompt` and `answer`, or `messages`")
    if any(holds_images(sample.get(name)) for name in IMAGE_COLUMNS):
        raise ConfigError(f"{where}: has an image; supervised training reads only text")
    text, messages, answer = (sample.get(key) for key in ("prompt", "messages", "answer"))
    if (text is None) == (messages is None):
        raise ConfigError(f"{where}: needs either `prompt` with `answer`, or `messages`")
    if text is not None and not (isinstance(text, str) and text):
        raise ConfigError(f"{where}: `prompt` must be a non-empty text")
    if answer is not None and not (isinstance(answer, str) and answer):
        raise ConfigError(f"{where}: `answer` must be a non-empty text")
    if text is not None:
        if answer is None:
            raise ConfigError(f"{where}: has no `answer` to learn from")
        yield PromptResponse(where, Prompt(0, text, answer, [], {}, "train"), answer)
        return
    turns = file.parse_turns(where, messages)
    meta = {name: file.to_text(sample.get(name)) for name in TEMPLATE_COLUMNS}
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    answer_indices = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answer_indices:
        raise ConfigError(f"{where}: `messages` has no assistant turn to learn from")
    for index in answer_indices:
        turn = turns[index]
        problems = {
            "without a turn before it": not index,
            "right after another one": index and turns[index - 1]["role"] == "assistant",
            "with `tool_calls`, which are not trained on": turn.get("tool_calls"),
            "with `reasoning_content`, which is not trained on": turn.get("reasoning_content"),
            "without content": not turn.get("content"),
        }
        if problem := next((text for text, is_present in problems.items() if is_present), ""):
            raise ConfigError(
                f"{where}: turn {index + 1} of `messages` is an assistant turn {problem}"
            )
        previous = turns[:index]
        prompt = Prompt(0, previous[-1].get("content") or "", "", previous, meta, "train")
        file.check_template_columns(where, prompt)
        yield PromptResponse(where, prompt, turns[index]["content"])


def read(path: str, tokenizer: Any, data: SftData, limit: int, model: str | Path) -> PairFile:
    """Read every row of the file at `path`.

    limit: maximum length of the model, in tokens.  model: its directory.  Raises ConfigError with
    file and line for an unusable row."""
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"data: {path} is not a file")
    if tokenizer.eos_token_id is None:
        raise ConfigError("model.path: its tokenizer has no end token, which every answer needs")
    stops = collect_model_stops(tokenizer, model)
    end_tokens = dict.fromkeys(stops)
    longest = min(data.context, limit)
    examples: list[FitExample] = []
    skipped = 0
    for where, sample in data_rows.read_rows(source):
        for pair in parse_pairs(where, sample):
            try:
                prompt_ids = encode_prompt(tokenizer, pair.prompt)
            except ConfigError as error:
                # drop the name of a task's prompt from the template's error
                problem = str(error).removeprefix(
                    f"task: {pair.prompt.split} prompt {pair.prompt.id}"
                )
                raise ConfigError(f"{where}: {problem.lstrip(': ')}") from error
            example = FitExample(prompt_ids, _encode_answer(tokenizer, pair, stops))
            if not len(example.prompt):
                raise ConfigError(f"{where}: the prompt has no token")
            if example.size <= longest:
                examples.append(example)
                end_tokens[int(example.answer[-1])] = None
            elif data.too_long == "skip":
                skipped += 1
            else:
                is_set = longest == data.context
                key = f"data.context = {longest}" if is_set else f"the model's {longest}"
                raise ConfigError(
                    f'{where}: {example.size} tokens are more than {key}; data.too_long = "skip" '
                    "leaves out such rows"
                )
    if not examples:
        raise ConfigError(f"{path}: has no usable rows ({skipped} rows are too long)")
    return PairFile(examples, skipped, tuple(end_tokens))


def _encode_answer(tokenizer: Any, pair: PromptResponse, stops: tuple[int, ...]) -> np.ndarray:
    if not pair.prompt.messages:
        ids = [*tokenizer.encode(pair.answer, add_special_tokens=False), stops[0]]
        return np.array(ids, np.int32)
    try:
        return np.array(encode_chat_response(tokenizer, pair.prompt, pair.answer, stops), np.int32)
    except Exception as error:  # a template is a program that may raise any exception
        raise ConfigError(
            f"{pair.where}: the chat template fails on the answer: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
