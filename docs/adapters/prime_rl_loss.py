# prime-rl (559b447): trainer.loss.type = "custom", import_path = "FILE.method_loss", and in
# trainer.loss.kwargs: method = "ipo"
import torch
from prime_rl.trainer.rl.loss import LossOutputs

from asyncrl.losses import loss


def method_loss(inputs, **keys):
    names = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
    rows = [getattr(inputs, name)[None] for name in names]
    result = loss(*rows, reduction="seq-mean-token-sum", **keys)
    metrics = {name: torch.tensor(value) for name, value in result.metrics.items()}
    return LossOutputs(loss=result.loss, metrics=metrics)
