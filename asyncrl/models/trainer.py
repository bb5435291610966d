"""Train a model: add up the gradients of micro-batches, then make one optimizer step.

    for rows in split_micro_batches(order, widths, tokens):
        trainer.accumulate(compute_loss(rows))
    norm = trainer.apply(rate)

The learner's backends, supervised training, the warm start and the server of the Tinker API train
by it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import AdamW

from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import LearnerConfig

# most training sequences in a micro-batch: with more, padding and saved activations outgrow caches
ROWS = 96


def split_micro_batches(
    order: Iterable[int],
    widths: Sequence[int],
    tokens: float,
    rows: float = ROWS,
    counts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split `order` into micro-batches of at most `tokens` padded tokens and `rows` rows.

    Each has at least one item. Widths that ascend need the least padding.

    Args:
        widths: tokens of the widest row of each item.
        counts: rows of each item; None: one.
    """
    micros: list[list[int]] = []
    row_count = 0  # rows of the last micro-batch
    width = 0  # tokens of its widest row
    for item in order:
        count = 1 if counts is None else counts[item]
        row_count += count
        width = max(width, widths[item])
        if micros and row_count <= rows and row_count * width <= tokens:
            micros[-1].append(item)
        else:
            micros.append([item])
            row_count, width = count, widths[item]
    return micros


def split_by_length(lengths: Sequence[int], tokens: float, rows: float = ROWS) -> list[list[int]]:
    """Split the indices of `lengths` as `split_micro_batches` does, by similar length.

    >>> split_by_length([5, 40_000, 9, 30_000, 7], 1 << 15)
    [[0, 4, 2], [3], [1]]
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return split_micro_batches(order, lengths, tokens, rows)


class PlainAdamW(AdamW):
    """torch's AdamW without the wrappers for torch.compile.

    The first call of each wrapper would import the compiler, which takes seconds of CPU.
    """

    # the effect of the wrapper when nothing is compiled
    step = torch.no_grad()(inspect.unwrap(AdamW.step))
    add_param_group = inspect.unwrap(AdamW.add_param_group)
    zero_grad = inspect.unwrap(AdamW.zero_grad)
    state_dict = inspect.unwrap(AdamW.state_dict)
    load_state_dict = inspect.unwrap(AdamW.load_state_dict)


class MuonWithAdamW:
    """Muon for `matrices`, AdamW for the other parameters, at one learning rate.

    Muon's update is scaled to the usual size of AdamW's (arXiv 2502.16982). It does not depend on
    the gradient's scale, so clipping does not shrink it.
    """

    def __init__(
        self,
        settings: LearnerConfig | SftTraining,
        matrices: Sequence[torch.nn.Parameter],
        others: Sequence[torch.nn.Parameter],
    ) -> None:
        muon = torch.optim.Muon(
            matrices,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self.parts = [muon, build_adamw(settings, others)]
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, own in zip(self.parts, state["muon"], strict=True):
            part.load_state_dict(own)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def build_adamw(
    settings: LearnerConfig | SftTraining, parameters: Sequence[torch.nn.Parameter]
) -> PlainAdamW:
    return PlainAdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )


def build_optimizer(
    settings: LearnerConfig | SftTraining,
    parameters: Sequence[torch.nn.Parameter],
    matrices: Sequence[torch.nn.Parameter] = (),
) -> Any:
    """matrices: of `parameters`, those that Muon steps; without any it is AdamW."""
    name = getattr(settings, "optimizer", "adamw")
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    if name == "muon" and matrices:
        chosen = set(matrices)
        return MuonWithAdamW(settings, matrices, [p for p in parameters if p not in chosen])
    return build_adamw(settings, parameters)


class Trainer:
    """Parameters with their optimizer.

    owner: clips the gradients, where the parameters are parts of those of several ranks.
    matrices: see `build_optimizer`.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: LearnerConfig | SftTraining,
        owner: Trainer | None = None,
        matrices: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        self.parameters = list(parameters)
        self.clip_norm = settings.clip_norm
        self.owner = owner or self
        # copies numbers from the device; a learner copies others along
        self.read: Callable[[torch.Tensor], list[float]] = lambda numbers: numbers.tolist()
        self.optimizer = build_optimizer(settings, self.parameters, matrices)

    def drop_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, loss: torch.Tensor, *, is_last: bool = True) -> None:
        """Add a micro-batch's gradient; `is_last` marks the last one of the optimizer step."""
        loss.backward()  # type: ignore[no-untyped-call]

    def apply(self, rate: float, loss: torch.Tensor | None = None) -> float:
        """Clip and step with the learning rate `rate`; return the gradient's norm.

        Where it or the loss (a scalar) is not finite, the gradient is dropped, no step is made, and
        the norm is not finite. Reads the device once.
        """
        grad_norm = self.owner.clip(self.parameters).double()
        value = grad_norm if loss is None else loss.detach().to(grad_norm)
        norm, loss_value = self.read(torch.stack([grad_norm, value]))
        if not math.isfinite(norm + loss_value):
            self.drop_gradient()
            return math.nan
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return float(norm)

    def clip(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """Clip the accumulated gradients to `clip_norm`; return their norm, a scalar."""
        return torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm or math.inf)
