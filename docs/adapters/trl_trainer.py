# TRL 1.16.0: GRPOTrainer with any method; metrics go to TRL's log
import torch
from trl import GRPOTrainer

from asyncrl.losses import loss


class MethodTrainer(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        score = self._get_per_token_logps_and_entropies
        now = score(model, ids, attention, mask.shape[1])[0].float()
        old = inputs.get("old_per_token_logps", now.detach()).float()
        sampled = inputs.get("sampling_per_token_logps", old).float()
        result = loss(now, sampled, inputs["advantages"], mask, method="vespo", start=old)
        for name, value in result.metrics.items():
            self._metrics["train"][name].append(value)
        return result.loss / self.current_gradient_accumulation_steps
