"""Environments of verifiers, one of each kind, for test_verifiers.py; `python` imports it in the
environment of the clients."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def rows(*questions: str) -> Dataset:
    return Dataset.from_list([{"question": question, "answer": "7"} for question in questions])


async def exact(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def short(completion: Any) -> float:
    return float(len(completion[-1]["content"]) < 4)


async def fragile(completion: Any) -> float:
    return 1.0 / int(completion[-1]["content"])


async def best(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


class Guess(vf.MultiTurnEnv):
    """Guess a number: the environment answers until it is hit."""

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        said = messages[-1]["content"]
        answer = [{"role": "user", "content": "hit" if said == state["answer"] else "no"}]
        if said == state["answer"]:
            state["final_env_response"] = answer
        return answer


async def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


def load_environment(kind: str = "all") -> vf.Environment:
    if kind == "group":
        return vf.SingleTurnEnv(dataset=rows("q"), rubric=vf.Rubric(funcs=[best]))
    if kind == "picture":
        content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        messages = [{"role": "user", "content": content}]
        return vf.SingleTurnEnv(dataset=Dataset.from_list([{"prompt": messages, "answer": ""}]))
    scores = vf.Rubric(funcs=[exact, short], weights=[1.0, 0.5])
    single = vf.SingleTurnEnv(
        dataset=rows("3+4=", "4+3="),
        eval_dataset=rows("5+2="),
        system_prompt="Be brief.",
        rubric=scores,
    )
    if kind == "single":
        return single
    return vf.EnvGroup(
        [
            single,
            Guess(dataset=rows("guess"), rubric=vf.Rubric(funcs=[exact]), max_turns=3),
            vf.ToolEnv(
                dataset=rows("What is 7 times 1?"),
                tools=[multiply],
                rubric=vf.Rubric(funcs=[exact]),
            ),
            vf.SingleTurnEnv(dataset=rows("a number, please"), rubric=vf.Rubric(funcs=[fragile])),
        ],
        env_names=["single", "guess", "tool", "fragile"],
    )
