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
from asyncrl.algorithms import loss as step_loss
from asyncrl.algorithms.batch import LossBatch
from asyncrl.config.tree import LoraConfig
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.models import adapters, memory
from asyncrl.models.policy import PolicyModel, export, list_named_weights, load_policy, load_weights
from asyncrl.records import atomic_write
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
from asyncrl.tinker.workers import losses
from learner import checkpoint
from learner.backend import PlainAdamW

ROWS = 96  # most datums in one forward pass
STATE = "state.pt"
# metrics, by their beginnings, that are the same in every step: of several passes over a batch,
# and of the importance weights and masks of a correction, which only a method has
CONSTANT = ("kl/start_target", "by_lag/update")
UNWEIGHTED = (
    *("is/mean_weight", "is/weight_ess", "is/ess_by_answer"),
    *("is/zero_share", "is/rejected", "is/vetoed", "is/masked_share"),
)
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
        self.is_weighted = False  # a loss of the current step has importance weights of its own
        if request.path:
            self.load(Path(request.path), request.optimizer)

    def load(self, path: Path, optimizer: bool) -> None:
        """Load a state that `save` wrote.  Raises DamagedDataError."""
        if self.policy.adapter is not None:
            adapters.restore(self.policy, path / MODEL)
        else:
            saved = load_policy(path / MODEL, str(self.parameters[0].dtype).removeprefix("torch."))
            load_weights(self.policy, dict(list_named_weights(saved)))
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
        self.is_weighted = False


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
                    return CallFailure(f"{type(request).__name__} is not a training call", "server")
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
        if losses.METHOD in request.config:
            return self._method_loss(request, model, order)
        scored: dict[int, bytes] = {}
        total = 0.0
        for places in self._micro_batches(request.data, order):
            data = [request.data[place] for place in places]
            with torch.set_grad_enabled(not request.forward_only):
                lp = self.score(model.policy, data)
            loss, sums = policy_loss(request, data, lp)
            if not request.forward_only:
                loss.backward()  # type: ignore[no-untyped-call]
                diagnostics.add_sums(model.sums, sums)
            total += float(sums["loss/policy"])
            scored |= zip(places, split_rows(data, lp), strict=True)
        return ScoreResult([scored[place] for place in range(len(request.data))], total)

    def _method_loss(
        self, request: ForwardBackward, model: TrainedModel, order: Sequence[int]
    ) -> ScoreResult:
        """Compute the loss of a method by the learner's own functions, on all datums at once.

        Its reduction weighs tokens and datums as in a run, times the number of tokens: a sum like
        the other losses."""
        ordered = [request.data[place] for place in order]
        micros = self._micro_batches(ordered, range(len(ordered)))
        parts = [[ordered[place] for place in places] for places in micros]
        with torch.no_grad():
            rows = [self.score(model.policy, part) for part in parts]
        current = torch.cat(rows).float()
        prep, step = method_step(request.config, ordered, current)
        total, begin = 0.0, 0
        for part in parts if not request.forward_only else []:
            count = sum(datum.length for datum in part)
            positions = torch.arange(begin, begin + count, device=current.device)
            loss, sums = step_loss.compute_micro_loss(
                prep, step, positions, self.score(model.policy, part).float()
            )
            loss.backward()  # type: ignore[no-untyped-call]
            diagnostics.add_sums(model.sums, sums)
            model.is_weighted = True
            total += float(loss.detach())
            begin += count
        scored = [row for part, lp in zip(parts, rows, strict=True) for row in split_rows(part, lp)]
        by_place = dict(zip(order, scored, strict=True))
        return ScoreResult([by_place[place] for place in range(len(order))], total)

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
        metrics = diagnostics.compute_metrics(model.sums)
        if "tokens" not in model.sums:
            metrics = {name: float(x) for name, x in model.sums.items()}
        constant = CONSTANT + (() if model.is_weighted else UNWEIGHTED)
        model.drop_gradient()
        return StepResult(
            {name: x for name, x in metrics.items() if not name.startswith(constant)}
            | {"optim/grad_norm": norm, "optim/lr": request.learning_rate}
        )


def split_rows(data: Sequence[Datum], lp: torch.Tensor) -> list[bytes]:
    """Return the float32 values of each datum from packed ones [N]."""
    ends = np.cumsum([datum.length for datum in data])[:-1]
    return [row.tobytes() for row in np.split(lp.detach().float().cpu().numpy(), ends)]


