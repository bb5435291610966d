"""A GPU that computes on the CPU, but mixes with it no more than a real one does.

A `GpuTensor` says that it is on cuda:0 and holds its numbers in a CPU tensor.  While `pretend_gpu`
is active, tensors that are created on or moved to "cuda" are such tensors, and an operator that
gets one of them and a tensor of the CPU fails as it would on a GPU.  As on a GPU, numbers of the
CPU (tensors without axes) and indices may be mixed in."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel

from actors import decoder
from asyncrl.models import packed_attention

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
# kernels of a GPU alone; the product's calls of the CPU's kernel have the same results
ON_GPU_ONLY: dict[Any, Callable[..., Any]] = {
    aten._pin_memory.default: lambda x, **_: x,
    aten._flash_attention_forward.default: lambda *args, **more: attend(*args, **more),
    aten._flash_attention_backward.default: lambda *args: packed_attention._backpropagate_flash(
        *args[:6], call=read_call(args[6:])
    ),
}


# operators for which the host has waited until a GPU's work was done
waits: list[str] = []
WAITING = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default),
    *(aten.equal.default, aten._unique2.default),
}


def record_wait(function: Any, args: Any, kwargs: dict[str, Any], on_gpu: list[Any]) -> None:
    """Add the operator to `waits`, if it waits."""
    waited = function in WAITING and bool(on_gpu)
    if function is aten._to_copy.default and kwargs.get("device") is not None:
        crosses = is_gpu(kwargs["device"]) != isinstance(args[0], GpuTensor)
        waited = crosses and not kwargs.get("non_blocking")
    if function is aten.copy_.default:
        waited = len({isinstance(x, GpuTensor) for x in args[:2]}) == 2 and args[2:] != (True,)
    if function is aten.index.Tensor and on_gpu:  # a mask's indices are counted first
        waited = any(x is not None and x.dtype == torch.bool for x in args[1])
    if waited:
        waits.append(str(function))


def read_call(bounds: tuple[Any, ...]) -> packed_attention.FlashCall:
    """Read the arguments of a flash kernel behind the tensors."""
    queries, keys, longest_query, longest_key, _dropout, causal, *_ = bounds
    assert int(queries.diff().max()) == longest_query and int(keys.diff().max()) == longest_key
    assert queries.dtype == keys.dtype == torch.int32
    return packed_attention.FlashCall(queries, keys, longest_query, longest_key, causal)


def attend(
    q: Any, k: Any, v: Any, *bounds: Any, scale: float = 0.0, seqused_k: Any = None
) -> tuple[Any, ...]:
    """The flash kernel; with `seqused_k`, the last query of a row sees all keys that it uses."""
    queries, keys, longest_query, longest_key, _dropout, causal, *_ = bounds
    call = read_call(bounds) if seqused_k is None else None
    if seqused_k is not None:
        assert seqused_k.dtype == torch.int32 and int(seqused_k.max()) <= longest_key
        width = int(queries[1])
        assert (
            width == longest_query and causal == (width > 1) and torch.all(queries.diff() == width)
        )
        used = (seqused_k[:, None] - torch.arange(width).flip(0)).flatten().tolist()
        begins = keys[:-1].repeat_interleave(width).tolist()
        own = torch.cat([torch.arange(at, at + n) for at, n in zip(begins, used, strict=True)])
        q, k, v = q * scale * q.shape[2] ** 0.5, k[own], v[own]
        ends = torch.tensor([0, *used]).cumsum(0).int()
        call = packed_attention.FlashCall(torch.arange(len(ends)), ends, 1, max(used), False)
    return *packed_attention._attend_flash(q, k, v, call), *(q.new_empty(0) for _ in range(3))


def capture(step: Callable[[], Any]) -> Callable[[], Any]:
    """As a CUDA graph, each run leaves its result in the same tensor."""
    kept: list[Any] = []

    def replay() -> Any:
        kept.append(step())
        return None if kept[0] is None else kept[0].copy_(kept.pop() if kept[1:] else kept[0])

    return replay


# a CPU tensor may index one of the GPU
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}


class GpuTensor(torch.Tensor):
    """A tensor of the GPU.  For torch's own code it is a meta tensor, as autograd wants no GPU."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> GpuTensor:
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="meta",
            requires_grad=host.requires_grad,
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return GPU

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    def tolist(self) -> Any:
        waits.append("tolist")
        return self.host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.host.__reduce_ex__(protocol)  # read by map_location="cpu", all are the CPU's

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.host!r})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(function, args, kwargs or {}, nullcontext())


