"""Tokenizers, encoded prompts and a quick check of weight files, without torch.

transformers takes seconds of CPU to import, and wraps a Rust library that does the work. Where its
configuration adds nothing to `tokenizer.json`, that library is used directly, with the same results
(a test compares them). Its chat template, and published Qwen models, use transformers' classes,
which need no torch; all others use AutoTokenizer, which also imports models: 330 MiB more.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.tree import Config
from asyncrl.contract.blobs.images import MARKER, MOST_IMAGES, ImageShape
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models import fetch, image_tokens
from asyncrl.models.image_tokens import read_shape, split_image_parts
from asyncrl.records.jsonl import read_object

fetch.stay_offline()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

KNOWN_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
    "spiece.model",
)
# Further files that transformers reads and that may change the tokens: transformers loads every
# directory that has any of them.
OTHER_FILES = (
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tekken.json",
)
# families for which transformers uses tokenizer_class = TokenizersBackend without changes
OWN_CLASS = ("qwen3", "llama")
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
HARMLESS = {"tokenizer_class", "backend", "model_max_length", "chat_template", *NAMED}
# longer texts are encoded as a batch of one, during which other threads can run
LONG_TEXT = 1 << 14
NAMED_FIRST = 3  # missing parameters that a message lists
# texts and a sample of the vocabulary, by which a class is compared with its tokenizer.json
COMPARED_TEXTS = (
    "Hello world,  it's 1234!\n\n\tdef f(x): return x",
    " naïve 日本語 emoji 🙂 ",
    "a b",
)
COMPARED_TOKENS = 256
PROBE = 32  # characters of the text that shows which tokens begin one
PATCHED_VOCABULARY = 100_000  # for larger ones transformers may replace a faulty pre-tokenizer


class PlainTokenizer:
    """A `tokenizer.json` in the tokenizers library, with the methods that a run needs."""

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        import tokenizers

        self.path = str(path)
        self.inner = tokenizers.Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
        self.inner.no_truncation()
        self.inner.no_padding()
        self.eos_token_id, self.pad_token_id, self.unk_token_id = (
            self.inner.token_to_id(settings[k]) if settings.get(k) else None
            for k in ("eos_token", "pad_token", "unk_token")
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode `text` into token ids.

        add_special_tokens: add those that transformers would add.
        """
        if len(text) > LONG_TEXT:
            (encoding,) = self.inner.encode_batch([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def get_vocab(self) -> dict[str, int]:
        """Return every token with its id."""
        return dict(self.inner.get_vocab(with_added_tokens=True))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the chat template with transformers, which has its template environment."""
        return self.full_tokenizer.apply_chat_template(*args, **kwargs)

    @cached_property
    def full_tokenizer(self) -> Any:
        """The same tokenizer in transformers' class."""
        return load_transformers_tokenizer(self.path)


def read_plain_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of a tokenizer that its tokenizer.json describes completely.

    Returns None when transformers adds something to it, or may.
    """
    if any((path / name).exists() for name in OTHER_FILES):
        return None
    try:
        family = read_object(path / "config.json").get("model_type")
        settings = read_object(path / "tokenizer_config.json")
        stored = read_object(path / "tokenizer.json")
        special = {t["content"] for t in stored["added_tokens"] if t["special"]}
        special_tokens = [settings[k] for k in NAMED if settings.get(k) is not None]
        is_plain = (
            family in OWN_CLASS
            and set(settings) <= HARMLESS
            and settings["tokenizer_class"] == "TokenizersBackend"
            and settings.get("backend") == "tokenizers"
            and stored["truncation"] is None
            and stored["padding"] is None
            and all(isinstance(t, str) and t in special for t in special_tokens)
            and len(stored["model"]["vocab"]) + len(special) < PATCHED_VOCABULARY
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # transformers raises the error
    return settings if is_plain else None


def uses_qwen_tokenizer(path: Path) -> bool:
    """Return whether AutoTokenizer would choose Qwen2Tokenizer for this directory."""
    # AutoTokenizer chooses another class for these names
    if str(path).lower().startswith(("deepseek-ai/", "stepfun-ai/")):
        return False
    settings = read_object(path / "tokenizer_config.json")
    return (
        read_object(path / "config.json").get("model_type") in ("qwen2", "qwen3")
        and settings.get("tokenizer_class") in ("Qwen2Tokenizer", "Qwen2TokenizerFast")
        and "auto_map" not in settings
    )


def read_vocabulary_size(path: str | Path) -> int:
    """Return the vocabulary size in a model's config.json; 0 if it is missing."""
    raw = read_object(Path(path) / "config.json")
    size = raw.get("vocab_size", (raw.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else 0


def load_transformers_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer in a model directory with transformers, without torch where it can.

    A class of transformers may build another tokenizer than tokenizer.json describes: for a Qwen2
    model always one of byte-level BPE. Then the file decides, and `replaced_class` names the class.
    Raises ConfigError when it does not load.
    """
    plain = "transformers.tokenization_utils_tokenizers", "TokenizersBackend"
    if read_plain_settings(Path(path)) is not None:
        module, name = plain
    elif uses_qwen_tokenizer(Path(path)):
        module, name = "transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer"
    else:
        module, name = "transformers", "AutoTokenizer"
    try:
        tokenizer = getattr(importlib.import_module(module), name).from_pretrained(str(path))
        by_file = getattr(importlib.import_module(plain[0]), plain[1])
        if type(tokenizer) is not by_file and differs_from_file(tokenizer, path):
            replaced = type(tokenizer).__name__
            tokenizer = by_file.from_pretrained(str(path))
            tokenizer.replaced_class = replaced
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.path: the tokenizer in {path} cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    return tokenizer


def differs_from_file(tokenizer: Any, path: str | Path) -> bool:
    """Return whether a tokenizer reads or writes texts otherwise than its tokenizer.json."""
    import tokenizers

    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return False
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception:  # the library raises bare Exception; transformers has read the file
        return False
    ids = sorted(inner.get_vocab().values())
    known = ids[:: max(1, len(ids) // COMPARED_TOKENS)]
    texts = [*COMPARED_TEXTS, *(inner.decode(known[i : i + 8]) for i in range(0, len(known), 8))]
    own = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return any(
        tokenizer.encode(text, add_special_tokens=False) != encoded
        or tokenizer.decode(encoded, **own) != inner.decode(encoded, skip_special_tokens=False)
        for text in texts
        for encoded in [inner.encode(text, add_special_tokens=False).ids]
    )


def load_tokenizer(path: str | Path, *, renders_chats: bool = False) -> Any:
    """Load the tokenizer in a model directory. Raises ConfigError when there is none.

    Its `image_shape` describes how the model reads images; None: it reads only text.
    renders_chats: import what renders a chat template now, because that takes seconds.
    """
    if not any((Path(path) / name).is_file() for name in KNOWN_FILES):
        raise ConfigError(
            f"model.path: {path} has no tokenizer (none of {', '.join(KNOWN_FILES)}); save the "
            "model's tokenizer there"
        )
    tokenizer: Any = None
    if (settings := read_plain_settings(Path(path))) is not None:
        # the library raises bare Exception; transformers raises a better one
        with suppress(Exception):
            tokenizer = PlainTokenizer(path, settings)
    if tokenizer is None:
        tokenizer = load_transformers_tokenizer(path)
    elif renders_chats and has_template(path):
        _ = tokenizer.full_tokenizer
    tokenizer.image_shape = read_shape(path)
    return tokenizer


def collect_stop_tokens(tokenizer: Any, config: Config) -> tuple[int, ...]:
    """Return the tokens that end a completion.

    They come from the tokenizer, from generation_config.json (else config.json, as in
    transformers), and from generator.stop. Raises ConfigError for a text of generator.stop that is
    not one token.
    """
    stops = [*collect_model_stops(tokenizer, config.model.path)]
    for text in config.generator.stop:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"generator.stop: {text!r} is {len(ids)} tokens for the tokenizer in "
                f"{config.model.path}; give texts of exactly one token"
            )
        stops += ids
    return tuple(dict.fromkeys(stops))


def collect_model_stops(tokenizer: Any, path: str | Path) -> tuple[int, ...]:
    """Return the tokens of a model directory that end a completion in any run."""
    stops = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    settings = read_object(Path(path) / "generation_config.json")
    settings = settings or read_object(Path(path) / "config.json")
    if (end_ids := settings.get("eos_token_id")) is not None:
        stops += [int(x) for x in (end_ids if isinstance(end_ids, list) else [end_ids])]
    return tuple(dict.fromkeys(stops))


def encode_prompt(tokenizer: Any, prompt: Prompt) -> np.ndarray:
    """Encode a prompt into token ids, int32 [P]; chat turns use the chat template.

    An assistant's last turn is continued, as with transformers' `continue_final_message`.

    Each image takes the number of tokens that the model reads. Raises ConfigError for chat turns
    without a working template, and for images that the model cannot read.
    """
    shape: ImageShape | None = getattr(tokenizer, "image_shape", None)
    directory = get_directory(tokenizer)
    label, images = f"task: {prompt.split} prompt {prompt.id}", len(prompt.images)
    if images and shape is None:
        raise ConfigError(
            f"{label} has an image, and the model in {directory} reads only text: images need a "
            f"LLaVA (model_type = {image_tokens.FAMILY})"
        )
    if images > MOST_IMAGES:
        raise ConfigError(f"{label} has {images} images; at most {MOST_IMAGES} are allowed")
    if prompt.messages:
        ids = encode_chat_prompt(tokenizer, prompt)
    else:
        image_markers = "" if MARKER in prompt.text else MARKER * images
        ids = encode_text(tokenizer, image_markers + prompt.text)
    if shape is None:
        return np.asarray(ids, dtype=np.int32)
    markers = image_tokens.count(ids, shape)
    if markers != images:
        raise ConfigError(
            f"{label} has {images} images and {markers} image tokens under the tokenizer in "
            f"{directory}: write {MARKER} once for each image, or nowhere"
        )
    return image_tokens.expand(ids, shape)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Encode a text to be continued, after the tokens that the tokenizer begins it with (BOS).

    A text that begins with these tokens gets them once.  Tokens that the tokenizer puts after a
    text would end it, and are left out.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    begin: list[int] | None = getattr(tokenizer, "begin_ids", None)
    if begin is None and ids:
        probe = list(tokenizer.encode(text[:PROBE], add_special_tokens=False))
        full = list(tokenizer.encode(text[:PROBE], add_special_tokens=True))
        spans = (full[start : start + len(probe)] for start in range(len(full)))
        begin = full[: next((start for start, span in enumerate(spans) if span == probe), 0)]
        tokenizer.begin_ids = begin
    begin = begin or []
    return ids if not ids or ids[: len(begin)] == begin else [*begin, *ids]


def get_directory(tokenizer: Any) -> str:
    """Return the directory that a tokenizer was loaded from."""
    return str(getattr(tokenizer, "path", None) or getattr(tokenizer, "name_or_path", ""))


def encode_chat_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Encode the chat turns of a prompt, up to the beginning of the completion.

    Raises ConfigError like `encode_prompt`.
    """
    directory = get_directory(tokenizer)
    full_tokenizer = getattr(tokenizer, "full_tokenizer", tokenizer)
    if not full_tokenizer.chat_template:
        raise ConfigError(
            f"task: {prompt.split} prompt {prompt.id} has `messages`, and the tokenizer in "
            f"{directory} has no chat template: put one there (chat_template.jinja), or give the "
            "text as `prompt`"
        )
    turns: list[Any] = [dict(turn) for turn in prompt.messages]
    if getattr(tokenizer, "image_shape", None) is not None:
        # turns without markers get them in front of the last user's text
        if not any(MARKER in (turn.get("content") or "") for turn in turns):
            last = ([turn for turn in turns if turn["role"] == "user"] or turns)[-1]
            last["content"] = MARKER * len(prompt.images) + (last.get("content") or "")
        if takes_parts(tokenizer):
            turns = [
                {**turn, "content": split_image_parts(turn.get("content") or "")} for turn in turns
            ]
    try:
        return list(
            full_tokenizer.apply_chat_template(
                turns,
                add_generation_prompt=not prompt.is_continued,
                continue_final_message=prompt.is_continued,
                tokenize=True,
                return_dict=False,
                **prompt.template_arguments,
            )
        )
    except Exception as error:  # a template is a program and may raise anything
        raise ConfigError(
            f"task: {prompt.split} prompt {prompt.id}: the chat template in {directory} fails on "
            f"its `messages`: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def takes_parts(tokenizer: Any) -> bool:
    """Return whether the chat template of a model that reads images takes content in parts.

    Such a template writes nothing for content that is text.
    """
    takes: bool | None = getattr(tokenizer, "parts_taken", None)
    if takes is None:
        content = [{"type": "text", "text": "MMM"}]
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False
            )
            takes = "MMM" in text and "type" not in text
        except Exception:  # a template is a program and may raise anything
            takes = False
        tokenizer.parts_taken = takes
    return takes


def encode_chat_response(
    tokenizer: Any, prompt: Prompt, answer: str, stops: Sequence[int]
) -> list[int]:
    """Encode an assistant's turn after those of `prompt`, as the chat template writes it.

    The tokens end at the first of `stops` after the text, else at the first special token there.
    Where the template writes neither, they are the text and stops[0]. Raises any exception of the
    template.
    """
    full_tokenizer = getattr(tokenizer, "full_tokenizer", tokenizer)
    arguments = prompt.template_arguments
    prompt_text, full_text = (
        str(
            full_tokenizer.apply_chat_template(
                chat, add_generation_prompt=generate, tokenize=False, **arguments
            )
        )
        for chat, generate in ((prompt.messages, True), (prompt.join_answer(answer), False))
    )
    # a template may strip the text, or write earlier turns differently once there is an answer
    text = answer if answer in full_text else answer.strip()
    if full_text.startswith(prompt_text):
        turn = full_text[len(prompt_text) :]
    else:
        turn = text + _find_text_after(full_text, text)
    if text not in turn:
        turn = text
    ids = list(full_tokenizer.encode(turn, add_special_tokens=False))
    suffix_ids = list(full_tokenizer.encode(_find_text_after(turn, text), add_special_tokens=False))
    special = {
        number for number, token in full_tokenizer.added_tokens_decoder.items() if token.special
    }
    for ends in (stops, special):
        for index, token in enumerate(suffix_ids):
            if token in ends:
                return ids[: len(ids) - len(suffix_ids) + index + 1]
    return [*full_tokenizer.encode(text, add_special_tokens=False), *stops[:1]]


def _find_text_after(turn: str, text: str) -> str:
    """Return the part of `turn` after the last occurrence of `text`; "" without one."""
    return turn.rpartition(text)[2] if text in turn else ""


def has_template(path: str | Path) -> bool:
    """Return whether the tokenizer in a model directory has a chat template."""
    settings = read_object(Path(path) / "tokenizer_config.json")
    return (Path(path) / "chat_template.jinja").is_file() or bool(settings.get("chat_template"))


def describe_missing_weights(path: str | Path, missing: Sequence[str]) -> str:
    """Describe weight files that lack these parameters."""
    ellipsis = ", ..." if len(missing) > NAMED_FIRST else ""
    return (
        f"the weights in {path} lack {len(missing)} of the parameters in its config.json, which "
        f"would be random: {', '.join(missing[:NAMED_FIRST])}{ellipsis}"
    )


def check_weights(path: str | Path) -> None:
    """Check the headers of a directory's weight files, without loading the weights.

    Raises ConfigError for missing or damaged files.
    """
    import safetensors

    files = sorted(Path(path).glob("*.safetensors"))
    if not files and not list(Path(path).glob("*.bin")):
        raise ConfigError(f"model.path: {path} has no weights (no *.safetensors)")
    for file in files:
        try:
            with safetensors.safe_open(str(file), framework="np") as opened:
                opened.keys()
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(
                f"model.path: {file} is damaged ({error}): copy or download it again"
            ) from error
