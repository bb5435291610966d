"""Prompts from files and data sets with `prompt` or `messages` (chat turns), and `answer`.

A column `image` has one image, a column `images` a list: paths, data: URLs, and the images of data
sets. Only a path of a PNG or JPEG file or a data: URL counts as an image, because data sets have
columns of that name with other text. The reward function receives the other columns in
`prompt.meta`, as text or JSON.
"""

import contextlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract.blobs.images import digest
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import TEMPLATE_COLUMNS, Numbers, Prompt
from asyncrl.models import pictures
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks.data.rows import find_files, read_rows

# common names of the prompt column in data sets
PROMPT_COLUMNS = ("question", "problem", "query", "instruction", "input", "text", "prompts")
# common names of the answer in data sets, also inside columns as reward_model
ANSWER_COLUMNS = ("ground_truth", "answer", "solution", "target", "expected_answer", "label")
RIGHT = 0.75  # share of correct demonstrations in a warm start
MOST_SYMBOLS = 256  # most characters of a model whose tokens are characters
IMAGE_COLUMNS = ("image", "images")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


def parse_turns(where: str, value: Any) -> list[JsonObject]:
    """Return chat turns as the chat template takes them.  Raises ConfigError for invalid turns.

    A turn with `tool_calls` needs no content.  Other keys that are null are left out."""
    if not isinstance(value, list) or not all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and (
            isinstance(turn.get("content"), str)
            or (turn.get("content") is None and turn.get("tool_calls"))
        )
        for turn in value
    ):
        raise ConfigError(
            f"{where}: `messages` must be a list of objects with a `role` and a `content`, both "
            "text"
        )
    return [
        {key: value for key, value in turn.items() if value is not None or key == "content"}
        for turn in value
    ]


def check_template_columns(where: str, prompt: Prompt) -> None:
    """Raise ConfigError for columns that a prompt's chat template cannot take."""
    if not prompt.messages and prompt.meta.get("chat_template_kwargs"):
        raise ConfigError(f"{where}: `chat_template_kwargs` needs `messages`")
    try:
        prompt.template_arguments  # noqa: B018 - raises ValueError
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def to_text(value: Any) -> str:
    """Convert the value of a column to text; other types become JSON."""
    return (
        value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    )


def holds_images(value: Any) -> bool:
    """Return whether the value of a column is an image or a list of images."""
    if isinstance(value, list):
        return bool(value) and all(map(holds_images, value))
    if isinstance(value, dict):  # the stored form of a data set's `Image` feature
        return set(value) == {"bytes", "path"}
    if not isinstance(value, str):
        return False
    return value.startswith(pictures.DATA_URL) or value.lower().endswith(IMAGE_SUFFIXES)


def read_images(location: str, column: str, value: Any, folder: Path) -> list[bytes]:
    """Return the blobs of a column that holds images; paths are relative to `folder`.

    Raises ConfigError that starts with `location`."""
    values = value if isinstance(value, list) else [value]
    try:
        return [pictures.build_blob(_read_bytes(image, folder)) for image in values]
    except (OSError, ValueError) as error:
        problem = (
            f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        )
        raise ConfigError(
            f"{location}: `{column}` is not an image: {problem}; give the path of a PNG or JPEG "
            "file, relative to this one, or a data: URL"
        ) from error


def _read_bytes(value: Any, folder: Path) -> bytes:
    """Read the bytes of an image.  Raises OSError or ValueError."""
    if isinstance(value, dict):
        if value["bytes"] is not None:
            return bytes(value["bytes"])
        value = value["path"]
    if not isinstance(value, str):
        raise ValueError("it has neither bytes nor a path")
    if value.startswith(pictures.DATA_URL):
        return pictures.decode_data_url(value)
    return (folder / value).read_bytes()


def _rename_columns(where: str, row: JsonObject, columns: Mapping[str, str]) -> JsonObject:
    """Apply `task.columns` (our name -> the file's) and move chat turns in `prompt` to `messages`.

    TRL stores chat turns in `prompt`.  Raises ConfigError for a missing column."""
    values: JsonObject = {}
    for name, column in columns.items():
        try:
            # or a part of a column, as `reward_model.ground_truth`; a number chooses an entry of a
            # list: `messages.-1.content`
            value: Any = row
            for part in [column] if column in row else column.split("."):
                value = value[int(part)] if isinstance(value, list) else value[part]
            values[name] = value
        except (LookupError, TypeError, ValueError):
            raise ConfigError(
                f"{where}: task.columns: has no column `{column}`; it has "
                f"{', '.join(map(str, row))}"
            ) from None
    moved = {column for name, column in columns.items() if name != "answer"}
    row = {column: value for column, value in row.items() if column not in moved} | values
    if isinstance(row.get("prompt"), list) and not row.get("messages"):
        row = row | {"messages": row["prompt"], "prompt": ""}
    return row


