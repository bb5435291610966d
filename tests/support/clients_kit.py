"""Runs the agents of docs/clients with their real packages, started as a run starts agent.command,
against the endpoint over an engine that answers what a test says."""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from gateway_kit import Served
from process_kit import ROOT
from pushed_kit import Commands

from actors.gateway.agents.session_messages import SessionResult
from actors.gateway.call_tree import CallNode
from actors.gateway.chat import parse_hermes
from actors.gateway.endpoint import web
from actors.gateway.endpoint.requests import ParsedRequest
from actors.gateway.sessions import Session
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.messages import Prompt

AGENTS = {
    path.stem.removesuffix("_agent").replace("_", "-"): path
    for path in (ROOT / "docs" / "clients").glob("*_agent.*")
}
TASK = Prompt(0, "What is 17 times 3?", answer="51", meta={"value": "51"})
# one process for all pages of an environment: the page is named in the task
RUN_PAGE = (
    "import json, os, runpy; task = json.load(open(os.environ['ASYNCRL_TASK'])); "
    "runpy.run_path(task['meta']['program'], run_name='__main__')"
)


def tool_call(name: str, **arguments: Any) -> str:
    """As the policy writes one."""
    body = msgspec.json.encode({"name": name, "arguments": arguments}).decode()
    return f"<tool_call>{body}</tool_call>"


MULTIPLY = tool_call("multiply", a=17, b=3)


def write_program(page: str, folder: Path) -> Path:
    return Path(shutil.copy(AGENTS[page], folder))


def python_of(environment: str) -> str:
    path = Path(sys.prefix) / environment / "bin" / "python"
    assert path.exists(), f"{path} is not there: run `make env`"
    return str(path)


@dataclass
class Ended:
    """What came of a session.  ignored: what its requests asked for in vain."""

    session: Session
    left: SessionResult
    ignored: set[str] = field(default_factory=set)

    @property
    def prompts(self) -> list[str]:
        """Of its calls."""
        text = self.session.composer.decode_text
        return [text(node.prompt_ids.tolist()) for node in self.session.tree.nodes]


class Runner:
    """The endpoint, and a process that starts programs."""

    def __init__(self, path: Path, command: Sequence[str]) -> None:
        self.path = path
        self.served = Served(parser=parse_hermes)
        agent = AgentConfig(command=[*command])
        self.commands = Commands(path, agent)

    def play(
        self, page: str, answers: Sequence[str], asides: Mapping[str, str] = MappingProxyType({})
    ) -> Ended:
        """One session of a page's program.  answers: what the engine writes, call by call, the last
        one again where it is asked for more.  asides: text in a prompt -> the answer to that call,
        which is not counted."""
        program = write_program(page, self.path)
        opened = self.served.do(self.served.service.open)
        ended = Ended(opened, SessionResult(0, "failed"))
        left = [*answers]

        def answer(call: CallNode) -> str:
            prompt = opened.composer.decode_text(call.prompt_ids.tolist())
            aside = next((asides[text] for text in asides if text in prompt), None)
            return aside or (left.pop(0) if len(left) > 1 else left[0])

        self.served.service.say = answer
        prompt = msgspec.structs.replace(TASK, meta={**TASK.meta, "program": str(program)})
        with recorded(ended):
            ended.left = self.commands.play(self.served, opened, prompt)
        return ended

    def log(self) -> str:
        """What programs printed."""
        return self.commands.log.read_text()

    def close(self) -> None:
        self.commands.worker.kill()
        self.served.close()


@contextmanager
def recorded(ended: Ended) -> Iterator[None]:
    """Note what the endpoint ignores of each request."""
    read = web.WebApp._read_call

    async def noted(self: Any, *given: Any) -> ParsedRequest:
        asked = await read(self, *given)
        ended.ignored.update(asked.ignored)
        return asked

    web.WebApp._read_call = noted
    try:
        yield
    finally:
        web.WebApp._read_call = read
