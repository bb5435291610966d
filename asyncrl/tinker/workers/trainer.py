"""The training process: the weights and optimizers of all models of a server.

With adapters, all models share the base's weights. A call changes a model completely or not at all.

A loss of the API is a sum over tokens. It has the learner's coefficient form: its gradient is that
of - sum coefficient log pi, with the coefficient detached (`asyncrl.algorithms.surrogates`). The
ratio of a token is that of the current policy to the policy that sampled it: SurrogateTokens.raw.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms import diagnostics, ratios, settings
from asyncrl.algorithms import loss as step_loss
from asyncrl.algorithms.batch import LossBatch
from asyncrl.algorithms.surrogates import SURROGATES, SurrogateTerm, SurrogateTokens
from asyncrl.config import load
from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import Config, LoraConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.losses import BEYOND, prepare_step, resolve
from asyncrl.models import adapters, memory
from asyncrl.models.policy import PolicyModel, export, list_named_weights, load_policy, load_weights
from asyncrl.models.trainer import Trainer, split_by_length
from asyncrl.records import atomic_write
from asyncrl.tinker.messages import (
    FREE_BYTES,
    LABEL,
    NOT_SAMPLED,
    CallFailure,
    Datum,
    ScoreResult,
    describe_failure,
)
from asyncrl.tinker.settings import TinkerConfig
from learner import checkpoint

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
RATIO_MASK = "sequence_ratio_mask"  # positions of gspo's ratio, which the cookbook sends
STATE = "state.pt"
MODEL = "model"
# Prefixes of metrics that are constant here: those of several passes over a batch, and those of the
# importance weights and masks of a correction, which only a method has.
CONSTANT = ("kl/start_target", "by_lag/update")
UNWEIGHTED = (
    *["is/mean_weight", "is/weight_ess", "is/ess_by_answer", "is/zero_share"],
    *["is/rejected", "is/vetoed", "is/masked_share"],
)


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
    if config.correction.proximal in ("version", "ema") or config.loss.center != "off":
        raise ConfigError(
            "loss_fn_config: correction.proximal = version or ema and loss.center are more than a "
            "loss, as they need earlier weights; leave them out"
        )
    return config


class TrainedModel:
    """One client's weights, optimizer and collected gradient."""

    def __init__(self, base: PolicyModel, lora: LoraConfig, rank: int, seed: int) -> None:
        """rank: of the adapter; 0: train all weights."""
        shared = {id(weight): weight for weight in base.hf.parameters()} if rank else {}
        hf = copy.deepcopy(base.hf, shared)
        self.policy = PolicyModel(hf, base.tokenizer_dir, generation_config=base.generation_config)
        if rank:
            adapter = LoraConfig(rank=rank, alpha=lora.alpha, target_modules=lora.target_modules)
            adapters.attach(self.policy, adapter, seed)
        parameters = [weight for weight in hf.parameters() if weight.requires_grad]
        self.trainer = Trainer(parameters, SftTraining())
        self.drop_gradient()

    def load(self, path: Path, optimizer: bool) -> None:
        """Load a state that `save` wrote.  Raises DamagedDataError."""
        if self.policy.adapter is not None:
            load_weights(self.policy, adapters.read_fitting(self.policy, path / MODEL))
        else:
            dtype = str(self.trainer.parameters[0].dtype).removeprefix("torch.")
            saved = load_policy(path / MODEL, dtype)
            load_weights(self.policy, dict(list_named_weights(saved)))
        if optimizer:
            state = torch.load(path / STATE, weights_only=True, map_location="cpu")
            self.trainer.optimizer.load_state_dict(state["optimizer"])

    def save(
        self, path: Path, *, state: bool = False, label: str = "", named: bool = False
    ) -> None:
        """Write the model to the directory `path`.

        state: include the optimizer, so that training can continue from it; otherwise write only
            the weights, as a sampler needs them.
        label: version and branch of the weights, for their file LABEL; "": they are not for
            samplers.
        named: a client named them, and they stay until a client deletes them.

        Raises ConfigError if too little of the disk would stay free: named weights leave room for
        two checkpoints, and others for the rows and calls of the server."""
        path.parent.mkdir(exist_ok=True)
        size = sum(weight.nbytes for weight in self.trainer.parameters) * (3 if state else 1)
        floor = FREE_BYTES + 2 * size if named else FREE_BYTES // 2
        if (free := shutil.disk_usage(path.parent).free) < size + floor:
            raise ConfigError(
                f"{path}: not saved: {size / 2**20:.1f} MiB would leave less than "
                f"{floor >> 20} MiB of the disk free, which has {free >> 20} MiB: delete saved "
                "weights (delete_checkpoint), or free other space"
            )
        with atomic_write.replace(path) as folder:
            weights = folder / (MODEL if state else "")
            weights.parent.mkdir(exist_ok=True)
            export(self.policy, weights)
            if label:
                (weights / LABEL).write_text(label, encoding="utf-8")
            if state:
                torch.save({"optimizer": self.trainer.optimizer.state_dict()}, folder / STATE)
                checkpoint.seal(folder)

    def step(
        self,
        rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_norm: float,
    ) -> dict[str, float]:
        """Make an AdamW step with the gradient collected since the last one.

        Args:
            rate: the learning rate.
            betas: of the two moving averages.
            eps: added to the root of the second one.
            weight_decay: decoupled, times the rate.
            clip_norm: the largest norm of the gradient; 0: no clipping.

        Returns the metrics of the step's tokens. Raises CallFailure if the gradient or the new
        weights are not finite; with such weights the model must be restored."""
        self.trainer.clip_norm = clip_norm
        for group in self.trainer.optimizer.param_groups:
            group.update(betas=betas, eps=eps, weight_decay=weight_decay)
        norm = self.trainer.apply(rate)
        if not math.isfinite(norm):
            self.drop_gradient()
            raise CallFailure(
                "the gradient is not finite: it was dropped, and the step was not made"
            )
        if not torch.stack([weight.isfinite().all() for weight in self.trainer.parameters]).all():
            raise CallFailure(
                f"the step with learning_rate = {rate:g} made weights that are not finite: it was "
                "undone",
                spoiled=True,
            )
        metrics = diagnostics.compute_metrics(self.sums)
        if "tokens" not in self.sums:
            metrics = {name: float(x) for name, x in self.sums.items()}
        constant = CONSTANT + (() if self.is_weighted else UNWEIGHTED)
        self.drop_gradient()
        metrics = {name: x for name, x in metrics.items() if not name.startswith(constant)}
        return metrics | {"optim/grad_norm": norm, "optim/lr": rate}

    def drop_gradient(self) -> None:
        """Forget the gradient collected since the last optimizer step."""
        self.trainer.drop_gradient()
        self.sums: dict[str, Tensor] = {}
        self.is_weighted = False  # a loss of the current step has its own importance weights


