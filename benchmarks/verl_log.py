"""Write a log by verl's own code: its metrics of batches, and its file logger.

    VERL_FILE_LOGGER_PATH=log.jsonl python benchmarks/verl_log.py [--top-p 0.8] [--steps 40]

verl 0.9.1 trains on GPUs only, but the functions that make its metrics and write its log run on a
CPU.  They get batches of a random policy over 40 symbols, sampled by an engine that is about 0.02
nats off, with top_p if it is given, and seconds of a synchronous run.  tests/data/logs has such a
log.  It needs `verl`, `ray`, `tensordict`, `codetiming` and `hydra-core`."""

from __future__ import annotations

import argparse
import random

import torch
from verl import DataProto
from verl.trainer.ppo import metric_utils, rollout_corr_helper
from verl.utils.tracking import Tracking

ROWS, PROMPT, LENGTH, SYMBOLS = 64, 8, 48, 40


def make_batch(rng: torch.Generator, top_p: float) -> DataProto:
    """Sample a batch: [ROWS, LENGTH] tokens, with log-probabilities of engine and trainer."""
    logits = 1.5 * torch.randn(ROWS, LENGTH, SYMBOLS, generator=rng)
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    inside = ordered.cumsum(-1) - ordered < top_p
    mu = torch.zeros_like(logits).scatter(-1, order, ordered * inside)
    mu /= mu.sum(-1, keepdim=True)
    tokens = torch.multinomial(mu.view(-1, SYMBOLS), 1, generator=rng).view(ROWS, LENGTH, 1)
    noise = torch.randn(logits.shape, generator=rng)
    trained = (logits + 0.02 * noise).log_softmax(-1)
    lengths = torch.randint(8, LENGTH + 1, (ROWS, 1), generator=rng)
    mask = (torch.arange(LENGTH) < lengths).long()
    scores = torch.zeros(ROWS, LENGTH)
    scores[:, 0] = (torch.rand(ROWS, generator=rng) < 0.4).float()
    advantages = (scores.sum(-1, keepdim=True) - 0.4).expand(ROWS, LENGTH)
    return DataProto.from_dict(
        {
            "prompts": torch.ones(ROWS, PROMPT, dtype=torch.long),
            "responses": tokens[..., 0],
            "attention_mask": torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.long), mask], 1),
            "response_mask": mask,
            "token_level_scores": scores,
            "token_level_rewards": scores,
            "advantages": advantages,
            "returns": advantages,
            "rollout_log_probs": mu.gather(-1, tokens)[..., 0].log(),
            "old_log_probs": trained.gather(-1, tokens)[..., 0],
        }
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--steps", type=int, default=40)
    args = p.parse_args()
    rng, clock = torch.Generator().manual_seed(0), random.Random(0)
    tracking = Tracking("project", "experiment", ["file"])
    for step in range(1, args.steps + 1):
        batch = make_batch(rng, args.top_p)
        seconds = {
            "gen": clock.uniform(15, 25),
            "old_log_prob": clock.uniform(2, 3),
            "adv": 0.1,
            "update_actor": clock.uniform(7, 9),
            "update_weights": clock.uniform(0.8, 1.2),
        }
        seconds["step"] = sum(seconds.values())
        _, values = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(
            batch, {"rollout_is": "token", "rollout_is_threshold": 2.0}
        )
        values |= metric_utils.compute_data_metrics(batch, use_critic=False)
        values |= metric_utils.compute_timing_metrics(batch, seconds)
        lags = {"trajectory_staleness/mean": 0.0, "trajectory_staleness_worst/mean": 0.0}
        values |= {f"training/off_policy/{name}": lag for name, lag in lags.items()}
        tracking.log(values | {"actor/lr": 1e-6, "actor/grad_norm": 0.3}, step)


if __name__ == "__main__":
    main()
