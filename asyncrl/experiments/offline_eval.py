"""Evaluations outside a run.

An engine in this process samples the completions that a run's evaluation would request.
"""

import time
from collections.abc import Callable

from actors.engine import Engine, load_model
from actors.engine_embedded import make_engine
from actors.turn import EVERYTHING, GeneratorTurn
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Ticket
from asyncrl.contract.versions import Label
from asyncrl.models.policy import PolicyModel
from asyncrl.records.pass_at_k import compute_set_metrics
from buffer.evaluation import EvaluationSet
from buffer.service import make_evaluations

Report = Callable[[str, int, int], None]  # name of a set, scored completions, all completions


class OfflineEvaluator:
    """The evaluations of `config` outside a run.

    Prompts, random streams and evaluated versions are those of a run.

    engine: None: the embedded one. report: called while a set is evaluated.
    failures: the reasons for which completions of the last set have no reward.
    """

    def __init__(
        self, config: Config, engine: Engine | None = None, report: Report | None = None
    ) -> None:
        self.config = config
        self.engine = engine or make_engine(config)
        self.report = report or (lambda name, done, total: None)
        self.turn = GeneratorTurn(config, self.engine, lockstep=False)
        self.plan = make_evaluations(config, self.turn.task).plan
        self.loaded = Label(1, 0)
        self.attempt = 0  # of all tickets of a set, so that each is accepted once
        self.failures: list[str] = []

    def load(self, model: PolicyModel, number: int) -> None:
        """Load the model to evaluate, as version `number`."""
        self.loaded = Label(1, number)
        load_model(self.engine, model, self.loaded)

    def evaluate(self, model: PolicyModel, number: int, *, last: bool) -> dict[str, float]:
        """Return the metrics of version `number`; empty if no evaluation is due.

        last: the final evaluation, which has more prompts.
        """
        due_sets = self.plan.list_due(number, number if last else -1)
        if not due_sets:
            return {}
        self.load(model, number)
        values: dict[str, float] = {}
        for name, prompts in due_sets:
            values |= self.measure(self.plan.find_set(name), prompts)
        return values

    def make_tickets(self, plan: EvaluationSet, prompts: int) -> list[Ticket]:
        """Return the tickets of a set, as a run's evaluation grants them.

        The tickets require the loaded version. A greedy completion has its own ticket.
        """
        config = self.config
        sample_groups = [list(range(plan.samples)), *([[plan.samples]] if plan.greedy else [])]
        tickets = []
        for samples in sample_groups:
            self.attempt += 1
            tickets += [
                Ticket(
                    ticket=plan.compute_ticket(index),
                    attempt=self.attempt,
                    kind="eval",
                    prompt=self.turn.task.prompt(plan.name, index, config.seed),
                    samples=samples,
                    sampling=plan.make_sampling(samples[0], config.generator.max_new_tokens),
                    min_version=self.loaded,
                    exact_version=self.loaded,
                    seed=config.seed,
                )
                for index in range(prompts)
            ]
        return tickets

    def measure(self, plan: EvaluationSet, prompts: int) -> dict[str, float]:
        """Return the metrics over the first `prompts` prompts of a set; empty without prompts.

        Completions are left out if their reward fails or their prompt is too long.
        """
        self.failures = []
        if not prompts:
            return {}
        self.turn.accept_tickets(self.make_tickets(plan, prompts))
        total = prompts * len(plan.numbers)
        requests, refused = self.turn.build_requests(self.loaded, room=EVERYTHING)
        for too_long in refused:
            self.turn.schedule.finish_sample(too_long.key, 0)
            self.failures.append(too_long.failure.why)
        self.engine.add(requests)
        rewards: dict[int, list[float]] = {}
        greedy: list[float] = []
        lengths: list[int] = []
        while self.engine.active or self.turn.unscored:
            for completion in self.engine.step() if self.engine.active else []:
                if (finished := self.turn.finish(completion)) is not None:
                    self.turn.submit(finished)
            results = self.turn.poll_results()
            for response, result in results:
                if result.failed:
                    self.failures.append(result.failed.why)
                    continue
                ticket, sample, _ = response.completion.key
                if sample == plan.samples:
                    greedy.append(result.reward)
                    continue
                rewards.setdefault(ticket - plan.compute_ticket(0), []).append(result.reward)
                lengths.append(len(response.completion.tokens))
            if results:
                scored = len(lengths) + len(greedy) + len(self.failures)
                self.report(plan.name, scored, total)
            elif not self.engine.active:
                time.sleep(0.001)
        return compute_set_metrics(plan.name, rewards, greedy, lengths, plan.passing, plan.counts)

    def close(self) -> None:
        self.turn.rewards.close()
