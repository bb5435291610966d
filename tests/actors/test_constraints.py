"""Completions that are decoded under a grammar: every answer has the form, and the learner's
log-probabilities over the recorded tokens are those that it was sampled with."""

import json
import sys
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from engine_kit import engine, request, run
from gateway_kit import CHATML, SPECIAL
from gateway_kit import tokenizer as chat_tokenizer
from process_kit import run_command
from warm_python import FORKED

from actors.decoding import constraints
from actors.decoding.constraints import (
    GrammarCompiler,
    TokenBytes,
    TokenConstraint,
    advance,
    compute_allowed_tokens,
    convert_tokenizer,
)
from actors.decoding.drafts import DraftPolicy
from actors.engine import CompletionRequest
from actors.engine_generic import GenericEngine
from actors.gateway.endpoint.requests import build_grammar
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.models.tokenizer import load_tokenizer

SYMBOLS = '{}[]":,<>/_abcdefgilmnrstuvyz0123456789'  # no white space: an answer has an end
ANSWER = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["sure", "size"],
    "additionalProperties": False,
}


def form(**options: Any) -> str:
    return build_grammar(options, options.get("tools", ()), "hermes")


JSON = form(response_format={"type": "json_schema", "json_schema": {"schema": ANSWER}})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> policy.PolicyModel:
    path = tmp_path_factory.mktemp("model")
    return policy.build_model(path, SYMBOLS, family="qwen3", kv_heads=2, seed=3)


@pytest.fixture(scope="module")
def compiler(model: policy.PolicyModel) -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer(model.tokenizer_dir), model.tokenizer_dir, (1,))


def requests(compiler: GrammarCompiler, grammar: str = JSON, **how: Any) -> list[CompletionRequest]:
    """Constrained ones, beside one that is not."""
    asked = [request(t, s, [3 + t, 4], 60, **how) for t in range(3) for s in range(2)]
    constrained = [type(r)(**{**vars(r), "constraint": compiler.begin(grammar)}) for r in asked]
    return [*constrained, request(9, 0, [5, 6], 12)]


def text(compiler: GrammarCompiler, tokens: np.ndarray) -> str:
    return str(compiler.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def engines(model: policy.PolicyModel, kind: str) -> Any:
    if kind == "generic":
        other = GenericEngine(model, slots=5, context=64)
        other.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
        return other
    drafts = DraftPolicy(4, 64) if kind == "drafts" else None
    return engine(model, slots=5, fixed=kind == "exact", drafts=drafts)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("embedded", {}),
        ("embedded", {"top_k": 2}),
        ("exact", {"top_p": 0.8, "temperature": 0.7}),
        ("drafts", {"top_p": 0.8, "temperature": 0.7}),
        ("generic", {"top_p": 0.8, "temperature": 0.7}),
    ],
)
def test_every_answer_has_the_form_and_the_learner_its_probabilities(
    model: policy.PolicyModel,
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    how: dict[str, float],
) -> None:
    asked = requests(compiler, **how)
    found = run(engines(model, kind), asked)
    answers = [found[r.key] for r in asked]
    if kind == "drafts":
        for key, plain in run(engines(model, "embedded"), requests(compiler, **how)).items():
            assert np.array_equal(plain.tokens, found[key].tokens)
            assert plain.support_bytes == found[key].support_bytes
    for answer in answers[:-1]:
        written = json.loads(text(compiler, answer.tokens))
        assert set(written) == {"sure", "size"} and written["size"] in ("small", "large")
        assert answer.finish == "stop" and answer.support is not None
        assert answer.support.contains(answer.tokens).all()
        assert 1 == answer.support.sizes.min() < answer.support.sizes.max()
        assert answer.support.sizes.max() <= how.get("top_k", 20)
    assert answers[-1].support is None
    recorded = torch.from_numpy(np.concatenate([a.logprobs for a in answers]))
    monkeypatch.setattr(model, "exact", kind == "exact")
    with torch.no_grad():
        out = model.logprobs(
            [a.prompt for a in answers],
            [a.tokens for a in answers],
            torch.tensor([r.temperature for r in asked]),
            supports=[a.support for a in answers],
        )
    if kind == "exact":
        assert torch.equal(out.logprobs, recorded)
    torch.testing.assert_close(out.logprobs, recorded, atol=1e-5, rtol=0)


def test_a_completion_ends_where_the_vocabulary_cannot_go_on(
    model: policy.PolicyModel, compiler: GrammarCompiler
) -> None:
    """The vocabulary has no X: the end token is all that is left."""
    some = requests(compiler, form(structured_outputs={"choice": ["abX", "aeX"]}))
    for answer in list(run(engines(model, "embedded"), some).values())[:-1]:
        if answer.support is not None:
            assert text(compiler, answer.tokens) in ("ab", "ae") and answer.finish == "stop"
            assert answer.support.sizes.tolist() == [1, 2, 1] and answer.logprobs[2] == 0


