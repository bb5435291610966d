"""Held-out accuracy without a run around it: the embedded engine writes the answers that a run's
evaluation would ask for.
"""

from __future__ import annotations

import math
import time

from actors.engine import Request
from actors.engine_embedded import make_engine
from actors.rewards import RewardRunner
from asyncrl.config.tree import Config
from asyncrl.contract.messages import EVAL_BASE
from asyncrl.contract.versions import Label
from asyncrl.models.policy import PolicyModel, named_weights, weights_digest
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer, stop_tokens
from asyncrl.tasks import get_task
from buffer.evaluation import OOD_BASE


class Evaluator:
    """The evaluations of `config`: the same prompts and random streams as in a run, at the versions
    where a run makes them.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.task = config, get_task(config.task)
        self.tokenizer = load_tokenizer(config.model.path)
        self.engine = make_engine(config)
        self.stops, self.rewards = (
            stop_tokens(self.tokenizer, config),
            RewardRunner(config, self.task),
        )

    def at(self, model: PolicyModel, number: int, *, last: bool) -> dict[str, float]:
        """Metrics of version `number`; empty where none is due.  last: the final evaluation, which
        has more prompts.
        """
        e = self.config.evaluation
        ends = last or number == 0
        heldout, ood = (ends or (every and number % every == 0) for every in (e.every, e.ood_every))
        if not heldout and not ood:
            return {}
        self.engine.load(dict(named_weights(model)), Label(1, number), weights_digest(model))
        out = self.split("heldout", e.final_prompts if ends else e.prompts) if heldout else {}
        return out | (
            self.split("ood", e.ood_prompts if ends else min(e.prompts, e.ood_prompts))
            if ood
            else {}
        )

    def split(self, split: str, n: int) -> dict[str, float]:
        """Mean reward and length over the first n prompts; a sample whose reward fails is left
        out.
        """
        size = self.task.size(split)
        n = n if size is None else min(n, size)
        if not n:
            return {}
        base = OOD_BASE if split == "ood" else EVAL_BASE
        g = self.config.generator
        prompts = {base + i: self.task.prompt(split, i, self.config.seed) for i in range(n)}
        for ticket, p in prompts.items():
            coded = encode_prompt(self.tokenizer, p)
            most = min(g.max_new_tokens, g.context - len(coded))
            self.engine.add(
                [
                    Request(
                        (ticket, 0, 1),
                        coded,
                        ticket,
                        most,
                        self.config.evaluation.temperature,
                        1.0,
                        0,
                        self.stops,
                        self.config.seed,
                    )
                ]
            )
        rewards = []
        lengths = []
        waiting = n
        while waiting:
            for a in self.engine.step() if self.engine.active else []:
                shown = [int(t) for t in a.tokens if int(t) not in self.stops]
                self.rewards.submit(
                    a.key,
                    prompts[a.key[0]],
                    self.tokenizer.decode(shown, skip_special_tokens=True),
                    a.tokens,
                )
                lengths.append(len(a.tokens))
            got = list(self.rewards.poll())
            waiting -= len(got)
            rewards += [reward for _, reward, _, _, failed in got if not failed]
            if not got and not self.engine.active:
                time.sleep(0.001)
        return {
            f"eval/{split}": math.fsum(rewards) / max(len(rewards), 1),
            f"eval/{split}_n": len(rewards),
            f"eval/{split}_length": sum(lengths) / n,
        }

    def close(self) -> None:
        self.rewards.close()
