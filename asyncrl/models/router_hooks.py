"""Record and replay the experts of any transformers model that has routers.

A router computes scores of the experts and passes them to `torch.topk` once. Inside the block that
call is observed, or its choice is replaced by recorded ids with the router's own scores for them.
The rest of the router (renormalization, scaling, a softmax over the chosen) runs unchanged, and so
does a load-balancing loss, which computes its statistics from the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import RoutingShape
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.models.expert_layers import divide_by_layer


class TopKChoice(TorchFunctionMode):
    """Replace the ids that `torch.topk` chooses, and record the ids that were used.

    replayed: int64 [n, k]; an id equal to the number of experts stands for the router's own choice.
        None: the router's own choice everywhere.
    """

    def __init__(self, replayed: Tensor | None) -> None:
        super().__init__()
        self.replayed = replayed
        self.used: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        chosen = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return chosen
        scores, ids = args[0], chosen.indices
        if self.replayed is not None:
            ids = torch.where(self.replayed < scores.shape[-1], self.replayed, ids)
            chosen = torch.return_types.topk((scores.gather(-1, ids), ids))
        self.used.append(ids)
        return chosen


def list_routers(hf: Any) -> list[Any]:
    """Return the modules of a transformers model that choose experts, in order."""
    recordable = getattr(hf, "_can_record_outputs", None) or {}
    target = getattr(recordable.get("router_logits"), "target_class", None)
    return [] if target is None else [m for m in hf.modules() if isinstance(m, target)]


def find_routing(hf: Any) -> RoutingShape | None:
    """Return the shape of a model's routing; None: a dense model."""
    modules = list_routers(hf)
    if not modules:
        return None
    router = modules[0]
    return RoutingShape(len(modules), int(router.num_experts), int(router.top_k))


@torch.no_grad()
def check_replayable(hf: Any) -> None:
    """Try a router. Raises ConfigError if it chooses in another way than by one `torch.topk`."""
    router = list_routers(hf)[0]
    choice = TopKChoice(None)
    with choice:
        router(torch.zeros_like(router.weight[:1]))
    if len(choice.used) != 1:
        raise ConfigError(
            f"learner.replay_routing: the routers of a {hf.config.model_type} choose their experts "
            f"by {len(choice.used)} calls of torch.topk, which cannot be replayed; set it to false"
        )


@contextmanager
def replay_routing(
    hf: Any, replayed: Tensor | None = None, recorded: list[Tensor] | None = None
) -> Iterator[None]:
    """Replay or record the experts of the forward passes inside the block.

    replayed: int64 [layers, n, k], see `TopKChoice`
    recorded: the ids used in each layer [n, k] are appended to it
    """
    modules = list_routers(hf) if replayed is not None or recorded is not None else []
    own_forwards = [router.__dict__.get("forward") for router in modules]
    for layer, router in enumerate(modules):
        ids = None if replayed is None else replayed[layer]
        router.forward = partial(_call_router, router.forward, ids, recorded)
    try:
        yield
    finally:
        for router, forward in zip(modules, own_forwards, strict=True):
            if forward is None:
                del router.forward  # restores the method of the class
            else:
                router.forward = forward


def _call_router(
    forward: Callable[..., Any],
    replayed: Tensor | None,
    recorded: list[Tensor] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    choice = TopKChoice(replayed)
    with choice:
        output = forward(*args, **kwargs)
    if recorded is not None:
        recorded += choice.used
    return output


def build_padded_table(
    routed: Sequence[RoutedExperts | None] | None,
    shape: RoutingShape | None,
    width: int,
    device: torch.device,
) -> Tensor | None:
    """Return the recorded ids of padded rows, int64 [layers, rows * width, k], or None.

    routed: of each row; None: not recorded
    """
    if shape is None or routed is None or not any(recorded is not None for recorded in routed):
        return None
    table = RoutedExperts.make_unrecorded(len(routed) * width, shape).ids
    for row, recorded in enumerate(routed):
        if recorded is not None:
            table[row * width : row * width + len(recorded.ids)] = recorded.ids
    return divide_by_layer(table, device)
