"""Policy versions: labels, their tree, and the one definition of lag.  Pure; see
docs/protocol.md, "Names".

A *policy* is a node of a tree: a parent and an update.  Its *number* is its depth, the count of
batches committed since the start.  A *label* (epoch, number) names it; the epoch counts the
learner's lives.  Same parent and same digest: same node, whatever the label."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from typing import NamedTuple

from asyncrl.contract.errors import ProtocolError

KNOWN = 4096  # policies whose distance is remembered


class Label(NamedTuple):
    """A policy version.  Labels compare as pairs: a newer epoch wins, also with a lower number."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


class PolicyTreeState(NamedTuple):
    """A tree, to be kept: the policies by number, and the labels that name them."""

    labels: list[tuple[Label, int]]
    parents: list[int]  # -1: none is stored
    depths: list[int]
    digests: list[str]


class PolicyTree:
    """The policies that learners registered by hello or commit.

    >>> tree = PolicyTree()
    >>> for n in range(3):
    ...     tree.register(Label(1, n), Label(1, n - 1) if n else None, f"d{n}")

    Epoch 2 resumes from the checkpoint of number 1, and trains on: another update than epoch 1's.

    >>> tree.register(Label(2, 1), Label(1, 0), "d1")
    >>> tree.register(Label(2, 2), Label(2, 1), "other")

    One step back on the dead branch, one forward on ours:

    >>> tree.lag(Label(1, 2), Label(2, 2), 2)
    2
    """

    def __init__(self) -> None:
        # epoch -> number -> policy; a run has a version a batch, so they take little memory each
        self._node: dict[int, dict[int, int]] = {}
        self._parent = array("q")
        self._depth: list[int] = []
        self._digest: list[str] = []
        # a policy's newest child, and that one's elder sister: to find one by its digest
        self._child = array("q")
        self._sister = array("q")
        self._root: dict[tuple[int, str], int] = {}  # by number and digest
        # token -> `lag` less the number, for one `train`: asked for at every answer, of few
        self._known: dict[Label, int] = {}
        self._known_for: Label | None = None

    def snapshot(self) -> PolicyTreeState:
        labels = list(self._items())
        parents = list(self._parent)
        return PolicyTreeState(labels, parents, self._depth, self._digest)

    def restore(self, state: PolicyTreeState) -> None:
        """Become the tree that `state` was taken of."""
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
        """The digest that was registered under `label`; KeyError when there is none."""
        return self._digest[self._policy(label)]

    def labels(self) -> list[Label]:
        """All registered labels, sorted."""
        return sorted(label for label, _ in self._items())

    def __len__(self) -> int:
        return sum(map(len, self._node.values()))

    def prune(self, below: int, keep: Collection[Label]) -> None:
        """Forget the labels of numbers under `below` that are not in `keep`; the lag between any
        others stays what it is.

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
        # children of a policy under which something is wanted: two make a branch, whose depth
        # counts
        below_it = [0] * size
        for number in reversed(range(size)):
            if (number in wanted or below_it[number]) and self._parent[number] >= 0:
                below_it[self._parent[number]] += 1
        # the policy, or its nearest ancestor that stays; the last one: of roots
        to = [-1] * (size + 1)
        parent = array("q")
        depth: list[int] = []
        digest: list[str] = []
        for number in range(size):
            above = to[self._parent[number]]
            if number in wanted or below_it[number] >= 2:
                to[number] = len(parent)
                parent.append(above)
                depth.append(self._depth[number])
                digest.append(self._digest[number])
            else:
                to[number] = above
        self._load_labels([(label, to[policy]) for label, policy in names])
        self._parent = parent
        self._depth = depth
        self._digest = digest
        self.index()

    def index(self) -> None:
        """Find policies by parent and digest again: a root by its number too, as equal weights may
        come at several.
        """
        self._known = {}
        self._child = array("q")
        self._sister = array("q")
        self._root = {}
        for policy, parent in enumerate(self._parent):
            beyond = self._depth[policy] - self._depth[parent]
            self._append_policy(policy, parent, direct=beyond == 1)

    def _append_policy(self, policy: int, parent: int, *, direct: bool = True) -> None:
        """The newest policy, where `_find_child` looks; not direct: policies between were
        pruned."""
        sister = -1
        if parent < 0:
            self._root[self._depth[policy], self._digest[policy]] = policy
        elif direct:
            sister = self._child[parent]
            self._child[parent] = policy
        self._child.append(-1)
        self._sister.append(sister)

    def _find_child(self, parent: int, number: int, digest: str) -> int:
        """The policy of these weights under this one, -1: there is none."""
        if parent < 0:
            return self._root.get((number, digest), -1)
        policy = self._child[parent]
        while policy >= 0 and self._digest[policy] != digest:
            policy = self._sister[policy]
        return policy

    def register(self, label: Label, parent: Label | None, digest: str) -> None:
        """Give a policy its label.  Registering it again is fine; another digest under it raises
        ProtocolError.

        A parent that is unknown (None: the tree starts here, as in a new buffer) makes a root of
        depth `label.number`."""
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
        """Let `label` name the policy that `known` names: a resumed learner's name for weights of
        the life before.
        """
        self._name(label, self._policy(known))
        self._known = {}

    def lag(self, token: Label, train: Label, number: int) -> int:
        """Updates between the policy `token` and the one that batch `number` starts from, a
        descendant of `train`.

        `(n_token - c) + (number - c)` with c the depth of the last common ancestor; updates not yet
        made count as different, so a lag reckoned early can only shrink.  Never negative.  KeyError
        for a label nobody registered."""
        if train != self._known_for or len(self._known) > KNOWN:
            self._known = {}
            self._known_for = train
        beyond = self._known.get(token)
        if beyond is None:
            beyond = self._known[token] = self._lag_beyond_number(token, train)
        return beyond + number

    def _lag_beyond_number(self, token: Label, train: Label) -> int:
        """`lag` less the number."""
        ours = self._policy(token)
        theirs = self._policy(train)
        start = ours
        while ours != theirs:
            # no common root is stored: the distance to both is known only from the depths
            if ours < 0 or theirs < 0:
                return self._depth[start]
            if self._depth[ours] >= self._depth[theirs]:
                ours = self._parent[ours]
            else:
                theirs = self._parent[theirs]
        common = self._depth[ours]
        return self._depth[start] - 2 * common
