"""The losses, advantages and KL estimators of a run as functions of padded tensors.

    from asyncrl.losses import loss

    result = loss(logprobs, behavior_logprobs, advantages, mask, method="vespo", vespo_k_pos=2.5)
    result.loss.backward()

They are the learner's own, bit for bit. Their names, arguments and values stay from now on.
Tensors are [rows, tokens], one completion a row. `mask` is true on the tokens that the policy
sampled and that are trained; other positions may hold anything. Log-probabilities are in nats, in
float32 or float64, at the temperature of sampling.

Settings are keywords: a key of the config by its name (`eps_high=0.28`), or with its section
(`**{"kl.loss.coefficient": 0.1}`). Every mistake is a ConfigError that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.algorithms import kl, ratios
from asyncrl.algorithms import loss as step_loss
from asyncrl.algorithms.advantages import compute_advantage
from asyncrl.algorithms.batch import LossBatch
from asyncrl.algorithms.settings import FunctionAdvantage, FunctionLoss
from asyncrl.config import layers, load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError

# settings that are more than a loss
BEYOND = (
    "learner.epochs",
    "learner.minibatches",
    "learner.gradient_cosine",
    "stop.kl_max",
    "stop.lr_by_ess",
)
OF_LOSS = ("start", "reference", "version", "entropy", "groups")
OF_TOKENS = ("behavior", "start", "reference", "token_rewards", "steps", "values", "energy")
OF_ROWS = ("truncated", "bootstrap", "greedy", "greedy_truncated", "greedy_lengths", "baselines")
OTHERS = ("parts", "part_names", "squared_norms")


class LossResult(NamedTuple):
    """loss: a scalar with gradient. metrics: floats by the names of `asyncrl config metrics`."""

    loss: Tensor
    metrics: dict[str, float]


def loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    versions: Tensor | None = None,
    method: str = "ppo",
    current_version: int = -1,
    **keys: Any,
) -> LossResult:
    """Compute the loss of one optimizer step by a method of `asyncrl methods`.

    Means and batch statistics cover the tensors of this call: pass the whole step's, or each
    micro-batch has its own. The metrics cost one wait for the device.

    Args:
        logprobs: [rows, tokens] with gradient, log pi of the policy that is trained.
        behavior_logprobs: [rows, tokens], log mu of the sampled tokens, as the engine reported it.
        advantages: [rows] or [rows, tokens].
        mask: [rows, tokens], bool, or 0 and 1.
        versions: int [rows] or [rows, tokens], the number of updates in the weights that sampled
            each token. Without them no metric is by lag.
        method: a name of `asyncrl methods`.
        current_version: the number of updates before this batch, from which lag is counted.
        keys: settings of [loss], [correction], [reshape], [kl.loss] and [staleness], or tensors:
            start: [rows, tokens], log pi before the batch's first step; absent: this is that step.
            reference: [rows, tokens], log pi of the reference policy, for KL in the loss.
            version: [rows, tokens], the trainer's log pi under the weights that sampled the token,
                or with the proximal policy ema under the average of its weights.
            entropy: [rows, tokens] with gradient, in nats, for the setting `loss.entropy`.
            groups: int [rows], the prompt of each row, for gepo.

    Raises ConfigError for a tensor that does not fit, an unknown method or key, and a method that
    needs more than it is given.
    """
    given = {name: keys.pop(name) for name in OF_LOSS if name in keys}
    given |= {} if versions is None else {"versions": versions}
    sections = ("loss", "correction", "reshape", "kl.loss", "staleness")
    config = resolve(method, keys, sections, beyond=BEYOND)
    proximal, reduction = config.correction.proximal, config.loss.reduction
    needs = {
        "versions": proximal == "interpolate" or config.staleness.on_exceed != "pace",
        "version": proximal in ("version", "ema"),
        "reference": config.kl.loss.coefficient > 0,
        "entropy": config.loss.entropy != 0,
        "groups": config.loss.surrogate == "gepo",
        "norm_length": reduction == "seq-mean-token-sum-norm" and not config.loss.norm_length,
    }
    for name, is_needed in needs.items():
        if is_needed and name not in given:
            raise ConfigError(
                f"asyncrl.losses: method {method} with these settings needs {name}=; "
                "help(asyncrl.losses.loss) describes it"
            )
    if not needs["version"]:
        given.pop("version", None)
    required = {"logprobs": logprobs, "behavior_logprobs": behavior_logprobs}
    columns = _pack(mask, required | {"advantages": advantages} | given)
    lp, adv = columns.pop("logprobs"), columns.pop("advantages")
    columns["behavior"] = columns.pop("behavior_logprobs")
    entropy, sampled_by = columns.pop("entropy", None), columns.pop("versions", None)
    lag = torch.zeros_like(columns["seq"])
    if sampled_by is not None:
        lag = current_version - sampled_by.long()
        if bool((lag < 0).any()):
            raise ConfigError(
                f"asyncrl.losses: current_version = {current_version} is below one of versions; "
                "give the number of updates before this batch"
            )
    rewards = torch.zeros(len(mask), device=lp.device, dtype=lp.dtype)
    groups = _number(columns.pop("groups", columns["seq"]))
    columns = {"start": lp.detach()} | columns
    columns["groups"] = rewards.long().index_put((columns["seq"],), groups)
    batch = LossBatch(token_lag=lag, rewards=rewards, truncated=rewards.bool(), **columns)
    prep, step = prepare_step(batch, config, adv.to(lp.dtype), lp.detach())
    part = torch.arange(len(lp), device=lp.device)
    total, sums = step_loss.compute_micro_loss(prep, step, part, lp, entropy)
    metrics = step.metrics | step_loss.finish(sums)
    unknown = ("by_lag/", "mismatch/") if versions is None else ()
    known = (name for name in metrics if not name.startswith(unknown))
    return LossResult(total, {k: metrics[k] for k in known if not k.endswith("_reward")})


def advantages(
    rewards: Tensor,
    groups: Tensor,
    mask: Tensor | None = None,
    method: str = "ppo",
    baseline: float = 0.0,
    **keys: Any,
) -> Tensor:
    """Compute the advantages of a whole batch: [rows], or with a mask [rows, tokens].

    Args:
        rewards: [rows].
        groups: int [rows], the prompt of each row.
        mask: [rows, tokens], for advantages that differ by token or read lengths.
        method: a name of `asyncrl methods`, whose advantage it is; the key `name` chooses another.
        baseline: the mean reward of past batches, for reinforce with baseline = ema.
        keys: settings of [advantage], [kl.reward] and [generator], or tensors that the advantage
            reads. `LossBatch` (asyncrl/algorithms/batch.py) has their meaning. [rows, tokens]:
            behavior, start, reference, token_rewards, steps, values, energy. [rows]: truncated,
            bootstrap, greedy, baselines. [rows, parts]: parts, with part_names.

    Raises ConfigError like `loss`.
    """
    by_row, by_token, others = (
        {name: keys.pop(name) for name in names if name in keys}
        for names in (OF_ROWS, OF_TOKENS, OTHERS)
    )
    config = resolve(method, keys, ("advantage", "kl.reward", "generator"))
    penalty = config.kl.reward
    penalizes = penalty.coefficient > 0 and penalty.at == "behavior"
    if (penalizes or config.advantage.name == "opob") and "behavior" not in by_token:
        raise ConfigError(
            "asyncrl.losses: these settings need behavior=, log mu of the sampled tokens"
        )
    single = torch.ones_like(rewards)[:, None]
    inside = single if mask is None else mask
    if "greedy" in by_row:
        by_row = {"greedy_truncated": rewards * 0, "greedy_lengths": groups * 0} | by_row
    rows = {"rewards": rewards, "groups": groups, "truncated": rewards * 0} | by_row
    columns = others | _pack(single, rows)
    tokens = _pack(inside, {"behavior": rewards * 0} | by_token)
    columns |= tokens
    columns |= {
        name: columns[name] != 0 for name in ("truncated", "greedy_truncated") if name in columns
    }
    columns["groups"] = _number(columns["groups"])
    batch = LossBatch(token_lag=torch.zeros_like(tokens["seq"]), **columns)
    adv = compute_advantage(batch, batch.mask, config, baseline, config.kl.reward.coefficient)[0]
    padded = adv.new_zeros(inside.shape).masked_scatter(inside != 0, adv)
    return padded[:, 0] if mask is None else padded


def estimate_kl(logprobs: Tensor, reference: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) at each token, of the arguments' shape, with gradient.

    Args:
        logprobs: with gradient, log pi of tokens that the policy sampled.
        reference: log pi of the reference policy, of the same tokens.
        estimator: k1, k2, k3, abs or low_var_kl; with a + it has the gradient of k2.
    """
    return kl.estimate(estimator, ratios.subtract(logprobs, reference))


