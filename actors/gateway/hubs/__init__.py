"""Environments of the hubs, by name: agent.env = "verifiers:NAME".

The adapters run in the processes of agent.workers, and so in agent.python. They import a hub's
package only to load one of its environments, and otherwise only asyncrl, msgspec and xxhash.

    self_playing   chooses the adapter of an environment that calls the policy itself
    verifiers_v0   environments of verifiers 0.1: load_environment(NAME, **args)
    verifiers_v1   environments of verifiers 0.4: a taskset and the agents that play it
    verifiers_chat the harness of such an agent that only chats, in the process of the adapter
    examine        a program that makes an environment and writes its prompts to files
    prompt_files   starts that program before a run
    stepped        environments of gem, gymnasium and OpenEnv, with reset and step
    tools          agent.tools: functions, and classes in the form of TRL's environments
"""

from typing import Literal

Split = Literal["train", "eval"]  # the data sets of an environment
SPLITS: tuple[Split, ...] = ("train", "eval")
