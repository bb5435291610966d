"""The tokens that top-p and top-k kept when each token of a completion was sampled.

An engine that truncates its distribution samples from q restricted to a kept set K_t and records
log q of that restriction. A ratio against the learner's policy p is unbiased only if p is
normalized over the same set: log p_K(y_t) = log p(y_t) - log sum_{v in K_t} p(v).  The support
travels with the tokens, from the engine to the learner.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

HEAD = struct.Struct("<I")  # the size of the vocabulary
MOST_TOKENS = 1 << 24  # of a vocabulary


@dataclass(frozen=True, eq=False)
class SampledSupport:
    """The kept tokens of T positions.

    sizes: int64 [T], number of kept tokens; 0: the whole vocabulary, nothing was truncated.
    ids: int32 [sum of sizes], the kept tokens of each position in ascending order.
    vocabulary: number of tokens that the engine samples from.

    >>> part = SampledSupport(np.array([2, 0]), np.array([3, 5], np.int32), 9)
    >>> SampledSupport.decode(part.encode(), 2).ids.tolist()
    [3, 5]
    >>> part.contains(np.array([5, 7])).tolist(), part.contains(np.array([4, 7])).tolist()
    ([True, True], [False, True])
    """

    sizes: np.ndarray
    ids: np.ndarray
    vocabulary: int

    @classmethod
    def from_lists(cls, kept: list[np.ndarray], vocabulary: int) -> SampledSupport:
        """Build it from the kept tokens of each position; an empty array: the whole vocabulary."""
        sizes = np.array([len(ids) for ids in kept], np.int64)
        ids = np.concatenate([np.zeros(0, np.int32), *kept]).astype(np.int32)
        return cls(sizes, ids, vocabulary)

    @classmethod
    def untruncated(cls, length: int) -> SampledSupport:
        """The support of positions where nothing was truncated."""
        return cls(np.zeros(length, np.int64), np.zeros(0, np.int32), 0)

    @classmethod
    def join(cls, parts: Iterable[SampledSupport]) -> SampledSupport:
        """The support of several stretches of tokens, one after another."""
        every = list(parts)
        return cls(
            np.concatenate([np.zeros(0, np.int64), *(part.sizes for part in every)]),
            np.concatenate([np.zeros(0, np.int32), *(part.ids for part in every)]),
            max((part.vocabulary for part in every), default=0),
        )

    def first(self, length: int) -> SampledSupport:
        """The support of the first `length` positions."""
        sizes = self.sizes[:length]
        return SampledSupport(sizes, self.ids[: int(sizes.sum())], self.vocabulary)

    def contains(self, tokens: np.ndarray) -> np.ndarray:
        """Bool [T]: the token of each position is in its support."""
        position = np.repeat(np.arange(len(self.sizes)), self.sizes)
        inside: np.ndarray = self.sizes == 0
        inside[position[self.ids == tokens[position]]] = True
        return inside

    # ---- the wire --------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The wire form; empty where nothing was truncated.

        Vocabulary, sizes [T], then the ids of all positions with few kept tokens, then a bitmap of
        the vocabulary for each of the others, whichever is shorter. Sizes and ids take 2 bytes in a
        vocabulary of up to 65,535 tokens, else 4.
        """
        if not self.sizes.any():
            return b""
        kind, row = _layout(self.vocabulary)
        dense = self.sizes * kind.itemsize > row
        by_id = np.repeat(dense, self.sizes)
        bits = np.zeros((int(dense.sum()), row * 8), np.uint8)
        bits[np.repeat(np.arange(len(bits)), self.sizes[dense]), self.ids[by_id]] = 1
        return b"".join(
            (
                HEAD.pack(self.vocabulary),
                self.sizes.astype(kind).tobytes(),
                self.ids[~by_id].astype(kind).tobytes(),
                np.packbits(bits, axis=1, bitorder="little").tobytes(),
            )
        )

    @classmethod
    def decode(cls, data: bytes, length: int) -> SampledSupport:
        """Read the wire form of `length` positions. Raises ValueError for anything else."""
        if not data:
            return cls.untruncated(length)
        if len(data) < HEAD.size:
            raise ValueError(f"{len(data)} bytes")
        (vocabulary,) = HEAD.unpack_from(data)
        if not 0 < vocabulary <= MOST_TOKENS:
            raise ValueError(f"a vocabulary of {vocabulary} tokens")
        kind, row = _layout(vocabulary)
        at = HEAD.size + length * kind.itemsize
        if len(data) < at:
            raise ValueError(f"{len(data)} bytes for {length} tokens")
        sizes = np.frombuffer(data, kind, length, HEAD.size).astype(np.int64)
        dense = sizes * kind.itemsize > row
        few, many = int(sizes[~dense].sum()), int(dense.sum())
        if int(sizes.max(initial=0)) > vocabulary or len(data) != (
            at + few * kind.itemsize + many * row
        ):
            raise ValueError(f"{len(data)} bytes do not hold its sizes")
        ids = np.empty(int(sizes.sum()), np.int32)
        by_id = np.repeat(dense, sizes)
        ids[~by_id] = np.frombuffer(data, kind, few, at)
        rows = np.frombuffer(data, np.uint8, offset=at + few * kind.itemsize).reshape(many, row)
        bits = np.unpackbits(rows, axis=1, bitorder="little")
        if not np.array_equal(bits.sum(1), sizes[dense]):
            raise ValueError("a bitmap with another number of tokens than its size")
        ids[by_id] = np.nonzero(bits)[1]
        inner = np.ones(len(ids), bool)  # not the first of its position
        inner[(np.cumsum(sizes) - sizes)[sizes > 0]] = False
        if len(ids) and (
            ids.max() >= vocabulary or not (np.diff(ids, prepend=-1) > 0)[inner].all()
        ):
            raise ValueError(f"ids that are not ascending below {vocabulary}")
        return cls(sizes, ids, vocabulary)


def _layout(vocabulary: int) -> tuple[np.dtype[np.unsignedinteger], int]:
    """The type of sizes and ids, and the bytes of a bitmap."""
    kind: np.dtype[np.unsignedinteger] = np.dtype("<u2" if vocabulary < 1 << 16 else "<u4")
    return kind, -(-vocabulary // 8)
