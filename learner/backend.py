"""Optimizer backends: torch, DeepSpeed and FSDP2, in one process or over several ranks.

The learner's mathematics (learner/step.py) is the same on every rank and sees the whole batch. A
backend assigns samples' forward and backward passes to ranks, adds up their results and makes the
optimizer step. Only rank 0 communicates with the buffer. It sends commands to the others by
`broadcast`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.models.policy import (
    PolicyModel,
    build_manifest,
    compute_probe_logprobs,
    copy_flat,
    list_named_weights,
)
from asyncrl.models.trainer import Trainer
from learner.gradients import GradientAlignment, sum_squares


class TorchBackend(Trainer):
    """The backend of plain torch in one process; `ReplicatedBackend` has several."""

    rank = 0
    ranks = 1
    # every rank takes part in each forward pass, and the parameters on a rank are parts
    sharded = False
    # cosine of the last step's gradient with the previous one, where it is measured
    cosine: float | None = None
    # a learner checkpoint holds all trained parts in the backend's own files
    writes_parts = False

    def __init__(self, config: Config, model: PolicyModel) -> None:
        trained = [p for p in model.hf.parameters() if p.requires_grad]
        tables = (model.hf.get_input_embeddings(), model.hf.get_output_embeddings())
        looked_up = {id(table.weight) for table in tables if table is not None}
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in looked_up]
        super().__init__(trained, config.learner, matrices=matrices)
        self.config = config
        self.model = model
        self.layout = build_manifest(model)
        self.alignment = self.build_gradient_alignment()

    @cached_property
    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The published weights: finding them takes half the time of a small publication.

        Other backends yield one after another, in full on rank 0.
        """
        return list_named_weights(self.model)

    def build_gradient_alignment(self) -> GradientAlignment | None:
        """Return the measurement that learner.gradient_cosine asks for."""
        mode = self.config.learner.gradient_cosine
        if mode == "off":
            return None
        largest = self.config.learner.cosine_max if mode == "project" else None
        return GradientAlignment(largest, self.sum_over_ranks)

    @property
    def load_device(self) -> str:
        """The device to which a model is loaded before `add_part` prepares it."""
        return self.config.model.device

    def add_part(self, name: str, head: torch.nn.Module, trunk: PolicyModel | None) -> Trainer:
        """Prepare another trained part and return its trainer.

        name: in checkpoints.
        head, trunk: its modules, whose parameters are all trained.
        """
        modules = [head, *([] if trunk is None else [trunk.hf])]
        parameters = [p for module in modules for p in module.parameters()]
        trainer = Trainer(parameters, self.config.learner, owner=self)
        self.keep_part(name, trainer, modules)
        return trainer

    def keep_part(self, name: str, trainer: Trainer, modules: Sequence[torch.nn.Module]) -> None:
        """Keep the modules' parameters and their optimizer for the backend's own files."""

    # ---- ranks -----------------------------------------------------------------------------------

    def broadcast(self, command: str, payload: Any = None) -> None:
        """Send the next command from rank 0 to the other ranks."""

    def keep_alive(self) -> None:
        """Keep the other ranks within their deadline while rank 0 waits for a batch."""

    def guard(self) -> AbstractContextManager[None]:
        """Guard an operation that may wait for another rank, such as a ZeRO-3 forward pass."""
        return nullcontext()

    def split_samples(self, samples: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Assign `samples` to ranks; lengths are those of all samples, in tokens."""
        return [list(samples)]

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the object of every rank, of a tensor group that of its first one."""
        return [value]

    # ---- one optimizer step ----------------------------------------------------------------------

    def apply(self, rate: float, loss: Tensor | None = None) -> float:
        """Measure the gradient's cosine, then `Trainer.apply`."""
        if self.alignment is None:
            return super().apply(rate, loss)
        cosine = self.alignment.measure(self.collect_gradients(self.parameters))
        norm = super().apply(rate, loss)
        if math.isfinite(norm):
            self.alignment.remember()
            self.cosine = float(cosine)
        return norm

    def collect_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> list[Tensor]:
        """Return this rank's part of the accumulated gradients."""
        return [p.grad for p in parameters if p.grad is not None]

    def compute_squared_gradient(self, value: Tensor) -> Tensor:
        """Return the square of the gradient's norm of `value`, a scalar: float64 scalar.

        Every rank passes the same value. It leaves no gradient behind.
        """
        gradients = torch.autograd.grad(value, self.parameters, allow_unused=True)
        return sum_squares([gradient for gradient in gradients if gradient is not None])

    # ---- weights and state -----------------------------------------------------------------------

    def release_gathered(self) -> None:
        """Free what the last forward pass without a backward pass left gathered."""

    @contextmanager
    def gather_full_parameters(self) -> Iterator[None]:
        """Hold every parameter in full in rank 0's model inside the context."""
        yield

    def list_parts(self) -> list[Tensor]:
        """Return this rank's parts of the trained parameters, sharing their memory."""
        return [p.detach() for p in self.parameters]

    def write_flat(self, buffer: memoryview | None) -> float | None:
        """Write the weights into `buffer` on rank 0; the other ranks contribute their parts.

        Returns a bound like `asyncrl.models.policy.copy_flat` on rank 0.
        """
        if buffer is not None:
            return copy_flat(self.weights, buffer, self.layout)
        for _ in self.weights:
            pass
        return None

    def probe(self) -> bytes:
        """Return the probe's log-probabilities (float32) for engines that check swaps.

        It is empty for other engines. With adapters it is the digest of the base they belong to.
        """
        if self.model.adapter is not None:
            return self.model.adapter.base.encode()
        if not self.config.generator.abilities.probed:
            return b""
        return compute_probe_logprobs(self.model).tobytes()

    def save(self, directory: Path) -> dict[str, Any]:
        """Return the optimizer's state, or write it below `directory` on every rank."""
        state: dict[str, Any] = self.optimizer.state_dict()
        if self.alignment is not None:
            state |= {"previous_gradient": self.alignment.previous}
        return state

    def load(self, state: dict[str, Any], directory: Path) -> None:
        groups = state.get("param_groups", [])
        written_by = "adamw" if groups and "betas" in groups[0] else "sgd" if groups else "muon"
        if written_by != self.config.learner.optimizer:
            raise ConfigError(
                f"learner.optimizer: {self.config.learner.optimizer} cannot go on from the state "
                f"that {written_by} left in {directory}; resume with {written_by}"
            )
        previous = state.pop("previous_gradient", [])
        if self.alignment is not None:
            self.alignment.previous = [gradient.to(self.model.device) for gradient in previous]
        self.optimizer.load_state_dict(state)

    def close(self) -> None:
        """End the other ranks."""
