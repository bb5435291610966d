"""The section [agent]: samples as sessions of several calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from asyncrl.algorithms.settings import Count, NonNegative, Port, Positive, PositiveFloat, Section
from asyncrl.contract.outcomes import MOST_ROWS

# opponents in a two-player game, besides a function
RANDOM = "random"
SELF = "self"
# hubs; the environments of VERIFIERS call the policy themselves, the others have reset and step
VERIFIERS = "verifiers"
GEM = "gem"
GYMNASIUM = "gymnasium"
OPENENV = "openenv"
HUBS = (VERIFIERS, GEM, GYMNASIUM, OPENENV)


class AgentSource(Section):
    """The source and the limits of sessions, which each part of a mixture may have."""

    env: str = ""
    """Environment in which every sample is a session: module:Class or file.py:Class with
    gymnasium's reset and step, textarena:GAME, verifiers:NAME, gem:ID, gymnasium:ID or openenv:URL.
    Empty: none."""
    args: dict[str, Any] = {}
    """Settings of `env` or of a class in `tools`, as a section [agent.args]: keyword arguments of
    the class or of the loader that creates it. With verifiers 0.4 they are an [env] block, and
    `select` chooses the tasks."""
    python: str = ""
    """Python interpreter that runs `env`, `tools` or `function`, for example that of a virtual
    environment with their packages. It needs msgspec and xxhash, not asyncrl. Empty: this one."""
    opponent: str = ""
    """Opponent in `env`, a two-player game: random; self, the policy itself (its tokens are sampled
    but excluded from training); or module:function or file.py:function from text to text. Empty:
    `env` has one player."""
    eval_opponent: str = ""
    """Opponent in evaluations. Empty: the same as `opponent`."""
    tools: list[str] = []
    """Tools of a session: module:function or file.py:function each, or one class with reset and
    methods. The session ends with a completion that calls no tool. The run's reward, or the class's
    get_reward, scores that completion."""
    serve: bool = False
    """Lease and score sessions over HTTP, for your own agent that calls the policy through OpenAI's
    API. RUN/agent.url and RUN/agent.key hold the address and the key."""
    command: list[str] = []
    """Program and its arguments, started for each session. It calls the endpoint, and its last line
    of output is the reward. Empty: none."""
    env_pass: list[str] = []
    """Environment variables that `command` inherits besides the basic ones (PATH, HOME, LANG,
    TMPDIR ...), by name or pattern. ["*"]: all."""
    function: str = ""
    """Agent as a function: module:function or file.py:function of (prompt, session), called for
    each session. It calls the endpoint and returns the reward. Empty: none."""
    at_once: Positive = 16
    """Most programs of `command`, or calls of `function`, that run at the same time in the
    gateway."""
    workers: Positive = 1
    """Processes that run environments, `command` or `function`."""
    step_s: PositiveFloat = 10.0
    """Seconds that one reset or step of an environment may take. Its import may take at least 60
    seconds."""
    max_calls: Count = 32
    """Most calls of a session. 0: no limit."""
    max_tokens: Positive = 4096
    """Most tokens that a session may sample."""
    rows: Annotated[int, Meta(ge=0, le=MOST_ROWS)] = 16
    """Most training sequences of a session. 0: 4096."""
    deadline_s: PositiveFloat = 600.0
    """Seconds that a session may take."""
    at_limit: Literal["keep", "fail"] = "keep"
    """Treatment of a session that reaches a limit. keep: it gets its reward so far, as a truncated
    completion (advantage.truncated); fail: it fails and is generated again."""

    def choose_opponent(self, kind: str) -> str:
        """Return the opponent in a ticket of this kind, or "" for none."""
        return (self.eval_opponent if kind == "eval" else "") or self.opponent

    @property
    def uses_sessions(self) -> bool:
        """Whether samples are sessions."""
        return bool(self.env or self.tools or self.http)

    @property
    def source_name(self) -> str:
        """The key and the value that define the source of sessions."""
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
        """Whether the gateway starts the agents that call over HTTP."""
        return bool(self.command or self.function or self.hub == VERIFIERS)

    @property
    def http(self) -> bool:
        """Whether agents call over HTTP."""
        return self.serve or self.starts_agents


class AgentConfig(AgentSource):
    host: str = "127.0.0.1"
    """Address on which the endpoint listens. Beyond loopback it needs a certificate or
    behind_proxy."""
    port: Port = 0
    """Port of the endpoint. 0: a free one."""
    certificate: str = ""
    """File of the endpoint's TLS certificate. Empty: none."""
    private_key: str = ""
    """File of the certificate's private key."""
    behind_proxy: bool = False
    """A proxy in front of the endpoint terminates TLS, so that `host` may be any address."""
    model: str = "policy"
    """Model name whose calls are trained."""
    other_models: Literal["aside", "train", "refuse"] = "aside"
    """Treatment of calls under another model name. aside: sample but do not train; train: also
    train; refuse: respond with status 404."""
    sampling: Literal["ignore", "refuse"] = "ignore"
    """Treatment of a client's own temperature, top_p, top_k and seed. ignore: ignore them and name
    them in a header; refuse: respond with status 400."""
    forced: Literal["ignore", "refuse", "constrain"] = "ignore"
    """Treatment of a client's request for a format or a tool (response_format, tool_choice).
    ignore: ignore it and name it in a header; refuse: respond with status 400; constrain: decode
    the response under it, and train over the tokens that it allows."""
    parser: str = "hermes"
    """Parser of tool calls in a completion: hermes, none, or module:function from text to
    message."""
    history: Literal["template", "keep"] = "template"
    """Treatment of chat templates that strip earlier thinking. template: follow them, which starts
    another training sequence; keep: leave the sampled thinking in the prompt."""
    parallel: Count = 16
    """Most calls of a session at the same time. 0: no limit."""
    idle_s: NonNegative = 300.0
    """Seconds without a call or a heartbeat after which a session fails."""
    sessions: Positive = 256
    """Most sessions open at the same time in the gateway."""
    fork: Literal["row", "end"] = "row"
    """Treatment of a call that continues no earlier one. row: start another training sequence; end:
    end the session, as estimators require that need the order of all tokens."""
