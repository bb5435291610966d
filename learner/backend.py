"""What turns gradients into new weights: torch on one process, or DeepSpeed over several ranks.

The learner's mathematics (learner/step.py) is the same on every rank and sees the whole batch; a
backend says which samples' forward and backward passes are this rank's, adds up what ranks
computed, and makes the optimizer step.  Rank 0 alone talks to the buffer: it tells the others what
to do (`broadcast`), they `hear` it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.engines import ENGINES
from asyncrl.config.tree import Config
from asyncrl.models.policy import PolicyModel, copy_flat, manifest, named_weights, probe_logprobs
from learner.gradients import GradientAlignment


class PlainAdamW(torch.optim.AdamW):
    """torch's AdamW without what wraps its methods for torch.compile: the first call of each would
    import the compiler, seconds of CPU.
    """

    # what its wrapper does when nothing is compiled
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)


def optimizer_for(
    config: Config, parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    settings = config.learner
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    return PlainAdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )


class TorchBackend:
    """One process, plain torch."""

    rank = 0
    ranks = 1
    # early stopping may look at the gradient's own forward pass: an unused gradient is simply
    # dropped
    stops_first = False
    # of the last step's gradient with that of the step before, where it is measured
    cosine: float | None = None

    def __init__(self, config: Config, model: PolicyModel) -> None:
        self.config = config
        self.model = model
        self.layout = manifest(model)
        # looking through the modules would take half the time of a small model's publication
        self.weights: list[tuple[str, torch.Tensor]] = (
            list(model.hf.named_parameters(remove_duplicate=True))
            if model.adapter is None
            else named_weights(model)
        )
        self.optimizer = optimizer_for(
            config, [p for p in model.hf.parameters() if p.requires_grad]
        )
        how = config.learner.gradient_cosine
        self.alignment = (
            None
            if how == "off"
            else GradientAlignment(config.learner.cosine_max if how == "project" else None)
        )

    # ---- ranks -----------------------------------------------------------------------------------

    def broadcast(self, what: str, payload: Any = None) -> None:
        """Rank 0: what the other ranks do now."""

    def keep_alive(self) -> None:
        """Rank 0, while it waits for a batch: the others are not left waiting past their own
        deadline.
        """

    def guard(self) -> AbstractContextManager[None]:
        """Around whatever may wait for another rank, such as a forward pass over partitioned
        parameters.
        """
        return nullcontext()

    def split_samples(self, samples: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """`samples` dealt to the ranks; lengths of all samples of the batch, in tokens."""
        return [list(samples)]

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of x over the ranks."""
        return value

    def max_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the ranks."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object."""
        return [value]

    # ---- one optimizer step ----------------------------------------------------------------------

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate a micro-batch's gradient; `last`: of this optimizer step."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, rate: float, loss: torch.Tensor) -> float | None:
        """Clip and step with the learning rate `rate`; the gradient's norm, None where it or the
        loss (a scalar) is not finite.

        Reads the device once.
        """
        seen = []
        if self.alignment is not None:
            given = [p.grad for p in self.model.hf.parameters() if p.grad is not None]
            seen = [self.alignment.measure(given)]
        found = torch.nn.utils.clip_grad_norm_(
            self.model.hf.parameters(), self.config.learner.clip_norm or math.inf
        )
        norm: float
        norm, value, *cosines = torch.stack(
            [found.double(), loss.detach().to(found.device).double(), *seen]
        ).tolist()
        if not (math.isfinite(norm) and math.isfinite(value)):
            self.zero_grad()
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.alignment is not None:
            self.alignment.remember()
            self.cosine = cosines[0]
        return norm

    # ---- weights and state -----------------------------------------------------------------------

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Inside, rank 0's model holds every parameter in full."""
        yield

    def write_flat(self, buffer: memoryview | None) -> torch.Tensor | None:
        """The weights into `buffer`, on rank 0; the other ranks give their parts.  Returns a bound
        as `asyncrl.models.policy.copy_flat` does, None where nothing was looked at.
        """
        assert buffer is not None
        return copy_flat(self.weights, buffer, self.layout)

    def probe(self) -> bytes:
        """The weights' log-probabilities of the probe's tokens (float32), for engines that check a
        swap; nothing for the others.  Of adapters: digest of the base that they belong to.
        """
        if self.model.adapter is not None:
            return self.model.adapter.base.encode()
        return (
            probe_logprobs(self.model).astype("<f4").tobytes()
            if ENGINES[self.config.generator.engine].probed
            else b""
        )

    def state(self, directory: Path) -> dict[str, Any]:
        """The optimizer's state: returned, or written below `directory` by every rank."""
        state = self.optimizer.state_dict()
        if self.alignment is not None:
            state |= {"previous_gradient": self.alignment.previous}
        return state

    def load_state(self, state: dict[str, Any], directory: Path) -> None:
        previous = state.pop("previous_gradient", [])
        if self.alignment is not None:
            self.alignment.previous = [each.to(self.model.device) for each in previous]
        self.optimizer.load_state_dict(state)

    def close(self) -> None:
        """End the other ranks."""
