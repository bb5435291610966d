"""The losses of the Tinker API, computed by the learner's surrogates.

A loss is a sum over tokens. It has the learner's coefficient form: its gradient is that of
- sum coefficient log pi, with the coefficient detached (`asyncrl.algorithms.surrogates`). The ratio
of a token is that of the current policy to the policy that sampled it: SurrogateTokens.raw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from asyncrl.algorithms import surrogates
from asyncrl.algorithms.surrogates import SurrogateTerm, SurrogateTokens
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError

Options = Mapping[str, float | str]
CLIPS = ("clip_low_threshold", "clip_high_threshold")


def _read_bounds(options: Options, low: float = 0.8, high: float = 1.2) -> tuple[float, float]:
    return float(options.get(CLIPS[0], low)), float(options.get(CLIPS[1], high))


def _ppo(tokens: SurrogateTokens, options: Options) -> SurrogateTerm:
    low, high = _read_bounds(options)
    return surrogates.compute_ppo(tokens.log_r, tokens.adv, low=1 - low, high=high - 1)


def _cispo(tokens: SurrogateTokens, options: Options) -> SurrogateTerm:
    low, high = _read_bounds(options)
    return surrogates.compute_cispo(tokens.log_r, tokens.adv, tokens.lp, lo=low, hi=high)


def _gspo(tokens: SurrogateTokens, options: Options) -> SurrogateTerm:
    low, high = _read_bounds(options, 1 - surrogates.GSPO_CLIP[0], 1 + surrogates.GSPO_CLIP[1])
    return surrogates.compute_gspo(
        tokens.raw, tokens.adv, tokens.mask, tokens.seq, tokens.n, low=1 - low, high=high - 1
    )


class PolicyLoss(NamedTuple):
    """A loss of sampled tokens, and the names in loss_fn_config that it reads."""

    term: Callable[[SurrogateTokens, Options], SurrogateTerm]
    options: tuple[str, ...] = ()


# loss_fn -> the loss of sampled tokens; cross_entropy has no ratio and is computed by the trainer
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "importance_sampling": PolicyLoss(
        lambda tokens, options: surrogates.compute_vanilla(tokens.log_r, tokens.adv)
    ),
    "ppo": PolicyLoss(_ppo, CLIPS),
    "cispo": PolicyLoss(_cispo, CLIPS),
    "dro": PolicyLoss(
        lambda tokens, options: surrogates.compute_dro(
            tokens.log_r, tokens.adv, tokens.lp, beta=float(options.get("beta", 0.05))
        ),
        ("beta",),
    ),
    "gspo": PolicyLoss(_gspo, CLIPS),
}
CROSS_ENTROPY = "cross_entropy"
LARGEST = float(torch.finfo(torch.float32).max)  # of the numbers in loss_fn_config
METHOD = "method"  # in loss_fn_config: one of `asyncrl methods`
NAMES = (CROSS_ENTROPY, *POLICY_LOSSES)
# a method that sets one of these cannot be a loss of one call
MORE_THAN_A_LOSS = (
    "learner.epochs",
    "learner.minibatches",
    "learner.gradient_cosine",
    "stop.kl_max",
    "stop.lr_by_ess",
    "kl.loss.coefficient",
    "kl.reward.coefficient",
)


def check(loss: str, options: Options) -> None:
    """Raise ConfigError for a loss that is not served, or an option that it does not read."""
    if loss not in NAMES:
        raise ConfigError(f"loss_fn = {loss}: choose one of {', '.join(NAMES)}")
    for name, value in options.items():
        if not isinstance(value, str) and not abs(value) <= LARGEST:
            raise ConfigError(f"loss_fn_config.{name}: {value:g} is not a number of float32")
    if METHOD in options and loss in POLICY_LOSSES:
        resolve_method(options)
        return
    readable = POLICY_LOSSES[loss].options if loss in POLICY_LOSSES else ()
    for name in options:
        if name not in readable:
            hint = f"it reads {', '.join(readable)}" if readable else "it reads none"
            raise ConfigError(f"loss_fn_config.{name}: {loss} has no such option; {hint}")


def resolve_method(options: Options) -> Config:
    """Return the settings of the method that `options` names, with its other keys.

    The client gives the advantages, so the method's own are not computed.  Raises ConfigError for a
    method that is more than a loss of sampled tokens."""
    tree: dict[str, Any] = {
        "model": {"path": "client"},
        "task": {"name": "client"},
        "method": str(options[METHOD]),
        "advantage": {"name": "reinforce"},  # of any number of datums
    }
    for key, value in options.items():
        if key == METHOD:
            continue
        section, _, name = key.partition(".")
        if section not in ("loss", "correction", "reshape") or not name:
            raise ConfigError(
                f"loss_fn_config.{key}: with a method, keys of [loss], [correction] and [reshape] "
                "are read, such as loss.eps_high"
            )
        tree.setdefault(section, {})[name] = value
    config = load.build(tree, "loss_fn_config")
    if config.correction.proximal == "version":
        raise ConfigError(
            "loss_fn_config.correction.proximal: version is more than a loss, as it needs earlier "
            "weights; use recompute"
        )
    defaults = load.build({"model": {"path": "client"}, "task": {"name": "client"}})
    for key in MORE_THAN_A_LOSS:
        if attrgetter(key)(config) != attrgetter(key)(defaults):
            raise ConfigError(
                f"loss_fn_config.method = {options[METHOD]}: it sets {key}, which is more than a "
                "loss; train with it by asyncrl run"
            )
    return config
