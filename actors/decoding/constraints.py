"""Grammars that a completion is decoded under (`agent.forced = "constrain"`).

llguidance computes the tokens that may come next from a grammar and the tokens so far.  The engine
samples from these alone and records them as the sampled support, so that the learner normalizes
over the same tokens.  A gateway writes the grammars (actors/gateway/endpoint/requests.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.models.tokenizer import PlainTokenizer, read_vocabulary_size
from asyncrl.records.machine_memory import read_resident_bytes

REMEMBERED = 256  # compiled grammars
REMEMBERED_BYTES = 256 << 20  # of their automata, besides that of the newest


@dataclass
class CompiledGrammar:
    """A compiled grammar before the first token, an `llguidance.LLMatcher`.

    Copies share its automaton, whose states are built as completions reach them: up to 250,000 of
    1 to 2 kB. bytes: by how much the process grew meanwhile.
    """

    matcher: Any
    bytes: int = 0

    def measure(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a matcher, and count by how much the process grows."""
        resident = read_resident_bytes()
        value = call(*arguments)
        self.bytes += max(0, read_resident_bytes() - resident)
        return value


class TokenConstraint:
    """The grammar of one completion, behind its tokens so far.

    Where no token of the vocabulary can continue, the completion ends.

    stops: the tokens that end a completion, which they may where the grammar is complete.
    """

    def __init__(self, grammar: CompiledGrammar, stops: Sequence[int]) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher.deep_copy()
        self.stops = list(stops)
        self.consumed = 0  # tokens

    def compute_allowed(self, size: int) -> np.ndarray:
        """Return bool [size]: the tokens that may come next; size: of the vocabulary."""
        packed = np.frombuffer(self.grammar.measure(self.matcher.compute_bitmask), np.uint8)
        bits = np.unpackbits(packed, count=size, bitorder="little").astype(bool)
        bits[self.stops] = self.matcher.is_accepting()
        if self.matcher.is_error() or not bits.any():
            bits[:] = False
            bits[self.stops] = True
        return bits

    def advance(self, token: int) -> None:
        """Advance by the sampled token, which was allowed."""
        self.consumed += 1
        if token not in self.stops:
            self.grammar.measure(self.matcher.consume_token, token)

    def advance_to(self, tokens: Sequence[int]) -> None:
        """Advance behind all tokens of a completion so far."""
        for token in tokens[self.consumed :]:
            self.advance(token)


class GrammarCompiler:
    """A compiler of grammars for the tokens of a model, with a cache.

    path: the model's directory. stops: the tokens that end a completion.
    """

    def __init__(self, tokenizer: Any, path: str, stops: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.size = max(len(tokenizer.get_vocab()), read_vocabulary_size(path))
        self.stops = list(stops)
        self.tokens: Any = None  # llguidance's form of the tokenizer, made on first use
        self.compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def begin(self, grammar: str) -> TokenConstraint:
        """Return the constraint of a new completion.  Raises ValueError for a bad grammar."""
        from llguidance import LLMatcher

        if not self.stops:
            raise ValueError("the model has no token that ends a completion (generator.stop)")
        if self.tokens is None:
            self.tokens = convert_tokenizer(self.tokenizer, self.size, self.stops)
        compiled = self.compiled.pop(grammar, None)
        if compiled is None:
            matcher = LLMatcher(self.tokens, grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(" ".join(matcher.get_error().split()))
            compiled = CompiledGrammar(matcher)
        while (
            len(self.compiled) >= REMEMBERED
            or sum(other.bytes for other in self.compiled.values()) > REMEMBERED_BYTES
        ):
            self.compiled.popitem(last=False)
        self.compiled[grammar] = compiled
        return TokenConstraint(compiled, self.stops)


class TokenBytes:
    """A tokenizer as the bytes of each token, for `llguidance.TokenizerWrapper`."""

    def __init__(self, tokenizer: Any, stops: Sequence[int]) -> None:
        self.eos_token_id = stops[0]
        self.bos_token_id = None
        names = {number: name for name, number in tokenizer.get_vocab().items()}
        texts = [tokenizer.decode([x], skip_special_tokens=True) for x in range(max(names) + 1)]
        self.special_token_ids = [number for number, text in enumerate(texts) if not text]
        self.tokens = [
            (text or names.get(number, f"<unused {number}>")).encode()
            for number, text in enumerate(texts)
        ]
        self.tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text.decode() if isinstance(text, bytes) else text
        ids = list(self.tokenizer.encode(decoded, add_special_tokens=False))
        return [] if self.tokenizer.unk_token_id in ids else ids


def convert_tokenizer(tokenizer: Any, size: int, stops: Sequence[int]) -> Any:
    """Convert a tokenizer to `llguidance.LLTokenizer`.

    A byte-level or sentencepiece tokenizer is read from its definition. Of any other, each token is
    its decoded text.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = list(stops)
    is_plain = isinstance(tokenizer, PlainTokenizer)
    inner = tokenizer.inner if is_plain else tokenizer.backend_tokenizer
    try:
        return LLTokenizer(inner.to_str(), n_vocab=size, eos_token=ends)
    except ValueError:  # its decoder is unknown there
        return LLTokenizer(TokenizerWrapper(TokenBytes(tokenizer, stops)), eos_token=ends)


def compute_allowed_tokens(
    rows: Sequence[TokenConstraint | None], size: int, device: torch.device
) -> torch.Tensor | None:
    """Return bool [rows, size]: the tokens that each row may sample; None: all."""
    if all(constraint is None for constraint in rows):
        return None
    allowed = np.ones((len(rows), size), bool)
    for row, constraint in enumerate(rows):
        if constraint is not None:
            allowed[row] = constraint.compute_allowed(size)
    return torch.from_numpy(allowed).to(device)


def advance(rows: Sequence[TokenConstraint | None], tokens: torch.Tensor) -> None:
    """Advance the constraints of all rows by their sampled tokens, int64 [rows]."""
    for constraint, token in zip(rows, tokens.tolist(), strict=True):
        if constraint is not None:
            constraint.advance(token)
