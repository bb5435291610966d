"""Many updates on one batch: the drift of IS-reshape, and its bounds.

It is compared with no trust region and with clipping. The batch is sampled from mu, the policy at
its start, trained for 16 epochs by the learner's loss under configs that a run accepts, and
followed by another batch. KL(mu || theta) in nats a token and the expected reward are exact, over
all responses.
"""

import functools
import itertools
import math
from collections.abc import Callable
from math import nan

import torch
from torch import Tensor, arange

from asyncrl.algorithms import loss as step_loss
from asyncrl.algorithms import ratios
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers
from asyncrl.contract.printable import Say
from asyncrl.contract.toml_writer import read_table
from asyncrl.experiments.lab.corrections import draw_rewards
from asyncrl.experiments.lab.findings import LabFindings, make_table
from asyncrl.experiments.lab.policy import ResponseSpace, compute_cosine
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.metrics import average_known

GROUP = 8
BUDGET = 0.05  # nats a token: the repairs' limit
NEAR = 1.05  # of the budget: repair D is exact to second order, so allow 5 %
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": functools.partial(torch.optim.Adam, betas=(0.9, 0.99)),
}
ARMS, COLUMNS = read_table(__file__).values()


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
    return load.convert(base | ARMS[arm], f"lab reshape, {arm}")


class TabularTrainer:
    """A policy [K, V] under one arm and one optimizer, over several batches."""

    def __init__(
        self,
        space: ResponseSpace,
        start: Tensor,
        right: Tensor,
        c: Config,
        optimizer: str,
        rate: float,
    ) -> None:
        self.space, self.start, self.right, self.c, self.rate = space, start, right, c, rate
        self.theta = start.clone().requires_grad_(True)
        self.optimizer = OPTIMIZERS[optimizer]([self.theta], lr=rate)
        self.last: Tensor | None = None

    def compute_logprobs(self, sampled: Tensor) -> Tensor:
        every = self.space.compute_logprobs(self.theta).reshape(self.space.n, -1)
        return every[sampled].reshape(-1)

    def sample_batch(self, samples: int, seed: int) -> tuple[Tensor, step_loss.LossBatch]:
        """Sample responses from theta and build their batch for the loss.

        Returns the responses, int64 [B], and the batch in groups of 8.
        """
        s = self.space
        sampled = s.sample(self.theta.detach(), samples, seed)
        lp = self.compute_logprobs(sampled).detach()
        return sampled, step_loss.LossBatch(
            seq=arange(samples).repeat_interleave(s.length),
            behavior=lp,
            proximal=lp,
            mask=torch.ones_like(lp, dtype=torch.bool),
            token_lag=torch.zeros_like(lp, dtype=torch.long),
            rewards=self.right[sampled],
            groups=arange(samples) // GROUP,
            truncated=torch.zeros(samples, dtype=torch.bool),
        )

    def train(self, samples: int, seed: int) -> list[Numbers]:
        """Train all epochs of one batch; return a row for every optimizer step.

        The state is the one after the step. Skipped steps have no gradient values.
        """
        mu = self.theta.detach().clone()
        sampled, batch = self.sample_batch(samples, seed)
        prep = step_loss.prepare(batch, self.c)
        rows = []
        row: Numbers | None = None
        parts = self.c.learner.minibatches
        order = torch.Generator().manual_seed(seed)
        groups = arange(samples).reshape(-1, GROUP)
        for _ in range(self.c.learner.epochs):
            deal = torch.randperm(len(groups), generator=order)
            for m in range(parts):
                minibatch = groups[deal[m::parts].sort().values].reshape(-1)
                row = {} if row == {} else self._make_step(prep, sampled, minibatch)
                rows.append(row | self._measure_state(mu, prep, sampled))
        return rows

    def _measure_state(self, mu: Tensor, prep: step_loss.PreparedBatch, sampled: Tensor) -> Numbers:
        """Measure the policy, exactly and by the batch's k3 estimate."""
        theta, s = self.theta.detach(), self.space
        lp = self.compute_logprobs(sampled).detach()
        log_w = ratios.compute_log_ratio(lp, prep.batch.behavior)
        chance = s.compute_probability(theta)
        return {
            "kl": float(s.compute_kl(mu, theta)) / s.length,
            "kl_batch": float((torch.expm1(log_w) - log_w).mean()),
            "kl_start": float(s.compute_kl(self.start, theta)) / s.length,
            "reward": float((chance * self.right).sum()),
            "entropy": float(-(chance * chance.log()).sum() / s.length),
        }

    def _make_step(
        self, prep: step_loss.PreparedBatch, sampled: Tensor, minibatch: Tensor
    ) -> Numbers:
        """Make one optimizer step as the learner does; {} if early stopping skips it."""
        logprobs = self.compute_logprobs(sampled)
        has_stepped = prep.steps > 0
        step = step_loss.begin_step(prep, minibatch, logprobs.detach())
        part = arange(len(logprobs)).reshape(-1, self.space.length)[minibatch].reshape(-1)
        lp = logprobs[part]
        loss, sums = step_loss.compute_micro_loss(prep, step, part, lp)
        stop = self.c.stop
        kl, weight = step_loss.sum_update_kl(prep, part, lp.detach())
        is_past = stop.kl_max and stop.action == "skip" and float(kl / weight) > stop.kl_max
        if has_stepped and (step.lr_scale == 0 or is_past):
            return {}
        slope = torch.autograd.grad(loss, lp, retain_graph=True)[0]
        g = torch.autograd.grad(lp, self.theta, slope)[0]
        row = {
            "grad_norm": float(g.norm()),
            "cosine": nan if self.last is None else compute_cosine(g, self.last),
            "gamma": step_loss.finish(sums).get("reshape/gamma", nan),
            "share": step.reshape.share if step.reshape else nan,
            "lr_scale": step.lr_scale,
            "coefficient_var": float((-slope * len(part)).var()),
        }
        self.last = self.theta.grad = g
        self.optimizer.param_groups[0]["lr"] = self.rate * step.lr_scale
        self.optimizer.step()
        return row