class PackedDatums:
    """The tokens of some datums, packed: N tokens.

    inside: bool [N], tokens in the loss.
    lag: int64 [N], versions; NOT_SAMPLED or UNKNOWN where there is none.
    """

    def __init__(self, data: Sequence[Datum], device: torch.device) -> None:
        self.data = data
        self.device = device
        lengths = torch.tensor([datum.length for datum in data], device=device)
        self.seq = torch.repeat_interleave(torch.arange(len(data), device=device), lengths)
        self.mask = self.field("mask", 1.0)
        self.behavior = self.field("logprobs", 0.0)
        self.adv = self.field("advantages", 0.0)
        given = torch.tensor(["mask" in datum.fields for datum in data], device=device)
        # without a mask, a prompt's tokens have neither an advantage nor a log-probability
        sampled = given[self.seq] | (self.adv != 0) | (self.behavior != 0)
        lags = np.concatenate([np.frombuffer(datum.lags, "<i4") for datum in data])
        self.lag = torch.from_numpy(lags).to(device, torch.int64)
        self.inside = (self.mask != 0) & (sampled | (self.lag != NOT_SAMPLED))

    def field(self, name: str, default: float) -> torch.Tensor:
        """Return a field [N]."""
        rows = [
            np.full(datum.length, default, np.float32) if row is None else row
            for datum in self.data
            for row in [datum.field(name)]
        ]
        return torch.from_numpy(np.concatenate(rows)).to(self.device)


@torch.no_grad()
def method_step(
    options: losses.Options, data: Sequence[Datum], current: torch.Tensor
) -> tuple[step_loss.PreparedBatch, step_loss.StepPlan]:
    """Prepare the learner's loss of a method; current: [N], the policy's log-probabilities."""
    config = losses.method_settings(options)
    packed = PackedDatums(data, current.device)
    zeros = torch.zeros(len(data), device=current.device)
    batch = LossBatch(
        seq=packed.seq,
        behavior=packed.behavior,
        mask=packed.inside,
        token_lag=packed.lag.clamp(min=0),
        rewards=zeros,
        groups=torch.zeros(len(data), dtype=torch.int64, device=current.device),
        truncated=torch.zeros(len(data), dtype=torch.bool, device=current.device),
        start=current,
    )
    share = {"behavior": torch.ones_like(current), "recompute": torch.zeros_like(current)}.get(
        config.correction.proximal, 1.0 / (batch.token_lag.float() + 1.0)
    )
    batch.proximal = share * packed.behavior + (1 - share) * current
    prep = step_loss.prepare(batch, config, advantages=packed.adv)
    everything = torch.arange(len(data), device=current.device)
    step = step_loss.begin_step(prep, everything, current)
    step.factor = step.factor * prep.valid.sum()
    return prep, step


def policy_loss(
    request: ForwardBackward, data: Sequence[Datum], lp: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of `data`, and the sums for its metrics; lp: [N] with gradient."""
    packed = PackedDatums(data, lp.device)
    now = lp.detach().float()
    if request.loss == losses.CROSS_ENTROPY:
        weights = packed.field("weights", 0.0) * packed.mask
        loss = -(weights * lp).sum()
        return loss, {"loss/policy": loss.detach().double()}
    inside = packed.inside
    tokens = losses.LossTokens(now, packed.behavior, packed.adv, inside, packed.seq, len(data))
    term = losses.POLICY_LOSSES[request.loss].term(tokens, request.config)
    scale = packed.mask * packed.field("weights", 1.0)
    coefficient = torch.where(inside, term.coefficient * scale, 0.0)
    loss = -(coefficient * torch.where(inside, lp, 0.0)).sum()
    known = inside & (packed.lag >= 0)
    sums = diagnostics.sum_statistics(
        diagnostics.DiagnosticTokens(
            seq=packed.seq,
            lag=packed.lag,
            valid=known if bool(known.any()) else inside,
            kept=torch.ones_like(inside),
            vetoed=torch.zeros_like(inside),
            behavior=packed.behavior,
            start=now,
            target=now,
            weight=torch.ones_like(now),
            clipped=term.clipped,
            rewards=torch.zeros(len(data), device=lp.device),
        )
    )
    objective = torch.where(inside, term.objective * scale, 0.0).sum().double()
    return loss, sums | {"loss/policy": -objective}
