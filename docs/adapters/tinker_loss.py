# Tinker: client.forward_backward_custom(data, method_loss)
import torch
from torch.nn.utils.rnn import pad_sequence

from asyncrl.losses import loss

KEYS = {"method": "ppo", "eps_low": 0.3, "eps_high": 0.1, "reduction": "seq-mean-token-sum"}


def method_loss(data, logprobs):
    behavior, adv = (
        pad_sequence([torch.tensor(d.loss_fn_inputs[name].data) for d in data], batch_first=True)
        for name in ("logprobs", "advantages")
    )
    now = pad_sequence(logprobs, batch_first=True)
    mask = behavior != 0  # a prompt's tokens have 0
    result = loss(now, behavior, adv, mask, **KEYS)
    return result.loss * mask.any(1).sum(), result.metrics  # a sum, as the server's own
