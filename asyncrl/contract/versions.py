"""Policy versions: labels, their tree, and the definition of lag (docs/protocol.md, "Names").

A *policy* is a node of a tree: a parent and an update.  Its *number* is its depth, the count of
batches committed since the start.  A *label* (epoch, number) names it; the epoch counts starts of
the learner.  Equal parents and equal digests are the same node, whatever the labels."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from typing import NamedTuple

from asyncrl.contract.errors import ProtocolError

KNOWN = 4096  # most policies whose distance is cached


class Label(NamedTuple):
    """A policy version. Labels compare as pairs: a newer epoch is greater at any number."""

    epoch: int
    number: int

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

    >>> tree.lag(Label(1, 2), Label(2, 2), 2)
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
        # cache for one `train`: token -> `lag` minus the number; used for every sample
        self._known: dict[Label, int] = {}
        self._known_for: Label | None = None

    def snapshot(self) -> PolicyTreeState:
        labels = list(self._items())
        parents = list(self._parent)
        return PolicyTreeState(labels, parents, self._depth, self._digest)

    def restore(self, state: PolicyTreeState) -> None:
        """Take over the state of a snapshot."""
        self._load_labels(state.labels)
        self._parent = array("q", state.parents)
        self._depth = list(state.depths)
        self._digest = list(state.digests)
        self.index()

    def _load_labels(self, labels: Collection[tuple[Label, int]]) -> None:
        self._node = {}
        for label, policy in labels:
            self._name(label, policy)

    def _name(self, label: Label, policy: int) -> None:
        epoch, number = label
        self._node.setdefault(epoch, {})[number] = policy

    def _items(self) -> Iterator[tuple[Label, int]]:
        for epoch, numbers in self._node.items():
            for number, policy in numbers.items():
                yield Label(epoch, number), policy

    def _policy(self, label: Label) -> int:
        epoch, number = label
        return self._node[epoch][number]

    def __contains__(self, label: Label) -> bool:
        epoch, number = label
        numbers = self._node.get(epoch)
        return numbers is not None and number in numbers

    def digest(self, label: Label) -> str:
        """The digest registered under `label`. Raises KeyError for an unknown label."""
        return self._digest[self._policy(label)]

    def labels(self) -> list[Label]:
        """All registered labels, sorted."""
        return sorted(label for label, _ in self._items())

    def __len__(self) -> int:
        return sum(map(len, self._node.values()))

    def prune(self, below: int, keep: Collection[Label]) -> None:
        """Forget labels with numbers below `below` that are not in `keep`.

        The lag between the remaining labels does not change.

        >>> tree = PolicyTree()
        >>> for n in range(9): tree.register(Label(1, n), Label(1, n - 1) if n else None, f"d{n}")
        >>> tree.prune(6, [Label(1, 2)])
        >>> tree.labels()[0], len(tree), tree.lag(Label(1, 2), Label(1, 8), 8), len(tree._parent)
        (Label(epoch=1, number=2), 4, 6, 4)
        """
        names = [
            (label, policy)
            for label, policy in self._items()
            if label.number >= below or label in keep
        ]
        wanted = {policy for _, policy in names}
        size = len(self._parent)
        # number of children of a policy with wanted policies at or below them: with two it is a
        # branching point, whose depth is needed
        needed_children = [0] * size
        for number in reversed(range(size)):
            if (number in wanted or needed_children[number]) and self._parent[number] >= 0:
                needed_children[self._parent[number]] += 1
        # new index of the policy or of its nearest ancestor that stays; the last entry: for roots
        new_index = [-1] * (size + 1)
        parent = array("q")
        depth: list[int] = []
        digest: list[str] = []
        for number in range(size):
            above = new_index[self._parent[number]]
            if number in wanted or needed_children[number] >= 2:
                new_index[number] = len(parent)
                parent.append(above)
                depth.append(self._depth[number])
                digest.append(self._digest[number])
            else:
                new_index[number] = above
        self._load_labels([(label, new_index[policy]) for label, policy in names])
        self._parent = parent
        self._depth = depth
        self._digest = digest
        self.index()

    def index(self) -> None:
        """Build the index of policies by parent and digest.

        Roots are also indexed by number, because several roots may have equal weights."""
        self._known = {}
        self._child = array("q")
        self._sister = array("q")
        self._root = {}
        for policy, parent in enumerate(self._parent):
            beyond = self._depth[policy] - self._depth[parent]
            self._append_policy(policy, parent, direct=beyond == 1)

    def _append_policy(self, policy: int, parent: int, *, direct: bool = True) -> None:
        """Index the newest policy for `_find_child`.

        direct: no policies between it and its parent were pruned."""
        sister = -1
        if parent < 0:
            self._root[self._depth[policy], self._digest[policy]] = policy
        elif direct:
            sister = self._child[parent]
            self._child[parent] = policy
        self._child.append(-1)
        self._sister.append(sister)

    def _find_child(self, parent: int, number: int, digest: str) -> int:
        """The child of `parent` with these weights, or -1."""
        if parent < 0:
            return self._root.get((number, digest), -1)
        policy = self._child[parent]
        while policy >= 0 and self._digest[policy] != digest:
            policy = self._sister[policy]
        return policy

    def register(self, label: Label, parent: Label | None, digest: str) -> None:
        """Register a policy under a label; repeating it is harmless.

        A parent that is None or unknown makes a root of depth `label.number`, as in a new buffer.
        Raises ProtocolError if the label exists with another digest."""
        label = Label(*label)
        if label in self:
            if self.digest(label) != digest:
                raise ProtocolError(
                    f"two different weights carry the version {label}: {self.digest(label)} and "
                    f"{digest}"
                )
            return
        above = self._policy(parent) if parent is not None and parent in self else -1
        policy = self._find_child(above, label.number, digest)
        if policy < 0:
            policy = len(self._parent)
            self._parent.append(above)
            self._depth.append(label.number)
            self._digest.append(digest)
            self._append_policy(policy, above)
        self._name(label, policy)

    def add_alias(self, label: Label, known: Label) -> None:
        """Let `label` name the policy of `known`: a resumed learner's name for earlier weights."""
        self._name(label, self._policy(known))
        self._known = {}

    def lag(self, token: Label, train: Label, number: int) -> int:
        """Updates between the policy `token` and the policy from which batch `number` starts.

        That policy is a descendant of `train`.  The lag is `(n_token - c) + (number - c)` with c
        the depth of the last common ancestor. Updates that are not made yet count as different, so
        that a lag computed early can only shrink.  It is never negative.  Raises KeyError for an
        unknown label."""
        if train != self._known_for or len(self._known) > KNOWN:
            self._known = {}
            self._known_for = train
        beyond = self._known.get(token)
        if beyond is None:
            beyond = self._known[token] = self._lag_beyond_number(token, train)
        return beyond + number

    def _lag_beyond_number(self, token: Label, train: Label) -> int:
        """`lag` minus the number."""
        token_policy = self._policy(token)
        ancestor = token_policy
        train_ancestor = self._policy(train)
        while ancestor != train_ancestor:
            # without a stored common root the distance follows from the depths alone
            if ancestor < 0 or train_ancestor < 0:
                return self._depth[token_policy]
            if self._depth[ancestor] >= self._depth[train_ancestor]:
                ancestor = self._parent[ancestor]
            else:
                train_ancestor = self._parent[train_ancestor]
        return self._depth[token_policy] - 2 * self._depth[ancestor]
