"""Measurements beside the loss: the split of the log-ratio, moved KL and reference KL.

Each needs its own forward pass. The split is measured every `record.split_every` batches on
`record.split_samples` samples, the reference KL every `record.reference_kl_every` on
`record.reference_samples`. Samples are taken from the first optimizer step, whose forward was the
learner's start.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from asyncrl.algorithms import diagnostics, kl, ratios
from asyncrl.algorithms.loss import PreparedBatch, sum_moved_kl
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Batch
from asyncrl.contract.versions import Label
from asyncrl.models import adapters
from asyncrl.models.policy import Manifest, PolicyModel, list_named_weights, load_weights, read_flat
from asyncrl.models.weight_rounding import load_learner_policy
from learner.batch import PackedBatch

Forward = Callable[[PolicyModel, PackedBatch, list[int]], Tensor]  # [N], 0 elsewhere
# flat weights of a version by its label and digest, empty where they are no longer held
WeightReader = Callable[[Label, str], bytes | bytearray]


@dataclass
class SplitMeter:
    """Measurements of one learner besides its loss, at rank 0.

    `read_weights` is set by the owner of a ring.
    """

    config: Config
    model: PolicyModel
    layout: Manifest
    forward: Forward
    load_reference: Callable[[], PolicyModel]
    read_weights: WeightReader | None = None
    shadow: PolicyModel | None = None  # the model of one earlier version at a time

    def is_due(self, number: int) -> tuple[bool, ...]:
        """Return whether batch `number` measures the split, and the reference KL.

        Every rank returns the same.
        """
        record = self.config.record
        intervals = record.split_every, record.reference_kl_every
        return tuple(every > 0 and number % every == 0 for every in intervals)

    def __call__(
        self,
        batch: Batch,
        packed: PackedBatch,
        prep: PreparedBatch,
        answers: tuple[list[int], list[int]],
        updated: Tensor | None,
    ) -> dict[str, float]:
        """Return the metrics of this batch on its `answers`, from `choose_samples`.

        updated [N] holds the log-probabilities under the updated policy, where the split is due.
        """
        metrics: dict[str, float] = {}
        split_on, refer_on = answers
        if updated is not None:
            part = packed.find_token_positions(split_on)
            columns = (prep.start, updated, prep.batch.behavior, prep.valid)
            if not self.config.record.kl_moved:  # else it is measured on whole batches
                metrics["kl/moved"] = measure_move(*(x[part] for x in columns))
            if self.read_weights is not None:
                version = packed.version
                if version is None:
                    version = self.compute_version_logprobs(batch, packed, split_on)
                # sampled by the policy that the batch starts from
                version = packed.version = torch.where(packed.token_lag == 0, prep.start, version)
                usable = part[prep.valid[part] & version[part].isfinite()]
                assert packed.age is not None
                updated = updated.to(prep.start.dtype)
                policies = packed.behavior, version, prep.start, updated
                metrics |= diagnostics.compute_split_metrics(
                    *(x[usable] for x in (*policies, packed.token_lag, packed.age))
                )
                metrics["split/coverage"] = len(usable) / max(int(prep.valid[part].sum()), 1)
        if packed.reference is None and refer_on:
            metrics |= self.measure_reference_kl(packed, prep, refer_on)
        return metrics

    def choose_samples(
        self, packed: PackedBatch, prep: PreparedBatch, number: int
    ) -> tuple[list[int], list[int]]:
        """Choose samples for the split and the reference KL, where they are due, by (seed, batch).

        Candidates have a known start and were seen by a pass of this rank. The split's samples come
        from as few groups as possible: a group's prompt is encoded once, and few versions sampled
        it, each of which costs a forward with its weights.
        """
        candidates = packed.find_whole_samples(prep.known & prep.passed)
        source = torch.Generator().manual_seed((self.config.seed * 1_000_003 + number) % 2**63)
        order = torch.randperm(len(candidates), generator=source).tolist()
        shuffled = [candidates[i] for i in order]
        record = self.config.record
        groups = list(dict.fromkeys(packed.group_of[answer] for answer in shuffled))
        by_group = sorted(shuffled, key=lambda answer: groups.index(packed.group_of[answer]))
        split, reference = self.is_due(number)
        return (
            sorted(by_group[: record.split_samples]) if split else [],
            sorted(shuffled[: record.reference_samples]) if reference else [],
        )

    # ---- three parts -----------------------------------------------------------------------------

    def compute_version_logprobs(
        self, batch: Batch, packed: PackedBatch, answers: Sequence[int]
    ) -> Tensor:
        """Return log pi_v [N] of `answers`, under the version v that sampled each token.

        nan: of lag 0, or of a version whose weights are no longer held.
        """
        version = torch.full_like(packed.behavior, torch.nan)
        for model, places, answers_of_version in self.load_versions(batch, packed, answers):
            logprobs = self.forward(model, packed, answers_of_version)
            version[places] = logprobs[places].to(version.dtype)
        return version

    def load_versions(
        self, batch: Batch, packed: PackedBatch, answers: Sequence[int]
    ) -> Iterator[tuple[PolicyModel, Tensor, list[int]]]:
        """Load the weights of each earlier version that sampled tokens of `answers`.

        Yields the model with its weights, valid until the next one, the positions of its tokens
        among N, and the answers that have them.  Weights that are no longer held are left out.
        """
        token_lag = packed.token_lag.cpu()
        spans: dict[tuple[Label, str], list[tuple[int, Tensor]]] = {}
        for answer in answers:
            for span in batch.samples[packed.places[answer]].list_spans():
                begin, stop = (
                    int(packed.offsets[answer]) + position for position in (span.start, span.end)
                )
                if stop > begin and bool((token_lag[begin:stop] > 0).any()):
                    version_key = (Label(*span.label), span.digest)
                    spans.setdefault(version_key, []).append((answer, torch.arange(begin, stop)))
        for version_key, places in sorted(spans.items(), key=itemgetter(0)):
            data = self.read_weights(*version_key) if self.read_weights else b""
            if not data:
                continue
            found = torch.cat([x for _, x in places]).to(packed.seq.device)
            with self.use_weights(data) as model:
                yield model, found, sorted({answer for answer, _ in places})

    @contextmanager
    def use_weights(self, data: bytes | bytearray) -> Iterator[PolicyModel]:
        """A model that has the flat weights `data` inside the block."""
        flat = read_flat(memoryview(bytearray(data)), self.layout)
        # the learner's own model needs every rank for a forward pass, and this is rank 0 alone
        if self.model.adapter is not None and not self.config.learner.distributed:
            own = [tensor for _, tensor in list_named_weights(self.model)]
            with adapters.replace_values(own, list(flat.values())):
                yield self.model
            return
        if self.shadow is None:
            self.shadow = load_learner_policy(self.config.model.path, self.config)
            if self.model.adapter is not None:
                adapters.attach(self.shadow, self.config.lora, self.config.seed)
            self.shadow.exact = self.model.exact
            self.shadow.exact_length = self.model.exact_length
        load_weights(self.shadow, flat)
        yield self.shadow

    # ---- reference -------------------------------------------------------------------------------

    def measure_reference_kl(
        self, packed: PackedBatch, prep: PreparedBatch, answers: list[int]
    ) -> dict[str, float]:
        """Return KL(target || reference) over the valid tokens of `answers`.

        It is needed where no KL term has computed the reference's log-probabilities.
        """
        part = packed.find_token_positions(answers)
        part = part[prep.valid[part]]
        log_ratios = ratios.compute_log_ratio(
            prep.latest[part],
            self.forward(self.load_reference(), packed, answers)[part].to(prep.latest.dtype),
        ).double()
        return {
            "kl/target_ref_k1": diagnostics.average(log_ratios),
            "kl/target_ref_k3": diagnostics.average(kl.estimate_k3(log_ratios)),
            "kl/ref_target": diagnostics.average(kl.estimate_forward_k3(log_ratios)),
        }


def measure_move(
    old_logprobs: Tensor, new_logprobs: Tensor, behavior: Tensor, valid: Tensor
) -> float:
    """Return KL(before || after) of one batch's updates, nats per token, by k3.

    The arguments are those of `sum_moved_kl`.
    """
    total, weight = sum_moved_kl(old_logprobs, new_logprobs, behavior, valid)
    return float(total / weight.clamp(min=1e-12))
