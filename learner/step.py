"""One batch to one new version: the learner without sockets.

`run`, `replay` and the tests share `LearnerCore.train`.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from asyncrl.algorithms import advantages, correction, kl, ratios, settings
from asyncrl.algorithms import loss as step_loss
from asyncrl.config.tree import Config, compute_learning_rate_share
from asyncrl.contract.errors import AsyncrlError, ConfigError, NotFiniteError
from asyncrl.contract.messages import Batch
from asyncrl.models import adapters, memory, packed_forward
from asyncrl.models.policy import PolicyModel, build_manifest
from asyncrl.models.weight_rounding import load_learner_policy
from learner.backend import TorchBackend
from learner.batch import PackedBatch, pack, split_micro_batches, split_minibatches
from learner.critic import Critic
from learner.sample_log import SampleLog
from learner.split import SplitMeter, measure_move
from learner.state import LearnerState, WeightAverage

BAD_IN_A_ROW = 3


# metrics of the passes after a batch's first optimizer step
OF_LATER_PASSES = ("kl/start_target_", "by_lag/update_")
# metrics of each optimizer step's own pass, in RUN/optimizer_steps.jsonl
OF_EACH_STEP = (
    "loss/policy",
    "kl/behavior_target_k3",
    "kl/start_target_k3",
    "is/target_ratio",
    "is/target_ratio_max",
    "is/target_ess",
    "clip/share",
    "policy/entropy",
)


class Update(NamedTuple):
    """One completed optimizer step.

    metrics: measured before its pass, or of its gradient.
    sums: of its pass.
    """

    metrics: dict[str, float]
    sums: dict[str, Tensor]


@dataclass
class BatchSteps:
    """The optimizer steps that were made on a batch.

    sums: the sums behind their metrics.
    updates: each step by itself.
    stop_kl: the last KL that early stopping measured.
    trained: the samples of all steps.
    unused: see `_sum_unused_tokens`; empty: no step was completed.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    stop_kl: float = 0.0
    trained: set[int] = field(default_factory=set)
    unused: list[Tensor] = field(default_factory=list)


