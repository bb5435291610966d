"""The value head of advantage.name = gae: V of the state that predicts each response token.

`value.trunk = own` trains a second model, so that the critic does not affect the policy. `shared`
adds a linear head to the policy's last hidden state, and its value loss also moves the policy's
trunk (by value.coefficient). Either is trained by the learner's own step, on the same
micro-batches, with its gradient clipped separately from the policy's (PPO, Schulman et al. 2017,
arXiv 1707.06347; initializations as in Huang et al. 2024, arXiv 2403.17031).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError, DamagedDataError
from asyncrl.models.policy import PolicyModel, load_policy
from learner.backend import TorchBackend
from learner.batch import PackedBatch

# names of a reward model's head in its weight files
HEADS = ("score.weight", "v_head.weight", "value_head.weight")


class Critic:
    """A trunk (None: the policy's), a linear head in fp32, and their optimizer.

    The optimizer is that of `backend`.

    Raises ConfigError when value.path is not a reward model.
    """

    def __init__(self, config: Config, policy: PolicyModel, backend: TorchBackend) -> None:
        settings = config.value
        self.config = config
        self.policy = policy
        self.backend = backend
        self.trunk = None
        source = torch.Generator().manual_seed(config.seed)
        self.head = torch.nn.Linear(policy.hidden_size, 1)
        with torch.no_grad():
            self.head.bias.zero_()
            self.head.weight.zero_()
            if settings.init != "zeros":
                self.head.weight.normal_(0.0, 1 / (policy.hidden_size + 1), generator=source)
        if settings.trunk == "own":
            self.trunk = load_policy(
                settings.path or config.model.path, config.model.dtype, backend.load_device
            )
            self.trunk.exact, self.trunk.recompute = policy.exact, policy.recompute
            if self.trunk.hidden_size != policy.hidden_size:
                self.head = torch.nn.Linear(self.trunk.hidden_size, 1)
            if settings.init == "random":
                _initialize_weights(self.trunk, source)
            elif settings.init == "reward_model":
                self._load_head(Path(settings.path))
        self.head.to(policy.device)
        self.trainer = backend.add_part("critic", self.head, self.trunk)

    def _load_head(self, path: Path) -> None:
        import safetensors

        for file in sorted(path.glob("*.safetensors")):
            with safetensors.safe_open(str(file), framework="pt") as opened:
                for name in HEADS:
                    if name in opened.keys():  # noqa: SIM118  (safe_open is not a mapping)
                        weight = opened.get_tensor(name)
                        if weight.shape != self.head.weight.shape:
                            raise ConfigError(
                                f"value.path: {file} has {name} {list(weight.shape)}; one number a "
                                f"state needs {list(self.head.weight.shape)}"
                            )
                        with torch.no_grad():
                            self.head.weight.copy_(weight)
                        return
        raise ConfigError(
            f"value.path: {path} has no reward head (none of {', '.join(HEADS)} in its "
            "*.safetensors); use value.init = policy"
        )

    # ---- values ----------------------------------------------------------------------------------

    def compute_values(
        self, packed: PackedBatch, samples: Sequence[int], hidden: Tensor | None
    ) -> Tensor:
        """Return V [n] before each response token of `samples`, with gradient.

        hidden [n, H] holds the policy's states, for a shared trunk.
        """
        if self.trunk is not None:
            hidden = self._compute_states(self.trunk, packed, samples)
        assert hidden is not None
        return self._apply_head(hidden)

    @torch.no_grad()
    def compute_start_values(
        self, packed: PackedBatch, passes: Sequence[tuple[list[int], bool]]
    ) -> tuple[Tensor, Tensor]:
        """Return (V [N], bootstrap [B]) at the start of the batch.

        bootstrap is V after the last token of a truncated sample, elsewhere 0. Every sample must
        have one row; `LearnerCore` refuses others.
        """
        trunk = self.trunk or self.policy
        values = torch.zeros(int(packed.offsets[-1]))
        bootstrap = torch.zeros(packed.count)
        is_truncated = packed.truncated.tolist()
        for part, is_real in passes:
            # an extra token yields the state after the last one; which token it is has no effect
            answers = [
                np.append(r, r[-1:]) if is_truncated[sample] else r
                for sample in part
                for r in [packed.responses[sample]]
            ]
            states = self._compute_states(trunk, packed, part, responses=answers)
            computed = self._apply_head(states).cpu()
            by_sample = torch.split(computed, [len(answer) for answer in answers])
            for sample, row in zip(part, by_sample, strict=True) if is_real else ():
                start, end = packed.offsets[sample : sample + 2]
                values[start:end] = row[: end - start]
                if is_truncated[sample]:
                    bootstrap[sample] = row[-1]
        return values, bootstrap

    def _apply_head(self, hidden: Tensor) -> Tensor:
        return self.head(hidden.float())[:, 0]  # type: ignore[no-any-return]

    def _compute_states(
        self, model: PolicyModel, packed: PackedBatch, samples: Sequence[int], **other: Any
    ) -> Tensor:
        """Return the state [n, H] that predicts each response token; other: of `ForwardInput`."""
        unused = dict.fromkeys(("supports", "routed", "images"))
        inputs = packed.select_rows(samples) | unused | other
        with self.backend.guard():
            output = model.logprobs(**inputs, want_hidden=True)
        assert output.hidden is not None
        return output.hidden

    # ---- training --------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return weights and optimizer for the checkpoint."""
        return {
            "head": self.head.state_dict(),
            "trunk": {} if self.trunk is None else self.trunk.hf.state_dict(),
            "optimizer": self.trainer.optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, Any] | None, path: Path) -> None:
        """Restore the critic. Raises DamagedDataError for a missing or different value head."""
        if not state or bool(state["trunk"]) != (self.trunk is not None):
            raise DamagedDataError(
                f"checkpoint {path} has no value head with value.trunk = "
                f"{self.config.value.trunk}: resume it with the settings it was made with"
            )
        self.head.load_state_dict(state["head"])
        if self.trunk is not None:
            self.trunk.hf.load_state_dict(state["trunk"])
        self.trainer.optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def _initialize_weights(model: PolicyModel, source: torch.Generator) -> None:
    """Initialize a trunk: matrices normal with the model's own spread, norms 1, biases 0."""
    spread = float(getattr(model.hf.config, "initializer_range", 0.02))
    for name, parameter in model.hf.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=source) * spread)
        else:
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
