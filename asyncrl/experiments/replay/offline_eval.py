"""Held-out accuracy outside a run.

The embedded engine samples the completions that a run's evaluation would request.
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
    """The evaluations of `config` outside a run.

    Prompts, random streams and evaluated versions are those of a run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engine = make_engine(config)
        self.turn = GeneratorTurn(config, self.engine, lockstep=False)
        self.loaded = Label(1, 0)
        self.attempt = 0  # of all tickets of a split, so that none is accepted twice

    def evaluate(self, model: PolicyModel, number: int, *, last: bool) -> dict[str, float]:
        """Return the metrics of version `number`; empty if no evaluation is due.

        last: the final evaluation, which has more prompts.
        """
        evaluation = self.config.evaluation
        ends = last or number == 0
        heldout, ood = (
            ends or (every and number % every == 0)
            for every in (evaluation.every, evaluation.ood_every)
        )
        if not heldout and not ood:
            return {}
        self.loaded = Label(1, number)
        self.engine.load(dict(named_weights(model)), self.loaded, weights_digest(model))
        values: dict[str, float] = {}
        if heldout:
            values |= self.split(
                "heldout", evaluation.final_prompts if ends else evaluation.prompts
            )
        if ood:
            prompts = (
                evaluation.ood_prompts if ends else min(evaluation.prompts, evaluation.ood_prompts)
            )
            values |= self.split("ood", prompts)
        return values

    def tickets(self, split: str, prompts: int) -> list[Ticket]:
        """Return one ticket a prompt, as a run's evaluation grants them.

        The tickets require the loaded version.
        """
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
        """Return mean reward and length over the first `prompts` prompts of a split.

        Samples are left out if their reward fails or their prompt leaves no room for a completion.
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
            for completion in self.engine.step() if self.engine.active else []:
                if (finished := self.turn.finished(completion)) is not None:
                    self.turn.submit(finished)
                    tokens += len(completion.tokens)
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
