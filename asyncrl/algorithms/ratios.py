"""Log-ratios, and sums over samples of packed tensors.

Tensors are [N] over tokens; seq int64 [N] is the sample of each, of n samples.

A log-ratio is clamped to [-20, 20] where it is exponentiated. For a whole sample that is the sum
(or mean) of its tokens' log-ratios. Clamping each token first would change the product as soon as
one token lies beyond the clamp.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLAMP = 20.0
# stands for an infinite log-ratio: beyond every clamp, and sums of it stay finite
FAR = 1000.0
EDGE = 1e-8  # distance of a probability from 0 and 1 before its logarithm is taken


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b with its gradient, not clamped.

    Where both are -inf, or the difference is nan, it is 0. Infinite differences become +-FAR. These
    values carry no gradient.
    """
    x = a - b
    return torch.where(
        x.isfinite(), x, torch.nan_to_num(x.detach(), nan=0.0, posinf=FAR, neginf=-FAR)
    )


def compute_log_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return clamp(a - b, -20, 20); nan (also of two -inf) counts as 0, ratio 1."""
    return subtract(a, b).clamp(-CLAMP, CLAMP)


def compute_binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL of (p, 1 - p) from (q, 1 - q) [N], with all other tokens as one.

    p and q are clamped to [1e-8, 1 - 1e-8].
    """
    p, q = (x.double().exp().clamp(EDGE, 1 - EDGE) for x in (log_p, log_q))
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return kl.to(log_p.dtype)


def sum_by_sample(x: Tensor, seq: Tensor, n: int) -> Tensor:
    """Return the sum of x over each sample: [n]."""
    return torch.zeros(n, dtype=x.dtype, device=x.device).index_add_(0, seq, x)


def average_by_sample(x: Tensor, mask: Tensor, seq: Tensor, n: int) -> Tensor:
    """Return the mean of x over each sample's tokens in the mask: [n]; 0 without any."""
    return sum_by_sample(torch.where(mask, x, 0.0), seq, n) / sum_by_sample(
        mask.to(x.dtype), seq, n
    ).clamp(min=1)


def find_sample_max(x: Tensor, mask: Tensor, seq: Tensor, n: int) -> Tensor:
    """Return the largest x of each sample's tokens in the mask: [n]; -inf without any."""
    largest = torch.full((n,), -torch.inf, dtype=x.dtype, device=x.device)
    return largest.scatter_reduce_(0, seq, torch.where(mask, x, -torch.inf), "amax")


def average_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x over the mask, 0 when it is empty; nan outside has no effect."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


class PaddedRows:
    """Packed tokens as a matrix [samples, width], and back.

    Building one reads a number from the device.
    """

    def __init__(self, seq: Tensor) -> None:
        starts = torch.ones_like(seq, dtype=torch.bool)
        starts[1:] = seq[1:] != seq[:-1]
        self.row = starts.cumsum(0) - 1
        position = torch.arange(len(seq), device=seq.device)
        self.column = position - position[starts][self.row]
        self.shape = (
            tuple((torch.stack([self.row.amax(), self.column.amax()]) + 1).tolist())
            if len(seq)
            else (0, 0)
        )

    def pad(self, x: Tensor) -> Tensor:
        """Return [samples, width], 0 beyond a sample's end."""
        return x.new_zeros(self.shape).index_put((self.row, self.column), x)

    def pack(self, m: Tensor) -> Tensor:
        """Return the packed form [N] of a matrix."""
        return m[self.row, self.column]


def compute_running_sum(x: Tensor, seq: Tensor) -> Tensor:
    """Return the sum of x over a sample's tokens up to and including each: [N]."""
    rows = PaddedRows(seq)
    return rows.pack(rows.pad(x).cumsum(1))


def compute_running_min(x: Tensor, seq: Tensor) -> Tensor:
    """Return the smallest x of a sample's tokens up to and including each: [N].

    |x| is at most FAR. One pass without reading the device: each sample is shifted below all
    earlier ones, in float64.
    """
    starts = torch.zeros_like(seq, dtype=torch.float64)
    starts[1:] = (seq[1:] != seq[:-1]).double()
    shift = starts.cumsum(0) * (2 * FAR + 1)
    return ((x.double() - shift).cummin(0).values + shift).to(x.dtype) if len(x) else x


def sum_discounted_suffix(x: Tensor, seq: Tensor, discount: float | Tensor) -> Tensor:
    """S_t = x_t + discount_t S_{t+1} within each sample: [N]. discount: a float or [N]."""
    if not len(x):
        return x
    rows = PaddedRows(seq)
    m = rows.pad(x)
    d = rows.pad(torch.as_tensor(discount, dtype=x.dtype, device=x.device).expand_as(x))
    suffix = torch.empty_like(m)
    carry = torch.zeros_like(m[:, 0])
    for t in range(m.shape[1] - 1, -1, -1):
        carry = m[:, t] + d[:, t] * carry
        suffix[:, t] = carry
    return rows.pack(suffix)
