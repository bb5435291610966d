"""A user's functions for `loss.function` and `advantage.function`, right and wrong ones."""

from typing import Any

import torch

from asyncrl import losses


def ppo(logprobs: Any, behavior_logprobs: Any, advantages: Any, mask: Any, **keys: Any) -> Any:
    assert keys["versions"].shape == mask.shape and len(keys["groups"]) == len(mask)
    loss, metrics = losses.loss(logprobs, behavior_logprobs, advantages, mask, **keys)
    return loss, {"ess": metrics["is/ess"], "version": keys["current_version"], "value": loss}


def rloo(rewards: Any, groups: Any, mask: Any) -> Any:
    return losses.advantages(rewards, groups, name="rloo")


def to_go(rewards: Any, groups: Any, mask: Any, behavior: Any, **keys: Any) -> Any:
    return losses.advantages(rewards, groups, mask, name="reinforce_pp", behavior=behavior, **keys)


def half(logprobs: Any, behavior_logprobs: Any, advantages: Any, mask: Any) -> Any:
    return (logprobs - behavior_logprobs).exp()[mask].mul(0.5).sum()


def of_rows(logprobs: Any, *rest: Any) -> Any:
    return logprobs.sum(1)


def detached(logprobs: Any, *rest: Any) -> Any:
    return logprobs.detach().sum()


def elsewhere(logprobs: Any, *rest: Any) -> Any:
    return torch.zeros((), requires_grad=True) * 2


def broken(logprobs: Any, *rest: Any) -> Any:
    return logprobs.tokens


def infinite(logprobs: Any, *rest: Any) -> Any:
    return (logprobs * torch.inf).sum()


def named(logprobs: Any, *rest: Any) -> Any:
    return logprobs.sum(), {"name": "ppo"}


def in_list(logprobs: Any, *rest: Any) -> Any:
    return [logprobs.sum()]
