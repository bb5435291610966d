"""Many updates on one batch: the drift of IS-reshape, and its bounds.

It is compared with no trust region and with clipping. The batch is sampled from mu, the policy at
its start, trained for 16 epochs by the learner's loss under configs that a run accepts, and
followed by another batch. KL(mu || theta) in nats a token and the expected reward are exact, over
all responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from asyncrl.algorithms import loss as step_loss
from asyncrl.algorithms import ratios
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.experiments.lab.corrections import draw_rewards
from asyncrl.experiments.lab.policy import ResponseSpace, compute_cosine

GROUP = 8
BUDGET = 0.05  # nats a token: the repairs' limit
RESHAPE: dict[str, Any] = {"loss": {"surrogate": "reshape"}}
STOP = {"stop": {"kl_max": BUDGET, "against": "behavior"}}
SLOW = {"stop": {"kl_max": BUDGET, "against": "behavior", "action": "slow"}}


def _merge_reshape(**reshape: Any) -> dict[str, Any]:
    return RESHAPE | {"reshape": reshape}


ARMS: dict[str, dict[str, Any]] = {
    "vanilla": {"loss": {"surrogate": "vanilla"}},
    "clip": {"loss": {"surrogate": "ppo"}},
    "v3.1": RESHAPE,
    "v3.1 box-cox": _merge_reshape(form="box_cox"),
    "gamma base": _merge_reshape(mode="base"),
    "gamma 0.001": _merge_reshape(mode="constant", gamma=0.001),
    "gamma 0.5": _merge_reshape(mode="constant", gamma=0.5),
    "gamma 0 box-cox": _merge_reshape(mode="constant", gamma=0.0, form="box_cox"),
    "A": RESHAPE | STOP,
    "B": _merge_reshape(clip=0.2),
    "C": _merge_reshape(kl_penalty=1.0),
    "D coefficient": _merge_reshape(budget="tokens", kl_budget=BUDGET),
    "D global": _merge_reshape(budget="global", kl_budget=BUDGET),
    "D learning rate": RESHAPE | SLOW,
    "A+B": _merge_reshape(clip=0.2) | STOP,
    "A+D coefficient": _merge_reshape(budget="tokens", kl_budget=BUDGET) | STOP,
    "B+C": _merge_reshape(clip=0.2, kl_penalty=1.0),
    "B+D learning rate": _merge_reshape(clip=0.2) | SLOW,
    "A+B+C+D coefficient": _merge_reshape(
        clip=0.2, kl_penalty=1.0, budget="tokens", kl_budget=BUDGET
    )
    | STOP,
    "vanilla+A": {"loss": {"surrogate": "vanilla"}} | STOP,
    "vanilla+D learning rate": {"loss": {"surrogate": "vanilla"}} | SLOW,
    "clip+D learning rate": {"loss": {"surrogate": "ppo"}} | SLOW,
}


def make_config(arm: str, epochs: int, minibatches: int) -> Config:
    """Return the arm's settings, validated as in a run."""
    base = {
        "model": {"path": "-"},
        "task": {"name": "sort"},
        "correction": {"proximal": "behavior"},
        "advantage": {"name": "grpo"},
        "learner": {
            "epochs": epochs,
            "minibatches": minibatches,
            "group_size": GROUP,
            "groups": 32,
        },
    }
    return load.convert(base | {k: dict(v) for k, v in ARMS[arm].items()}, f"lab reshape, {arm}")


def sample_batch(
    space: ResponseSpace, theta: torch.Tensor, right: torch.Tensor, samples: int, seed: int
) -> tuple[torch.Tensor, step_loss.LossBatch]:
    """Sample responses from theta and build their batch for the loss.

    Returns the responses, int64 [B], and the batch in groups of 8.
    """
    sampled = space.sample(theta, samples, seed)
    n = samples * space.length
    lp = space.compute_logprobs(theta).reshape(space.n, -1)[sampled].reshape(-1)
    return sampled, step_loss.LossBatch(
        seq=torch.arange(samples).repeat_interleave(space.length),
        behavior=lp,
        proximal=lp,
        mask=torch.ones(n, dtype=torch.bool),
        token_lag=torch.zeros(n, dtype=torch.long),
        rewards=right[sampled],
        groups=torch.arange(samples) // GROUP,
        truncated=torch.zeros(samples, dtype=torch.bool),
    )