def test_a_stop_text_ends_an_answer_only_where_it_is_complete(model: policy.PolicyModel) -> None:
    """generator.stop may be a token that occurs within the form."""
    tokenizer = load_tokenizer(model.tokenizer_dir)
    comma, digit = (tokenizer.encode(x)[0] for x in ",1")
    begun = GrammarCompiler(tokenizer, model.tokenizer_dir, (1, comma)).begin(
        form(structured_outputs={"regex": "1,?1"})
    )
    size = model.hf.config.vocab_size
    begun.advance(digit)
    assert np.flatnonzero(begun.compute_allowed(size)).tolist() == [digit]
    begun.advance(digit)
    assert np.flatnonzero(begun.compute_allowed(size)).tolist() == [1, comma]


def byte_level() -> Any:
    """A tokenizer as published models have one."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(['{"sure": true, "size": "größer"}'] * 9, trainer)
    return made


def test_tokens_of_many_characters_or_parts_are_constrained(model: policy.PolicyModel) -> None:
    """A text of the form is allowed token by token, however it is split, and another is not."""
    import transformers

    made = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>")
    schema = {"enum": ["größer", "kleiner"]}
    grammar = form(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    for tokenizer, good in ((made, '"größer"'), (chat_tokenizer(CHATML), '"kleiner"')):
        end = tokenizer.eos_token_id
        size = len(tokenizer)
        compiler = GrammarCompiler(tokenizer, model.tokenizer_dir, (end,))
        begun = compiler.begin(grammar)
        ids = tokenizer.encode(good, add_special_tokens=False)
        for token in ids:
            allowed = begun.compute_allowed(size)
            assert allowed[token] and not allowed[end]
            assert not allowed[tokenizer.encode("z", add_special_tokens=False)[0]]
            begun.advance(token)
        assert np.flatnonzero(begun.compute_allowed(size)).tolist() == [end]
    special = chat_tokenizer(CHATML).convert_tokens_to_ids(SPECIAL)
    begun = GrammarCompiler(chat_tokenizer(CHATML), model.tokenizer_dir, special[:1]).begin(
        form(structured_outputs={"regex": ".*"})
    )
    allowed = begun.compute_allowed(size)
    assert allowed[special[0]] and not allowed[special[1:]].any() and allowed.sum() > 90


def test_a_grammar_that_does_not_compile_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match="Unimplemented keys") as error:
        compiler.begin('%llguidance {}\nstart: %json {"not": {}}')
    assert str(error.value) == " ".join(str(error.value).split())
    endless = GrammarCompiler(compiler.tokenizer, "", ())
    with pytest.raises(ValueError) as error:
        endless.begin(JSON)
    assert str(error.value) == ("the model has no token that ends a completion (generator.stop)")


def test_a_grammar_is_compiled_once_until_256_others_are(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grammar(text: str) -> str:
        return form(structured_outputs={"choice": [text]})

    monkeypatch.setattr(constraints, "REMEMBERED", 2)
    own = GrammarCompiler(compiler.tokenizer, "", (1,))
    assert (own.size, own.stops, own.compiled) == (len(compiler.tokenizer.get_vocab()), [1], {})
    first, again = own.begin(grammar("a")), own.begin(grammar("a"))
    tokens, compiled = own.tokens, own.compiled[grammar("a")]
    (a,) = own.tokenizer.encode("a")
    first.advance(a)
    assert np.flatnonzero(first.compute_allowed(own.size)).tolist() == [1]
    assert np.flatnonzero(again.compute_allowed(own.size)).tolist() == [a], "each has its own state"
    own.begin(grammar("b"))
    own.begin(grammar("a"))
    assert list(own.compiled) == [grammar("b"), grammar("a")], "the one used last comes last"
    own.begin(grammar("c"))
    assert list(own.compiled) == [grammar("a"), grammar("c")]
    assert own.compiled[grammar("a")] is compiled and own.tokens is tokens


def test_the_compiled_grammars_take_a_bounded_number_of_bytes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each automaton is counted as it grows below its completions, and the oldest go first."""
    grown = iter(range(0, 1 << 40, 90 << 20))  # this process grows by 90 MiB at each look
    monkeypatch.setattr(constraints, "read_resident_bytes", lambda: next(grown))
    own = GrammarCompiler(compiler.tokenizer, "", (1,))
    forms_ = [form(structured_outputs={"regex": f"[a-z]{{1,{n}}}"}) for n in range(1, 5)]
    held = [own.begin(forms_[0]), own.begin(forms_[1])]
    held[0].compute_allowed(own.size)
    held[0].advance(own.tokenizer.encode("a")[0])
    held[1].compute_allowed(own.size)
    assert [entry.bytes >> 20 for entry in own.compiled.values()] == [180, 90]
    own.begin(forms_[2])
    own.begin(forms_[3])
    assert list(own.compiled) == forms_[1:4], "the oldest had 180 of 270 MiB"
    assert held[0].compute_allowed(own.size).any(), "its completions go on"


