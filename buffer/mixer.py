"""Draw the task and the prompt of each new group of a mixture (`task.mixture`).

The shares hold for what is trained: a group that is removed is replaced by one of its task, as long
as the task gives groups that can be trained. Without randomness, the draws of a journal replay."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.tree import Config, MixedTaskConfig
from asyncrl.contract.messages import LedgerLine, MixturePosition, Numbers, Prompt
from asyncrl.tasks.mixture import MixtureTask, choose_task, compute_weights
from buffer.ledger import Ledger

# A task is dry after this many removed groups in a row. Until it gives a group that can be trained,
# its removed groups are not replaced by further groups of the task.
DRY = 32
AVERAGED = 16  # groups in the running success rate of a generated task
NEW = -1  # index of a draw: the next prompt of its task
GOLDEN = 0.618033988749895  # spreads the passes in which the prompts of a pool are drawn


@dataclass
class MixtureState:
    """The state of a mixture in a snapshot, by task.

    credit: groups that the task is owed.
    indices: index of the next prompt.
    due: (task, index) to draw first.
    removed: removed groups so far.
    in_a_row: groups removed since the last one that can be trained.
    passed: prompt id -> share of its last group that passed; for a generated task its running mean,
        under 0.
    past: ledger of the groups that are no longer in the store."""

    credit: Numbers = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)
    due: list[tuple[str, int]] = field(default_factory=list)
    removed: dict[str, int] = field(default_factory=dict)
    in_a_row: dict[str, int] = field(default_factory=dict)
    passed: dict[str, dict[int, float]] = field(default_factory=dict)
    past: dict[str, Ledger] = field(default_factory=dict)


@dataclass(eq=False)
class TaskMixer:
    """Draws the task and the prompt of each new group; false if the run has one task.

    parts: the tasks of the mixture by title.
    prompt: makes the prompt of (task, index).
    lengths: number of training prompts of each task; None for a generated task.

    >>> parts = {"a": MixedTaskConfig(name="sort", weight=3), "b": MixedTaskConfig(name="rle")}
    >>> mixer = TaskMixer(parts)
    >>> [mixer.draw(0) for _ in range(4)]
    [('a', 0), ('a', 1), ('b', 0), ('a', 2)]
    """

    parts: Mapping[str, MixedTaskConfig] = field(default_factory=dict)
    prompt: Callable[[str, int], Prompt] = lambda title, index: Prompt(index, "")
    lengths: Mapping[str, int | None] = field(default_factory=dict)
    state: MixtureState = field(default_factory=MixtureState)
    log: Callable[[str], object] = lambda line: None

    def __bool__(self) -> bool:
        return bool(self.parts)

    # ---- draws -----------------------------------------------------------------------------------

    def draw(self, batch: float) -> tuple[str, int] | None:
        """Draw (task, index) of a new group for batch number `batch`; None: all have run out."""
        while self.state.due:
            title, index = self.state.due.pop(0)
            if index != NEW:
                return title, index
            if not self._is_out(title):
                return title, self._take_index(title)
        weights = self.compute_weights(batch)
        if not weights:
            return None
        title = choose_task(self.state.credit, weights)
        return title, self._take_index(title)

    def compute_weights(self, batch: float) -> Numbers:
        """Compute the weights at a batch of the tasks that have prompts left."""
        weights = compute_weights(self.parts, batch)
        return {
            title: weight * (self._get_pool_share(title, 0) if self._is_generated(title) else 1.0)
            for title, weight in weights.items()
            if not self._is_out(title)
        }

    def _is_generated(self, title: str) -> bool:
        return self.lengths.get(title) is None

    def _find_end(self, title: str) -> float:
        """Return the index at which a task has run out of prompts."""
        return self.parts[title].passes * (self.lengths.get(title) or 0) or math.inf

    def _is_out(self, title: str) -> bool:
        return self.state.indices.get(title, 0) >= self._find_end(title)

    def _take_index(self, title: str) -> int:
        """Return the index of a task's next prompt and advance past it."""
        index = self.state.indices.get(title, 0)
        while index + 1 < self._find_end(title) and not self._is_in_pass(title, index):
            index += 1
        self.state.indices[title] = index + 1
        if self._is_out(title):
            passes = self.parts[title].passes
            self.log(
                f"task {title} has run out of prompts after {passes} passes (task.mixture.passes): "
                "its share goes to the other tasks"
            )
        return index

    def _is_in_pass(self, title: str, index: int) -> bool:
        """Whether the prompt at `index` is drawn in this pass, by its pool."""
        length = self.lengths.get(title)
        if not length or title not in self.state.passed:
            return True
        key = self.prompt(title, index).id
        share = self._get_pool_share(title, key)
        phase = key * GOLDEN % 1.0
        turn = index // length
        return math.floor((turn + 1) * share + phase) > math.floor(turn * share + phase)

    def _get_pool_share(self, title: str, key: int) -> float:
        """Return the share of the passes in which the pool of a prompt is drawn.

        key: id of the prompt; 0 for a generated task."""
        passed = self.state.passed.get(title, {}).get(key)
        curriculum = self.parts[title].curriculum
        if passed is None:
            return 1.0
        if passed >= curriculum.easy_from:
            return curriculum.easy
        return curriculum.hard if passed <= curriculum.hard_to else 1.0

    # ---- outcomes of the groups ------------------------------------------------------------------

    def on_complete(self, title: str, index: int, rewards: Sequence[float]) -> None:
        """Record the success rate of a complete group, whether its rewards differ or not."""
        curriculum = self.parts[title].curriculum
        if curriculum.easy == curriculum.hard == 1.0:
            return
        passed = self.state.passed.setdefault(title, {})
        share = sum(reward >= curriculum.passing for reward in rewards) / len(rewards)
        if self._is_generated(title):
            mean = passed.get(0, 0.5)
            passed[0] = mean + (share - mean) / AVERAGED
        else:
            passed[self.prompt(title, index).id] = share

    def on_removed(self, title: str, line: LedgerLine) -> None:
        """Replace a removed group by another one of its task, unless the task is dry.

        line: the ledger line of its samples."""
        removed = self.state.in_a_row[title] = self.state.in_a_row.get(title, 0) + 1
        self.state.removed[title] = self.state.removed.get(title, 0) + 1
        if removed == DRY:
            self.log(
                f"task {title} runs dry: its last {DRY} groups were all removed (the last one: "
                f"{line}); removed groups are now replaced by those of the other tasks"
            )
        if removed < DRY:
            self.state.due.append((title, NEW))

    # ---- restarts --------------------------------------------------------------------------------

    def make_position(
        self, untrained: Iterable[tuple[str, int]], ledgers: Mapping[str, Ledger]
    ) -> MixturePosition | None:
        """Make the position from which a new buffer continues after a checkpoint.

        untrained: (task, index) of groups that end with this process, in their order.
        ledgers: the ledger of each task.
        Returns None without a mixture."""
        if not self:
            return None
        return MixturePosition(
            credit=dict(self.state.credit),
            indices=dict(self.state.indices),
            due=[*untrained, *self.state.due],
            removed=dict(self.state.removed),
            ledgers={title: ledger.compute_totals() for title, ledger in ledgers.items()},
        )

    def restore_position(self, position: MixturePosition) -> None:
        """Continue after a checkpoint. Success rates start empty."""
        self.state = MixtureState(
            credit=dict(position.credit),
            indices=dict(position.indices),
            due=[(title, index) for title, index in position.due if title in self.parts],
            removed=dict(position.removed),
            past={title: Ledger.restore(totals) for title, totals in position.ledgers.items()},
        )

    # ---- numbers ---------------------------------------------------------------------------------

    def compute_metrics(self, batch: float) -> Numbers:
        """Compute the metrics of the draws for batch number `batch`."""
        weights = self.compute_weights(batch)
        total = sum(weights.values()) or 1.0
        metrics: Numbers = {}
        for title in self.parts:
            metrics[f"task/{title}_weight"] = weights.get(title, 0.0) / total
            metrics[f"task/{title}_removed"] = self.state.removed.get(title, 0)
            # without prompts left, or with only groups that cannot be trained
            is_dry = self._is_out(title) or self.state.in_a_row.get(title, 0) >= DRY
            metrics[f"task/{title}_dry"] = float(is_dry)
        return metrics


def make_mixer(config: Config, task: Any) -> TaskMixer:
    """Make the mixer of a run's task. It has no parts if the run has one task."""
    mixture = getattr(task, "task", task)  # perhaps inside `TaskWithSets`
    if not isinstance(mixture, MixtureTask):
        return TaskMixer()
    return TaskMixer(
        mixture.parts,
        lambda title, index: mixture.build_prompt("train", title, index, config.seed),
        {title: mixture.count_prompts(title) for title in mixture.parts},
    )
