from typing import Any

from clients_kit import python_of
from process_kit import until

from actors.gateway.environment_pool import EnvironmentPool
from actors.gateway.environment_worker import EnvironmentEvent, EnvironmentOperation
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.messages import Prompt

PATIENCE_S = 600.0


class Player:
    def __init__(self, **agent: Any) -> None:
        given = {"python": python_of("clients"), "step_s": PATIENCE_S} | agent
        self.pool = EnvironmentPool(AgentConfig(**given))

    def event(self) -> EnvironmentEvent:
        (event,) = until(self.pool.poll)
        assert event.kind == "ok", event
        return event

    def reset(self, session: int, seed: int) -> EnvironmentEvent:
        self.pool.reset(EnvironmentOperation(session, "reset", prompt=Prompt(0, "0"), seed=seed))
        return self.event()

    def step(self, session: int, text: str) -> EnvironmentEvent:
        self.pool.step(EnvironmentOperation(session, "step", text))
        return self.event()
