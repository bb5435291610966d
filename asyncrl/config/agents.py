"""The section [agent]: samples that are sessions of several calls, and what a session may use."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count, Positive

# who plays the other side of a game of two, besides a function
RANDOM = "random"
SELF = "self"


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    env: Annotated[
        str,
        Meta(
            description="module:Class or file.py:Class, an environment with gymnasium's reset and "
            "step, or textarena:GAME: every sample is a session in one; empty: none"
        ),
    ] = ""
    opponent: Annotated[
        str,
        Meta(
            description="who plays the other side of env, a game of two: random; self, the policy "
            "(drawn as its own, set aside); module:function or file.py:function, text to text; "
            "empty: env is for one player"
        ),
    ] = ""
    eval_opponent: Annotated[str, Meta(description="the same in evaluations; empty: opponent")] = ""
    tools: Annotated[
        list[str],
        Meta(
            description="module:function or file.py:function of each tool: a session calls them "
            "until an answer calls none, which the reward then judges"
        ),
    ] = []
    serve: Annotated[
        bool,
        Meta(
            description="sessions are leased and scored over HTTP, and their calls are OpenAI's: "
            "RUN/agent.url, RUN/agent.key"
        ),
    ] = False
    command: Annotated[
        list[str],
        Meta(
            description="a program and its arguments, started for each session: it asks the "
            "endpoint, and its last line is the reward; empty: none"
        ),
    ] = []
    env_pass: Annotated[
        list[str],
        Meta(
            description="variables of the run's environment that command inherits besides the base "
            'environment (PATH, HOME, LANG, TMPDIR ...), by name or pattern; ["*"]: all of them'
        ),
    ] = []
    function: Annotated[
        str,
        Meta(
            description="module:function or file.py:function of (prompt, session), called for each "
            "session: it asks the endpoint, and returns the reward; empty: none"
        ),
    ] = ""
    at_once: Annotated[
        Positive,
        Meta(description="programs of command, or calls of function, at once in the gateway"),
    ] = 16
    host: Annotated[str, Meta(description="address of the endpoint")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0: a free one")] = 0
    certificate: Annotated[str, Meta(description="file of the TLS certificate; empty: none")] = ""
    private_key: Annotated[str, Meta(description="file of its private key")] = ""
    behind_proxy: Annotated[
        bool, Meta(description="a proxy in front does TLS: host may be any address")
    ] = False
    model: Annotated[str, Meta(description="the model name under which calls are trained")] = (
        "policy"
    )
    other_models: Annotated[
        Literal["aside", "train", "refuse"],
        Meta(description="calls for another name: drawn and never trained; trained; or 404"),
    ] = "aside"
    sampling: Annotated[
        Literal["ignore", "refuse"],
        Meta(description="a client's own temperature, top_p, top_k, seed: ignored by name, or 400"),
    ] = "ignore"
    forced: Annotated[
        Literal["ignore", "refuse"],
        Meta(
            description="a format or a tool that the answer must have (response_format, "
            "tool_choice): ignored by name, or 400"
        ),
    ] = "ignore"
    parser: Annotated[
        str,
        Meta(
            description="how an answer's tool calls are read: hermes, none or module:function, "
            "text to message"
        ),
    ] = "hermes"
    history: Annotated[
        Literal["template", "keep"],
        Meta(
            description="a chat template that strips earlier thinking: another row, or the drawn "
            "thinking stays"
        ),
    ] = "template"
    parallel: Annotated[Count, Meta(description="calls of a session at once; 0: no limit")] = 16
    idle_s: Annotated[
        float, Meta(ge=0, description="seconds without a call or a beat after which it has failed")
    ] = 300.0
    sessions: Annotated[Positive, Meta(description="open at once, in the gateway")] = 256
    workers: Annotated[
        Positive, Meta(description="processes that run environments, or command or function")
    ] = 1
    step_s: Annotated[
        float, Meta(gt=0, description="seconds for one reset or step; of the import, at least 60")
    ] = 10.0
    max_calls: Annotated[Count, Meta(description="calls of a session; 0: no limit")] = 32
    max_tokens: Annotated[Positive, Meta(description="tokens that a session may draw")] = 4096
    rows: Annotated[Count, Meta(description="rows of a session; 0: no limit")] = 16
    deadline_s: Annotated[float, Meta(gt=0, description="seconds of a session")] = 600.0
    fork: Annotated[
        Literal["row", "end"],
        Meta(
            description="a call that continues none before it opens another row, or ends the "
            "session; estimators that need the order of all tokens need end"
        ),
    ] = "row"
    at_limit: Annotated[
        Literal["keep", "fail"],
        Meta(
            description="a session that reached a limit: its reward so far, as an answer that was "
            "cut (advantage.truncated); or failed, and written again"
        ),
    ] = "keep"

    def opponent_for(self, kind: str) -> str:
        """Who plays the other side in a ticket of this kind; empty: there is none."""
        return (self.eval_opponent if kind == "eval" else "") or self.opponent

    @property
    def uses_sessions(self) -> bool:
        """Are samples sessions?"""
        return bool(self.env or self.tools or self.http)

    @property
    def source_name(self) -> str:
        """What plays the sessions, with its key."""
        for key in ("env", "tools", "command", "function"):
            if value := getattr(self, key):
                return f"agent.{key} = {value}"
        return "agent.serve"

    @property
    def http(self) -> bool:
        """Do agents ask over HTTP?"""
        return bool(self.serve or self.command or self.function)
