"""The section [agent]: samples that are sessions of several calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count, Positive
from asyncrl.contract.outcomes import MOST_ROWS

# opponents in a two-player game, besides a function
RANDOM = "random"
SELF = "self"
# hubs: of environments that call the policy themselves, and of those with reset and step
VERIFIERS = "verifiers"
GEM = "gem"
GYMNASIUM = "gymnasium"
OPENENV = "openenv"
HUBS = (VERIFIERS, GEM, GYMNASIUM, OPENENV)


class AgentSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where sessions come from, and their limits: what each part of a mixture may have."""

    env: Annotated[
        str,
        Meta(
            description="Environment in which every sample is a session: module:Class or "
            "file.py:Class with gymnasium's reset and step, textarena:GAME, verifiers:NAME, "
            "gem:ID, gymnasium:ID or openenv:URL. Empty: none."
        ),
    ] = ""
    args: Annotated[
        dict[str, Any],
        Meta(
            description="Settings of `env` or of a class in `tools`, as a section [agent.args]: "
            "keyword arguments of the class or of the loader that makes it. With verifiers 0.4 "
            "they are an [env] block, and `select` chooses the tasks."
        ),
    ] = {}
    python: Annotated[
        str,
        Meta(
            description="Python that runs `env`, `tools` or `function`, for example that of a "
            "virtual environment with their packages. It needs msgspec and xxhash, not asyncrl. "
            "Empty: this one."
        ),
    ] = ""
    opponent: Annotated[
        str,
        Meta(
            description="Other side of `env`, a two-player game: random; self, the policy "
            "itself (its tokens are sampled but excluded from training); or module:function or "
            "file.py:function from text to text. Empty: `env` has one player."
        ),
    ] = ""
    eval_opponent: Annotated[
        str, Meta(description="Other side of `env` in evaluations. Empty: as `opponent`.")
    ] = ""
    tools: Annotated[
        list[str],
        Meta(
            description="Tools of a session: module:function or file.py:function each, or one "
            "class with reset and methods. The session calls them until a completion calls none, "
            "which the reward then judges, or the class's get_reward."
        ),
    ] = []
    serve: Annotated[
        bool,
        Meta(
            description="Lease and score sessions over HTTP, for an agent of yours that calls "
            "the policy through OpenAI's API. RUN/agent.url and RUN/agent.key hold address and "
            "key."
        ),
    ] = False
    command: Annotated[
        list[str],
        Meta(
            description="Program and its arguments, started for each session. It calls the "
            "endpoint, and its last line is the reward. Empty: none."
        ),
    ] = []
    env_pass: Annotated[
        list[str],
        Meta(
            description="Environment variables that `command` inherits besides the basic ones "
            '(PATH, HOME, LANG, TMPDIR ...), by name or pattern. ["*"]: all.'
        ),
    ] = []
    function: Annotated[
        str,
        Meta(
            description="Agent as a function: module:function or file.py:function of (prompt, "
            "session), called for each session. It calls the endpoint and returns the reward. "
            "Empty: none."
        ),
    ] = ""
    at_once: Annotated[
        Positive,
        Meta(
            description="Programs of `command`, or calls of `function`, that run at the same "
            "time in the gateway."
        ),
    ] = 16
    workers: Annotated[
        Positive, Meta(description="Processes that run environments, `command` or `function`.")
    ] = 1
    step_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that one reset or step of an environment may take. Its import "
            "may take at least 60 seconds.",
        ),
    ] = 10.0
    max_calls: Annotated[Count, Meta(description="Calls of a session. 0: no limit.")] = 32
    max_tokens: Annotated[Positive, Meta(description="Tokens that a session may sample.")] = 4096
    rows: Annotated[
        int, Meta(ge=0, le=MOST_ROWS, description="Training sequences of a session. 0: 4096.")
    ] = 16
    deadline_s: Annotated[float, Meta(gt=0, description="Seconds that a session may take.")] = 600.0
    at_limit: Annotated[
        Literal["keep", "fail"],
        Meta(
            description="A session that reached a limit. keep: it gets its reward so far, as a "
            "truncated completion (advantage.truncated); fail: it failed and is generated again."
        ),
    ] = "keep"

    def opponent_for(self, kind: str) -> str:
        """Return the opponent in a ticket of this kind; empty: there is none."""
        return (self.eval_opponent if kind == "eval" else "") or self.opponent

    @property
    def uses_sessions(self) -> bool:
        """True if samples are sessions."""
        return bool(self.env or self.tools or self.http)

    @property
    def source_name(self) -> str:
        """Key and value of the source of sessions."""
        for key in ("env", "tools", "command", "function"):
            if value := getattr(self, key):
                return f"agent.{key} = {value}"
        return "agent.serve"

    @property
    def hub(self) -> str:
        """The hub in `env` = HUB:NAME, one of HUBS; "" for a module or a file."""
        hub = self.env.partition(":")[0]
        return hub if hub in HUBS else ""

    @property
    def starts_agents(self) -> bool:
        """True if the gateway starts the agents that call over HTTP."""
        return bool(self.command or self.function or self.hub == VERIFIERS)

    @property
    def http(self) -> bool:
        """True if agents call over HTTP."""
        return self.serve or self.starts_agents


