"""The tokenizer of a model directory and what a prompt is to it, without torch; and a look at the
weight files.

transformers takes seconds of CPU to import and wraps the Rust library that does the work.  Where
its configuration adds nothing to `tokenizer.json`, that library is used alone, with the same
results (a test compares them); everything else goes through transformers: published Qwen models by
their class, which needs no torch, the rest by AutoTokenizer, which imports models and all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models import fetch

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
# What transformers also reads, and what would change the tokens: with any of these in the directory
# it is asked.
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
# families for which transformers takes tokenizer_class = TokenizersBackend at its word
OWN_CLASS = ("qwen3", "llama")
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
HARMLESS = {"tokenizer_class", "backend", "model_max_length", "chat_template", *NAMED}
# characters from which on a text is encoded as a batch of one, in which other threads can go on
LONG_TEXT = 1 << 14
NAMED_FIRST = 3  # missing parameters that a message lists
PATCHED_VOCABULARY = 100_000  # above it transformers looks for a faulty pre-tokenizer and mends it


class PlainTokenizer:
    """`tokenizer.json` by the tokenizers library alone: what generator and supervisor use of a
    tokenizer.
    """

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
        """Token ids of `text`; with special tokens around it as transformers would put them, if
        asked for.
        """
        if add_special_tokens:
            return list(self.full_tokenizer.encode(text))
        if len(text) > LONG_TEXT:
            (found,) = self.inner.encode_batch([text], add_special_tokens=False)
            return list(found.ids)
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def get_vocab(self) -> dict[str, int]:
        """Every token with its number."""
        return dict(self.inner.get_vocab(with_added_tokens=True))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """By transformers, whose template environment it is."""
        return self.full_tokenizer.apply_chat_template(*args, **kwargs)

    @cached_property
    def full_tokenizer(self) -> Any:
        """The same tokenizer as transformers' class."""
        from asyncrl.models.policy import transformers_tokenizer

        return transformers_tokenizer(self.path)