def resolve(
    method: str,
    keys: dict[str, Any],
    sections: tuple[str, ...],
    source: str = "asyncrl.losses",
    beyond: tuple[str, ...] = (),
    convert: Callable[[dict[str, Any], str], Config] = load.convert,
) -> Config:
    """Return the config of a method with settings; a bare key is looked up in the sections.

    convert: `load.build` does without the rules that span several keys. Raises ConfigError, which
    begins with `source`, also if it sets a key of `beyond`.
    """
    raw: dict[str, Any] = {"model": {"path": "none"}, "task": {"name": "sort"}}
    defaults, known = load.build(raw), layers.list_keys(Config)
    for key, value in keys.items():
        names = [key] if "." in key else [f"{section}.{key}" for section in sections]
        name = next((name for name in names if name in known), names[0])
        if not name.startswith(tuple(f"{section}." for section in sections)):
            raise ConfigError(
                f"{source}.{key}: has no effect here; keys of {', '.join(sections)} are read"
            )
        raw[name] = value
    config = convert(raw | {"method": method}, source)
    for key in beyond:
        if attrgetter(key)(config) != attrgetter(key)(defaults):
            raise ConfigError(
                f"{source}.method = {method}: it sets {key}, which is more than a loss; train with "
                "it by asyncrl run"
            )
    return config


