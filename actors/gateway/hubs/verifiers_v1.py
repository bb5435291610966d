"""Environments of verifiers 0.4 (`verifiers.v1`).

An environment has a taskset, its tasks with their rewards, and the agents that play them. A session
is one episode. The environment's interception server forwards the policy's calls to the
session's endpoint. All sessions of a process share that server and the event loop of
agents.agent_process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import harness_class, load_environment, resolve_env_config

from actors.gateway.agents.session_messages import SessionAccess, SessionResult, parse_outcome
from actors.gateway.hubs import Split, verifiers_chat
from actors.gateway.hubs.self_playing import build_text_messages, check_row
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.contract.printable import get_first_line

SELECT = "select"  # the key of agent.args beside those of an [env] block
CONTEXT_EXCEEDED = "maximum context length"  # in the endpoint's error for an overlong prompt


def load(name: str, args: Mapping[str, Any]) -> TasksetEnvironment:
    """Load a taskset and its environment.

    args: agent.args, an [env] block of verifiers with `select` beside it

    Raises ConfigError for keys that verifiers refuses and for agents that cannot be played, and any
    error of the taskset's import.
    """
    block = dict(args)
    select = block.pop(SELECT, {})
    block["taskset"] = {**block.get("taskset", {}), "id": name}
    try:
        selection = vf.SelectConfig.model_validate(select)
        config = resolve_env_config(block)
    except ValidationError as error:
        details = error.errors()[0]
        key = ".".join(map(str, details["loc"])) or "env"
        reason = get_first_line(f"{key}: {details['msg']}")
        raise ConfigError(f"[agent.args]: {reason}") from error
    policy, agents = localize_agents(config)
    environment = load_environment(config.model_copy(update=agents))
    taskset = environment.taskset.select(selection)
    if not taskset.bounded:
        raise ConfigError(
            "its taskset never ends: say how many tasks are read, agent.args.select.limit = 1000"
        )
    return TasksetEnvironment(environment, list(taskset), policy)


def localize_agents(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of the policy's agent, and all agents for this machine.

    An agent without a runtime and with a harness that only chats runs here and not in Prime's
    sandboxes. The harness `null` runs in this process instead of one for each session.

    Raises ConfigError unless exactly one agent is the policy, and for a harness that would run the
    policy's commands here unasked.
    """
    specs = agent_config_fields(config)
    policies = [name for name, spec in specs.items() if spec.client is None]
    if len(policies) != 1:
        raise ConfigError(
            f"its agents {', '.join(specs)} would be played by {len(policies)} policies: give all "
            "but one a model of their own, [agent.args.AGENT] with model and client"
        )
    harnesses = config.agent_harnesses()
    agents = {}
    for name, spec in specs.items():
        harness, runtime = harnesses[name], spec.runtime
        harness_type = harness_class(harness.id)
        if "runtime" not in spec.model_fields_set:
            runtime = SubprocessConfig()
            if harness_type.EXECUTES_CODE:
                raise ConfigError(
                    f"its agent {name} has the harness {harness.id}, which runs the policy's "
                    f'commands: choose where, agent.args.{name}.runtime.type = "docker" or '
                    f'"subprocess" (this machine), or agent.args.{name}.harness.id = "null" for '
                    "a chat without commands"
                )
        if harness_type is NullHarness and isinstance(runtime, SubprocessConfig):
            harness = verifiers_chat.build_config(harness)
        # a second attempt would be trained on as a part of the same session
        agents[name] = spec.model_copy(
            update={"harness": harness, "runtime": runtime, "retries": vf.RetryConfig()}
        )
    return policies[0], agents


class TasksetEnvironment:
    """A taskset with its agents, as `self_playing` describes an environment.

    policy: the name of the agent that the policy plays
    """

    def __init__(self, environment: Any, tasks: list[Any], policy: str) -> None:
        self.environment = environment
        self.tasks = tasks
        self.policy = policy
        self.serving: AbstractAsyncContextManager[None] | None = None
        self.starting = asyncio.Lock()

    def iterate_rows(self, split: Split) -> Iterator[dict[str, Any]]:
        if split == "train":  # a taskset has no second data set
            for number, task in enumerate(self.tasks):
                messages = build_task_messages(task.data, f"row {number}")
                yield {"messages": messages, "answer": "", "dataset": split}

    async def serve(self) -> None:
        """Start the interception server and shared tools, once in this process.

        They end with the process: verifiers stops its processes when Python exits.
        """
        async with self.starting:
            if self.serving is None:
                serving = self.environment.serving()
                await serving.__aenter__()
                self.serving = serving

    async def play(self, prompt: Prompt, session: SessionAccess) -> SessionResult:
        task = self.tasks[prompt.id]
        check_row(prompt, build_task_messages(task.data, f"row {prompt.id}"), "the taskset")
        await self.serve()
        # a client reads its key from a variable alone; programs of the environment do not inherit
        # one with API_KEY in its name
        variable = f"ASYNCRL_API_KEY_{session.number}"
        os.environ[variable] = session.api_key
        try:
            client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=variable)
            context = vf.ModelContext(model=session.model, client=client)
            episode = await self.environment.run_episode(task, context)
        finally:
            del os.environ[variable]
        return read_episode(session.number, episode, self.policy)


def read_episode(number: int, episode: Any, policy: str) -> SessionResult:
    """Convert an Episode: rewards and metrics of the policy's trace become parts."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        reason = f"failed: {get_first_line(f'{errors[0].type}: {errors[0].message}')}"
        return SessionResult(number, "failed", why=reason)
    traces = [trace for trace in episode.traces if trace.agent.name == policy]
    if len(traces) != 1:
        reason = f"the environment ran the agent {policy} {len(traces)} times, not once"
        return SessionResult(number, "failed", why=reason)
    (trace,) = traces
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    outcome = {**metrics, **scores, "reward": trace.reward}
    call_error = trace.calls[-1].error if trace.calls else None
    overlong = call_error is not None and CONTEXT_EXCEEDED in call_error.message
    truncated = bool(trace.is_truncated or trace.is_timeout or episode.is_timeout or overlong)
    failed = "" if call_error is None or overlong else call_error.message
    return parse_outcome(number, outcome, truncated=truncated, failed=failed)


def build_task_messages(data: Any, location: str) -> list[dict[str, str]]:
    """Return a task's prompt as chat messages, its system prompt first.

    A task without a prompt, which another agent opens, has its name instead.
    """
    if data.prompt is None or isinstance(data.prompt, str):
        prompt: Any = data.prompt or data.name or data.description or f"task {data.idx}"
    else:
        prompt = [{"role": turn.role, "content": turn.content} for turn in data.prompt]
    messages = build_text_messages(prompt, location)
    if data.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages


sys.modules.setdefault(verifiers_chat.HARNESS_ID, verifiers_chat)  # how verifiers finds a harness