def test_the_states_that_completions_reach_are_counted() -> None:
    """A pattern whose automaton has a state a character, in a process that measures itself."""
    code = """
import sys
from actors.decoding import constraints
sys.path.insert(0, "tests/support")
from gateway_kit import CHATML, tokenizer
own = constraints.GrammarCompiler(tokenizer(CHATML), "", (1,))
constraint = own.begin("%llguidance {}\\nstart: /\\\\p{L}{1,20000}.{1,20000}/")
before = sum(x.bytes for x in own.compiled.values())
(a,) = own.tokenizer.encode("a", add_special_tokens=False)
for _ in range(1500):
    assert constraint.compute_allowed(own.size)[a]
    constraint.advance(a)
assert sum(x.bytes for x in own.compiled.values()) - before > 4 << 20, own.compiled
"""
    done = run_command([sys.executable, "-c", FORKED + code])
    assert done.code == 0, done.err


@pytest.mark.parametrize("kind", ["plain", "byte level", "other"])
def test_a_tokenizer_keeps_its_size_and_its_ends(model: policy.PolicyModel, kind: str) -> None:
    """Where the library reads the definition, it takes the model's size, which is larger."""
    import transformers

    tokenizer = {
        "plain": lambda: load_tokenizer(model.tokenizer_dir),
        "byte level": lambda: transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_level(), eos_token="</s>"
        ),
        "other": lambda: chat_tokenizer(CHATML),
    }[kind]()
    size = len(tokenizer.get_vocab()) + 3
    made = convert_tokenizer(tokenizer, size, (2, 0))
    assert made.eos_tokens == [2, 0]
    if kind == "byte level":
        assert made.vocab_size == size
    ids = tokenizer.encode("size", add_special_tokens=False)
    assert made.decode_str(ids) == "size" and made.tokenize_str("size") == ids


class Words:
    """A tokenizer without a definition in Rust."""

    unk_token_id = 7

    def get_vocab(self) -> dict[str, int]:
        return {"<end>": 0, "a": 1, "bc": 2, "<gap>": 5}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join({1: "a", 2: "bc"}.get(token, "") for token in ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        assert not add_special_tokens
        return tuple(1 if symbol == "a" else 7 for symbol in text)


def test_any_other_tokenizer_is_the_bytes_of_its_tokens() -> None:
    made = TokenBytes(Words(), (5, 0))
    assert made.tokens == [b"<end>", b"a", b"bc", b"<unused 3>", b"<unused 4>", b"<gap>"]
    assert made.special_token_ids == [0, 3, 4, 5]
    assert (made.eos_token_id, made.bos_token_id) == (5, None)
    assert made("aa") == made(b"aa") == [1, 1] and made("ab") == [], "no part of an unknown text"


def test_each_row_has_its_own_tokens(compiler: GrammarCompiler) -> None:
    size = compiler.size
    begun = [compiler.begin(form(structured_outputs={"choice": [text]})) for text in ("ab", "b")]
    rows: list[TokenConstraint | None] = [begun[0], None, begun[1]]
    cpu = torch.device("cpu")
    assert compute_allowed_tokens([None, None], size, cpu) is None
    a, b = compiler.tokenizer.encode("ab")
    wanted = torch.ones(3, size, dtype=torch.bool)
    wanted[0] = wanted[2] = False
    wanted[0, a] = wanted[2, b] = True
    found = compute_allowed_tokens(rows, size, cpu)
    assert found is not None and found.dtype == torch.bool and torch.equal(found, wanted)
    advance(rows, torch.tensor([a, b, b]))
    wanted[0, a], wanted[0, b], wanted[2, b], wanted[2, 1] = False, True, False, True
    found = compute_allowed_tokens(rows, size, cpu)
    assert found is not None and torch.equal(found, wanted)
    advance([begun[1]], torch.tensor([1]))
    assert np.flatnonzero(begun[1].compute_allowed(size)).tolist() == [1], "an end is not consumed"
    with pytest.raises(ValueError, match="zip"):
        advance(rows, torch.tensor([a, b]))


def test_a_broken_grammar_leaves_the_ends_alone(
    compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    """A token that was not allowed breaks it, and the library writes nothing about that."""
    begun = compiler.begin(form(structured_outputs={"regex": "a*"}))
    (b,) = compiler.tokenizer.encode("b")
    assert begun.compute_allowed(compiler.size).dtype == bool
    begun.matcher.consume_token(b)
    assert begun.matcher.is_error()
    assert np.flatnonzero(begun.compute_allowed(compiler.size)).tolist() == [1]
    assert capfd.readouterr() == ("", "")
