"""Policy versions: labels, their tree, and the one definition of lag.  Pure; see docs/architecture.md, "Versions".

A *policy* is a node of a tree: a parent and an update.  Its *number* is its depth, the count of batches committed since
the start.  A *label* (epoch, number) names it; the epoch counts the learner's lives.  Same parent and same digest: same
node, whatever the label.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.errors import ProtocolError


class Label(NamedTuple):
    """A policy version.  Labels compare as pairs: a newer epoch wins, also with a lower number."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


class PolicyTree:
    """The policies that learners registered by hello or commit.

    >>> tree = PolicyTree()
    >>> for n in range(3): tree.register(Label(1, n), Label(1, n - 1) if n else None, f"d{n}")
    >>> tree.register(Label(2, 1), Label(1, 0), "d1")      # epoch 2 resumes from the checkpoint of number 1
    >>> tree.register(Label(2, 2), Label(2, 1), "other")   # and trains on: another update than epoch 1's
    >>> tree.lag(Label(1, 2), Label(2, 2), 2)              # one step back on the dead branch, one forward on ours
    2
    """

    def __init__(self) -> None:
        self._node: dict[Label, int] = {}
        self._intern: dict[tuple[int, str], int] = {}
        self._parent: list[int] = []
        self._depth: list[int] = []
        self._digest: list[str] = []

    def __contains__(self, label: Label) -> bool:
        return label in self._node

    def digest(self, label: Label) -> str:
        """The digest that was registered under `label`; KeyError when there is none."""
        return self._digest[self._node[label]]

    def labels(self) -> list[Label]:
        """All registered labels, sorted."""
        return sorted(self._node)

    def register(self, label: Label, parent: Label | None, digest: str) -> None:
        """Give a policy its label.  Registering it again is fine; another digest under it raises ProtocolError.

        A parent that is unknown (None: the tree starts here, as in a new buffer) makes a root of depth `label.number`.
        """
        label = Label(*label)
        if label in self._node:
            if self.digest(label) != digest:
                raise ProtocolError(f"two different weights carry the version {label}: {self.digest(label)} and {digest}")
            return
        root = -1 if parent is None or Label(*parent) not in self._node else self._node[Label(*parent)]
        key = (root, digest)
        if key not in self._intern:
            self._intern[key] = len(self._parent)
            self._parent.append(root)
            self._depth.append(label.number)
            self._digest.append(digest)
        self._node[label] = self._intern[key]

    def alias(self, label: Label, known: Label) -> None:
        """Let `label` name the policy that `known` names: a resumed learner's name for weights of the life before."""
        self._node[Label(*label)] = self._node[Label(*known)]

    def lag(self, token: Label, train: Label, number: int) -> int:
        """Updates between the policy `token` and the one that batch `number` starts from, a descendant of `train`.

        `(n_token - c) + (number - c)` with c the depth of the last common ancestor; updates not yet made count as
        different, so a lag reckoned early can only shrink.  Never negative.  KeyError for a label nobody registered.
        """
        a, b = self._node[Label(*token)], self._node[Label(*train)]
        start = a
        while a != b:
            if a < 0 or b < 0:  # no common root is stored: the distance to both is known only from the depths
                return self._depth[start] + number
            if self._depth[a] >= self._depth[b]:
                a = self._parent[a]
            else:
                b = self._parent[b]
        common = self._depth[a]
        return (self._depth[start] - common) + (number - common)
