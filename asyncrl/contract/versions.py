"""Policy versions: labels, their tree, and the definition of lag (docs/protocol.md, "Names").

A *policy* is a node of a tree: a parent and an update.  Its *number* is its depth, the count of
batches committed since the start.  A *label* (epoch, number) names it; the epoch counts starts of
the learner.  Equal parents and equal digests are the same node, whatever the labels."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
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
        # epoch -> number -> policy; compact, because a run has a version for each batch
        self._node: dict[int, dict[int, int]] = {}
        self._parent = array("q")
        self._depth: list[int] = []
        self._digest: list[str] = []
        # a policy's newest child, and a child's next older sibling: to find a child by its digest
        self._child = array("q")
        self._sister = array("q")
        self._root: dict[tuple[int, str], int] = {}  # by number and digest
        # cache for one `train`: token -> `compute_lag` minus the number; used for every sample
        self._cached_lags: dict[Label, int] = {}
        self._cached_for: Label | None = None

    def snapshot(self) -> PolicyTreeState:
        """Return the state for a snapshot of the store."""
        labels = list(self._iterate_labels())
        return PolicyTreeState(labels, list(self._parent), self._depth, self._digest)

    def restore(self, state: PolicyTreeState) -> None:
        """Take over the state of a snapshot."""
        self._load_labels(state.labels)
        self._parent = array("q", state.parents)
        self._depth = list(state.depths)
        self._digest = list(state.digests)
        self.build_index()

    def _load_labels(self, labels: Collection[tuple[Label, int]]) -> None:
        self._node = {}
        for label, policy in labels:
            self._assign(label, policy)

    def _assign(self, label: Label, policy: int) -> None:
        """Let `label` name this policy."""
        epoch, number = label
        self._node.setdefault(epoch, {})[number] = policy

    def _iterate_labels(self) -> Iterator[tuple[Label, int]]:
        """Yield each label with its policy."""
        for epoch, numbers in self._node.items():
            for number, policy in numbers.items():
                yield Label(epoch, number), policy

    def _find_policy(self, label: Label) -> int:
        """Find the policy of a label. Raises KeyError for an unknown label."""
        epoch, number = label
        return self._node[epoch][number]

    def __contains__(self, label: Label) -> bool:
        epoch, number = label
        numbers = self._node.get(epoch)
        return numbers is not None and number in numbers

    def get_digest(self, label: Label) -> str:
        """Return the digest registered under `label`. Raises KeyError for an unknown label."""
        return self._digest[self._find_policy(label)]

    def list_labels(self) -> list[Label]:
        """List all registered labels, sorted."""
        return sorted(label for label, _ in self._iterate_labels())

    def __len__(self) -> int:
        return sum(map(len, self._node.values()))

    def prune(self, below: int, keep: Collection[Label]) -> None:
        """Forget labels with numbers below `below` that are not in `keep`.

        The lag between the remaining labels does not change.

        >>> tree = PolicyTree()
        >>> for n in range(9): tree.register(Label(1, n), Label(1, n - 1) if n else None, f"d{n}")
        >>> tree.prune(6, [Label(1, 2)])
        >>> tree.list_labels()[0], len(tree), len(tree._parent)
        (Label(epoch=1, number=2), 4, 4)
        >>> tree.compute_lag(Label(1, 2), Label(1, 8), 8)
        6
        """
        remaining = [
            (label, policy)
            for label, policy in self._iterate_labels()
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
        parents = array("q")
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
        self._load_labels([(label, new_index[policy]) for label, policy in remaining])
        self._parent = parents
        self._depth = depths
        self._digest = digests
        self.build_index()

    def build_index(self) -> None:
        """Build the index of policies by parent and digest.

        Roots are also indexed by number, because several roots may have equal weights."""
        self._cached_lags = {}
        self._child = array("q")
        self._sister = array("q")
        self._root = {}
        for policy, parent in enumerate(self._parent):
            is_direct = self._depth[policy] - self._depth[parent] == 1
            self._append_policy(policy, parent, is_direct=is_direct)

    def _append_policy(self, policy: int, parent: int, *, is_direct: bool = True) -> None:
        """Index the newest policy for `register`.

        is_direct: no policies between it and its parent were pruned."""
        sister = -1
        if parent < 0:
            self._root[self._depth[policy], self._digest[policy]] = policy
        elif is_direct:
            sister = self._child[parent]
            self._child[parent] = policy
        self._child.append(-1)
        self._sister.append(sister)

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
        parent_policy = self._find_policy(parent) if parent is not None and parent in self else -1
        if parent_policy < 0:
            policy = self._root.get((label.number, digest), -1)
        else:
            policy = self._child[parent_policy]
            while policy >= 0 and self._digest[policy] != digest:
                policy = self._sister[policy]
        if policy < 0:
            policy = len(self._parent)
            self._parent.append(parent_policy)
            self._depth.append(label.number)
            self._digest.append(digest)
            self._append_policy(policy, parent_policy)
        self._assign(label, policy)

    def add_alias(self, label: Label, original: Label) -> None:
        """Let `label` name the policy of `original`: a resumed learner's name for its weights."""
        self._assign(label, self._find_policy(original))
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
            beyond = self._cached_lags[token] = self._compute_lag_beyond_number(token, train)
        return beyond + number

    def _compute_lag_beyond_number(self, token: Label, train: Label) -> int:
        """Compute the lag minus the number."""
        token_policy = self._find_policy(token)
        ancestor = token_policy
        train_ancestor = self._find_policy(train)
        while ancestor != train_ancestor:
            # without a stored common root the distance follows from the depths alone
            if ancestor < 0 or train_ancestor < 0:
                return self._depth[token_policy]
            if self._depth[ancestor] >= self._depth[train_ancestor]:
                ancestor = self._parent[ancestor]
            else:
                train_ancestor = self._parent[train_ancestor]
        return self._depth[token_policy] - 2 * self._depth[ancestor]
