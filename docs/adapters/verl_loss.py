# verl 0.9.1: policy_loss.loss_mode=asyncrl, with bypass_mode = true (old_log_prob: the engine's)
from verl.trainer.ppo.core_algos import register_policy_loss

from asyncrl.losses import loss


@register_policy_loss("asyncrl")
def method_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", **more
):
    keys = {"method": "vespo", "reduction": loss_agg_mode}
    if loss_agg_mode == "seq-mean-token-sum-norm":
        keys["norm_length"] = response_mask.shape[1]
    return tuple(loss(log_prob, old_log_prob, advantages, response_mask, **keys))
