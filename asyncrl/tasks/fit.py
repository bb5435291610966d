"""Supervised training: its examples, and the next-token loss on them, step by step.

Samples are JSONL or parquet with `prompt` and `answer`, or with `messages`. Every assistant turn of
a chat is one example, with the turns before it as the prompt. Its answer is the chat template's
text up to the token that ends the turn. Any other answer is its text and the end token, as the
model has to write it in a run.

Examples are packed if the model has a packed forward: linear layers process no padding, and
attention pads only within a micro-batch.  The warm start of tiny models and `asyncrl sft` both use
this module."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncrl.config.sft import SftData, SftTraining
from asyncrl.config.tree import compute_learning_rate_share
from asyncrl.contract.errors import ConfigError, NotFiniteError
from asyncrl.contract.messages import TEMPLATE_COLUMNS, Prompt
from asyncrl.models.policy import PolicyModel
from asyncrl.models.tokenizer import collect_model_stops, encode_chat_response, encode_prompt
from asyncrl.models.trainer import Trainer, split_micro_batches
from asyncrl.tasks import file
from asyncrl.tasks.data import rows as data_rows


class FitExample(NamedTuple):
    """One example of supervised training.

    prompt: int32 [P], not in the loss.
    answer: int32 [T], in the loss, with its end token.
    images: the blobs of the prompt's image tokens.
    given: the first tokens of the answer that are not in the loss."""

    prompt: np.ndarray
    answer: np.ndarray
    images: Sequence[bytes] = ()
    given: int = 0

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.answer)


# ---- the examples of a file ----------------------------------------------------------------------


class PairFile(NamedTuple):
    """The examples of a file.

    skipped: number of rows that were left out because they are too long.
    ends: tokens that end an answer, from the tokenizer, the model's directory and the rows."""

    rows: list[FitExample]
    skipped: int
    ends: tuple[int, ...]


def parse_pairs(where: str, sample: Any) -> Iterator[tuple[Prompt, str]]:
    """Yield the answers of one sample, each with its prompt.

    Raises ConfigError that starts with `where`."""
    if not isinstance(sample, dict):
        raise ConfigError(f"{where}: needs an object with `prompt` and `answer`, or `messages`")
    if any(file.holds_images(sample.get(name)) for name in file.IMAGE_COLUMNS):
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
        yield Prompt(0, text, answer, [], {}, "train"), answer
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
        yield prompt, turns[index]["content"]


def read_pairs(path: str, tokenizer: Any, data: SftData, limit: int, model: str | Path) -> PairFile:
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
        for prompt, answer in parse_pairs(where, sample):
            try:
                prompt_ids = encode_prompt(tokenizer, prompt)
            except ConfigError as error:
                # drop the name of a task's prompt from the template's error
                problem = str(error).removeprefix(f"task: {prompt.split} prompt {prompt.id}")
                raise ConfigError(f"{where}: {problem.lstrip(': ')}") from error
            try:
                answer_ids = (
                    encode_chat_response(tokenizer, prompt, answer, stops)
                    if prompt.messages
                    else [*tokenizer.encode(answer, add_special_tokens=False), stops[0]]
                )
            except Exception as error:  # a template is a program that may raise any exception
                raise ConfigError(
                    f"{where}: the chat template fails on the answer: {type(error).__name__}: "
                    f"{' '.join(str(error).split())}"
                ) from error
            example = FitExample(prompt_ids, np.array(answer_ids, np.int32))
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


# ---- their loss ----------------------------------------------------------------------------------


def split_examples(examples: Sequence[FitExample], limit: int) -> list[list[FitExample]]:
    """Split `examples` into passes of at most `limit` tokens, padded to the longest of each.

    If one pass is enough, the order stays; otherwise the examples are sorted by length.  An example
    with more than `limit` tokens gets its own pass."""
    widths = [example.size for example in examples]
    order = list(range(len(examples)))
    if len(order) * max(widths) > limit:
        order.sort(key=widths.__getitem__)
    micros = split_micro_batches(order, widths, limit, rows=math.inf)
    return [[examples[index] for index in micro] for micro in micros]


def select_batch(
    examples: Sequence[FitExample], training: SftTraining, seed: int, step: int
) -> list[FitExample]:
    """Return the examples of a step from repeated passes, each shuffled by (seed, pass).

    A batch may span two passes.  The result depends only on the arguments, so that a resumed run
    continues with the same examples."""
    batch: list[FitExample] = []
    for position in range(step * training.batch, (step + 1) * training.batch):
        turn, place = divmod(position, len(examples))
        if not batch or not place:
            order = np.random.default_rng([seed, turn]).permutation(len(examples))
        batch.append(examples[order[place]])
    return batch


class ModelFitter:
    """A model with its trainer; `number` counts the steps.

    rate: the learning rate of a step; None: by the keys of `training`."""

    def __init__(
        self, model: PolicyModel, training: SftTraining, rate: Callable[[int], float] | None = None
    ) -> None:
        self.model = model
        self.training = training
        self.rate = rate or (lambda step: training.lr * compute_learning_rate_share(training, step))
        self.number = 0
        self.trainer = Trainer(model.hf.parameters(), training)

    def step(self, examples: Sequence[FitExample]) -> float:
        """Make one optimizer step on `examples`; return its loss in nats per answer token.

        If it raises NotFiniteError, the weights are unchanged."""
        self.model.hf.train()
        tokens = sum(len(example.answer) - example.given for example in examples)
        self.trainer.drop_gradient()
        total = torch.zeros((), dtype=torch.double)
        for micro_batch in split_examples(examples, self.training.micro_batch_tokens):
            loss = self._sum_loss(micro_batch) / tokens
            self.trainer.accumulate(loss)
            total += loss.detach().cpu()
        if not math.isfinite(self.trainer.apply(self.rate(self.number), total)):
            raise NotFiniteError(
                f"the loss or its gradient is not finite in step {self.number}: training.lr = "
                f"{self.training.lr:g} is too large"
            )
        self.number += 1
        return float(total)

    @torch.no_grad()
    def measure_loss(self, examples: Sequence[FitExample]) -> float:
        """Return the mean loss on `examples` in nats per answer token, without training."""
        self.model.hf.eval()
        micro_batches = split_examples(examples, self.training.micro_batch_tokens)
        return sum(float(self._sum_loss(micro_batch)) for micro_batch in micro_batches) / sum(
            len(example.answer) - example.given for example in examples
        )

    def _sum_loss(self, examples: Sequence[FitExample]) -> torch.Tensor:
        """Return the negative sum of the answers' log-probabilities."""
        scores = self.model.logprobs(
            [example.prompt for example in examples],
            [example.answer for example in examples],
            torch.ones(len(examples)),
            groups=[id(example.prompt) for example in examples],
            images=[example.images for example in examples],
        )
        in_loss = np.concatenate([np.arange(len(x.answer)) >= x.given for x in examples])
        return -(scores.logprobs * torch.from_numpy(in_loss).to(scores.logprobs.device)).sum()
