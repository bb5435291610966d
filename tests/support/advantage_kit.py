from typing import Any

import torch

from asyncrl.algorithms import advantages, settings

STRUCTS = {kind.__struct_config__.tag: kind for kind in settings.list_variants(settings.Advantage)}
OF_BATCH = ("parts", "part_names", "weights", "squared_norms", "values", "bootstrap", "energy")


def rewarded(
    rewards: torch.Tensor, groups: torch.Tensor, seq: torch.Tensor, mask: torch.Tensor, **more: Any
) -> advantages.RewardedBatch:
    lengths = more.pop("lengths", torch.ones_like(groups))
    return advantages.RewardedBatch(
        seq, seq, mask, seq, rewards, groups, groups > groups, lengths=lengths, ema=0.0, **more
    )


def advantage(
    name: str,
    rewards: torch.Tensor,
    groups: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    **keys: Any,
) -> torch.Tensor:
    """An advantage [B] of samples of a token each."""
    more = {key: keys.pop(key) for key in OF_BATCH if key in keys}
    lengths = torch.ones_like(groups) if lengths is None else lengths
    seq = torch.arange(len(rewards))
    batch = rewarded(rewards, groups, seq, seq >= 0, lengths=lengths, **more)
    return advantages.BY_ANSWER[name](batch, STRUCTS[name](**keys))


def by_token(
    name: str,
    token_rewards: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    groups: torch.Tensor | None = None,
    *,
    steps: torch.Tensor | None = None,
    **keys: Any,
) -> tuple[torch.Tensor, Any]:
    """An advantage [N], and the returns of `gae`."""
    more = {key: keys.pop(key) for key in OF_BATCH if key in keys}
    count = int(seq.max()) + 1
    totals = token_rewards.new_zeros(count)
    more |= {"tokens": token_rewards, "token_rewards": token_rewards, "totals": totals}
    groups = torch.zeros(count, dtype=torch.long) if groups is None else groups
    batch = rewarded(totals, groups, seq, mask, steps=steps, **more)
    return advantages.BY_TOKEN[name](batch, STRUCTS[name](**keys)), batch.returns
