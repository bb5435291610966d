import numpy as np
import torch

from actors.engine import Completion, CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.models.packed_forward import find_kept_tokens, renormalize

EOS = 1


def request(
    ticket: int, sample: int, prompt: list[int], limit: int = 20, **how: float
) -> CompletionRequest:
    cut = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | how
    return CompletionRequest(
        (ticket, sample, 1), np.array(prompt, np.int32), ticket, limit, stop=(EOS,), seed=7, **cut
    )


def engine(model: policy.PolicyModel, slots: int = 8, **more: object) -> EmbeddedEngine:
    e = EmbeddedEngine(model, slots=slots, context=64, max_new_tokens=20, **more)
    e.load(dict(policy.list_named_weights(model)), Label(1, 0), "d0")
    return e


def run(
    e: EmbeddedEngine, requests: list[CompletionRequest], n: int = 5
) -> dict[tuple[int, int, int], Completion]:
    e.add(requests)
    answers = []
    while e.active:
        answers += e.step(n)
    return {a.key: a for a in answers}


def expected(model: policy.PolicyModel, a: Completion, r: CompletionRequest) -> torch.Tensor:
    """Log-probabilities of the answer by transformers, truncated and scaled as sampled."""
    ids = torch.from_numpy(np.concatenate([a.prompt, a.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model.hf(input_ids=ids).logits[0, len(a.prompt) - 1 : -1].float() / r.temperature
    logs = torch.log_softmax(logits, -1)
    n = len(logs)
    kept = find_kept_tokens(
        logs, torch.full((n,), r.top_p), torch.full((n,), r.top_k, dtype=torch.long)
    )
    logs = renormalize(logs, kept)
    return logs.gather(1, ids[0, len(a.prompt) :, None])[:, 0]


CUTS = [
    {},
    {"temperature": 0.6},
    {"top_p": 0.8},
    {"top_k": 3},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 6},
]
