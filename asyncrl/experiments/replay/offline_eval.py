"""Held-out accuracy without a run around it: the embedded engine writes the answers that a run's
evaluation would ask for.
"""

from __future__ import annotations

import math
import time

from actors.engine_embedded import make_engine
from actors.turn import EVERYTHING, GeneratorTurn
from asyncrl.config.tree import Config
from asyncrl.contract.messages import EVAL_BASE, SamplingSettings, Ticket
from asyncrl.contract.versions import Label
from asyncrl.models.policy import PolicyModel, named_weights, weights_digest
from buffer.evaluation import OOD_BASE


class OfflineEvaluator:
    """The evaluations of `config`: the same prompts and random streams as in a run, at the versions
    where a run makes them.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engine = make_engine(config)
        self.turn = GeneratorTurn(config, self.engine, lockstep=False)
        self.loaded = Label(1, 0)
        self.attempt = 0  # of all tickets of a split together: one is never taken twice

    def evaluate(self, model: PolicyModel, number: int, *, last: bool) -> dict[str, float]:
        """Metrics of version `number`; empty where none is due.  last: the final evaluation, which
        has more prompts.
        """
        due = self.config.evaluation
        ends = last or number == 0
        heldout, ood = (
            ends or (every and number % every == 0) for every in (due.every, due.ood_every)
        )
        if not heldout and not ood:
            return {}
        self.loaded = Label(1, number)
        self.engine.load(dict(named_weights(model)), self.loaded, weights_digest(model))
        found: dict[str, float] = {}
        if heldout:
            found |= self.split("heldout", due.final_prompts if ends else due.prompts)
        if ood:
            prompts = due.ood_prompts if ends else min(due.prompts, due.ood_prompts)
            found |= self.split("ood", prompts)
        return found

    def tickets(self, split: str, prompts: int) -> list[Ticket]:
        """One a prompt, as a run's evaluation would grant them at the weights that are loaded."""
        self.attempt += 1
        config = self.config
        first = OOD_BASE if split == "ood" else EVAL_BASE
        sampling = SamplingSettings(
            temperature=config.evaluation.temperature,
            max_new_tokens=config.generator.max_new_tokens,
        )
        return [
            Ticket(
                ticket=first + index,
                attempt=self.attempt,
                kind="eval",
                prompt=self.turn.task.prompt(split, index, config.seed),
                samples=[0],
                sampling=sampling,
                min_version=self.loaded,
                exact_version=self.loaded,
                seed=config.seed,
            )
            for index in range(prompts)
        ]

    def split(self, split: str, prompts: int) -> dict[str, float]:
        """Mean reward and length over so many first prompts; a sample whose reward fails, or whose
        prompt leaves no room for an answer, is left out.
        """
        size = self.turn.task.size(split)
        prompts = prompts if size is None else min(prompts, size)
        if not prompts:
            return {}
        self.turn.accept_tickets(self.tickets(split, prompts))
        requests, refused = self.turn.requests(self.loaded, room=EVERYTHING)
        for sample in refused:
            self.turn.schedule.finish_sample(sample.key, 0)
        self.engine.add(requests)
        rewards = []
        tokens = 0
        while self.engine.active or self.turn.judged:
            for answer in self.engine.step() if self.engine.active else []:
                if (written := self.turn.finished(answer)) is not None:
                    self.turn.submit(written)
                    tokens += len(answer.tokens)
            results = self.turn.results()
            rewards += [result.reward for _, result in results if not result.failed]
            if not results and not self.engine.active:
                time.sleep(0.001)
        return {
            f"eval/{split}": math.fsum(rewards) / max(len(rewards), 1),
            f"eval/{split}_n": len(rewards),
            f"eval/{split}_length": tokens / prompts,
        }

    def close(self) -> None:
        self.turn.rewards.close()