def measure(
    vocabulary: int,
    length: int,
    seeds: int,
    epochs: int,
    batches: int,
    minibatches: int,
    samples: int,
    lr_sgd: float,
    lr_adam: float,
    say: Say,
) -> JsonObject:
    """Run the experiment.

    - runs[optimizer][arm][quantity]: mean over seeds at every step
    - highest[optimizer][arm]: each seed's largest KL of any batch and of the first, its last reward
      and its number of steps

    Raises ConfigError for samples that are not whole groups, at least one in a minibatch.
    """
    if samples % GROUP or minibatches > samples // GROUP:
        raise ConfigError(
            f"--samples {samples} --minibatches {minibatches}: groups of {GROUP} completions, with "
            "at least one group in a minibatch"
        )
    rates = {"sgd": lr_sgd, "adam": lr_adam}
    space = ResponseSpace(vocabulary, length)
    cases = [
        (space.draw_table(1000 * seed), draw_rewards(space, 1000 * seed + 1))
        for seed in range(seeds)
    ]
    runs: JsonObject = {optimizer: {} for optimizer in rates}
    highest: JsonObject = {optimizer: {} for optimizer in rates}
    for optimizer, rate in rates.items():
        for arm in ARMS:
            say(f"{optimizer}: {arm}")
            c = make_config(arm, epochs, minibatches)
            rows = []
            for seed, (theta, right) in enumerate(cases):
                trainer = TabularTrainer(space, theta, right, c, optimizer, rate)
                by_batch = [trainer.train(samples, 1000 * seed + 10 + n) for n in range(batches)]
                rows.append(list(itertools.chain(*by_batch)))
            runs[optimizer][arm] = {
                n: [
                    average_known([row.get(n, nan) for row in step])
                    for step in zip(*rows, strict=True)
                ]
                for n in rows[0][0]
            }
            highest[optimizer][arm] = {
                "kl": [max(x["kl"] for x in r) for r in rows],
                "kl_batch": [max(x["kl_batch"] for x in r) for r in rows],
                "kl_first": [max(x["kl"] for x in r[: epochs * minibatches]) for r in rows],
                "reward": [r[-1]["reward"] for r in rows],
                "steps": [sum("grad_norm" in x for x in r) for r in rows],
            }
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
        "start_reward": average_known(
            [float((space.compute_probability(theta) * right).sum()) for theta, right in cases]
        ),
        "highest": highest,
        "runs": runs,
    }