class LearnerCore:
    """Model, optimizer and state of the learner.

    Every random choice is a function of (seed, batch number, epoch).
    """

    def __init__(self, config: Config, model_dir: str | Path, run_dir: Path | None = None) -> None:
        torch.set_num_threads(config.learner.threads)
        memory.keep_freed()
        self.config = config
        self.run_dir = run_dir
        backend = config.learner.backend
        # under ZeRO-3, modules fetch their parameters by hooks
        runs_modules = backend == "deepspeed" and config.learner.zero_stage == 3
        # FSDP2 moves a rank's part to its device
        device = "cpu" if backend == "fsdp2" else config.model.device
        self.model = load_learner_policy(
            model_dir, config, device=device, with_modules=runs_modules
        )
        self.model.exact = bool(config.exact)
        self.model.exact_length = config.generator.context
        self.model.recompute = config.learner.gradient_checkpointing
        # routers whose recorded experts are replayed; None: no replay
        self.routing = (
            self.model.require_replayable_routing() if config.learner.replay_routing else None
        )
        if config.lora.rank:
            adapters.attach(self.model, config.lora, config.seed)
        # `reference` belongs to the loss and the metrics, `reward_reference` to the reward; with
        # only one term, the metrics use its reference
        self.references: dict[Path, PolicyModel] = {}
        loss_reference, self.reward_reference = (
            self.load_reference(term.reference) if term.coefficient > 0 else None
            for term in (config.kl.loss, config.kl.reward)
        )
        self.reference = loss_reference or self.reward_reference
        self.centers = config.loss.center != "off"
        self.full_kl = config.kl.loss.coefficient > 0 and config.kl.loss.off_policy == "prefix_full"
        for key, is_on, too in (
            ("kl.loss.off_policy: prefix_full", self.full_kl, ", also as its reference"),
            ("advantage.name: otb", config.advantage.name == "otb", ""),
            ("loss.center", self.centers, ""),
        ):
            models = (self.model, self.reference) if too else (self.model,)
            if is_on and any(model is None or model.fast is None for model in models):
                raise ConfigError(
                    f"{key} needs a model of the packed forward (Llama, Qwen2, Qwen3, Mistral, "
                    f"Qwen3-MoE, Mixtral){too}; use another"
                )
        self.layout = build_manifest(self.model)  # before a backend partitions the parameters
        self.backend = make_backend(config, self.model)
        # one process computes the loss on the model's device and never waits for it; several ranks
        # exchange it on the host
        self.loss_device = torch.device("cpu") if config.learner.distributed else self.model.device
        self.critic = (
            Critic(config, self.model, self.backend) if config.advantage.name == "gae" else None
        )
        self.measure = SplitMeter(
            config, self.model, self.layout, self._forward, partial(self.load_reference, alone=True)
        )
        self.state = LearnerState(beta=config.kl.reward.coefficient)
        self.average = None
        if isinstance(config.correction, settings.AveragedCorrection):
            self.average = WeightAverage(self.backend, config.correction.ema_half_life)
        self.reported = False  # that token rewards are not trained on
        self.sample_log: SampleLog | None = None  # set by the owner of a run directory
        self.updates: list[dict[str, float]] = []  # of the last batch, one row per optimizer step
        # (untrained, rejected) tokens of each sample of the last batch; [] when all are 0
        self.unused: list[tuple[int, int]] = []

    def load_reference(self, path: str = "", *, alone: bool = False) -> PolicyModel:
        """Load the reference policy in a directory ("": model.reference, then model.path), once.

        With adapters the base model is already loaded: it is the model with adapters off. `alone`:
        this rank alone runs it.
        """
        directory = Path(path or self.config.model.reference or self.config.model.path)
        found = directory.resolve()
        if found not in self.references:
            needs_others = alone and self.config.learner.distributed
            is_base = found == Path(self.model.tokenizer_dir).resolve()
            if self.model.adapter is not None and is_base and not needs_others:
                self.references[found] = adapters.build_base_policy(self.model)
            else:
                self.references[found] = load_learner_policy(directory, self.config)
                self.references[found].hf.requires_grad_(False)
        return self.references[found]

    # ---- one batch -------------------------------------------------------------------------------

    def train(self, batch: Batch) -> dict[str, float]:
        """Train on one batch and return its metrics.

        Raises NotFiniteError after three batches in a row whose loss is not finite, and
        AsyncrlError when `exact` is true and engine and learner differ.
        """
        self.backend.broadcast("train", batch)
        config = self.config
        packed = self._pack_batch(batch)
        advantage = config.advantage
        by_prompt = getattr(advantage, "baseline", "") == "prompt"
        digests = self._look_up_prompts(batch, packed) if by_prompt else []
        prep = step_loss.prepare(
            packed,
            config,
            baseline=self.state.baseline,
            beta=self.state.beta,
            number=batch.number,
        )
        self.backend.read = lambda numbers: prep.reads.read(numbers)[0]
        self.lr_share = compute_learning_rate_share(config.learner, self.state.number)
        self.rate = config.learner.lr * self.lr_share
        if config.learner.lr_lag == "inverse" and packed.mask.any():
            self.rate /= 1 + float(packed.token_lag[packed.mask].double().mean())
        measures_move = config.record.kl_moved and batch.number % config.record.kl_moved == 0
        logprobs = self._forward(self.model, packed) if measures_move else None
        steps = self._run_epochs(prep, packed)
        prep.reads.planned += steps.sums.values()
        counts = prep.reads.read(*(steps.unused or self._sum_unused_tokens(prep, packed)))
        unused = [(0, 0)] * len(batch.samples)
        of_samples = zip(packed.places, *counts, strict=True)
        for sample, (place, rejected, sampled) in enumerate(of_samples):
            is_trained = sample in steps.trained
            # all tokens of a sample without any step; else those that every step rejected or vetoed
            unused[place] = (0, int(rejected)) if is_trained else (int(sampled), 0)
        self.unused = unused if any(map(any, unused)) else []
        batch_metrics, *step_metrics = (
            step_loss.finish(sums, prep.reads, packed.task_names)
            for sums in (steps.sums, *(u.sums for u in steps.updates))
        )
        metrics = prep.metrics | batch_metrics
        has_later_passes = config.learner.epochs > 1 or packed.start is not None
        if len(steps.updates) < 2 or not has_later_passes:
            # every pass uses the start's own weights: always 0
            metrics = {k: x for k, x in metrics.items() if not k.startswith(OF_LATER_PASSES)}
        if any(self.measure.is_due(batch.number)):
            # at rank 0; all ranks run the pass under the updated policy
            chosen = self.backend.gather(self.measure.choose_samples(packed, prep, batch.number))[0]
            updated = self._forward(self.model, packed, chosen[0]) if chosen[0] else None
            if not self.backend.rank:
                metrics |= self.measure(batch, packed, prep, chosen, updated)
        if self.sample_log is not None and self.sample_log.is_due(batch.number):
            self.sample_log.add(self.sample_log.build_rows(batch, packed, prep))
        self.updates = []
        for update, values in zip(steps.updates, step_metrics, strict=True):
            row = update.metrics | {
                name: value
                for name, value in values.items()
                if name in OF_EACH_STEP or name.startswith("reshape/")
            }
            row = {name: value for name, value in row.items() if math.isfinite(value)}
            self.updates.append({"step": batch.number, "update": len(self.updates), **row})
        for name, place in (("at_lag_0", "at lag 0"), ("one_version", "under the same weights")):
            error = metrics.get(f"mismatch/max_{name}", 0.0)
            if config.exact is True and error != 0:
                raise AsyncrlError(
                    f"exact: engine and learner differ {place} in batch {batch.number} by "
                    f'{error:.1e} nats; see `asyncrl doctor --exact`, or exact = "try"'
                )
        for name in ("optim/grad_norm", "value/grad_norm", "optim/gradient_cosine"):
            if of_steps := [u.metrics[name] for u in steps.updates if name in u.metrics]:
                metrics[name] = sum(of_steps) / len(of_steps)
                if name == "optim/gradient_cosine":
                    metrics["optim/gradient_cosine_max"] = max(of_steps)
        if logprobs is not None:
            columns = logprobs, self._forward(self.model, packed), packed.behavior
            metrics["kl/moved"] = measure_move(*columns, prep.valid)
        self.backend.release_gathered()
        used_beta = self.state.beta
        mean = metrics["reward/used_mean"]
        # other advantages than reinforce keep the running mean by the default
        decay = float(getattr(advantage, "ema_decay", settings.ReinforceAdvantage().ema_decay))
        if self.state.number:
            mean = decay * self.state.baseline + (1 - decay) * mean
        self.state.baseline = mean
        if "kl/answer" in metrics:
            measured = metrics["kl/answer"], packed.count
            self.state.beta = kl.adapt_beta(used_beta, *measured, config.kl.reward)
        rewards_by_prompt: dict[str, list[float]] = {}
        for digest, reward in zip(digests, packed.rewards.tolist() if digests else (), strict=True):
            rewards_by_prompt.setdefault(digest, []).append(reward)
        for digest, rewards in rewards_by_prompt.items():
            mean = sum(rewards) / len(rewards)
            previous = self.state.prompts.get(digest, mean)
            self.state.prompts[digest] = decay * previous + (1 - decay) * mean
        self.state.number = batch.number + 1
        self.state.steps = config.learner.steps
        if self.average is not None:
            self.average.add(self.state.number)
        return metrics | {
            "optim/lr": self.rate,
            "optim/steps": len(steps.updates),
            "optim/grad_norm": metrics.get("optim/grad_norm", 0.0),
            "optim/early_stops": self.state.early_stops,
            "optim/skipped": self.state.skipped,
            "optim/stop_kl": steps.stop_kl,
            "kl/beta": used_beta,
            "kl/loss_beta": config.kl.loss.coefficient,
        }

    def save(self, directory: Path) -> dict[str, Any]:
        """Write this rank's files of a checkpoint; return the optimizer's state."""
        if self.average is not None and (self.backend.sharded or not self.backend.rank):
            torch.save(self.average.values, self.average.locate(directory))
        return self.backend.save(directory)

    def _pack_batch(self, batch: Batch) -> PackedBatch:
        """Pack the batch and add proximal and reference log-probabilities and values."""
        config = self.config
        packed = pack(batch, greedy=config.advantage.name == "remax").to_device(self.loss_device)
        if len(packed.responses) > packed.count and (
            keys := settings.list_ordered_settings(config)
        ):
            raise ConfigError(
                f"{keys[0]} needs the order of a session's tokens, but a session of batch "
                f'{batch.number} has forked, so it has no order; set agent.fork = "end"'
            )
        if packed.token_rewards is not None and config.advantage.name not in advantages.BY_TOKEN:
            if not self.reported and self.backend.rank == 0:
                print(
                    f"learner: advantage.name = {config.advantage.name} uses one reward per "
                    "sample, so the reward function's token_rewards are not trained on; "
                    f"{', '.join(advantages.BY_TOKEN)} use them",
                    file=sys.stderr,
                )
            self.reported = True
        self._set_proximal(batch, packed)
        self._add_gradient_norms(packed)
        if self.centers:
            self._add_sampling_states(batch, packed)
        if self.reference is not None:
            packed.reference = self._forward(self.reference, packed)
        if self.reward_reference is not None and self.reward_reference is not self.reference:
            packed.reward_reference = self._forward(self.reward_reference, packed)
        if self.critic is not None:
            passes = self._select_own_micro_batches(packed, range(packed.count))
            packed.values, packed.bootstrap = (
                self.backend.sum_over_ranks(x).to(self.loss_device)
                for x in self.critic.compute_start_values(packed, passes)
            )
        return packed

    def _add_gradient_norms(self, packed: PackedBatch) -> None:
        """Add the gradient norms or token energies that the advantage needs to the batch."""
        if self.config.advantage.name == "opob":
            # |grad log pi_theta(y)|^2 of each sample over all parameters: a forward and a backward
            # pass per sample, whose log pi_theta(y) sums over its tokens in the mask
            norms = []
            for sample in range(packed.count):
                part = packed.find_token_positions([sample])
                lp = self._run(self.model, packed, [sample]).logprobs.to(packed.mask.device)
                logprob = torch.where(packed.mask[part], lp, 0.0).sum()
                norms.append(self.backend.compute_squared_gradient(logprob))
            packed.squared_norms = torch.stack(norms).to(packed.behavior)
        if self.config.advantage.name == "otb":
            # 1 - 2 p + sum_v p_v^2, which is |grad log pi_theta|^2 with respect to the logits alone
            # (the proxy of arXiv 2602.07078)
            energy = torch.zeros_like(packed.behavior)
            assert self.model.fast is not None
            for part, output in self._score(self.model, packed, range(packed.count), hidden=True):
                squares = packed_forward.compute_squared_probabilities(
                    self.model.fast, output.hidden, output.scale, output.support
                )
                energy[part] = (1 - 2 * output.logprobs.exp() + squares).to(energy)
            packed.energy = self.backend.sum_over_ranks(energy)

    def _look_up_prompts(self, batch: Batch, packed: PackedBatch) -> list[str]:
        """Return each sample's key in `LearnerState.prompts`; set the baselines of the loss."""
        digests = [
            xxhash.xxh3_64_hexdigest(sample.prompt_tokens + "".join(sample.images).encode("ascii"))
            for sample in (batch.samples[place] for place in packed.places)
        ]
        means = [self.state.prompts.get(digest, math.nan) for digest in digests]
        packed.baselines = torch.tensor(means).to(packed.rewards)
        return digests

    def _run_epochs(self, prep: step_loss.PreparedBatch, packed: PackedBatch) -> BatchSteps:
        """Make all optimizer steps of a batch, until KL early stopping ends them."""
        steps, stop = BatchSteps(), self.config.stop
        for epoch in range(self.config.learner.epochs):
            if epoch and stop.every == "epoch":
                lp = self._forward(self.model, packed)
                steps.stop_kl = self._compute_stop_kl(
                    *step_loss.sum_update_kl(prep, slice(None), lp)
                )
                if steps.stop_kl > stop.kl_max:
                    self.state.early_stops += 1
                    break
            for samples in self._choose_minibatches(packed, epoch):
                current = None
                if step_loss.needs_current(prep):
                    current = self._forward(self.model, packed)
                step = step_loss.begin_step(
                    prep, packed_forward.copy_to(self.loss_device, torch.tensor(samples)), current
                )
                if step.metrics:
                    prep.metrics |= step.metrics
                # skip the step: with a learning rate of 0 it would still move Adam's moments
                stopped = step.lr_scale == 0
                sums: dict[str, Tensor] = {}
                if not stopped:
                    sums, step_kl = self._accumulate_gradient(prep, step, packed, samples)
                    if stop.every == "step":
                        steps.stop_kl = step_kl
                        exceeds_kl = 0 < stop.kl_max < step_kl
                        stopped = exceeds_kl and stop.action == "skip" and bool(steps.updates)
                if stopped:
                    # sums for the metrics, of a batch whose first step was stopped
                    if not steps.sums:
                        steps.sums = self._accumulate_gradient(prep, step, packed, samples)[0]
                    self.state.early_stops += 1
                    self._drop_gradient()
                    return steps
                step_loss.add_sums(steps.sums, sums)
                share = step_loss.compute_learning_rate_share(prep, step, sums)
                used_before, prep.used = prep.used, prep.used | prep.live
                of_step = self._sum_unused_tokens(prep, packed)
                # what the batch's metrics need is read with the norm, in one wait
                prep.reads.planned += [*of_step, *steps.sums.values(), *sums.values()]
                gradient = self._apply(packed, sums, share)
                if gradient is None:
                    prep.used = used_before
                else:
                    steps.unused = of_step
                    steps.trained.update(samples)
                    steps.updates.append(Update(step.metrics | gradient, sums))
        return steps

    def _sum_unused_tokens(
        self, prep: step_loss.PreparedBatch, packed: PackedBatch
    ) -> list[Tensor]:
        """Return each sample's tokens that no step used, and those of the mask, [B] each."""
        # each rank has seen only its own samples
        used_tokens = self.backend.sum_over_ranks(prep.used.float())
        masks = prep.valid & (used_tokens == 0), packed.mask
        return [ratios.sum_by_sample(x.double(), packed.seq, packed.count) for x in masks]

    def _choose_minibatches(self, packed: PackedBatch, epoch: int) -> list[list[int]]:
        """Return the samples of each optimizer step of the epoch."""
        return split_minibatches(
            packed.group_of,
            self.config.learner.minibatches,
            seed=self.config.seed,
            number=self.state.number,
            epoch=epoch,
        )

    def _accumulate_gradient(
        self,
        prep: step_loss.PreparedBatch,
        step: step_loss.StepPlan,
        packed: PackedBatch,
        samples: Sequence[int],
    ) -> tuple[dict[str, Tensor], float]:
        """Accumulate the gradient of one optimizer step; return its sums and the stop's KL."""
        sums: dict[str, Tensor] = {}
        self._drop_gradient()
        passes = self._select_own_micro_batches(packed, samples)
        for index, (micro, is_real) in enumerate(passes):
            is_last = index == len(passes) - 1
            output = self._run(
                self.model,
                packed,
                micro,
                entropy=True,
                hidden=self.full_kl
                or self.centers
                or (self.critic is not None and self.critic.trunk is None),
            )
            values = step_kl = None
            if self.critic is not None:
                values = self.critic.compute_values(packed, micro, output.hidden)
                values = values.to(self.loss_device)
            if self.full_kl:  # KL(theta || ref) over the vocabulary at each state
                assert self.model.fast is not None and self.reference is not None
                with torch.no_grad():
                    ref = self._run(self.reference, packed, micro, hidden=True)
                step_kl = packed_forward.compute_vocabulary_term(
                    kl.compute_exact_kl,
                    self.model.fast,
                    output.hidden,
                    (ref.hidden, self.reference.hf.get_output_embeddings().weight),
                    output.scale,
                    output.support,
                )
            center = self._compute_center(packed, micro, output) if self.centers else None
            if not is_real:  # every rank makes as many passes as the busiest one
                outputs = [x for x in (output.logprobs, values, step_kl) if x is not None]
                zero_loss = torch.stack([x.sum().to(self.loss_device) * 0.0 for x in outputs]).sum()
                self.backend.accumulate(zero_loss, is_last=is_last)
                continue
            # a view: the loss takes gradients with respect to it, and these must not run what FSDP2
            # attaches to the outputs of a forward pass
            lp = output.logprobs.to(self.loss_device).view(-1)
            part = packed.find_token_positions(micro)
            loss, micro_sums = step_loss.compute_micro_loss(
                prep,
                step,
                part,
                lp,
                entropy=None if output.entropy is None else output.entropy.to(self.loss_device),
                values_now=values,
                step_kl=step_kl,
                center=center,
            )
            self.backend.accumulate(loss, is_last=is_last)
            if self.config.stop.kl_max:
                micro_sums["stop"] = torch.stack(step_loss.sum_update_kl(prep, part, lp.detach()))
            step_loss.add_sums(sums, micro_sums)
        if self.backend.ranks > 1:  # one without samples has no sums
            by_rank = self.backend.gather({name: x.double() for name, x in sums.items()})
            sums = {}
            for own in by_rank:
                step_loss.add_sums(sums, own)
        return sums, self._compute_stop_kl(*sums.pop("stop", torch.zeros(2)))

    def _compute_stop_kl(self, total: Tensor, weight: Tensor) -> float:
        """Return the KL for early stopping from the sums of `step_loss.sum_update_kl`."""
        return max(0.0, float(total / weight.clamp(min=1e-12))) if self.config.stop.kl_max else 0.0

    def _select_own_micro_batches(
        self, packed: PackedBatch, samples: Sequence[int]
    ) -> list[tuple[list[int], bool]]:
        """Return this rank's micro-batches of `samples`, each with True.

        Every rank makes as many passes as the busiest one: those beyond its own have False.
        """
        by_rank = [
            self._split_micro_batches(self.model, packed, share) if share else []
            for share in self.backend.split_samples(samples, packed.count_sample_tokens())
        ]
        own_micros = by_rank[self.backend.rank]
        empty = [(list(samples[:1]), False)] * (max(map(len, by_rank)) - len(own_micros))
        return [*((micro, True) for micro in own_micros), *empty]

    def _split_micro_batches(
        self, model: PolicyModel, packed: PackedBatch, samples: Sequence[int]
    ) -> list[list[int]]:
        """Return the micro-batches of `samples` under `model`."""
        return split_micro_batches(
            packed,
            samples,
            self.config.learner.micro_batch_tokens,
            by_group=model.fast is not None or model.vision is not None,
        )

    def _apply(
        self, packed: PackedBatch, sums: dict[str, Tensor], lr_scale: float = 1.0
    ) -> dict[str, float] | None:
        """Make the optimizer step; return its rate and the gradient's metrics, None if skipped.

        A gradient that is not finite is skipped and counted. Raises NotFiniteError for the third in
        a row.
        """
        rate = self.rate * lr_scale
        metrics = {"optim/grad_norm": self.backend.apply(rate, sums["loss/policy"])}
        if math.isfinite(metrics["optim/grad_norm"]):
            metrics["optim/lr"] = rate
            if self.critic is not None:
                own_rate = self.config.value.lr
                critic_rate = own_rate * (self.lr_share * lr_scale) if own_rate else rate
                metrics["value/grad_norm"] = self.critic.trainer.apply(critic_rate)
            if self.backend.cosine is not None and not math.isnan(self.backend.cosine):
                metrics["optim/gradient_cosine"] = self.backend.cosine
            self.state.bad_in_a_row = 0
            return metrics
        self.state.skipped += 1
        self.state.bad_in_a_row += 1
        if self.state.bad_in_a_row >= BAD_IN_A_ROW:
            raise NotFiniteError(
                f"the loss or its gradient was not finite {BAD_IN_A_ROW} times in a row, last in "
                f"batch {self.state.number}{self._save(packed)}"
            )
        return None

    def _save(self, packed: PackedBatch) -> str:
        """Save the batch for inspection; return the end of an error message that names the file."""
        if self.run_dir is None:
            return ""
        path = self.run_dir / "bad_batch.msgpack"
        rows = [
            {
                "prompt": packed.prompts[row].tolist(),
                "tokens": packed.responses[row].tolist(),
                "reward": reward,
            }
            for sample, reward in enumerate(packed.rewards.tolist())
            for row in packed.list_rows([sample])
        ]
        path.write_bytes(msgspec.msgpack.encode(rows))
        return f"; the batch is saved in {path}"

    # ---- pieces ----------------------------------------------------------------------------------

    def _run(
        self,
        model: PolicyModel,
        packed: PackedBatch,
        samples: Sequence[int],
        *,
        entropy: bool = False,
        hidden: bool = False,
    ) -> Any:
        # the policy of any version replays the experts; reference policies route by themselves
        inputs = packed.select_rows(samples)
        if model is not self.model and model is not self.measure.shadow:
            inputs["routed"] = None
        with self.backend.guard():
            return model.logprobs(**inputs, want_entropy=entropy, want_hidden=hidden)

    @torch.no_grad()
    def _add_sampling_states(self, batch: Batch, packed: PackedBatch) -> None:
        """Add the states and heads of the versions that sampled, for score centering.

        Tokens of lag 0 were sampled by the learner's start.  Its center has no gradient before the
        batch's second optimizer step.
        """
        everything = list(range(packed.count))
        versions = self.measure.load_versions(batch, packed, everything)
        if self.config.learner.epochs * self.config.learner.minibatches > 1:
            newest = torch.nonzero(packed.token_lag == 0)[:, 0]
            versions = itertools.chain([(self.model, newest, everything)], versions)
        for model, places, answers in versions:
            rows = torch.full_like(packed.seq, -1)
            rows[places] = torch.arange(len(places), device=rows.device)
            head = model.hf.get_output_embeddings().weight.detach().clone()
            states = head.new_zeros(len(places), head.shape[1])
            for part, output in self._score(model, packed, answers, hidden=True):
                found = rows[part]
                states[found[found >= 0]] = output.hidden[found >= 0].to(states)
            packed.sampling.append((rows, states, head))

    def _compute_center(self, packed: PackedBatch, samples: Sequence[int], output: Any) -> Tensor:
        """Return the center of each token's score [n] with gradient, 0 where it is not known."""
        loss = self.config.loss
        assert self.model.fast is not None and isinstance(loss, settings.ReinforceLoss)
        top = loss.center_top if loss.center == "top" else 0
        term = partial(correction.compute_score_center, c=self.config.correction, top=top)
        part = packed.find_token_positions(samples)
        center: Tensor = output.hidden.new_zeros(len(part), dtype=torch.float32)
        for rows, states, head in packed.sampling:
            (chosen,) = torch.nonzero(rows[part] >= 0, as_tuple=True)
            if not len(chosen):
                continue
            values = packed_forward.compute_vocabulary_term(
                term,
                self.model.fast,
                output.hidden[chosen],
                (states[rows[part[chosen]]], head),
                output.scale[chosen],
            )
            center = center.index_put((chosen,), values)
        return center

    def _drop_gradient(self) -> None:
        self.backend.drop_gradient()
        if self.critic is not None:
            self.critic.trainer.drop_gradient()

    def _score(
        self, model: PolicyModel, packed: PackedBatch, samples: Sequence[int], hidden: bool = False
    ) -> Iterator[tuple[Tensor, Any]]:
        """Yield token positions and output of the micro-batches of training, without gradient.

        Those of the learner's own model are this rank's.
        """
        passes = [(micro, True) for micro in self._split_micro_batches(model, packed, samples)]
        if model is self.model:
            passes = self._select_own_micro_batches(packed, samples)
        for micro, is_real in passes:
            with torch.no_grad():
                output = self._run(model, packed, micro, hidden=hidden)
            if is_real:
                yield packed.find_token_positions(micro), output

    def _forward(
        self, model: PolicyModel, packed: PackedBatch, samples: Sequence[int] | None = None
    ) -> Tensor:
        """Return log-probabilities [N] of `samples` (None: all) under `model`, without gradient."""
        logprobs = torch.zeros(int(packed.offsets[-1]), device=self.loss_device)
        chosen = range(packed.count) if samples is None else samples
        for part, output in self._score(model, packed, chosen):
            logprobs[part] = output.logprobs.float().to(self.loss_device)
        return self.backend.sum_over_ranks(logprobs) if model is self.model else logprobs

    def _set_proximal(self, batch: Batch, packed: PackedBatch) -> None:
        """Set the proximal policy, and the learner's start where a forward computes it.

        Nothing is set where the first optimizer step's own forward provides it.
        """
        config = self.config
        kind = config.correction.proximal
        recompute = kind == "recompute" and step_loss.needs_proximal_first(config)
        if recompute or kind == "interpolate" or step_loss.needs_start_first(config):
            packed.start = self._forward(self.model, packed)
        start = packed.start
        if kind == "version":
            version = torch.zeros_like(packed.behavior)
            if not self.backend.rank:
                version = self.measure.compute_version_logprobs(batch, packed, range(packed.count))
            version = self.backend.sum_over_ranks(version)
            unknown = sorted(set(packed.seq[version.isnan() & packed.mask].tolist()))
            if start is None:
                start = self._forward(self.model, packed, unknown)
            is_current = version.isnan() & (packed.token_lag == 0)
            packed.version = torch.where(is_current, start, version)
        if self.average is not None:
            with self.average.use():
                start = self._forward(self.model, packed)
        packed.proximal = step_loss.choose_proximal(packed, config, start)


def make_backend(config: Config, model: PolicyModel) -> TorchBackend:
    """Build the backend named by `learner.backend`."""
    if config.learner.backend == "deepspeed":
        from learner.distributed.deepspeed_backend import DeepSpeedBackend

        return DeepSpeedBackend(config, model)
    if config.learner.backend == "fsdp2":
        from learner.distributed.fsdp_backend import FsdpBackend

        return FsdpBackend(config, model)
    if config.learner.process_count > 1:
        from learner.distributed.ranks import ReplicatedBackend

        return ReplicatedBackend(config, model)
    return TorchBackend(config, model)
