"""Sessions of a verifiers environment, in a Python of its own, against the endpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from clients_kit import python_of
from gateway_kit import Served
from pushed_kit import Commands

from actors.gateway.agents.session_messages import SessionResult
from actors.gateway.chat import parse_hermes
from actors.gateway.sessions import Session, SessionLimits
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config, ModelConfig, TaskConfig
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import get_task

KINDS = Path(__file__).parent  # the folder of the environments


def config(runs: Path, env: str, python: str = "", **agent: Any) -> Config:
    agent = {"env": env, "python": python or python_of("clients"), **agent}
    return Config(
        runs=str(runs),
        model=ModelConfig(path="m"),
        task=TaskConfig(name="env"),
        agent=AgentConfig(**agent),
    )


class Bench:
    def __init__(self, path: Path, located: Config, context: int = 300) -> None:
        self.task = get_task(located.task)
        self.rows = len(Path(located.task.prompts).read_text(encoding="utf-8").splitlines())
        self.heldout = self.task.size("heldout") or 0
        self.served = Served(
            parser=parse_hermes, limits=SessionLimits(max_calls=3, context=context)
        )
        self.commands = Commands(path, located.agent)

    def prompt(self, text: str) -> Prompt:
        prompts = [self.task.prompt("train", at, 0) for at in range(self.rows)]
        prompts += [self.task.prompt("heldout", at, 0) for at in range(self.heldout)]
        return next(prompt for prompt in prompts if prompt.messages[-1]["content"] == text)

    def play(
        self, prompt: Prompt, *answers: str, open_: Callable[[], Session] | None = None
    ) -> tuple[SessionResult, Session]:
        opened = self.served.do(open_ or self.served.service.open)
        left = [*answers]
        self.served.service.say = lambda _: left.pop(0)
        return self.commands.play(self.served, opened, prompt), opened

    def play_limited(self, prompt: Prompt, *answers: str) -> tuple[SessionResult, Session]:
        """Play a session that may call the policy once."""

        def with_limit() -> Session:
            opened = self.served.service.open()
            opened.limits = SessionLimits(max_calls=1)
            return opened

        return self.play(prompt, *answers, open_=with_limit)

    def close(self) -> None:
        self.commands.worker.kill()
        self.served.close()

    def texts(self, opened: Session) -> list[str]:
        decode = opened.composer.decode_text
        return [decode(node.prompt_ids.tolist()) for node in opened.tree.nodes]
