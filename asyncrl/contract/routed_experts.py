"""The experts that each token of a sequence was routed to when it was sampled.

A mixture of experts sends each token to the k experts whose router probabilities are largest. Where
two of them are close, an engine and a learner that round differently choose different experts, and
the token's log-probability changes by far more than rounding. The engine therefore records the
experts that it used, and the learner uses the same ones (rollout routing replay, Ma et al. 2025,
arXiv 2510.11370). The ids travel with the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.contract.messages import RoutingShape

HEAD = struct.Struct("<HHB")  # experts, layers, experts of a token
NARROW = 256  # numbers that fit one byte


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The experts of the N tokens that a model read: all of a sequence but the last.

    ids: uint16 [N, layers, k], in the order of the router. `experts` in place of all k ids of a
        token in a layer: not recorded, the learner's own routing applies.
    experts: number of experts in a layer.

    >>> routed = RoutedExperts(np.array([[[3, 0]], [[8, 8]]], np.uint16), 8)
    >>> RoutedExperts.decode(routed.encode(), 2).ids.tolist()
    [[[3, 0]], [[8, 8]]]
    >>> routed.shape
    RoutingShape(layers=1, experts=8, chosen=2)
    """

    ids: np.ndarray
    experts: int

    @classmethod
    def unrecorded(cls, length: int, shape: RoutingShape) -> RoutedExperts:
        """The ids of `length` tokens of which none is recorded."""
        size = (length, shape.layers, shape.chosen)
        return cls(np.full(size, shape.experts, np.uint16), shape.experts)

    @classmethod
    def join(cls, parts: Sequence[RoutedExperts]) -> RoutedExperts:
        """The ids of several stretches of tokens, one after another; at least one."""
        return cls(np.concatenate([part.ids for part in parts]), parts[0].experts)

    @property
    def shape(self) -> RoutingShape:
        return RoutingShape(self.ids.shape[1], self.experts, self.ids.shape[2])

    def part(self, first: int, end: int) -> RoutedExperts:
        """The ids of the tokens [first, end)."""
        return RoutedExperts(self.ids[first:end], self.experts)

    # ---- the wire --------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The wire form: the shape, then the ids, one byte each with up to 255 experts, else 2."""
        layers, experts, chosen = self.shape
        return HEAD.pack(experts, layers, chosen) + self.ids.astype(_kind(experts)).tobytes()

    @classmethod
    def decode(cls, data: bytes, length: int) -> RoutedExperts:
        """Read the wire form of `length` tokens. Raises ValueError for anything else."""
        if len(data) < HEAD.size:
            raise ValueError(f"{len(data)} bytes")
        experts, layers, chosen = HEAD.unpack_from(data)
        if not (layers and 0 < chosen <= experts):
            raise ValueError(f"{layers} layers with {chosen} of {experts} experts")
        kind = _kind(experts)
        if len(data) != HEAD.size + length * layers * chosen * kind.itemsize:
            raise ValueError(
                f"{len(data)} bytes for {length} tokens and {layers} layers with {chosen} experts"
            )
        ids = np.frombuffer(data, kind, offset=HEAD.size).reshape(length, layers, chosen)
        ordered = np.sort(ids, -1)
        recorded = ordered[..., 0] < experts
        if (ordered[..., -1] > experts).any() or (
            (ordered[..., -1] >= experts) | (np.diff(ordered, axis=-1) == 0).any(-1)
        )[recorded].any():
            raise ValueError(f"ids that are not {chosen} different ones below {experts}")
        return cls(ids.astype(np.uint16), experts)


def _kind(experts: int) -> np.dtype[np.unsignedinteger]:
    """The type of the ids on the wire; `experts` itself is one of them."""
    return np.dtype("<u1" if experts < NARROW else "<u2")