def suggest_answer_column(prompt: Prompt) -> str:
    """Suggest the setting for a prompt whose answer is in another column; "" without one."""
    values: JsonObject = {**prompt.meta}
    for name, text in prompt.meta.items():
        with contextlib.suppress(ValueError):
            if isinstance(inner := json.loads(text), dict):
                values |= {f"{name}.{key}": value for key, value in inner.items()}
    likely = next((x for x in values if x.rpartition(".")[2] in ANSWER_COLUMNS), "")
    return f'task.columns = {{ answer = "{likely}" }}' if likely else ""


def _build_prompt(
    where: str,
    row: Any,
    number: int,
    split: str,
    columns: Mapping[str, str] = {},
    folder: Path = Path(),
) -> Prompt:
    """Convert one row to a Prompt.  Raises ConfigError that starts with `where`.

    folder: directory of the file, which paths of images are relative to."""
    if isinstance(row, dict):
        row = _rename_columns(where, dict(row), columns)
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
            f"{where}: has both `prompt` and `messages`; the model reads only one: remove the other"
        )
    turns = parse_turns(where, row.get("messages") or [])
    answer = to_text(row.get("answer"))
    if turns and turns[-1]["role"] == "assistant":
        if answer.strip() and (turns[-1]["content"] or "").strip() == answer.strip():
            turns.pop()  # the reference answer is not a part of the prompt
        elif row.get("prompt") is None:
            name = columns.get("messages", "messages")
            raise ConfigError(
                f"{where}: `{name}` ends with an assistant turn; set task.columns = "
                f'{{ answer = "{name}.-1.content" }} if it is the reference answer, '
                f'{{ prompt = "{name}" }} if the model continues it'
            )
    contents = (turn.get("content") for turn in reversed(turns))
    text = row.get("prompt") or next(filter(None, contents), "")
    if not text:
        raise ConfigError(f"{where}: the prompt is empty")
    columns_of_images = [name for name in IMAGE_COLUMNS if holds_images(row.get(name))]
    images = [
        blob for name in columns_of_images for blob in read_images(where, name, row[name], folder)
    ]
    used = ("prompt", "messages", "answer", *columns_of_images)
    meta = {str(k): to_text(v) for k, v in row.items() if k not in used}
    prompt = Prompt(number, text, answer, turns, meta, split, images=images)
    check_template_columns(where, prompt)
    return prompt


def read_prompts(path: str, split: str, columns: Mapping[str, str] = {}) -> list[Prompt]:
    """Read all prompts of a file.

    Raises ConfigError with file and line (parquet: row) for an unusable row."""
    files = find_files(path)
    if files is None:
        key = {"train": "task.prompts: ", "heldout": "task.heldout: ", "ood": "task.ood: "}
        raise ConfigError(f"{key.get(split, '')}{path} is not a file")
    rows = ((file.parent, *row) for file in files for row in read_rows(file))
    prompts = [
        _build_prompt(where, row, number, split, columns, folder)
        for number, (folder, where, row) in enumerate(rows)
    ]
    if not prompts:
        raise ConfigError(f"{path}: has no prompts")
    return prompts


def _identify_turn(turn: JsonObject) -> list[Any]:
    others = {key: value for key, value in turn.items() if key not in ("role", "content")}
    content = (turn.get("content") or "").strip()
    return [turn["role"], content, *([others] if others else [])]


def canonicalize(prompt: Prompt) -> str:
    """Return the text that identifies a problem: the model's input without surrounding space.

    It contains the digests of the images."""
    columns = [prompt.meta.get(name) for name in TEMPLATE_COLUMNS]
    text = prompt.text.strip()
    if prompt.messages:
        text = json.dumps([*map(_identify_turn, prompt.messages), *filter(None, columns)])
    return "\0".join([text, *map(digest, prompt.images)])


