"""A taskset of verifiers 0.4 with a task of each kind, for test_verifiers.py."""

from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf

Kind = Literal["single", "chat", "guess", "tool", "fragile", "raises", "twice"]
ROWS: dict[str, Kind] = {
    "3+4=": "single",
    "4+3=": "chat",
    "guess": "guess",
    "What is 7 times 1?": "tool",
    "a number, please": "fragile",
    "an error, please": "raises",
    "two answers, please": "twice",
}


class KindData(vf.TaskData):
    kind: Kind
    answer: str = "7"


class KindTask(vf.Task[KindData]):
    @vf.reward
    async def exact(self, trace: Any) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: Any) -> float:
        if self.data.kind == "fragile":
            return 1.0 / int(trace.last_reply)
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def turns(self, trace: Any) -> float:
        return float(trace.num_turns)


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "calculator"

    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(a * b)


class KindConfig(vf.TasksetConfig):
    endless: bool = False
    picture: bool = False


class KindTaskset(vf.Taskset[KindTask, KindConfig]):
    def __init__(self, config: KindConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    @classmethod
    def toolsets(cls, config: KindConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[KindTask]:
        if self.config.picture:
            picture = {"type": "image_url", "image_url": {"url": "data:,"}}
            yield KindTask(KindData(kind="chat", prompt=[{"role": "user", "content": [picture]}]))
        while True:
            for text, kind in ROWS.items():
                chat = [{"role": "user", "content": text}]
                prompt: Any = chat if kind == "chat" else text
                yield KindTask(KindData(kind=kind, prompt=prompt, system_prompt="Be brief."))
            if not self.config.endless:
                return


class KindEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(
        harness={"id": "null"}, max_turns=3, retries={"max_retries": 1}
    )
    other: vf.AgentConfig = vf.AgentConfig(
        harness={"id": "null"}, model="fixed", client={"type": "eval", "base_url": "http://[::1]:9"}
    )


class KindEnv(vf.Env[KindEnvConfig]):
    async def run(self, task: KindTask, agents: Any) -> None:
        kind = task.data.kind
        if kind == "guess":
            async with agents.agent.interaction(task) as talk:
                segment = await talk.turn()
                while not segment.terminated and segment.last_reply != task.data.answer:
                    segment = await talk.turn("no")
            return
        for _ in range(2 if kind == "twice" else 1):
            await agents.agent.run(task)
        if kind == "raises":
            raise RuntimeError("the environment is broken")


__all__ = ["KindEnv", "KindTaskset"]

if __name__ == "__main__":  # the process of the tools
    Calculator.run()
