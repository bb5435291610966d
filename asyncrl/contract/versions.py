"""Policy versions: labels, their tree, and the definition of lag (docs/protocol.md, "Names").

A *policy* is a node of a tree: a parent and an update.  Its *number* is its depth, the count of
batches committed since the start.  A *label* (epoch, number) names it; the epoch counts starts of
the learner.  Equal parents and equal digests are the same node, whatever the labels."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, NamedTuple

from msgspec import Meta

from asyncrl.contract.errors import ProtocolError

Count = Annotated[int, Meta(ge=0, lt=1 << 60)]  # so that differences fit int64
KNOWN = 4096  # most policies whose distance is cached


class Label(NamedTuple):
    """A policy version. Labels compare as pairs: a newer epoch is greater at any number."""

    epoch: Count
    number: Count

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


class PolicyTreeState(NamedTuple):
    """The state of a tree in a snapshot: policies by index, and the labels that name them."""

    labels: list[tuple[Label, int]]
    parents: list[int]  # -1: not stored
    depths: list[int]
    digests: list[str]


class PolicyTree:
    """The policies that learners have registered by hello or commit.

    >>> tree = PolicyTree()
    >>> for n in range(3):
    ...     tree.register(Label(1, n), Label(1, n - 1) if n else None, f"d{n}")

    Epoch 2 resumes from the checkpoint of number 1 and makes another update than epoch 1.

    >>> tree.register(Label(2, 1), Label(1, 0), "d1")
    >>> tree.register(Label(2, 2), Label(2, 1), "other")

    One step back on the dead branch, one step forward on the new one:

    >>> tree.compute_lag(Label(1, 2), Label(2, 2), 2)
    2
    """

    def __init__(self) -> None:
        self._policies: dict[Label, int] = {}
        self._parent: list[int] = []
        self._depth: list[int] = []
        self._digest: list[str] = []
        # (parent, depth, digest) -> policy; several roots, of parent -1, may have equal weights
        self._index: dict[tuple[int, int, str], int] = {}
        # cache for one `train`: token -> `compute_lag` minus the number; used for every sample
        self._cached_lags: dict[Label, int] = {}
        self._cached_for: Label | None = None

    def snapshot(self) -> PolicyTreeState:
        """Return the state for a snapshot of the store."""
        return PolicyTreeState(
            list(self._policies.items()), self._parent, self._depth, self._digest
        )

    def restore(self, state: PolicyTreeState) -> None:
        """Take over the state of a snapshot."""
        labels, self._parent, self._depth, self._digest = state
        self._policies = dict(labels)
        self._cached_lags = {}
        keys = zip(self._parent, self._depth, self._digest, strict=True)
        self._index = {key: policy for policy, key in enumerate(keys)}

    def __contains__(self, label: Label) -> bool:
        return label in self._policies

    def get_digest(self, label: Label) -> str:
        """Return the digest registered under `label`. Raises KeyError for an unknown label."""
        return self._digest[self._policies[label]]

    def __len__(self) -> int:
        return len(self._policies)

    def prune(self, below: int, keep: Collection[Label]) -> None:
        """Forget labels with numbers below `below` that are not in `keep`.

        The lag between the remaining labels does not change.

        >>> tree = PolicyTree()
        >>> for n in range(9): tree.register(Label(1, n), Label(1, n - 1) if n else None, f"d{n}")
        >>> tree.prune(6, [Label(1, 2)])
        >>> min(tree._policies), len(tree), len(tree._parent)
        (Label(epoch=1, number=2), 4, 4)
        >>> tree.compute_lag(Label(1, 2), Label(1, 8), 8)
        6
        """
        remaining = [
            (label, policy)
            for label, policy in self._policies.items()
            if label.number >= below or label in keep
        ]
        named = {policy for _, policy in remaining}
        size = len(self._parent)
        # number of children of a policy with named policies at or below them: with two it is a
        # branching point, whose depth is needed
        needed_children = [0] * size
        for policy in reversed(range(size)):
            if (policy in named or needed_children[policy]) and self._parent[policy] >= 0:
                needed_children[self._parent[policy]] += 1
        # new index of the policy or of its nearest ancestor that stays; the last entry: for roots
        new_index = [-1] * (size + 1)
        parents: list[int] = []
        depths: list[int] = []
        digests: list[str] = []
        for policy in range(size):
            new_parent = new_index[self._parent[policy]]
            if policy in named or needed_children[policy] >= 2:
                new_index[policy] = len(parents)
                parents.append(new_parent)
                depths.append(self._depth[policy])
                digests.append(self._digest[policy])
            else:
                new_index[policy] = new_parent
        labels = [(label, new_index[policy]) for label, policy in remaining]
        self.restore(PolicyTreeState(labels, parents, depths, digests))

    def register(self, label: Label, parent: Label | None, digest: str) -> None:
        """Register a policy under a label; repeating it is harmless.

        A parent that is None or unknown makes a root of depth `label.number`, as in a new buffer.
        Raises ProtocolError if the label exists with another digest."""
        label = Label(*label)
        if label in self:
            if self.get_digest(label) != digest:
                raise ProtocolError(
                    f"two different weights have the version {label}: {self.get_digest(label)} and "
                    f"{digest}"
                )
            return
        parent_policy = -1 if parent is None else self._policies.get(parent, -1)
        key = parent_policy, label.number, digest
        if key not in self._index:
            self._index[key] = len(self._parent)
            self._parent.append(parent_policy)
            self._depth.append(label.number)
            self._digest.append(digest)
        self._policies[label] = self._index[key]

    def add_alias(self, label: Label, original: Label) -> None:
        """Let `label` name the policy of `original`: a resumed learner's name for its weights."""
        self._policies[label] = self._policies[original]
        self._cached_lags = {}

    def compute_lag(self, token: Label, train: Label, number: int) -> int:
        """Count the updates between the policy `token` and the start of batch `number`.

        The batch starts from a descendant of `train`.  The lag is `(n_token - c) + (number - c)`
        with c the depth of the last common ancestor. Updates that are not made yet count as
        different, so that a lag computed early can only shrink.  It is never negative.  Raises
        KeyError for an unknown label."""
        if train != self._cached_for or len(self._cached_lags) > KNOWN:
            self._cached_lags = {}
            self._cached_for = train
        beyond = self._cached_lags.get(token)
        if beyond is None:
            ancestor, train_ancestor = self._policies[token], self._policies[train]
            beyond = self._depth[ancestor]
            # without a stored common root the distance follows from the depths alone
            while ancestor != train_ancestor and ancestor >= 0 and train_ancestor >= 0:
                if self._depth[ancestor] >= self._depth[train_ancestor]:
                    ancestor = self._parent[ancestor]
                else:
                    train_ancestor = self._parent[train_ancestor]
            if ancestor == train_ancestor and ancestor >= 0:
                beyond -= 2 * self._depth[ancestor]
            self._cached_lags[token] = beyond
        return beyond + number