class FileTask:
    """A task read from files.

    Without `heldout`, a fixed tenth of the problems (at least one) is held out.  A training prompt
    that is also in `heldout` or `ood` is excluded from training.

    unanswered: number of training prompts without an answer."""

    name = "file"
    steps = 250  # of the warm start
    unset = "give the file of prompts (task.name = file)"  # error if task.prompts is empty

    def __init__(
        self, prompts: str, heldout: str = "", ood: str = "", columns: Mapping[str, str] = {}
    ) -> None:
        if not prompts:
            raise ConfigError(f"task.prompts: {self.unset}")
        named = [(canonicalize(file), file) for file in read_prompts(prompts, "train", columns)]
        self.sets: dict[str, list[Prompt]] = {
            "heldout": read_prompts(heldout, "heldout", columns) if heldout else [],
            "ood": read_prompts(ood, "ood", columns) if ood else [],
        }
        fixed = {canonicalize(file) for rows in self.sets.values() for file in rows}
        named = [(name, file) for name, file in named if name not in fixed]
        if not heldout:
            problems = sorted({name for name, _ in named})
            if len(problems) < 2:
                raise ConfigError(
                    f"{prompts}: {len(problems)} prompt(s) cannot be both trained on and held out; "
                    "give task.heldout"
                )
            fixed = set(random.Random(0).sample(problems, max(1, len(problems) // 10)))
            self.sets["heldout"] = [
                msgspec.structs.replace(file, split="heldout")
                for name, file in named
                if name in fixed
            ]
        fresh = [file for name, file in named if name not in fixed]
        if not fresh:
            raise ConfigError(
                f"{prompts}: every prompt is also in task.heldout or task.ood; nothing is left to "
                "train on"
            )
        self.sets["train"] = fresh
        self.unanswered = sum(not file.answer for file in fresh)
        self._order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        """Return a prompt; training repeats the file, shuffled by (seed, pass)."""
        rows = self.sets[split]
        if split != "train":
            return rows[index % len(rows)]
        pass_number, position = divmod(index, len(rows))
        if self._order[0] != (seed, pass_number):
            order = list(range(len(rows)))
            random.Random(f"{seed}:{pass_number}").shuffle(order)
            self._order = ((seed, pass_number), order)
        return rows[self._order[1][position]]

    def size(self, split: str) -> int | None:
        """Return the number of prompts in a fixed split; None for the endless training stream."""
        return None if split == "train" else len(self.sets[split])

    @property
    def symbols(self) -> str:
        """Every character of the prompts of all splits and of the training answers."""
        texts = [file.text for rows in self.sets.values() for file in rows]
        texts += [file.answer for file in self.sets["train"]]
        return "".join(sorted(set().union(*texts)))

    def make_demonstrations(self, number: int, seed: int) -> list[tuple[str, str]]:
        """Return `number` pairs (prompt, answer) for the warm start of a tiny model.

        A quarter of the answers belong to other prompts, so that RL has something to learn. Raises
        ConfigError for chats, for prompts without an answer, and for too many characters."""
        rows = self.sets["train"]
        if any(file.images for rows in self.sets.values() for file in rows):
            problem = "prompts have images, which a model built for text does not read"
        elif any(file.messages for rows in self.sets.values() for file in rows):
            problem = "prompts are chats (`messages`), which it has no template for"
        elif self.unanswered:
            problem = (
                f"{self.unanswered} of {len(rows)} training prompts have no answer to learn from"
            )
        elif len(self.symbols) > MOST_SYMBOLS:
            problem = f"texts have {len(self.symbols)} different characters, {MOST_SYMBOLS} at most"
        else:
            rng = random.Random(f"file:demo:{seed}")
            chosen = rng.choices(rows, k=number)
            answering = [file if rng.random() < RIGHT else rng.choice(rows) for file in chosen]
            return [(file.text, a.answer) for file, a in zip(chosen, answering, strict=True)]
        raise ConfigError(
            f"model.warm_start: cannot build a tiny model: {problem}; set model.path to your own "
            "model"
        )

    def reward(self, prompt: Prompt, text: str) -> float | Numbers:
        """Return 1 for the exact answer, up to surrounding white space, otherwise 0.

        A prompt without an answer gives 0, because an empty response would equal it. Another reward
        needs `reward.function`."""
        return float(bool(prompt.answer) and text.strip() == prompt.answer.strip())


class EnvironmentPrompts(FileTask):
    """The rows of the data sets of `agent.env`, from files written before the run."""

    name = "env"
    unset = "is empty; `asyncrl run` writes the rows of agent.env's data sets to files"

    def reward(self, prompt: Prompt, text: str) -> float | Numbers:
        raise ValueError("task.name = env has no reward: the environment gives it")
