"""What the gateway's tests share: a small tokenizer, and the endpoint over a scripted engine."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from process_kit import until

from actors.gateway.call_tree import CallNode
from actors.gateway.chat import ChatFormat, Parser
from actors.gateway.endpoint.requests import RequestPolicy
from actors.gateway.endpoint.web import Endpoint
from actors.gateway.recovery.session_journal import SessionJournal
from actors.gateway.sessions import Session, SessionLimits
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.messages import Prompt, SamplingSettings, Ticket, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.transport.http_server import ListenAddress

SPECIAL = ["</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>"]
CHARACTERS = sorted(set("".join(map(chr, range(32, 127))) + "\n"))
MERGES = [("l", "o"), ("lo", "w"), ("\n", "\n"), ("e", "r"), (" ", "a")]

CHATML = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{{ c.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer(template: str) -> Any:
    names = CHARACTERS + [a + b for a, b in MERGES]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=MERGES)
    )
    made.add_special_tokens(SPECIAL)
    made.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", chat_template=template
    )


def build_policy(
    stops: Iterable[int] = (), vocabulary: int = 0, images: bool = False, **agent: Any
) -> RequestPolicy:
    return RequestPolicy(AgentConfig(**agent), vocabulary, frozenset(stops), images)


class Scripted:
    """A service whose engine draws what `say` returns for a call, one token a character (or a list
    of tokens), when the gate is open."""

    def __init__(
        self,
        *,
        limits: SessionLimits,
        parser: Parser | None = None,
        tokens: Any = None,
        **policy: Any,
    ) -> None:
        self.run_key = "the-runs-key"
        self.is_over = self.is_ending = False
        self.tokenizer = tokens or tokenizer(CHATML)
        stop = self.tokenizer.convert_tokens_to_ids([self.tokenizer.eos_token, "<|im_end|>"])
        self.request_policy = build_policy(stops=stop, **policy)
        self.chat = ChatFormat(self.tokenizer, stop, parser=parser)
        self.limits = limits
        self.sessions: dict[str, Session] = {}
        self.leases: dict[str, Session] = {}
        self.free = 0  # samples that may be leased
        self.say: Callable[[CallNode], str | list[str]] = lambda call: f"answer {call.number}"
        self.gate = asyncio.Event()
        self.gate.set()
        self.drawn: list[int] = []
        self.clock: Callable[[], float] = time.monotonic
        self.skew = 0.0  # seconds by which the clock was put on
        self.looked_at: list[str] = []
        self.journal = SessionJournal(Path("none"))

    def current_time(self) -> float:
        return self.clock() + self.skew

    def open(self) -> Session:
        number = len(self.sessions)
        prompt = Prompt(number, "2+2=", answer="4")
        sampling = SamplingSettings(max_new_tokens=200)
        ticket = Ticket(number, 1, "train", prompt, [0], sampling, Label(1, 0), None, 0)
        session = Session(
            ticket, 0, 1, self.limits, self.chat, opened=self.current_time(), seed=number
        )
        self.sessions[session.name] = session
        return session

    def find(self, name: str) -> Session | None:
        return self.sessions.get(name)

    async def lease(self, lease: str, wait_s: float) -> Session | None:
        if lease not in self.leases:
            if not self.free:
                await asyncio.sleep(min(wait_s, 0.01))
                return None
            self.free -= 1
            self.leases[lease] = self.open()
        return self.leases[lease]

    async def draw(self, session: Session, call: CallNode) -> CallNode | None:
        while not self.gate.is_set() and not call.cut:
            await asyncio.sleep(0.002)
        text = self.say(call)
        ids = self.tokenizer.convert_tokens_to_ids(list(text))
        finish = "stop"
        if len(ids) >= call.max_new_tokens:
            ids, finish = ids[: call.max_new_tokens], "length"
        elif any(stop in text for stop in call.stop):
            end = min(text.index(stop) + len(stop) for stop in call.stop if stop in text)
            ids = ids[:end]
        elif call.cut:
            finish = "length"
        else:
            ids.append(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self.drawn.append(call.number)
        logprobs = np.linspace(-1, 0, len(ids), dtype=np.float32)
        spans = [VersionSpan(Label(1, 2), "d", 0, len(ids), Label(1, 2))]
        return session.on_result(
            call, np.array(ids), logprobs, spans, finish, now=self.current_time()
        )

    def on_change(self, session: Session) -> None:
        session.tick(self.current_time())
        self.looked_at.append(session.name)


class Served:
    def __init__(self, **more: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        bind = more.pop("bind", ListenAddress())
        limits = more.pop("limits", SessionLimits(max_calls=0, rows=0))

        async def make() -> tuple[Scripted, Endpoint]:
            service = Scripted(limits=limits, **more)
            endpoint = Endpoint(service, bind)
            await endpoint.start()
            return service, endpoint

        self.service, self.endpoint = self.wait(asyncio.run_coroutine_threadsafe(make(), self.loop))
        self.url = self.endpoint.url

    @staticmethod
    def wait(future: Future[Any]) -> Any:
        return future.result(600)

    def do(self, function: Callable[[], Any]) -> Any:
        """In the endpoint's thread."""

        async def run() -> Any:
            return function()

        return self.wait(asyncio.run_coroutine_threadsafe(run(), self.loop))

    def until(self, function: Callable[[], Any]) -> Any:
        return until(lambda: self.do(function))

    def close(self) -> None:
        self.wait(asyncio.run_coroutine_threadsafe(self.endpoint.stop(), self.loop))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(600)
        self.loop.close()
