"""PPO and its advantage as functions: copy this file and change it.

    asyncrl run demo --set loss.function=configs/examples/methods/ppo.py:clipped
                     --set advantage.function=configs/examples/methods/ppo.py:leave_one_out

docs/extending.md lists the arguments. `**keys` instead of names takes all of them.
"""

import torch


def clipped(logprobs, behavior_logprobs, advantages, mask):
    """Return the loss of an optimizer step, and metrics for the log: `loss/function/NAME`.

    All are [rows, tokens], one completion a row; the mask is true on the tokens to train.
    """
    ratio = (logprobs - behavior_logprobs)[mask].exp()
    adv = advantages[mask]
    objective = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    return -objective.mean(), {"ratio": ratio.detach().mean(), "moved": (ratio != 1).sum()}


def leave_one_out(rewards, groups, mask):
    """Return the advantage of each row; [rows, tokens] would be that of each token."""
    same = (groups[:, None] == groups).to(rewards) - torch.eye(len(rewards)).to(rewards)
    return rewards - same @ rewards / same.sum(1).clamp(min=1)