@torch.no_grad()
def prepare_step(
    batch: LossBatch, config: Config, adv: Tensor, current: Tensor
) -> tuple[step_loss.PreparedBatch, step_loss.StepPlan]:
    """Prepare one step of a batch whose start is known; adv, current: [N]."""
    batch.proximal = step_loss.choose_proximal(batch, config, batch.start)
    prep = step_loss.prepare(batch, config, advantages=adv)
    samples = torch.arange(batch.count, device=current.device)
    return prep, step_loss.begin_step(prep, samples, current)


def check_functions(config: Config) -> dict[str, str]:
    """Call the config's own functions on two small rows; return their keys and paths.

    Raises ConfigError for a function that fails, or whose result is not finite.
    """
    seq, behavior = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7])
    rewards = torch.tensor([1.0, 0.0])
    columns: dict[str, Any] = {"start": behavior - 0.1, "reference": behavior}
    columns |= {"truncated": rewards < 0, "token_lag": seq, "mask": seq >= 0, "groups": seq[:2]}
    batch = LossBatch(seq=seq, behavior=behavior, rewards=rewards, **columns)
    adv, values = rewards[seq] - 0.5, {}
    if isinstance(config.advantage, FunctionAdvantage):
        adv = compute_advantage(batch, batch.mask, config, 0.0, config.kl.reward.coefficient)[0]
        values["advantage.function"] = config.advantage.function, adv
    if isinstance(config.loss, FunctionLoss):
        planned = prepare_step(batch, config, adv, columns["start"])[1].prepass
        values["loss.function"] = (
            config.loss.function,
            planned["coefficient"] + planned["objective"],
        )
    for key, (path, value) in values.items():
        if not bool(value.isfinite().all()):
            raise ConfigError(
                f"{key} = {path}: its value or gradient on two small rows is not finite"
            )
    return {key: path for key, (path, _) in values.items()}


def _number(groups: Tensor) -> Tensor:
    """Number groups from 0."""
    numbers: Tensor = torch.unique(groups, return_inverse=True)[1]
    return numbers


def _pack(mask: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the values in the mask of each tensor, [N], with `seq` and `mask` of a batch.

    Floats take the type of the first tensor. Raises ConfigError for what does not fit.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(((mask != 0) & (mask != 1)).any()):
        raise ConfigError("asyncrl.losses: mask: give [rows, tokens] of bool, or of 0 and 1")
    inside = mask != 0
    packed = {"seq": inside.nonzero()[:, 0], "mask": inside[inside]}
    kind = None
    for name, column in tensors.items():
        if not isinstance(column, Tensor) or column.device != mask.device:
            raise ConfigError(
                f"asyncrl.losses: {name}: give a tensor on {mask.device}, as the mask"
            )
        by_row = column.shape == inside.shape[:1]
        full = column[:, None].expand_as(inside) if by_row else column
        problem = ""
        if full.shape != inside.shape:
            problem = f"its shape is {[*column.shape]}, that of the mask {[*mask.shape]}"
        elif column.dtype not in (torch.float32, torch.float64) and (
            kind is None or column.is_floating_point()
        ):
            hint = ", from a log-softmax in float32" if name.endswith("logprobs") else ""
            problem = f"it is of {column.dtype}; give float32{hint}"
        elif not bool(full[inside].isfinite().all()):
            row, token = (inside & ~full.isfinite()).nonzero()[0].tolist()
            problem = f"it is {float(full[row, token])} at row {row}, token {token}, in the mask"
        elif name.endswith("logprobs") and bool(full[inside].sum() > 0):
            problem = "its mean is above 0; give log-probabilities, not losses or probabilities"
        if problem:
            raise ConfigError(f"asyncrl.losses: {name}: {problem}")
        kind = kind or column.dtype
        packed[name] = full[inside].to(kind if column.is_floating_point() else column.dtype)
    return packed
