"""The loss over a large vocabulary holds a bounded piece of the logits at once, forward and
backward, for any number of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.models import packed_forward

VOCABULARY, WIDTH, CHUNK = 1024, 8, 1 << 15


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operator gave back."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, tuple | list) else [out]
        sizes = [each.numel() for each in found if isinstance(each, torch.Tensor)]
        self.most = max(self.most, *sizes, 0)
        return out


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("tokens", [100, 400, 1600])
def test_no_piece_of_the_logits_is_larger_than_a_chunk(
    tokens: int, truncated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_forward, "LOGIT_CHUNK", CHUNK)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=draw, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=draw)
    support = None
    if truncated:
        kept = [np.unique([token, 0, 7]) for token in targets.tolist()]
        recorded = SampledSupport.from_lists(kept, VOCABULARY)
        support = packed_forward.SupportTable([recorded], [tokens], targets.device)
    with Largest() as seen:
        found, entropy = packed_forward._PickedLogprobs.apply(
            hidden, weight, targets, torch.ones(tokens), True, support
        )
        (found.sum() + entropy.sum()).backward()
    assert 0 < seen.most <= max(CHUNK, tokens * WIDTH) < tokens * VOCABULARY
    # and it is the loss with all logits at once
    logs = (hidden.detach() @ weight.detach().T).log_softmax(-1)
    if support is not None:
        logs = support.renormalize(logs, 0)
    want = logs.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
