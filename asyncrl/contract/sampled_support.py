"""The tokens that top-p and top-k kept when each token of a completion was sampled.

An engine that truncates its distribution samples from q restricted to a kept set K_t and records
log q of that restriction. A ratio against the learner's policy p is unbiased only if p is
normalized over the same set: log p_K(y_t) = log p(y_t) - log sum_{v in K_t} p(v).  The engine sends
the support with the tokens, and the learner uses it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

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

    sizes: ndarray
    ids: ndarray
    vocabulary: int

    @classmethod
    def from_lists(cls, kept: list[ndarray], vocabulary: int) -> SampledSupport:
        """Build it from the kept tokens of each position; an empty array: the whole vocabulary."""
        sizes = np.array([len(ids) for ids in kept], np.int64)
        ids = np.concatenate([np.zeros(0), *kept]).astype(np.int32)
        return cls(sizes, ids, vocabulary)

    @classmethod
    def make_untruncated(cls, length: int) -> SampledSupport:
        """Make the support of positions where nothing was truncated."""
        return cls(np.zeros(length, np.int64), np.zeros(0, np.int32), 0)

    @classmethod
    def join(cls, parts: Iterable[SampledSupport]) -> SampledSupport:
        """Join the support of successive stretches of tokens."""
        supports = list(parts)
        return cls(
            np.concatenate([np.zeros(0, np.int64), *(part.sizes for part in supports)]),
            np.concatenate([np.zeros(0, np.int32), *(part.ids for part in supports)]),
            max((part.vocabulary for part in supports), default=0),
        )

    def take_first(self, length: int) -> SampledSupport:
        """Return the support of the first `length` positions."""
        sizes = self.sizes[:length]
        return SampledSupport(sizes, self.ids[: int(sizes.sum())], self.vocabulary)

    def contains(self, tokens: ndarray) -> ndarray:
        """Return bool [T]: whether the token of each position is in its support.

        tokens: int [T]."""
        position = np.repeat(np.arange(len(self.sizes)), self.sizes)
        is_inside: ndarray = self.sizes == 0
        is_inside[position[self.ids == tokens[position]]] = True
        return is_inside

    # ---- the wire --------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the wire form; empty if nothing was truncated.

        Vocabulary, sizes [T], then the ids of all positions with few kept tokens, then a bitmap of
        the vocabulary for each other position, whichever is shorter. Sizes and ids take 2 bytes in
        a vocabulary of up to 65,535 tokens, else 4.
        """
        if not self.sizes.any():
            return b""
        id_type, row_bytes = _choose_layout(self.vocabulary)
        is_dense = self.sizes * id_type.itemsize > row_bytes
        in_bitmap = np.repeat(is_dense, self.sizes)
        bits = np.zeros((int(is_dense.sum()), row_bytes * 8), np.uint8)
        bits[np.repeat(np.arange(len(bits)), self.sizes[is_dense]), self.ids[in_bitmap]] = 1
        return b"".join(
            (
                HEAD.pack(self.vocabulary),
                self.sizes.astype(id_type).tobytes(),
                self.ids[~in_bitmap].astype(id_type).tobytes(),
                np.packbits(bits, axis=1, bitorder="little").tobytes(),
            )
        )

    @classmethod
    def decode(cls, data: bytes, length: int) -> SampledSupport:
        """Read the wire form of `length` positions. Raises ValueError for anything else."""
        if not data:
            return cls.make_untruncated(length)
        if len(data) < HEAD.size:
            raise ValueError(f"{len(data)} bytes")
        (vocabulary,) = HEAD.unpack_from(data)
        if not 0 < vocabulary <= MOST_TOKENS:
            raise ValueError(f"a vocabulary of {vocabulary} tokens")
        id_type, row_bytes = _choose_layout(vocabulary)
        offset = HEAD.size + length * id_type.itemsize
        if len(data) < offset:
            raise ValueError(f"{len(data)} bytes for {length} tokens")
        sizes = np.frombuffer(data, id_type, length, HEAD.size).astype(np.int64)
        is_dense = sizes * id_type.itemsize > row_bytes
        id_count, bitmaps = int(sizes[~is_dense].sum()), int(is_dense.sum())
        rows_offset = offset + id_count * id_type.itemsize
        has_size = len(data) == rows_offset + bitmaps * row_bytes
        if int(sizes.max(initial=0)) > vocabulary or not has_size:
            raise ValueError(f"{len(data)} bytes do not hold its sizes")
        ids = np.empty(int(sizes.sum()), np.int32)
        in_bitmap = np.repeat(is_dense, sizes)
        ids[~in_bitmap] = np.frombuffer(data, id_type, id_count, offset)
        rows = np.frombuffer(data, np.uint8, offset=rows_offset).reshape(bitmaps, row_bytes)
        bits = np.unpackbits(rows, axis=1, bitorder="little")
        if not np.array_equal(bits.sum(1), sizes[is_dense]):
            raise ValueError("a bitmap with another number of tokens than its size")
        ids[in_bitmap] = np.nonzero(bits)[1]
        follows = np.ones(len(ids), bool)  # whether an id is not the first of its position
        follows[(np.cumsum(sizes) - sizes)[sizes > 0]] = False
        if len(ids) and (
            ids.max() >= vocabulary or not (np.diff(ids, prepend=-1) > 0)[follows].all()
        ):
            raise ValueError(f"ids that are not ascending below {vocabulary}")
        return cls(sizes, ids, vocabulary)


def _choose_layout(vocabulary: int) -> tuple[np.dtype[np.unsignedinteger], int]:
    """Choose the type of sizes and ids, and the bytes of a bitmap."""
    id_type: np.dtype[np.unsignedinteger] = np.dtype("<u2" if vocabulary < 1 << 16 else "<u4")
    return id_type, -(-vocabulary // 8)
