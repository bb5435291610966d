from typing import Any

import torch

from asyncrl.algorithms import settings, surrogates

STRUCTS = {kind.__struct_config__.tag: kind for kind in settings.list_variants(settings.Loss)}


def term(
    name: str,
    raw: torch.Tensor,
    adv: torch.Tensor,
    lp: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    seq: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    **keys: Any,
) -> surrogates.SurrogateTerm:
    """A surrogate of raw [n] and adv [n]; by default all tokens are in the loss, a sample each."""
    lp = raw if lp is None else lp
    seq = torch.arange(len(raw)) if seq is None else seq
    mask = torch.ones_like(seq, dtype=torch.bool) if mask is None else mask
    tokens = surrogates.SurrogateTokens(raw, adv, lp, lp - raw, mask, seq, int(seq.max()) + 1)
    low, high = torch.tensor([0.5, 2.0], dtype=raw.dtype)
    tokens.prepass = {"chosen": chosen, "lo": low, "hi": high, "group_q": raw * 0}
    return surrogates.SURROGATES[name](tokens, STRUCTS[name](**keys))


def step_batch(
    behavior: torch.Tensor,
    adv: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    groups: torch.Tensor,
    current: torch.Tensor | None = None,
) -> surrogates.StepBatch:
    return surrogates.StepBatch(behavior, adv, mask, seq, groups, current, mask, 0)


def covariance(lp: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return step_batch(lp, adv, mask, mask, mask, lp).compute_covariance()
