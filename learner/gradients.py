"""Measurements of gradients: cosine with the previous one, squared norm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class GradientAlignment:
    """The last gradient in bfloat16: one more copy of the weights at half their size.

    Gradients of stale batches stay aligned from step to step, while those of fresh ones are nearly
    orthogonal (GAC, arXiv 2603.01501). `project` is a reconstruction from the paper's summary,
    because its projection was not available to read.
    """

    max_cosine: float | None  # largest cosine; None: the cosine is only measured
    # adds up a value of all ranks, each of which measures its part of the gradients
    sum_over_ranks: Callable[[Tensor], Tensor]
    previous: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def measure(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the cosine with the previous gradient, nan without one.

        With `max_cosine`, the gradients are changed in place so that the cosine is at most that.
        Call it with the gradients summed over ranks, before clipping, then call `remember` unless
        the step is dropped.
        """
        raw = [gradient.to(torch.bfloat16, copy=True) for gradient in gradients]
        cosine = torch.full((), torch.nan, dtype=torch.float64, device=raw[0].device)
        if len(self.previous) == len(raw):
            pairs = (gradients, self.previous), (gradients, gradients), (self.previous,) * 2
            # products in float32, their sums in float64
            dots = []
            for pair in pairs:
                products = (a.float() * b.float() for a, b in zip(*pair, strict=True))
                dots.append(torch.stack([x.sum(dtype=torch.float64) for x in products]).sum())
            along, squared_norm, previous_squared_norm = self.sum_over_ranks(torch.stack(dots))
            cosine = along / (squared_norm * previous_squared_norm).sqrt().clamp(min=1e-300)
            if self.max_cosine is not None:
                previous_norm = previous_squared_norm.sqrt().clamp(min=1e-300)
                # along, the signed length of the part along the previous gradient, may be at most
                # |orthogonal| m / sqrt(1 - m^2) for a cosine of m
                along = along / previous_norm
                orthogonal = (squared_norm - along.square()).clamp(min=0).sqrt()
                slope = self.max_cosine / (1 - self.max_cosine**2) ** 0.5
                scale = (along - orthogonal * slope).clamp(min=0) / previous_norm
                for gradient, previous in zip(gradients, self.previous, strict=True):
                    gradient.sub_(previous.to(gradient.dtype) * scale.to(gradient.dtype))
        self._next = raw
        return cosine

    def remember(self) -> None:
        """Store the measured gradient, without projection, for the next step."""
        self.previous = self._next


def sum_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares over all tensors, float64."""
    squares = (gradient.double().square().sum() for gradient in gradients)
    return sum(squares, torch.zeros((), dtype=torch.float64))
