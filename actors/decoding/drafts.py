"""Drafts for speculative decoding: continuations of n-grams, and when they pay.

A draft is a guess of a completion's next tokens.  It changes the speed of the engine and never a
sample, so nothing here needs to be right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from actors.engine import CompletionRequest, Key

NGRAMS = (4, 3, 2)  # tokens that a continuation is looked up by, longest first
PRIOR_STEPS = 64  # weight of the assumption with which each version starts, in drafted rows


class GroupDrafts:
    """The n-grams of one group's sequences, with their last continuations.

    >>> group = GroupDrafts()
    >>> group.extend((0, 0, 1), [5, 6, 7, 8, 9])
    >>> group.extend((0, 1, 1), [2, 6, 7])
    >>> group.propose((0, 1, 1), 3)
    [8, 9]
    """

    def __init__(self) -> None:
        self.sequences: dict[Key, list[int]] = {}
        # n-gram -> the sequence that continued it last, and the position of the continuation
        self.continuations: dict[tuple[int, ...], tuple[list[int], int]] = {}
        self.outstanding = 0  # requests in the engine
        self.finished: list[tuple[Key, np.ndarray]] = []  # completions that are not indexed yet

    def extend(self, key: Key, tokens: Iterable[int]) -> None:
        """Append tokens to the sequence of `key`."""
        sequence = self.sequences.setdefault(key, [])
        for token in tokens:
            end = len(sequence)
            for size in NGRAMS:
                if size <= end:
                    self.continuations[tuple(sequence[end - size :])] = sequence, end
            sequence.append(token)

    def propose(self, key: Key, limit: int) -> list[int]:
        """Return at most `limit` tokens that may follow the sequence of `key`."""
        own_sequence = self.sequences[key]
        for size in NGRAMS:
            if size <= len(own_sequence) and (
                continuation := self.continuations.get(tuple(own_sequence[-size:]))
            ):
                sequence, position = continuation
                return sequence[position : position + limit]
        return []


class DraftBook:
    """The drafts of all groups that have requests in the engine.

    Completions are indexed when a draft is first asked for, so that a full engine, which does not
    draft, pays nothing for them."""

    def __init__(self) -> None:
        self.groups: defaultdict[Hashable, GroupDrafts] = defaultdict(GroupDrafts)

    def open(self, request: CompletionRequest) -> None:
        """Count a request that enters the engine."""
        self.groups[request.group].outstanding += 1

    def close(self, request: CompletionRequest, tokens: np.ndarray | None = None) -> None:
        """Count a request that leaves the engine; tokens: its completion, int32 [T]."""
        group = self.groups[request.group]
        group.outstanding -= 1
        if group.outstanding <= 0:
            del self.groups[request.group]
        elif tokens is not None:
            group.finished.append((request.key, np.concatenate([request.prompt, tokens])))

    def count_indexed(self, request: CompletionRequest) -> int:
        """Count the tokens of the completion that are indexed."""
        sequence = self.groups[request.group].sequences.get(request.key)
        return len(sequence) - len(request.prompt) if sequence else 0

    def propose(
        self, request: CompletionRequest, new_tokens: Sequence[int], limit: int
    ) -> list[int]:
        """Return a draft of at most `limit` tokens.

        Args:
            request: a request that is being decoded.
            new_tokens: its tokens from `count_indexed` on.
            limit: at least 1.
        """
        group = self.groups[request.group]
        for key, full_sequence in group.finished:
            indexed_count = len(group.sequences.get(key, ()))
            group.extend(key, full_sequence[indexed_count:].tolist())
        group.finished = []
        if request.key not in group.sequences:
            group.extend(request.key, request.prompt.tolist())
        group.extend(request.key, new_tokens)
        return group.propose(request.key, limit)


class DraftPolicy:
    """The rule that decides at which number of live rows drafts pay.

    A step with drafts takes the seconds of verifying them and of looking them up, and yields `gain`
    tokens a row.  It pays while gain steps without drafts take longer.

    Args:
        draft_tokens: the most tokens of a draft.
        rows: draft for at most this many live rows; "auto": measure the cost and the gain.

    >>> policy = DraftPolicy(4, "auto")
    >>> policy.seconds = {1: (1.0, 1.5), 4: (1.0, 2.0), 8: (1.0, 5.0)}
    >>> [policy.pays(rows) for rows in (1, 3, 8, 9)]
    [True, True, False, False]
    >>> policy.count(1000, 1100)  # 1000 rows yielded 1100 tokens
    >>> policy.pays(1)
    False
    """

    def __init__(self, draft_tokens: int, rows: int | Literal["auto"]) -> None:
        self.draft_tokens = draft_tokens
        self.rows = rows
        # rows of a step -> seconds without and with drafts to verify
        self.seconds: Mapping[int, tuple[float, float]] = {}
        self.lookup_s = 0.0  # seconds of looking up all drafts so far
        self.looked_up = 0  # rows
        self.begin_version()

    def begin_version(self) -> None:
        """Forget the gain: new weights may repeat themselves more, or less.

        The first drafts assume that half of the tokens are accepted.
        """
        self.drafted = float(PRIOR_STEPS)
        self.yielded = PRIOR_STEPS * (1 + self.draft_tokens / 2)

    def count(self, drafted: int, yielded: int) -> None:
        """Count the rows of a step with drafts, and the tokens that it yielded."""
        self.drafted += drafted
        self.yielded += yielded

    def pays(self, live: int) -> bool:
        """Whether to draft at a step of `live` rows."""
        if self.rows != "auto":
            return live <= self.rows
        measured_rows = [rows for rows in self.seconds if rows >= live]
        if not measured_rows:
            return False
        plain, verified = self.seconds[min(measured_rows)]
        lookup = live * self.lookup_s / max(self.looked_up, 1)
        return verified + lookup < plain * self.yielded / self.drafted
