"""PyTorch's `fully_shard` (FSDP2) over one or several ranks, with gloo on a CPU and nccl on GPUs.

Each rank keeps a part of every parameter, gradient and moment, divided along its first axis. A
layer's parameters are gathered for its forward and its backward pass, and its gradient is added up
and divided again at once, so no rank holds a whole model or a whole gradient (Zhao et al. 2023,
arXiv 2304.11277). With `learner.mesh.replicate` only the ranks of a replica divide the model, and
the replicas add up their gradients. With `learner.mesh.tensor` the ranks of a `TensorGroup` share
their samples, and divide heads, feed-forward and vocabulary. Ranks add gradients up without
averaging them. In bfloat16 the parts are float32: layers are gathered, multiplied and published in
bfloat16.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError, DamagedDataError
from asyncrl.models.packed_forward import GATHERED_CALL, WholeModel
from asyncrl.models.policy import PolicyModel, list_published, recompute_modules
from asyncrl.models.trainer import Trainer
from asyncrl.records.jsonl import JsonObject
from learner.distributed.ranks import DistributedBackend
from learner.gradients import sum_squares

FOLDER = "fsdp2"  # of a checkpoint
PREVIOUS = "previous_gradient"
# heads, columns of the feed-forward and rows of the vocabulary, by module
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
AXES = dict.fromkeys(ROWS, 0) | {"o_proj": 1, "down_proj": 1}


class TensorGroup(WholeModel):
    """A rank's part of a model that a tensor group divides (Shoeybi et al. 2019, arXiv 1909.08053).

    torch's ColwiseParallel would sum the gradient of each projection by itself, five times a layer
    instead of twice, and its loss_parallel computes no entropy.
    """

    def __init__(self, mesh: DeviceMesh, vocabulary: int) -> None:
        self.mesh = mesh
        self.rows = -(-vocabulary // mesh.size())

    def enter(self, states: Tensor) -> Tensor:
        copies = DTensor.from_local(states, self.mesh, [Replicate()], run_check=False)
        return copies.to_local(grad_placements=[Partial()])

    def leave(self, states: Tensor) -> Tensor:
        return DTensor.from_local(states, self.mesh, [Partial()], run_check=False).full_tensor()

    def locate(self, ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        row = ids - self.mesh.get_local_rank() * self.rows
        here = (row >= 0) & (row < len(table))
        return row * here, here

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        row, here = self.locate(ids, table)
        return self.leave(F.embedding(row, table) * here[:, None])

    def log_softmax(self, logits: Tensor) -> Tensor:
        total = logits.logsumexp(-1, keepdim=True)
        totals = DTensor.from_local(total, self.mesh, [Shard(1)], run_check=False).full_tensor()
        return logits - totals.logsumexp(-1, keepdim=True)


class FsdpBackend(DistributedBackend):
    """The backend of FSDP2; see `TorchBackend`."""

    sharded = True
    writes_parts = True
    load_device = "cpu"

    def __init__(self, config: Config, model: PolicyModel) -> None:
        super().__init__(config, model)
        self.replicas = config.learner.mesh.replicate
        # the ranks of a tensor group follow each other, and so do those of a replica. A tensor
        # group's part of a parameter is divided into shards
        numbers = torch.arange(self.ranks).view(self.replicas, -1, self.tensor)
        names = ("replicate", "tensor", "shard")
        self.mesh = DeviceMesh(self.device.type, numbers.transpose(1, 2), mesh_dim_names=names)
        # of the parameters that tensor groups divide: the axis, and the whole shape
        self.divided: dict[nn.Parameter, tuple[int, torch.Size]] = {}
        self.roots: list[FSDPModule] = []
        # of each part of a checkpoint: its parameters and their optimizer
        self.parts: dict[str, tuple[dict[str, nn.Parameter], torch.optim.Optimizer]] = {}
        self._shard_model(model)
        Trainer.__init__(
            self, (p for p in model.hf.parameters() if p.requires_grad), config.learner
        )
        self.keep_part("policy", self, [model.hf])
        self.alignment = self.build_gradient_alignment()

    def add_part(self, name: str, head: nn.Module, trunk: PolicyModel | None) -> Trainer:
        self._shard(head, [], MixedPrecisionPolicy(cast_forward_inputs=False))
        if trunk is not None:
            self._shard_model(trunk)
        return super().add_part(name, head, trunk)

    def keep_part(self, name: str, trainer: Trainer, modules: Sequence[nn.Module]) -> None:
        named = nn.ModuleList(modules).named_parameters()
        self.parts[name] = {path: p for path, p in named if p.requires_grad}, trainer.optimizer

    def _shard_model(self, model: PolicyModel) -> None:
        """Divide a model among the ranks, layer by layer, in place."""
        config = self.config
        model.one_pass = True
        divided = self._divide(model) if self.tensor > 1 else {}
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
        named = model.hf.named_parameters()
        self.divided |= {p: divided[name] for name, p in named if name in divided}

    def _divide(self, model: PolicyModel) -> dict[str, tuple[int, torch.Size]]:
        """Divide a model among the ranks of its tensor group, in place; return `divided` by name.

        Raises ConfigError for a model that cannot be divided.
        """
        lay, size, config = model.fast, self.tensor, model.hf.config
        if (
            lay is None
            or lay.experts is not None
            or any(count % size for count in (lay.heads, lay.kv_heads, config.intermediate_size))
            or config.vocab_size < size**2
            or any(getattr(config, key, False) for key in ("attention_bias", "mlp_bias"))
        ):
            raise ConfigError(
                f"learner.mesh.tensor: {size} ranks cannot divide {model.tokenizer_dir}; it needs "
                "a Llama, Qwen2, Qwen3 or Mistral without attention_bias and mlp_bias in its "
                "config.json, whose heads, key heads and intermediate_size are multiples of it"
            )
        mesh, divided = self.mesh["tensor"], {}
        for name, parameter in model.hf.named_parameters():
            axis = AXES.get(name.split(".")[-2])
            if axis is not None:
                divided[name] = axis, parameter.shape
                # in place: a tied head stays the same parameter
                parameter.data = parameter.data.chunk(size, axis)[mesh.get_local_rank()].clone()
        lay.heads //= size
        lay.kv_heads //= size
        lay.part = TensorGroup(mesh, config.vocab_size)
        return divided

    def _shard(
        self, root: nn.Module, layers: Sequence[nn.Module], policy: MixedPrecisionPolicy
    ) -> None:
        offload = OffloadPolicy()
        if self.config.learner.offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        mesh = self.mesh["shard"] if self.replicas == 1 else self.mesh["replicate", "shard"]
        for module in [*layers, root]:
            sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
            # the loss has global denominators
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # for instance the experts that no token of a rank chose
            sharded.set_reduce_scatter_unused_params(True, recurse=False)
            setattr(sharded, GATHERED_CALL, operator.call)
            register_fsdp_forward_method(sharded, GATHERED_CALL)
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
        norm = self._square_norm(parameters).sqrt()
        if self.clip_norm:
            gradients = self.collect_gradients(parameters)
            torch._foreach_mul_(gradients, float((self.clip_norm / (norm + 1e-6)).clamp(max=1.0)))
        return norm

    def compute_squared_gradient(self, value: Tensor) -> Tensor:
        self.drop_gradient()
        self.accumulate(value * self.tensor / self.ranks)
        square = self._square_norm(self.parameters)
        self.drop_gradient()
        return square

    def _square_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the squared norm of the gradients; what several ranks hold counts once."""
        counted = [p for p in parameters if p in self.divided or self.rank % self.tensor == 0]
        square = sum_squares(self.collect_gradients(counted)).cpu()
        return self.add_up(square / self.replicas)

    # ---- weights and state -----------------------------------------------------------------------

    def _gather_weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, part and whole tensor of each weight, one at a time, on rank 0 alone."""
        self.release_gathered()
        published = zip(self.layout, list_published(self.model), strict=True)
        for (name, dtype, *_), (_, parameter) in published:
            part = get_local_part(parameter).detach().to(self.device, getattr(torch, dtype))
            divided = self._describe(parameter, part)
            placements = [Replicate(), divided.placements[1], Replicate()]
            with self.guard():
                whole = divided.redistribute(placements=placements).full_tensor()
            if self.rank == 0:
                yield name, parameter, whole

    @contextmanager
    def gather_full_parameters(self) -> Iterator[None]:
        full_parameters = {
            parameter: nn.Parameter(whole.cpu(), requires_grad=False)
            for _, parameter, whole in self._gather_weights()
        }
        owners = [
            (module, name, parameter)
            for module in self.model.hf.modules()
            for name, parameter in module._parameters.items()
            if parameter in full_parameters
        ]
        try:
            for module, name, parameter in owners:
                module._parameters[name] = full_parameters[parameter]
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
                if stored is not None:
                    optimizer.state[parameter] = {
                        key.removeprefix(f"{prefix}/"): torch.zeros_like(parameter)
                        if len(stored[key].size)
                        else torch.zeros((), dtype=torch.float32)
                        for key in stored
                        if key.startswith(f"{prefix}/")
                    }
                state = optimizer.state.get(parameter, {})
                values = {prefix: parameter} | {f"{prefix}/{key}": x for key, x in state.items()}
                tensors |= {
                    key: self._describe(parameter, x) if x.ndim else x for key, x in values.items()
                }
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
                f"{PREVIOUS}.{name}": self._describe(parameter, gradient)
                for (name, parameter), gradient in zip(
                    policy.items(), self.alignment.previous, strict=False
                )
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

    def _describe(self, parameter: nn.Parameter, part: Tensor) -> DTensor:
        """Describe this rank's part of a parameter, or of its moment, on the whole mesh."""
        axis, shape = self.divided.get(parameter, (None, parameter.shape))
        local = get_local_part(part)
        described = DTensor.from_local(
            local,
            self.mesh,
            [Replicate(), Replicate() if axis is None else Shard(axis), Shard(0)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        described._local_tensor = local  # of offloaded parameters it is a copy on the GPU
        return described


def get_local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a divided tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
