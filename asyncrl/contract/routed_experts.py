"""The experts that each token of a sequence was routed to when it was sampled.

A mixture of experts sends each token to the k experts whose router probabilities are largest. If
two of them are close, an engine and a learner that round differently choose different experts, and
the token's log-probability changes by far more than rounding. The engine therefore records the
experts that it used, and the learner uses the same experts (rollout routing replay, Ma et al. 2025,
arXiv 2510.11370). The ids are sent with the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.contract.messages import RoutingShape

HEAD = struct.Struct("<HHB")  # experts, layers, experts of a token
NARROW = 256  # experts from which on an id takes two bytes


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The experts of the N tokens that a model read: all of a sequence but the last.

    ids: uint16 [N, layers, k], in the order of the router. If all k ids of a token in a layer are
        `experts`, they were not recorded, and the learner's own routing applies.
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
    def make_unrecorded(cls, length: int, shape: RoutingShape) -> RoutedExperts:
        """Make the ids of `length` tokens without recorded experts."""
        size = (length, shape.layers, shape.chosen)
        return cls(np.full(size, shape.experts, np.uint16), shape.experts)

    @classmethod
    def join(cls, parts: Sequence[RoutedExperts]) -> RoutedExperts:
        """Join the ids of successive stretches of tokens; at least one."""
        return cls(np.concatenate([part.ids for part in parts]), parts[0].experts)

    @property
    def shape(self) -> RoutingShape:
        """The routers of the model."""
        return RoutingShape(self.ids.shape[1], self.experts, self.ids.shape[2])

    # ---- the wire --------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the wire form: the shape, then the ids of one byte (below NARROW) or two."""
        layers, experts, chosen = self.shape
        return HEAD.pack(experts, layers, chosen) + self.ids.astype(_choose_type(experts)).tobytes()

    @classmethod
    def decode(cls, data: bytes, length: int) -> RoutedExperts:
        """Read the wire form of `length` tokens. Raises ValueError for anything else."""
        if len(data) < HEAD.size:
            raise ValueError(f"{len(data)} bytes")
        experts, layers, chosen = HEAD.unpack_from(data)
        if not (layers and 0 < chosen <= experts):
            raise ValueError(f"{layers} layers with {chosen} of {experts} experts")
        id_type = _choose_type(experts)
        if len(data) != HEAD.size + length * layers * chosen * id_type.itemsize:
            raise ValueError(
                f"{len(data)} bytes for {length} tokens and {layers} layers with {chosen} experts"
            )
        ids = np.frombuffer(data, id_type, offset=HEAD.size).reshape(length, layers, chosen)
        ordered = np.sort(ids)
        is_recorded = ordered[..., 0] < experts
        has_duplicate = (np.diff(ordered, axis=-1) == 0).any(-1)
        is_invalid = (ordered[..., -1] >= experts) | has_duplicate
        if (ordered[..., -1] > experts).any() or is_invalid[is_recorded].any():
            raise ValueError(f"ids that are not {chosen} different ones below {experts}")
        return cls(ids.astype(np.uint16), experts)


def _choose_type(experts: int) -> np.dtype[np.unsignedinteger]:
    """Choose the type of the ids on the wire; the number `experts` must fit, too."""
    return np.dtype("<u1" if experts < NARROW else "<u2")
