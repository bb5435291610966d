from pathlib import Path
from typing import Any

import transformers
from bare_kit import edit
from generator_kit import announcement, make, one_pass, ticket, tickets  # noqa: F401

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.models import policy

SYMBOLS = "0123456789=:,#"


def config(path: Path, *sets: str) -> Config:
    return load.load("demo", [f"model.path={str(path)!r}", "model.warm_start=false", *sets])


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def chat_model(path: Path, **shape: int) -> policy.PolicyModel:
    """A chat model: `<eos>` ends a turn of the template, and generation_config.json names two more
    tokens that end an answer."""
    model = policy.build_model(path, SYMBOLS, family="llama", **shape)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    edit(path, "generation_config.json", eos_token_id=[1, 5, 9])
    return model


def check_ends(answers: dict[Any, Any], stops: tuple[int, ...], most: int) -> None:
    """Every answer goes to its first stop token, included; each of the tokens ended some."""
    assert {int(a.tokens[-1]) for a in answers.values() if a.finish == "stop"} == set(stops)
    for a in answers.values():
        inside = [i for i, t in enumerate(a.tokens) if int(t) in stops]
        assert inside == ([len(a.tokens) - 1] if a.finish == "stop" else [])
        assert a.finish == "stop" or len(a.tokens) == most