class AgentConfig(AgentSource, frozen=True, forbid_unknown_fields=True, kw_only=True):
    host: Annotated[
        str,
        Meta(
            description="Address on which the endpoint listens. Beyond loopback it needs a "
            "certificate or behind_proxy."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the endpoint. 0: a free one.")
    ] = 0
    certificate: Annotated[
        str, Meta(description="File of the endpoint's TLS certificate. Empty: none.")
    ] = ""
    private_key: Annotated[str, Meta(description="File of the certificate's private key.")] = ""
    behind_proxy: Annotated[
        bool,
        Meta(
            description="A proxy in front of the endpoint terminates TLS, so that `host` may "
            "be any address."
        ),
    ] = False
    model: Annotated[str, Meta(description="Model name whose calls are trained.")] = "policy"
    other_models: Annotated[
        Literal["aside", "train", "refuse"],
        Meta(
            description="Calls under another model name. aside: sample but do not train; "
            "train: train them too; refuse: answer 404."
        ),
    ] = "aside"
    sampling: Annotated[
        Literal["ignore", "refuse"],
        Meta(
            description="A client's own temperature, top_p, top_k and seed. ignore: ignore "
            "them and name them in a header; refuse: answer 400."
        ),
    ] = "ignore"
    forced: Annotated[
        Literal["ignore", "refuse", "constrain"],
        Meta(
            description="A client's demand for a format or a tool (response_format, "
            "tool_choice). ignore: ignore it and name it in a header; refuse: answer 400; "
            "constrain: decode the answer under it, and train over the tokens that it allows."
        ),
    ] = "ignore"
    parser: Annotated[
        str,
        Meta(
            description="How tool calls are read from a completion: hermes, none, or "
            "module:function from text to message."
        ),
    ] = "hermes"
    history: Annotated[
        Literal["template", "keep"],
        Meta(
            description="Chat templates that strip earlier thinking. template: follow them, "
            "which begins another training sequence; keep: leave the sampled thinking in the "
            "prompt."
        ),
    ] = "template"
    parallel: Annotated[
        Count, Meta(description="Calls of a session at the same time. 0: no limit.")
    ] = 16
    idle_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds without a call or a heartbeat after which a session has failed.",
        ),
    ] = 300.0
    sessions: Annotated[
        Positive, Meta(description="Sessions open at the same time in the gateway.")
    ] = 256
    fork: Annotated[
        Literal["row", "end"],
        Meta(
            description="A call that continues no earlier one. row: it begins another training "
            "sequence; end: it ends the session, which estimators that need the order of all "
            "tokens require."
        ),
    ] = "row"

    def with_source(self, source: AgentSource) -> AgentConfig:
        """Return these settings of the gateway with the source and limits of another agent."""
        own = {name: getattr(source, name) for name in AgentSource.__struct_fields__}
        return msgspec.structs.replace(self, **own)