class TabularTrainer:
    """A policy [K, V] under one arm and one optimizer, over several batches."""

    def __init__(
        self,
        space: ResponseSpace,
        theta: torch.Tensor,
        right: torch.Tensor,
        c: Config,
        optimizer: str,
        rate: float,
    ) -> None:
        self.space = space
        self.right = right
        self.c = c
        self.rate = rate
        self.theta = theta.clone().requires_grad_(True)
        self.start = theta.clone()
        self.optimizer = (
            torch.optim.SGD([self.theta], lr=rate)
            if optimizer == "sgd"
            else torch.optim.Adam([self.theta], lr=rate, betas=(0.9, 0.99))
        )
        self.last: torch.Tensor | None = None

    def compute_logprobs(self, sampled: torch.Tensor) -> torch.Tensor:
        return (
            self.space.compute_logprobs(self.theta).reshape(self.space.n, -1)[sampled].reshape(-1)
        )

    def train(self, samples: int, seed: int) -> list[dict[str, float]]:
        """Train all epochs of one batch; return a row for every optimizer step.

        The state is the one after the step. Skipped steps have no gradient values.
        """
        mu = self.theta.detach().clone()
        sampled, b = sample_batch(self.space, mu, self.right, samples, seed)
        prep = step_loss.prepare(b, self.c)
        rows = []
        stopped = False
        parts = self.c.learner.minibatches
        order = torch.Generator().manual_seed(seed)
        for _ in range(self.c.learner.epochs):
            deal = torch.randperm(samples // GROUP, generator=order)
            for m in range(parts):
                minibatch = torch.cat(
                    [torch.arange(GROUP) + GROUP * int(g) for g in deal[m::parts].sort().values]
                )
                row = {} if stopped else self._make_step(prep, sampled, minibatch)
                stopped = stopped or not row
                rows.append(row | self._measure_state(mu, prep, sampled))
        return rows

    def _measure_state(
        self, mu: torch.Tensor, prep: step_loss.PreparedBatch, sampled: torch.Tensor
    ) -> dict[str, float]:
        """Measure the policy, exactly and by the batch's k3 estimate."""
        theta = self.theta.detach()
        s = self.space
        log_w = ratios.compute_log_ratio(
            self.compute_logprobs(sampled).detach(), prep.batch.behavior
        )
        return {
            "kl": float(s.compute_kl(mu, theta)) / s.length,
            "kl_batch": float((torch.expm1(log_w) - log_w).mean()),
            "kl_start": float(s.compute_kl(self.start, theta)) / s.length,
            "reward": float((s.compute_probability(theta) * self.right).sum()),
            "entropy": s.compute_entropy(theta),
        }

    def _make_step(
        self, prep: step_loss.PreparedBatch, sampled: torch.Tensor, minibatch: torch.Tensor
    ) -> dict[str, float]:
        """Make one optimizer step as the learner does; {} if early stopping skips it."""
        logprobs = self.compute_logprobs(sampled)
        has_stepped = prep.steps > 0
        step = step_loss.begin_step(prep, minibatch, logprobs.detach())
        part = (minibatch[:, None] * self.space.length + torch.arange(self.space.length)).reshape(
            -1
        )
        lp = logprobs[part]
        loss, sums = step_loss.compute_micro_loss(prep, step, part, lp)
        if has_stepped and (
            step.lr_scale == 0
            or (
                self.c.stop.kl_max
                and self.c.stop.action == "skip"
                and self._is_over_budget(prep, part, lp.detach())
            )
        ):
            return {}
        slope = torch.autograd.grad(loss, lp, retain_graph=True)[0]
        g = torch.autograd.grad(lp, self.theta, slope)[0]
        coefficient = -slope * len(part)
        row = {
            "grad_norm": float(g.norm()),
            "cosine": math.nan if self.last is None else compute_cosine(g, self.last),
            "lr_scale": step.lr_scale,
            "coefficient_var": float(coefficient.var()),
            "share": step.reshape.share if step.reshape else math.nan,
        }
        metrics = step_loss.finish(sums) if self.c.loss.surrogate == "reshape" else {}
        row["gamma"] = metrics.get("reshape/gamma", math.nan)
        self.last = g
        self.theta.grad = g
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * step.lr_scale
        self.optimizer.step()
        return row

    def _is_over_budget(
        self, prep: step_loss.PreparedBatch, part: torch.Tensor, lp: torch.Tensor
    ) -> bool:
        a, b = step_loss.sum_update_kl(prep, part, lp)
        return float(a / b) > self.c.stop.kl_max


QUANTITIES = (
    "kl",
    "kl_batch",
    "kl_start",
    "reward",
    "entropy",
    "grad_norm",
    "cosine",
    "gamma",
    "share",
    "lr_scale",
    "coefficient_var",
)


def _find_extremes(rows: list[list[dict[str, float]]], a_batch: int) -> dict[str, list[float]]:
    """Return the extremes of each seed.

    They are the largest KL of any batch and of the first, the last reward, and the number of steps.
    a_batch: steps of a batch.
    """
    return {
        "kl": [max(x["kl"] for x in r) for r in rows],
        "kl_batch": [max(x["kl_batch"] for x in r) for r in rows],
        "kl_first": [max(x["kl"] for x in r[:a_batch]) for r in rows],
        "reward": [r[-1]["reward"] for r in rows],
        "steps": [sum("grad_norm" in x for x in r) for r in rows],
    }


def measure(
    vocabulary: int,
    length: int,
    seeds: int,
    epochs: int,
    batches: int,
    minibatches: int,
    samples: int,
    rates: dict[str, float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the experiment.

    - runs[optimizer][arm][quantity]: mean over seeds at every step
    - highest[optimizer][arm]: each seed's largest KL of any batch
    """
    space = ResponseSpace(vocabulary, length)
    start = _average(
        [
            float(
                (
                    space.compute_probability(space.draw_table(1000 * n))
                    * draw_rewards(space, 1000 * n + 1)
                ).sum()
            )
            for n in range(seeds)
        ]
    )
    runs: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    for optimizer, rate in rates.items():
        runs[optimizer], highest[optimizer] = {}, {}
        for arm in ARMS:
            say(f"{optimizer}: {arm}")
            c = make_config(arm, epochs, minibatches)
            rows = []
            for seed in range(seeds):
                trainer = TabularTrainer(
                    space,
                    space.draw_table(1000 * seed),
                    draw_rewards(space, 1000 * seed + 1),
                    c,
                    optimizer,
                    rate,
                )
                rows.append(
                    [
                        r
                        for n in range(batches)
                        for r in trainer.train(samples, 1000 * seed + 10 + n)
                    ]
                )
            runs[optimizer][arm] = {
                n: [_average([r[t].get(n, math.nan) for r in rows]) for t in range(len(rows[0]))]
                for n in QUANTITIES
            }
            highest[optimizer][arm] = _find_extremes(rows, epochs * minibatches)
    return {
        "vocabulary": vocabulary,
        "length": length,
        "seeds": seeds,
        "epochs": epochs,
        "batches": batches,
        "minibatches": minibatches,
        "samples": samples,
        "rates": rates,
        "budget": BUDGET,
        "start_reward": start,
        "highest": highest,
        "runs": runs,
    }


def _average(x: list[float]) -> float:
    """Average the values that are not nan.

    A seed that stopped early makes no step and has no gradient.
    """
    values = [v for v in x if not math.isnan(v)]
    return sum(values) / len(values) if values else math.nan
