# verl, with bypass_mode = true, so that old_log_prob is the engine's: policy_loss.loss_mode=asyncrl
from verl.trainer.ppo.core_algos import register_policy_loss

from asyncrl.losses import loss


@register_policy_loss("asyncrl")
def method_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", **more
):
    keys = {"method": "vespo", "reduction": loss_agg_mode}
    return tuple(loss(log_prob, old_log_prob, advantages, response_mask, **keys))
