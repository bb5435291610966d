"""Environments of verifiers 0.1.

The environments hub has them as SingleTurnEnv, MultiTurnEnv, ToolEnv and their subclasses, each
with its data sets and its rubric.

A session is one `run_rollout` with an OpenAI client at the session's endpoint. All sessions of a
process share one HTTP client and the event loop of agents.agent_process.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import verifiers
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

from actors.gateway.agents.session_messages import SessionAccess, SessionResult, parse_outcome
from actors.gateway.hubs import Split
from actors.gateway.hubs.self_playing import build_text_messages, check_row
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt

EMPTY_ANSWER = "EmptyModelResponseError"  # an error of the environment for an answer without text
TIMED_OUT = "timeout_reached"  # the environment's own limit of time

# of the session whose task runs: the errors of its reward functions
reward_errors: ContextVar[list[str]] = ContextVar("reward_errors")


class RewardErrorHandler(logging.Handler):
    """A handler that collects the errors of reward functions.

    A rubric logs the exception of a reward function and counts it as 0. Trained on, that would
    teach the policy to avoid all that breaks the function.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if (errors := reward_errors.get(None)) is not None:
            errors.append(record.getMessage())


def load(name: str, args: Mapping[str, Any]) -> VerifiersEnvironment:
    """Load an environment by its name.

    Raises ConfigError if its sessions cannot be scored, and any error of its loading.
    """
    return VerifiersEnvironment(verifiers.load_environment(name, **args))


class VerifiersEnvironment:
    """One environment, as `self_playing` describes it.

    Raises ConfigError if its rubric compares the rollouts of a group.
    """

    def __init__(self, environment: Any) -> None:
        # the environment sets signal handlers; the gateway handles an interrupt of the run
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.environment = environment
        if environment.requires_group_rollouts:
            raise ConfigError(
                "its rubric scores the rollouts of a group together, and sessions are scored one "
                "by one: use reward functions of one completion, and a group's baseline "
                "(advantage.name)"
            )
        self.client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=None)
        logging.getLogger("verifiers.rubrics").addHandler(RewardErrorHandler(logging.ERROR))

    def get_dataset(self, split: Split) -> Any:
        """Return one of its data sets, or None."""
        if split == "train":
            return self.environment.build_dataset()
        return self.environment.build_eval_dataset()

    def iterate_rows(self, split: Split) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(self.get_dataset(split) or ()):
            yield {
                "messages": build_text_messages(row["prompt"], f"{split} row {number}"),
                "answer": row.get("answer") or "",
                "dataset": split,
            }

    async def play(self, prompt: Prompt, session: SessionAccess) -> SessionResult:
        errors: list[str] = []
        reward_errors.set(errors)
        client = self.client.with_options(base_url=session.base_url, api_key=session.api_key)
        row = self.get_dataset("eval" if prompt.meta["dataset"] == "eval" else "train")[prompt.id]
        messages = build_text_messages(row["prompt"], f"row {prompt.id}")
        check_row(prompt, messages, "load_environment")
        output = await self.environment.run_rollout(
            row, OpenAIChatCompletionsClient(client), session.model, {}
        )
        return read_output(session.number, output, errors)


def read_output(
    number: int, output: Mapping[str, Any], reward_errors: Sequence[str]
) -> SessionResult:
    """Convert a RolloutOutput: its rubric's functions become parts of the reward.

    An empty answer is the policy's. It is scored, and a function that cannot read it pays 0. A
    failed session would be sampled again, so that the policy would never learn from empty answers.
    """
    outcome = {**(output.get("metrics") or {}), "reward": output.get("reward")}
    truncated = bool(output.get("is_truncated")) or output.get("stop_condition") == TIMED_OUT
    error = output.get("error")
    failed = next(iter(reward_errors), "")
    if error is not None:
        failed = "" if error["error"] == EMPTY_ANSWER else error["error_chain_repr"]
    return parse_outcome(number, outcome, truncated=truncated, failed=failed)
