"""The training process: the weights and optimizers of all models of a server.

With adapters all models share the base's weights. A call changes a model completely or not at all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from asyncrl.algorithms import diagnostics
from asyncrl.config.tree import LoraConfig
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.models import adapters, memory
from asyncrl.models.policy import PolicyModel, export, load_policy, load_weights, named_weights
from asyncrl.records import atomic_write
from asyncrl.tinker import losses
from asyncrl.tinker.messages import (
    NOT_SAMPLED,
    CallDone,
    CallFailure,
    Datum,
    DropGradient,
    ForwardBackward,
    LoadModel,
    OptimizerStep,
    Request,
    SaveWeights,
    ScoreResult,
    StepResult,
)
from asyncrl.tinker.settings import TinkerConfig
from learner import checkpoint
from learner.backend import PlainAdamW

ROWS = 96  # most datums in one forward pass
STATE = "state.pt"
MODEL = "model"


class TrainedModel:
    """One client's weights, optimizer and collected gradient."""

    def __init__(self, base: PolicyModel, request: LoadModel, lora: LoraConfig) -> None:
        shared = {id(weight): weight for weight in base.hf.parameters()} if request.rank else {}
        hf = copy.deepcopy(base.hf, shared)
        self.policy = PolicyModel(hf, base.tokenizer_dir)
        if request.rank:
            own = LoraConfig(
                rank=request.rank, alpha=lora.alpha, target_modules=lora.target_modules
            )
            adapters.attach(self.policy, own, request.seed)
        self.parameters = [weight for weight in hf.parameters() if weight.requires_grad]
        self.optimizer = PlainAdamW(self.parameters, lr=0.0, fused=True)
        self.sums: dict[str, torch.Tensor] = {}
        if request.path:
            self.load(Path(request.path), request.optimizer)

    def load(self, path: Path, optimizer: bool) -> None:
        """Load a state that `save` wrote.  Raises DamagedDataError."""
        if self.policy.adapter is not None:
            adapters.restore(self.policy, path / MODEL)
        else:
            saved = load_policy(path / MODEL, str(self.parameters[0].dtype).removeprefix("torch."))
            load_weights(self.policy, dict(named_weights(saved)))
        if optimizer:
            state = torch.load(path / STATE, weights_only=True)
            self.optimizer.load_state_dict(state["optimizer"])

    def save(self, path: Path, *, state: bool) -> int:
        """Write the weights, with `state` also the optimizer, by rename; return the bytes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not state:
            export(self.policy, path)
        else:
            with atomic_write.replacing(path) as part:
                part.mkdir()
                export(self.policy, part / MODEL)
                torch.save({"optimizer": self.optimizer.state_dict()}, part / STATE)
                checkpoint.seal(part)
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def drop_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.sums = {}


class Trainer:
    """All models of a server, by their ids."""

    def __init__(self, config: TinkerConfig) -> None:
        torch.set_num_threads(config.training.threads)
        memory.keep_freed()
        self.config = config
        self.base = load_policy(config.model.path, config.model.dtype, config.model.device)
        self.vocabulary = int(self.base.hf.config.get_text_config().vocab_size)
        self.models: dict[str, TrainedModel] = {}

    def handle(self, request: Request) -> ScoreResult | StepResult | CallDone | CallFailure:
        """Carry out one call."""
        try:
            match request:
                case LoadModel():
                    self.models[request.model] = TrainedModel(self.base, request, self.config.lora)
                case ForwardBackward():
                    return self.forward_backward(request)
                case OptimizerStep():
                    return self.step(request)
                case DropGradient():
                    self.models[request.model].drop_gradient()
                case SaveWeights():
                    model = self.models[request.model]
                    return CallDone(model.save(Path(request.path), state=request.state))
                case _:
                    return CallFailure(f"{type(request).__name__} is no call of training", "server")
        except AsyncrlError as error:
            return CallFailure(str(error), "user" if isinstance(error, ConfigError) else "server")
        return CallDone()

    # ---- loss ------------------------------------------------------------------------------------

    def forward_backward(self, request: ForwardBackward) -> ScoreResult:
        """Score the targets, and collect the gradient of the loss.  Raises ConfigError."""
        losses.check(request.loss, request.config)
        for place, datum in enumerate(request.data):
            self._check(request, place, datum)
        model = self.models[request.model]
        order = sorted(range(len(request.data)), key=lambda place: request.data[place].length)
        scored: dict[int, bytes] = {}
        total = 0.0
        for places in self._micro_batches(request.data, order):
            data = [request.data[place] for place in places]
            with torch.set_grad_enabled(not request.forward_only):
                lp = self.score(model.policy, data)
            loss, sums = policy_loss(request, data, lp)
            if not request.forward_only:
                loss.backward()  # type: ignore[no-untyped-call]
                diagnostics.add(model.sums, sums)
            total += float(sums["loss/policy"])
            ends = np.cumsum([datum.length for datum in data])[:-1]
            rows = np.split(lp.detach().float().cpu().numpy(), ends)
            scored |= {place: row.tobytes() for place, row in zip(places, rows, strict=True)}
        return ScoreResult([scored[place] for place in range(len(request.data))], total)

    def _check(self, request: ForwardBackward, place: int, datum: Datum) -> None:
        sampled = request.loss in losses.POLICY_LOSSES
        needed = ("logprobs", "advantages") if sampled else ("weights",)
        for name in needed:
            if name not in datum.fields:
                raise ConfigError(f"datum {place}: {request.loss} needs loss_fn_inputs.{name}")
        known = {"logprobs", "advantages", "mask", "weights"} if sampled else {"weights", "mask"}
        if other := sorted(set(datum.fields) - known):
            raise ConfigError(
                f"datum {place}: {request.loss} has no loss_fn_inputs.{other[0]}; it reads "
                f"target_tokens, {', '.join(sorted(known))}"
            )
        if datum.length > (limit := self.config.sampling.context):
            raise ConfigError(
                f"datum {place}: {datum.length} tokens exceed sampling.context = {limit} of the "
                "server"
            )
        for name, data in (("model_input", datum.tokens), ("target_tokens", datum.targets)):
            ids = np.frombuffer(data, "<i4")
            if len(ids) and (ids.min() < 0 or ids.max() >= self.vocabulary):
                raise ConfigError(
                    f"datum {place}: {name} has a token outside the vocabulary of {self.vocabulary}"
                )

    def _micro_batches(self, data: Sequence[Datum], order: Sequence[int]) -> list[list[int]]:
        """Cut datums, sorted by length, into forward passes."""
        limit = self.config.training.micro_batch_tokens
        cut: list[list[int]] = []
        for place in order:
            width = data[place].length
            if cut and len(cut[-1]) < ROWS and (len(cut[-1]) + 1) * width <= limit:
                cut[-1].append(place)
            else:
                cut.append([place])
        return cut

    @staticmethod
    def score(policy: PolicyModel, data: Sequence[Datum]) -> torch.Tensor:
        """Return the log-probabilities [N] of the targets at every position of `data`."""
        tokens = [np.frombuffer(datum.tokens, "<i4") for datum in data]
        targets = np.concatenate([np.frombuffer(datum.targets, "<i4") for datum in data])
        # the last position needs a response token to be scored; no later position sees it
        responses = [np.append(ids[1:], np.int32(0)) for ids in tokens]
        return policy.logprobs(
            [ids[:1] for ids in tokens],
            responses,
            torch.ones(len(data), device=policy.device),
            targets=torch.from_numpy(targets.astype(np.int64)),
        ).logprobs

    # ---- optimizer -------------------------------------------------------------------------------

    def step(self, request: OptimizerStep) -> StepResult | CallFailure:
        """Make the optimizer step."""
        model = self.models[request.model]
        norm = float(
            torch.nn.utils.clip_grad_norm_(model.parameters, request.clip_norm or math.inf)
        )
        if not math.isfinite(norm):
            model.drop_gradient()
            return CallFailure("the gradient is not finite: no step was made, and it was dropped")
        for group in model.optimizer.param_groups:
            group["lr"] = request.learning_rate
            group["betas"] = (request.beta1, request.beta2)
            group["eps"] = request.eps
            group["weight_decay"] = request.weight_decay
        model.optimizer.step()
        metrics = diagnostics.metrics(model.sums)
        if "tokens" not in model.sums:
            metrics = {name: float(x) for name, x in model.sums.items()}
        model.drop_gradient()
        later = ("kl/start_target", "by_lag/update")  # a call makes one pass: always 0
        return StepResult(
            {name: x for name, x in metrics.items() if not name.startswith(later)}
            | {"optim/grad_norm": norm, "optim/lr": request.learning_rate}
        )


def policy_loss(
    request: ForwardBackward, data: Sequence[Datum], lp: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of `data`, and the sums for its metrics; lp: [N] with gradient."""
    device = lp.device

    def pack_field(name: str, default: float) -> torch.Tensor:
        rows = [
            np.full(datum.length, default, np.float32) if row is None else row
            for datum in data
            for row in [datum.field(name)]
        ]
        return torch.from_numpy(np.concatenate(rows)).to(device)

    now = lp.detach().float()
    mask = pack_field("mask", 1.0)
    if request.loss == losses.CROSS_ENTROPY:
        weights = pack_field("weights", 0.0) * mask
        loss = -(weights * lp).sum()
        return loss, {"loss/policy": loss.detach().double()}
    behavior = pack_field("logprobs", 0.0)
    adv = pack_field("advantages", 0.0)
    lengths = torch.tensor([datum.length for datum in data], device=device)
    seq = torch.repeat_interleave(torch.arange(len(data), device=device), lengths)
    given = torch.tensor(["mask" in datum.fields for datum in data], device=device)
    # without a mask, a prompt's tokens have neither an advantage nor a log-probability
    inside = (mask != 0) & (given[seq] | (adv != 0) | (behavior != 0))
    tokens = losses.LossTokens(now, behavior, adv, inside, seq, len(data))
    term = losses.POLICY_LOSSES[request.loss].term(tokens, request.config)
    scale = mask * pack_field("weights", 1.0)
    coefficient = torch.where(inside, term.coefficient * scale, 0.0)
    loss = -(coefficient * torch.where(inside, lp, 0.0)).sum()
    lag = torch.from_numpy(np.concatenate([np.frombuffer(d.lags, "<i4") for d in data]))
    lag = lag.to(device, torch.int64)
    known = inside & (lag >= 0)
    valid = known if bool(known.any()) else inside
    sums = diagnostics.sums(
        diagnostics.DiagnosticTokens(
            seq=seq,
            lag=lag.clamp(min=NOT_SAMPLED),
            valid=valid,
            kept=torch.ones_like(inside),
            vetoed=torch.zeros_like(inside),
            behavior=behavior,
            start=now,
            target=now,
            weight=torch.ones_like(now),
            clipped=term.clipped,
            rewards=torch.zeros(len(data), device=device),
        )
    )
    objective = torch.where(inside, term.objective * scale, 0.0).sum().double()
    return loss, sums | {"loss/policy": -objective}
