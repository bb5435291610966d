"""PyTorch's `fully_shard` (FSDP2) over one or several ranks, with gloo on a CPU and nccl on GPUs.

Each rank keeps a part of every parameter, gradient and moment, divided along its first axis. A
layer's parameters are gathered for its forward and its backward pass, and its gradient is added up
and divided again at once, so no rank holds a whole model or a whole gradient (Zhao et al. 2023,
arXiv 2304.11277). With `learner.mesh.replicate` only the ranks of a replica divide the model, and
the replicas add up their gradients. Ranks add gradients up without averaging them. In bfloat16 the
parts are float32: layers are gathered, multiplied and published in bfloat16.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from asyncrl.config.tree import Config
from asyncrl.contract.errors import DamagedDataError
from asyncrl.models.policy import PolicyModel, list_named_weights, recompute_modules
from asyncrl.models.trainer import Trainer
from asyncrl.records.jsonl import JsonObject
from learner.distributed.ranks import DistributedBackend
from learner.gradients import sum_squares

FOLDER = "fsdp2"  # of a checkpoint
PREVIOUS = "previous_gradient"


class FsdpBackend(DistributedBackend):
    """The backend of FSDP2; see `TorchBackend`."""

    sharded = True
    writes_parts = True

    def __init__(self, config: Config, model: PolicyModel) -> None:
        super().__init__(config, model)
        self.replicas = config.learner.mesh.replicate
        self.shards = self.ranks // self.replicas
        # the ranks of a replica follow each other
        sizes = (self.replicas, self.shards) if self.replicas > 1 else (self.ranks,)
        names = ("replicate", "shard")[-len(sizes) :]
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        self.roots: list[FSDPModule] = []
        # of each part of a checkpoint: its parameters and their optimizer
        self.parts: dict[str, tuple[dict[str, nn.Parameter], torch.optim.Optimizer]] = {}
        self._shard_model(model)
        Trainer.__init__(
            self, (p for p in model.hf.parameters() if p.requires_grad), config.learner
        )
        self._keep_part("policy", self, [model.hf])
        self.alignment = self.build_gradient_alignment()

    @property
    def load_device(self) -> str:
        return "cpu"

    def add_part(self, name: str, head: nn.Module, trunk: PolicyModel | None) -> Trainer:
        self._shard(head, [], MixedPrecisionPolicy(cast_forward_inputs=False))
        if trunk is not None:
            self._shard_model(trunk)
        trainer = super().add_part(name, head, trunk)
        self._keep_part(name, trainer, [head, *([] if trunk is None else [trunk.hf])])
        return trainer

    def _keep_part(self, name: str, trainer: Trainer, modules: Sequence[nn.Module]) -> None:
        """Keep the modules' parameters and their optimizer in checkpoints."""
        parameters = {
            f"{index}.{path}": parameter
            for index, module in enumerate(modules)
            for path, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.parts[name] = parameters, trainer.optimizer

    def _shard_model(self, model: PolicyModel) -> None:
        """Divide a model among the ranks, layer by layer, in place."""
        config = self.config
        model.one_pass = True
        if config.learner.gradient_checkpointing and model.fast is None:
            recompute_modules(model.hf)
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        # adapters are float32 beside any base
        if config.model.dtype == "bfloat16" and model.adapter is None:
            for parameter in model.hf.parameters():
                parameter.data = parameter.data.float()
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        if model.fast is not None:
            layers = list(model.hf.model.layers)
        else:
            from transformers.modeling_layers import GradientCheckpointingLayer

            layers = [m for m in model.hf.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._shard(model.hf, layers, policy)

    def _shard(
        self, root: nn.Module, layers: Sequence[nn.Module], policy: MixedPrecisionPolicy
    ) -> None:
        offload = OffloadPolicy()
        if self.config.learner.offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for module in [*layers, root]:
            sharded: Any = fully_shard(
                module, mesh=self.mesh, mp_policy=policy, offload_policy=offload
            )
            # the loss has global denominators
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # for instance the experts that no token of a rank chose
            sharded.set_reduce_scatter_unused_params(True, recurse=False)
            sharded.gathered_call = _call
            register_fsdp_forward_method(sharded, "gathered_call")
        self.roots.append(sharded)

    def release_gathered(self) -> None:
        for root in self.roots:
            root.reshard()

    # ---- one optimizer step ----------------------------------------------------------------------

    def accumulate(self, loss: Tensor, *, is_last: bool = True) -> None:
        with self.guard():
            super().accumulate(loss, is_last=is_last)

    def collect_gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [get_local_part(p.grad) for p in parameters if p.grad is not None]

    def clip(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        gradients = self.collect_gradients(parameters)
        norm = self._sum_over_parts(sum_squares(gradients).cpu()).sqrt()
        if self.clip_norm:
            torch._foreach_mul_(gradients, float((self.clip_norm / (norm + 1e-6)).clamp(max=1.0)))
        return norm

    def compute_squared_gradient(self, value: Tensor) -> Tensor:
        self.drop_gradient()
        self.accumulate(value / self.ranks)
        square = sum_squares(self.collect_gradients(self.parameters)).cpu()
        self.drop_gradient()
        return self._sum_over_parts(square)

    def _sum_over_parts(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the parts of one replica; all replicas have the same."""
        return self.sum_over_ranks(value / self.replicas)

    # ---- weights and state -----------------------------------------------------------------------

    def _gather_weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, part and whole tensor of each weight, one at a time, on rank 0 alone."""
        self.release_gathered()
        dtypes = {name: getattr(torch, dtype) for name, dtype, *_ in self.layout}
        for name, parameter in list_named_weights(self.model):
            assert isinstance(parameter, DTensor)
            part = get_local_part(parameter).to(self.device, dtypes[name])
            if self.shards == 1 or self.rank >= self.shards:
                if self.rank == 0:
                    yield name, parameter, part
                continue
            rows, row_shape = -(-parameter.shape[0] // self.shards), list(parameter.shape[1:])
            padded = part.new_zeros(rows, *row_shape)
            padded[: len(part)] = part
            tensors = [torch.empty_like(padded) for _ in range(self.shards if not self.rank else 0)]
            with self.guard():
                dist.gather(padded, tensors or None, dst=0, group=self.mesh.get_group("shard"))
            if tensors:
                yield name, parameter, torch.cat(tensors)[: parameter.shape[0]]

    @contextmanager
    def gather_full_parameters(self) -> Iterator[None]:
        # by the address of rank 0's part, which is never empty; tied modules share one
        full_parameters_by_address = {
            get_local_part(parameter).data_ptr(): nn.Parameter(tensor.cpu(), requires_grad=False)
            for _, parameter, tensor in self._gather_weights()
        }
        owners = [
            (module, name, parameter)
            for module in self.model.hf.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
            and get_local_part(parameter).data_ptr() in full_parameters_by_address
        ]
        try:
            for module, name, parameter in owners:
                module._parameters[name] = full_parameters_by_address[
                    get_local_part(parameter).data_ptr()
                ]
            yield
        finally:
            for module, name, parameter in owners:
                module._parameters[name] = parameter

    def list_parts(self) -> list[Tensor]:
        return [get_local_part(p).detach() for p in self.parameters]

    @property
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield one parameter at a time: only rank 0 ever holds a whole one."""
        return ((name, whole) for name, _, whole in self._gather_weights())

    def probe(self) -> bytes:
        with self.guard():  # a forward pass of every rank
            return super().probe()

    def _collect_tensors(self, stored: Mapping[str, Any] | None = None) -> JsonObject:
        """Return all trained parts by their names: PART.NAME and PART.NAME/STATE.

        stored: the names of a checkpoint that is to be read. The optimizers get the states that it
        has.
        """
        self.release_gathered()
        tensors: JsonObject = {}
        for part, (parameters, optimizer) in self.parts.items():
            for name, parameter in parameters.items():
                prefix = f"{part}.{name}"
                tensors[prefix] = parameter
                if stored is not None:
                    optimizer.state[parameter] = {
                        key.removeprefix(f"{prefix}/"): torch.zeros_like(parameter)
                        if len(stored[key].size)
                        else torch.zeros((), dtype=torch.float32)
                        for key in stored
                        if key.startswith(f"{prefix}/")
                    }
                state = optimizer.state.get(parameter, {})
                tensors |= {f"{prefix}/{key}": value for key, value in state.items()}
        if self.alignment is not None:
            policy = self.parts["policy"][0]
            if stored is not None:
                has_previous = any(name.startswith(PREVIOUS) for name in stored)
                self.alignment.previous = [
                    torch.zeros_like(get_local_part(p), dtype=torch.bfloat16)
                    for p in policy.values()
                    if has_previous
                ]
            tensors |= {
                f"{PREVIOUS}.{name}": DTensor.from_local(
                    gradient,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                for (name, parameter), gradient in zip(
                    policy.items(), self.alignment.previous, strict=False
                )
                if isinstance(parameter, DTensor)
            }
        return tensors

    def save(self, directory: Path) -> JsonObject:
        with self.guard():
            state_dict_saver.save(self._collect_tensors(), checkpoint_id=directory / FOLDER)
            # every rank's part is on disk before rank 0 writes the manifest
            dist.barrier()
        return {FOLDER: self.ranks}

    def load(self, state: JsonObject, directory: Path) -> None:
        reader = FileSystemReader(directory / FOLDER)
        stored = reader.read_metadata().state_dict_metadata
        tensors = self._collect_tensors(stored)
        for name, tensor in tensors.items():
            if name not in stored or list(getattr(stored[name], "size", [])) != list(tensor.shape):
                raise DamagedDataError(
                    f"checkpoint {directory} is of another model than model.path = "
                    f"{self.config.model.path}, or of another value head ({name}): start a new "
                    "run, or resume it with the settings it was made with"
                )
        with self.guard():
            state_dict_loader.load(tensors, storage_reader=reader)


def get_local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a divided tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
