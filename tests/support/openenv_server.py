"""A server of OpenEnv on a free port, which it prints: `python openenv_server.py`."""

import socket
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    word: str


class Heard(Observation):
    text: str
    note: str = ""


class Echo(Environment):
    """Pays for long words; ends with "bye"."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Heard:
        self.seen = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Heard(text=f"seed {seed}")

    def step(self, action: Action, timeout_s: float | None = None, **more: Any) -> Heard:
        assert isinstance(action, Word)
        self.seen.step_count += 1
        reward = float(len(action.word))
        return Heard(text=action.word.upper(), reward=reward, done=action.word == "bye")

    @property
    def state(self) -> State:
        return self.seen


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Word, Heard, max_concurrent_envs=4)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