def read_plain_settings(path: Path) -> dict[str, Any] | None:
    """The settings of a tokenizer that is exactly its tokenizer.json; None when transformers would
    add to it, or might.
    """
    if any((path / name).exists() for name in OTHER_FILES):
        return None
    try:
        family = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        stored = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        special = {t["content"] for t in stored["added_tokens"] if t["special"]}
        named = [settings[k] for k in NAMED if settings.get(k) is not None]
        same = (
            family in OWN_CLASS
            and set(settings) <= HARMLESS
            and settings["tokenizer_class"] == "TokenizersBackend"
            and settings.get("backend") == "tokenizers"
            and stored["truncation"] is None
            and stored["padding"] is None
            and all(isinstance(t, str) and t in special for t in named)
            and len(stored["model"]["vocab"]) + len(special) < PATCHED_VOCABULARY
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # transformers says what is wrong with it
    return settings if same else None


def qwens(path: Path) -> bool:
    """Whether AutoTokenizer would choose Qwen2Tokenizer for this directory."""
    # names for which it has another opinion
    if str(path).lower().startswith(("deepseek-ai/", "stepfun-ai/")):
        return False
    try:
        family = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        return (
            family in ("qwen2", "qwen3")
            and settings.get("tokenizer_class") in ("Qwen2Tokenizer", "Qwen2TokenizerFast")
            and "auto_map" not in settings
        )
    except (OSError, ValueError, AttributeError):
        return False


def vocabulary(path: str | Path) -> int:
    """Tokens of the model in a directory, as its config.json says; 0: it does not say."""
    try:
        raw = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        size = raw.get("vocab_size", (raw.get("text_config") or {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError):
        return 0
    return size if isinstance(size, int) else 0


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer in a model directory.  Raises ConfigError when there is none."""
    if not any((Path(path) / name).is_file() for name in KNOWN_FILES):
        raise ConfigError(
            f"model.path: {path} has no tokenizer (none of {', '.join(KNOWN_FILES)}); save the "
            "model's tokenizer there"
        )
    settings = read_plain_settings(Path(path))
    if settings is not None:
        try:
            return PlainTokenizer(path, settings)
        except Exception:  # the tokenizers library raises bare Exception; transformers words it
            pass
    if qwens(Path(path)):
        from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

        try:
            return Qwen2Tokenizer.from_pretrained(str(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"model.path: {path} has no tokenizer that loads: {str(error).splitlines()[0]}"
            ) from error
    from asyncrl.models.policy import transformers_tokenizer

    return transformers_tokenizer(path)


def stop_tokens(tokenizer: Any, config: Config) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's, those of generation_config.json (one or a
    list), those of generator.stop.

    A model without a generation_config.json has its own in config.json, as for transformers.
    Raises ConfigError for a text of generator.stop that is not one token."""
    found = [*model_stops(tokenizer, config.model.path)]
    for text in config.generator.stop:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"generator.stop: {text!r} is {len(ids)} tokens for the tokenizer in "
                f"{config.model.path}; an answer ends at one token"
            )
        found += ids
    return tuple(dict.fromkeys(found))


def model_stops(tokenizer: Any, path: str | Path) -> tuple[int, ...]:
    """The tokens at which any run of the model in a directory ends an answer."""
    found = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for name in ("generation_config.json", "config.json"):
        try:
            named = json.loads((Path(path) / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        found += [
            int(x) for x in (named if isinstance(named, list) else [] if named is None else [named])
        ]
        break
    return tuple(dict.fromkeys(found))


def has_character(tokenizer: Any, character: str) -> bool:
    """Whether the vocabulary can write a printable character: it is not the unknown token, and not
    dropped.
    """
    ids = tokenizer.encode(character, add_special_tokens=False)
    return bool(ids) and tokenizer.unk_token_id not in ids


def encode_prompt(tokenizer: Any, prompt: Prompt) -> np.ndarray:
    """Token ids int32 [P] of a prompt; chat turns go through the tokenizer's chat template.

    Raises ConfigError where there is none, and for turns that it refuses.
    """
    if prompt.messages:
        ids = encode_chat_prompt(tokenizer, prompt)
    else:
        ids = tokenizer.encode(prompt.text, add_special_tokens=False)
    return np.asarray(ids, dtype=np.int32)


def encode_chat_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The chat turns of a prompt, up to where the answer begins."""
    where = getattr(tokenizer, "path", None) or getattr(tokenizer, "name_or_path", "")
    whole = tokenizer.full_tokenizer if isinstance(tokenizer, PlainTokenizer) else tokenizer
    if not whole.chat_template:
        raise ConfigError(
            f"task: {prompt.split} prompt {prompt.id} has `messages`, and the tokenizer in {where} "
            "has no chat template to write them with: "
            "put one there (chat_template.jinja), or give the text as `prompt`"
        )
    try:
        return list(
            whole.apply_chat_template(
                prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
    except Exception as error:  # whatever a template raises: it is a program of its own
        raise ConfigError(
            f"task: {prompt.split} prompt {prompt.id}: the chat template in {where} fails on its "
            "`messages`: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def encode_chat_response(
    tokenizer: Any, turns: Sequence[dict[str, str]], answer: str, stops: Sequence[int]
) -> list[int]:
    """The tokens of an assistant's turn behind `turns`, as the chat template writes it: up to the
    first of `stops` behind the text, else up to the first special token there; the text and
    stops[0] where the template writes neither.

    Raises whatever a template raises."""
    whole = tokenizer.full_tokenizer if isinstance(tokenizer, PlainTokenizer) else tokenizer
    before, after = (
        str(whole.apply_chat_template(list(each), add_generation_prompt=ask, tokenize=False))
        for each, ask in (
            (turns, True),
            ([*turns, {"role": "assistant", "content": answer}], False),
        )
    )
    # a template may strip the text, or write what goes before it otherwise once it is answered
    text = answer if answer in after else answer.strip()
    written = after[len(before) :] if after.startswith(before) else text + _text_after(after, text)
    if text not in written:
        written = text
    ids = list(whole.encode(written, add_special_tokens=False))
    behind = list(whole.encode(_text_after(written, text), add_special_tokens=False))
    special = {at for at, token in whole.added_tokens_decoder.items() if token.special}
    ends = [at for at, token in enumerate(behind) if token in stops]
    ends += [at for at, token in enumerate(behind) if token in special]
    if ends:
        return ids[: len(ids) - len(behind) + ends[0] + 1]
    return [*whole.encode(text, add_special_tokens=False), *stops[:1]]


def _text_after(written: str, text: str) -> str:
    """What follows the last place of `text`; nothing where it does not stand."""
    return written.rpartition(text)[2] if text in written else ""


def has_template(path: str | Path) -> bool:
    """Has the tokenizer in a model directory a chat template?"""
    if (Path(path) / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((Path(path) / "tokenizer_config.json").read_text(encoding="utf-8"))
        return bool(settings.get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def missing_weights_message(path: str | Path, missing: Sequence[str]) -> str:
    """What is wrong with weight files that have no value for these parameters."""
    more = ", ..." if len(missing) > NAMED_FIRST else ""
    return (
        f"the weights in {path} lack {len(missing)} of the parameters that its config.json asks "
        "for, which would be drawn at random: "
        f"{', '.join(missing[:NAMED_FIRST])}{more}"
    )


def check_weights(path: str | Path) -> None:
    """Look at the headers of a directory's weight files, without loading them.  Raises ConfigError
    for none, or for a damaged one.
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