def is_gpu(device: Any) -> bool:
    """Whether a new tensor is to be on the GPU; torch takes a GpuTensor's device for meta."""
    return device is not None and torch.device(device).type in ("cuda", "meta")


def run(function: Any, args: Any, kwargs: dict[str, Any], mode: Any) -> Any:
    """Run an operator, or those of which it is made: inference mode leaves that to its receiver."""
    if not can_decompose(function):
        return compute(function, args, kwargs)
    with mode:
        return function.decompose(*args, **kwargs)


@functools.cache
def can_decompose(function: Any) -> bool:
    return function._can_decompose()


def replace_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Change all tensors of an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)([replace_tensors(item, change) for item in value])
    return value


def compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU's tensors; its results are on the device where it would run."""
    on_gpu: list[GpuTensor] = []
    on_cpu: list[torch.Tensor] = []

    def take(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, GpuTensor):
            on_gpu.append(value)
            return value.host
        on_cpu.append(value)
        return value

    host_args = replace_tensors(tuple(args), take)
    host_kwargs = {name: replace_tensors(value, take) for name, value in kwargs.items()}
    made_there = bool(on_gpu)
    record_wait(function, args, kwargs, on_gpu)
    if kwargs.get("device") is not None:
        made_there = is_gpu(kwargs["device"])
    if on_gpu and function not in COPIES:
        if function in INDEXED:
            assert isinstance(args[0], GpuTensor), f"{function}: a CPU tensor indexed by the GPU's"
            on_cpu = [value for value in args[2:3] if any(value is one for one in on_cpu)]
        if any(value.dim() for value in on_cpu):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found cuda:0 and cpu: "
                f"{function}"
            )
    if is_gpu(host_kwargs.get("device")):
        host_kwargs["device"] = "cpu"
    if function in ON_GPU_ONLY:
        result = ON_GPU_ONLY[function](*host_args, **host_kwargs)
    elif function is aten.histc.default and on_gpu:  # takes integers on a GPU alone
        result = function(host_args[0].double(), *host_args[1:]).to(host_args[0].dtype)
    else:
        result = function(*host_args, **host_kwargs)
    by_host = {id(value.host): value for value in on_gpu}

    def place(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, GpuTensor):
            return value
        same = by_host.get(id(value))
        if same is not None:
            return same
        if not made_there:
            return value
        # a view of a tensor from outside inference mode is none of inference mode, as in torch
        if function.is_view and not on_gpu[0].is_inference():
            with torch.inference_mode(False):
                return GpuTensor(value)
        return GpuTensor(value)

    if function is aten.copy_.default:
        return args[0]
    return replace_tensors(result, place)


class GpuMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(function, args, kwargs or {}, self)


class NumberMode(TorchFunctionMode):
    """Say cuda:0 where cuda is said, as torch would ask a real GPU for its number."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def number(value: Any) -> Any:
            return GPU if isinstance(value, str | torch.device) and str(value) == "cuda" else value

        args = tuple(map(number, args))
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = kwargs | {"device": number(kwargs["device"])}
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            # torch would make a meta tensor of a list
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(v) if isinstance(v, list) else v for v in index)
            args = (args[0], index, *args[2:])
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") == GPU:
            return function(*args, **kwargs | {"device": "cpu"}).to(GPU)  # these are no operators
        return function(*args, **kwargs)


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """Have a GPU with 80 GB of memory."""
    replaced = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0),
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "mem_get_info": lambda *_: (80 * 10**9, 80 * 10**9),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=80 * 10**9),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
    }
    read_model = PreTrainedModel.from_pretrained.__func__

    def read_on_cpu(kind: Any, *args: Any, **kwargs: Any) -> Any:
        # it builds the model of real meta tensors
        no_gpu = mock.patch.object(torch.cuda, "is_available", lambda: False)
        with no_gpu, _disable_current_modes():
            return read_model(kind, *args, **kwargs)

    run_thread = threading.Thread.run

    def run_with_modes(thread: threading.Thread) -> None:
        with NumberMode(), GpuMode():  # torch keeps them for each thread
            run_thread(thread)

    future: Any = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)  # modules that share a parameter still do
    try:
        with (
            mock.patch.multiple(torch.cuda, **replaced),
            mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(read_on_cpu)),
            mock.patch.object(threading.Thread, "run", run_with_modes),
            mock.patch.object(decoder, "capture", capture),
            NumberMode(),
            GpuMode(),
        ):
            yield
    finally:
        future.set_swap_module_params_on_conversion(before)
