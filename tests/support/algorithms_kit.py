import re
from typing import Any

import torch

from asyncrl.algorithms import loss as sl
from asyncrl.algorithms.batch import LossBatch
from asyncrl.config import load
from asyncrl.config.tree import Config

D = torch.float64


def config(settings: str = "", **sections: Any) -> Config:
    """Decoupled PPO, unless `key=value` settings or `sections` say otherwise: `batch` has an anchor
    of its own."""
    sections = parse_settings(settings) | sections
    if "correction.proximal" not in sections:
        sections["correction"] = {"proximal": "recompute"} | sections.get("correction", {})
    return load.build({"model": {"path": "m"}, "task": {"name": "sort"}, **sections})


def parse_settings(settings: str) -> dict[str, Any]:
    """The sections of `key=value` settings with spaces between them."""
    sections: dict[str, Any] = {}
    for item in settings.split():
        load.apply(sections, item)
    return sections


def convert(settings: str) -> Config:
    """A configuration with these settings, checked as the command line does."""
    return load.convert(parse_settings(f"model.path=m task.name=sort {settings}"), "c.toml")


def parse_refusals(table: str) -> list[tuple[str, str]]:
    """(settings, error) of a table: lines of settings, and indented below them their error."""
    found = re.findall(r"((?:^\S.*\n)+) {4}(.+)\n", table, re.MULTILINE)
    return [(" ".join(settings.split()), said) for settings, said in found]


def batch(
    seed: int = 0, groups: int = 3, size: int = 4, spread: float = 0.4, proximal: bool = True
) -> LossBatch:
    g = torch.Generator().manual_seed(seed)
    n = groups * size
    lengths = torch.randint(1, 7, (n,), generator=g)
    total = int(lengths.sum())
    behavior = -2 * torch.rand(total, generator=g, dtype=D) - 0.05
    mask = torch.rand(total, generator=g) < 0.85
    return LossBatch(
        seq=torch.repeat_interleave(torch.arange(n), lengths),
        behavior=behavior,
        mask=mask,
        token_lag=torch.randint(0, 6, (total,), generator=g),
        rewards=torch.rand(n, generator=g, dtype=D),
        groups=torch.arange(n) // size,
        truncated=torch.rand(n, generator=g) < 0.2,
        proximal=behavior + spread * torch.randn(total, generator=g, dtype=D) if proximal else None,
        reference=behavior + 0.3 * torch.randn(total, generator=g, dtype=D),
    )


def theta(b: LossBatch, seed: int = 9, spread: float = 0.4) -> torch.Tensor:
    start = b.behavior if b.proximal is None else b.proximal
    return (
        start
        + spread * torch.randn(len(start), generator=torch.Generator().manual_seed(seed), dtype=D)
    ).requires_grad_(True)


def gradient(
    b: LossBatch,
    c: Config,
    lp: torch.Tensor,
    parts: list[list[int]] | None = None,
    samples: list[int] | None = None,
) -> tuple[Any, ...]:
    """(loss, gradient [N], sums) of one optimizer step over `samples`, cut into `parts`."""
    everyone = list(range(len(b.rewards))) if samples is None else samples
    prep = sl.prepare(b, c)
    step = sl.begin_step(prep, torch.tensor(everyone), lp.detach())
    total, sums = torch.zeros((), dtype=D), {}
    for p in parts or [everyone]:
        at = torch.cat([torch.nonzero(b.seq == i)[:, 0] for i in p])
        loss, more = sl.compute_micro_loss(prep, step, at, lp[at])
        total = total + loss
        sl.add_sums(sums, more)
    return total.detach(), torch.autograd.grad(total, lp)[0], sums
