"""An environment of verifiers with four turns, for benchmarks/environment_cost.py."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class FourTurns(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        return [{"role": "user", "content": "go on"}]


async def length(completion: Any) -> float:
    return float(len(completion))


def load_environment() -> vf.Environment:
    dataset = Dataset.from_list([{"question": "begin", "answer": ""}])
    return FourTurns(dataset=dataset, rubric=vf.Rubric(funcs=[length]), max_turns=4)