class ServedModels:
    """All models of a server, by their ids."""

    def __init__(self, config: TinkerConfig) -> None:
        torch.set_num_threads(config.training.threads)
        memory.keep_freed()
        self.config = config
        self.base = load_policy(config.model.path, config.model.dtype, config.model.device)
        self.vocabulary = int(self.base.hf.config.get_text_config().vocab_size)
        self.models: dict[str, TrainedModel] = {}

    def handle(self, method: str, id: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of this class, or of the model `id`.

        An exception becomes the result, so that it costs no model of another client. A GPU that no
        longer works ends the process."""
        try:
            if method in ("load", "forward_backward"):
                return getattr(self, method)(id, *arguments, **options)
            return getattr(self.models[id], method)(*arguments, **options)
        except Exception as error:  # it must not cost the models of other clients
            if self.base.device.type == "cuda":
                torch.cuda.synchronize()  # raises if the GPU no longer works for this process
            return describe_failure(error)

    def load(
        self,
        id: str,
        rank: int,
        seed: int,
        path: Path | None = None,
        *,
        optimizer: bool = False,
        checkpoint: Path | None = None,
    ) -> None:
        """Create a model, or load it from `path`.

        Args:
            id: of the model, which takes the place of an earlier one.
            rank: of its adapter; 0: train all weights.
            seed: of a new adapter.
            path: directory of a state that `save` wrote; None: begin with the base model.
            optimizer: also load the optimizer's moments.
            checkpoint: directory to which the loaded model is written; None: nowhere.

        Raises ConfigError and DamagedDataError, and then keeps the earlier model."""
        model = TrainedModel(self.base, self.config.lora, rank, seed)
        if path is not None:
            model.load(path, optimizer)
        if checkpoint is not None:
            model.save(checkpoint, state=True)
        self.models[id] = model

    # ---- loss ------------------------------------------------------------------------------------

    def forward_backward(
        self,
        id: str,
        data: Sequence[Datum],
        loss: str,
        options: Options,
        forward_only: bool = False,
    ) -> ScoreResult:
        """Score the targets, and add the gradient of a loss, summed over the tokens of `data`.

        Args:
            id: of the model.
            data: the datums, in any order of their lengths.
            loss: one of NAMES.
            options: the loss_fn_config of the call; with METHOD, the keys of a method.
            forward_only: compute no gradient.

        Raises ConfigError for a request that is not served, before anything is computed."""
        self._check(data, loss, options)
        if not data:
            return ScoreResult([], 0.0)
        model = self.models[id]
        lengths = [len(datum.tokens) for datum in data]
        micros = split_by_length(lengths, self.config.training.micro_batch_tokens)
        batches = [[data[index] for index in indices] for indices in micros]
        plan = None
        if METHOD in options and not forward_only:
            # by the learner's own functions: the reduction weights tokens and datums as in a run,
            # times the number of tokens, so that the loss is a sum like the others
            with torch.no_grad():
                scores = [self.score(model.policy, part) for part in batches]
            current = torch.cat(scores).float()
            packed = PackedDatums([datum for part in batches for datum in part], current.device)
            zeros = torch.zeros(len(lengths), device=current.device)
            batch = LossBatch(
                seq=packed.seq,
                behavior=packed.behavior,
                mask=packed.inside,
                token_lag=packed.lag.clamp(min=0),
                rewards=zeros,
                groups=zeros.long(),
                truncated=zeros.bool(),
                start=current,
            )
            plan = prepare_step(batch, resolve_method(options), packed.adv, current)
            plan[1].factor = plan[1].factor * plan[0].valid.sum()
        logprobs: dict[int, np.ndarray] = {}
        total, first = 0.0, 0
        for indices, part in zip(micros, batches, strict=True):
            with torch.set_grad_enabled(not forward_only):
                lp = self.score(model.policy, part)
            rows = torch.split(lp.detach().float().cpu(), [lengths[index] for index in indices])
            logprobs |= zip(indices, (row.numpy() for row in rows), strict=True)
            if plan is not None:
                positions = torch.arange(first, first := first + len(lp), device=lp.device)
                value, sums = step_loss.compute_micro_loss(*plan, positions, lp.float())
                total += float(value.detach())
            elif METHOD not in options:
                value, sums = compute_policy_loss(loss, options, part, lp)
                total += float(sums["loss/policy"])
            if not forward_only:
                model.trainer.accumulate(value)
                diagnostics.add_sums(model.sums, sums)
                model.is_weighted |= plan is not None
        return ScoreResult([logprobs[index] for index in range(len(lengths))], total)

    def _check(self, data: Sequence[Datum], loss: str, options: Options) -> None:
        """Raise ConfigError for a loss, an option or an input of a datum that is not served."""
        if loss not in NAMES:
            raise ConfigError(f"loss_fn = {loss}: choose one of {', '.join(NAMES)}")
        for name, value in options.items():
            if not isinstance(value, str) and not abs(value) <= LARGEST:
                raise ConfigError(f"loss_fn_config.{name}: {value:g} is not a number of float32")
        sampled = loss in POLICY_LOSSES
        if METHOD in options and sampled:
            resolve_method(options)
        else:
            keys = POLICY_LOSSES[loss][1] if sampled else {}
            hint = f"it reads {', '.join(keys)}" if keys else "it reads none"
            for name in options.keys() - keys:
                raise ConfigError(f"loss_fn_config.{name}: {loss} has no such option; {hint}")
        required = ("logprobs", "advantages") if sampled else ("weights",)
        readable = {"weights", "mask", *required} | ({RATIO_MASK} if loss == "gspo" else set())
        for index, datum in enumerate(data):
            for name in required:
                if name not in datum.fields:
                    raise ConfigError(f"datum {index}: {loss} needs loss_fn_inputs.{name}")
            if others := sorted(set(datum.fields) - readable):
                raise ConfigError(
                    f"datum {index}: {loss} has no loss_fn_inputs.{others[0]}; it reads "
                    f"target_tokens, {', '.join(sorted(readable))}"
                )
            if len(datum.tokens) > (limit := self.config.sampling.context):
                raise ConfigError(
                    f"datum {index}: {len(datum.tokens)} tokens exceed sampling.context = {limit} "
                    "of the server"
                )
            for name, ids in (("model_input", datum.tokens), ("target_tokens", datum.targets)):
                if len(ids) and (ids.min() < 0 or ids.max() >= self.vocabulary):
                    raise ConfigError(
                        f"datum {index}: {name} has a token outside the vocabulary of "
                        f"{self.vocabulary}"
                    )

    @staticmethod
    def score(policy: PolicyModel, data: Sequence[Datum]) -> Tensor:
        """Return the log-probabilities [N] of the targets at every position of `data`."""
        targets = np.concatenate([datum.targets for datum in data])
        # The last position needs a response token to be scored; no later position attends to it.
        return policy.logprobs(
            [datum.tokens[:1] for datum in data],
            [np.append(datum.tokens[1:], np.int32(0)) for datum in data],
            torch.ones(len(data), device=policy.device),
            targets=torch.from_numpy(targets.astype(np.int64)),
        ).logprobs


class PackedDatums:
    """The N packed tokens of some datums, one datum after the other.

    seq: int64 [N], the datum of each token.
    mask, behavior, adv: float32 [N], the fields mask, logprobs and advantages of the datums.
    inside: bool [N], tokens in the loss.
    lag: int64 [N], versions; NOT_SAMPLED or UNKNOWN for tokens without a lag.
    """

    def __init__(self, data: Sequence[Datum], device: torch.device) -> None:
        self.data = data
        self.device = device
        lengths = torch.tensor([len(datum.tokens) for datum in data], device=device)
        self.seq = torch.repeat_interleave(torch.arange(len(data), device=device), lengths)
        self.mask = self.read_field("mask", 1.0)
        self.behavior = self.read_field("logprobs", 0.0)
        self.adv = self.read_field("advantages", 0.0)
        lags = np.concatenate([datum.lags for datum in data])
        self.lag = torch.from_numpy(lags).to(device, torch.int64)
        self.inside = (self.mask != 0) & (self.lag != NOT_SAMPLED)

    def read_field(self, name: str, default: float) -> Tensor:
        """Return a field [N]."""
        values = [
            datum.fields.get(name, np.full(len(datum.tokens), default, np.float32))
            for datum in self.data
        ]
        return torch.from_numpy(np.concatenate(values)).to(self.device)


def compute_policy_loss(
    name: str, options: Options, data: Sequence[Datum], lp: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a loss of the API, without a method.

    Args:
        name: one of NAMES.
        options: its loss_fn_config.
        data: the datums, with N positions together.
        lp: [N] with gradient, log-probabilities of the targets.

    Returns the loss, a scalar with gradient, and the sums for the metrics of the step."""
    packed = PackedDatums(data, lp.device)
    current = lp.detach().float()
    scale = packed.mask * packed.read_field("weights", 1.0)
    if name == CROSS_ENTROPY:
        loss = -(scale * lp).sum()
        return loss, {"loss/policy": loss.detach().double()}
    inside = packed.inside
    in_ratio = inside & (packed.read_field(RATIO_MASK, 1.0) != 0)
    tokens = SurrogateTokens(
        ratios.subtract(current, packed.behavior),
        packed.adv,
        current,
        packed.behavior,
        in_ratio,
        packed.seq,
        n=len(data),
    )
    term = compute_term(name, tokens, options)
    coefficient = torch.where(inside, term.coefficient * scale, 0.0)
    loss = -(coefficient * torch.where(inside, lp, 0.0)).sum()
    known_lag = inside & (packed.lag >= 0)
    sums = diagnostics.sum_statistics(
        diagnostics.DiagnosticTokens(
            seq=packed.seq,
            lag=packed.lag,
            valid=known_lag if bool(known_lag.any()) else inside,
            kept=torch.ones_like(inside),
            vetoed=torch.zeros_like(inside),
            behavior=packed.behavior,
            start=current,
            target=current,
            weight=torch.ones_like(current),
            clipped=term.clipped,
            rewards=torch.zeros(len(data), device=lp.device),
        )
    )
    objective = torch.where(inside, term.objective * scale, 0.0).sum().double()
    return loss, sums | {"loss/policy": -objective}
