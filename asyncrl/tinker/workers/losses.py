"""The losses of the Tinker API, computed by the learner's surrogates.

A loss is a sum over tokens. It has the learner's coefficient form: its gradient is that of
- sum coefficient log pi, with the coefficient detached (`asyncrl.algorithms.surrogates`). The ratio
of a token is that of the current policy to the policy that sampled it: SurrogateTokens.raw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from asyncrl.algorithms import settings
from asyncrl.algorithms.surrogates import SURROGATES, SurrogateTerm, SurrogateTokens
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.losses import BEYOND, resolve

Options = Mapping[str, float | str]
CLIPS = {"clip_low_threshold": "eps_low", "clip_high_threshold": "eps_high"}
# loss_fn -> the settings of its surrogate, and the key of each option in loss_fn_config;
# cross_entropy has no ratio and is computed by the trainer
POLICY_LOSSES: dict[str, tuple[Callable[..., settings.Loss], dict[str, str]]] = {
    "importance_sampling": (settings.VanillaLoss, {}),
    "ppo": (settings.PpoLoss, CLIPS),
    "cispo": (partial(settings.CispoLoss, eps_low=0.2), CLIPS),
    "dro": (settings.DroLoss, {"beta": "dro_beta"}),
    "gspo": (settings.GspoLoss, CLIPS),
}
CROSS_ENTROPY = "cross_entropy"
LARGEST = float(torch.finfo(torch.float32).max)  # of the numbers in loss_fn_config
METHOD = "method"  # in loss_fn_config: one of `asyncrl methods`
NAMES = (CROSS_ENTROPY, *POLICY_LOSSES)


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
    readable = POLICY_LOSSES[loss][1] if loss in POLICY_LOSSES else {}
    for name in options:
        if name not in readable:
            hint = f"it reads {', '.join(readable)}" if readable else "it reads none"
            raise ConfigError(f"loss_fn_config.{name}: {loss} has no such option; {hint}")


def compute_term(loss: str, tokens: SurrogateTokens, options: Options) -> SurrogateTerm:
    """Apply a loss of POLICY_LOSSES; its thresholds are bounds of the ratio itself."""
    kind, keys = POLICY_LOSSES[loss]
    values = {keys[name]: float(value) for name, value in options.items()}
    for key, sign in (("eps_low", -1), ("eps_high", 1)):
        if key in values:
            values[key] = sign * (values[key] - 1)
    surrogate = kind(**values)
    return SURROGATES[surrogate.surrogate](tokens, surrogate)


def resolve_method(options: Options) -> Config:
    """Return the settings of the method that `options` names, with its other keys.

    Raises ConfigError for a method that is more than a loss of sampled tokens."""
    keys = {key: value for key, value in options.items() if key != METHOD}
    if bare := next((key for key in keys if "." not in key), ""):
        raise ConfigError(
            f"loss_fn_config.{bare}: with a method, keys of [loss], [correction] and [reshape] are "
            "read, such as loss.eps_high"
        )
    config = resolve(
        str(options[METHOD]),
        keys,
        ("loss", "correction", "reshape"),
        "loss_fn_config",
        (*BEYOND, "kl.loss.coefficient", "kl.reward.coefficient"),
        load.build,  # a server repeats the calls that an earlier version took
    )
    if config.correction.proximal in ("version", "ema"):
        raise ConfigError(
            f"loss_fn_config.correction.proximal: {config.correction.proximal} is more than a "
            "loss, as it needs earlier weights; use recompute"
        )
    return config