# ---- the presentation ----------------------------------------------------------------------------


def present_findings(r: JsonObject) -> LabFindings:
    """Present the result of `measure`: prior claims and a table for each rate."""
    rates = ", ".join(f"{o} {x:g}" for o, x in r["rates"].items())
    setting = (
        f"{r['vocabulary']} symbols, {r['length']} tokens; {r['batches']} batch(es) of "
        f"{r['samples']} responses, {r['epochs']} epochs of {r['minibatches']} step(s); rates: "
        f"{rates}; {r['seeds']} seeds; budget {r['budget']:g}. KL(mu || theta) a token, mu the "
        "batch's start: exact over all responses; `by the batch`: the k3 estimate on its samples, "
        "which the repairs use. A early stop, B clip, C KL penalty, D KL budget."
    )
    claims = [claim for o in r["runs"] for claim in _check_optimizer(r, o)]
    tables = [
        make_table(
            f"{o}, learning rate {r['rates'][o]:g}",
            {a: _describe_arm(x, r["highest"][o][a]) for a, x in arms.items()},
        )
        for o, arms in r["runs"].items()
    ]
    return LabFindings(setting, r, claims, tables)


def _check_optimizer(r: JsonObject, o: str) -> list[tuple[str, bool]]:
    budget, run = r["budget"], r["runs"][o]
    kl = {a: average_known(h["kl_first"]) for a, h in r["highest"][o].items()}
    agree = min(run["v3.1"]["cosine"][1 : r["epochs"] * r["minibatches"]])
    batch_kl = max(r["highest"][o]["D learning rate"]["kl_batch"])
    claims = [
        (
            f"{o}: v3.1 drifts past clip: KL {kl['v3.1']:.3f} against {kl['clip']:.3f} after "
            f"the first batch, {kl['v3.1'] / kl['clip']:.1f} times (vanilla {kl['vanilla']:.3f})",
            kl["v3.1"] > 2 * kl["clip"],
        ),
        (f"{o}: its successive gradients agree: least cosine {agree:.3f}", agree > 0.8),
        (
            f"{o}: D on the learning rate keeps the batch's own KL within {NEAR - 1:.0%} of "
            f"its budget for every seed (highest {batch_kl:.4f})",
            batch_kl <= NEAR * budget,
        ),
        (
            f"{o}: D in the report's wording (one gamma for the batch) does not bound it: "
            f"{kl['D global']:.3f}",
            kl["D global"] > 2 * budget,
        ),
    ]
    still = kl["gamma 0.001"] < 0.01 * kl["vanilla"]
    text = f"{o}: with gamma = 0.001 the policy does not move: KL {kl['gamma 0.001']:.1e}"
    if o != "adam":
        return [*claims, (text, still)]
    norms = zip(run["gamma 0.001"]["grad_norm"], run["vanilla"]["grad_norm"], strict=True)
    # without steps at which vanilla's norm has vanished
    small = max((norm / vanilla for norm, vanilla in norms if vanilla > 1e-6), default=0.0)
    return [
        *claims,
        (
            f"adam: with gamma = 0.001 the gradient is at most {small:.4f} of vanilla's "
            f"but the KL is {kl['gamma 0.001']:.3f}: steps are "
            "normalized, so a small consistent gradient drifts as far",
            small < 0.01 and kl["gamma 0.001"] > 0.5 * kl["vanilla"],
        ),
        (
            f"adam: D on the coefficient is not a bound: {kl['D coefficient']:.3f}",
            kl["D coefficient"] > budget,
        ),
    ]


def _describe_arm(run: JsonObject, highest: JsonObject) -> dict[str, str]:
    values = {"kl_worst": max(highest["kl"])}
    for name, by_step in run.items():
        series = [x for x in by_step if not math.isnan(x)] or [nan]
        values |= {f"{name}_first": series[0], f"{name}_last": series[-1]}
        values[f"{name}_least"] = min(series)
    values |= {name: average_known(by_seed) for name, by_seed in highest.items()}
    return {head: form.format(**values) for head, form in COLUMNS.items()}
