"""Prompts that are composed once: eight templates against a reference that puts the ids together
token by token, parsers, and what a request's messages may be."""

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from gateway_kit import CHATML, tokenizer

from actors.gateway.call_tree import build_rows
from actors.gateway.chat import (
    INVALID,
    ChatFormat,
    find_parser,
    make_call_id,
    normalize_messages,
    parse_hermes,
    parse_plain_text,
)
from actors.gateway.refusals import CallRefused
from actors.gateway.sessions import Session, SessionLimits, SessionPlayer
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt, SamplingSettings, Ticket, VersionSpan
from asyncrl.contract.versions import Label

WHEN = datetime(2026, 2, 3)

# as CHATML; thinking goes from every answer before the last user's turn
STRIPS = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor -%}
{%- for m in messages -%}
{%- set text = m.content -%}
{{- '' if m.role in ('user', 'assistant', 'tool') else raise_exception('role') -}}
{%- if loop.index0 < ns.last %}{% set text = text.split('</think>')[-1] %}{% endif -%}
<|im_start|>{{ m.role }}
{{ text }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """<|begin_of_text|>{%- for m in messages -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
PLAIN = """{%- for m in messages -%}
{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
APPEND = """{%- for m in messages -%}
{{ '#' if m.role == 'user' else '' }}{{ m.content }}{{ '' if m.role == 'user' else '</s>' }}
{%- endfor %}"""


@dataclass
class Kind:
    """A template, and by hand what it writes around each turn."""

    template: str
    start: str
    head: Callable[[str], str]
    end: str  # the end token of a turn
    close: str  # what follows it
    trims: bool = False

    def answers(self) -> str:
        return self.head("assistant")


def chatml_head(role: str) -> str:
    return f"<|im_start|>{role}\n"


def llama_head(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


DATED = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>{{ '\\n' }}" + CHATML
# SmolLM2's own: a system turn where the client sends none
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
ZOO = {
    "smollm2": Kind(
        SMOLLM2,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n",
        chatml_head,
        "<|im_end|>",
        "\n",
    ),
    "append": Kind(APPEND, "", lambda role: "#" if role == "user" else "", "</s>", ""),
    "chatml": Kind(CHATML, "", chatml_head, "<|im_end|>", "\n"),
    "dated": Kind(
        DATED,
        "<|im_start|>system\nToday is 03 Feb 2026.<|im_end|>\n",
        chatml_head,
        "<|im_end|>",
        "\n",
    ),
    "llama": Kind(LLAMA, "<|begin_of_text|>", llama_head, "<|eot_id|>", "", trims=True),
    "no end token": Kind(PLAIN, "", lambda role: f"{role}: ", "", "\n"),
}


@dataclass
class Said:
    """A turn of the reference; ids: drawn by us."""

    role: str
    text: str
    ids: list[int] | None = None


class Play:
    """A session on a template, with drawn answers that are spelled in other tokens than an encoding
    of their text would have."""

    def __init__(self, kind: Kind, **more: Any) -> None:
        self.kind = kind
        self.tokenizer = tokenizer(kind.template)
        stop = self.tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>", "<|eot_id|>"])
        self.end = stop[1]
        self.chat = ChatFormat(self.tokenizer, stop, **more).with_date(WHEN)
        sampling = SamplingSettings(max_new_tokens=99)
        ticket = Ticket(0, 1, "train", Prompt(0, ""), [0], sampling, Label(1, 0), None, 0)
        free = SessionLimits(max_calls=0, rows=0, deadline_s=0.0)
        self.session = Session(ticket, 0, 1, free, self.chat)

    def characters(self, text: str) -> list[int]:
        """One token a character."""
        return self.tokenizer.convert_tokens_to_ids(list(text))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, messages: list[dict[str, Any]], **more: Any) -> Any:
        return self.session.place(messages=normalize_messages(messages), now=0.0, **more)

    def draw(self, call: Any, ids: list[int], finish: str) -> dict[str, Any]:
        spans = [VersionSpan(Label(1, 0), "d", 0, len(ids), Label(1, 0))]
        logprobs = np.zeros(len(ids), np.float32)
        node = self.session.on_result(call, np.array(ids), logprobs, spans, finish)
        assert node is not None and node.answer is not None
        return sent(node.answer)

    def reference(self, said: list[Said]) -> list[int]:
        """The ids of a prompt, token by token: drawn ones as drawn, each run of text between."""
        ids: list[int] = []
        text = self.kind.start
        for turn in said:
            text += self.kind.head(turn.role)
            if turn.ids is None:
                text += turn.text.strip() if self.kind.trims else turn.text
                foreign = ""
                if turn.role == "assistant" or self.kind.head("user") != "#":
                    foreign = self.kind.end
                text += foreign + self.kind.close
                continue
            ids += self.encode(text) + turn.ids
            text = ("" if turn.ids[-1] in self.chat.ends else self.kind.end) + self.kind.close
        return ids + self.encode(text + self.kind.answers())


def sent(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer as a client has it and sends it back: nothing of ours but what the API names."""
    calls = []
    for call in answer.get("tool_calls", []):
        arguments = json.dumps(call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    made = {"role": "assistant", "content": answer["content"] or None}
    return {**made, "tool_calls": calls} if calls else made


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("seed", range(12))
def test_prompts_are_the_references_token_by_token(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    play = Play(ZOO[kind])
    end = play.tokenizer.convert_tokens_to_ids(ZOO[kind].end or "</s>")
    # conversations as the client has them, and as the reference does
    talks = [([{"role": "user", "content": "go lower"}], [Said("user", "go lower")])]
    for number in range(10):
        messages, said = chance.choice(talks)
        call = play.ask(messages)
        assert call.prompt_ids.tolist() == play.reference(said)
        # no two are equal: of those the newest would go on
        text = chance.choice(["slow", "lower lows", " a\n\nb", "low "])
        text = chance.choice([f"{number}{text}", f" {text}{number}\n"])
        if chance.random() < 0.7:
            ids, finish = [*play.characters(text), end], "stop"
        else:
            ids, finish = play.characters(text), "length"
        answer = play.draw(call, ids, finish)
        if chance.random() < 0.3:  # clients strip
            answer["content"] = answer["content"].strip()
        more = chance.choice(["and\n\nlow", "  low ", "er"])
        parts: Any = [{"type": "text", "text": letter} for letter in more]
        talks.append(
            (
                [*messages, answer, {"role": "user", "content": chance.choice([more, parts])}],
                [*said, Said("assistant", text, ids), Said("user", more)],
            )
        )
    assert set(play.session.tree.forks) <= {"branch", "again"}


@pytest.mark.parametrize("templated", [True, False])
def test_both_sides_of_a_game_may_be_told_and_say_the_same(templated: bool) -> None:
    """Each goes on behind its own draw, not behind the newest that is equal; the other side's draws
    are set aside, and another game begins anew."""
    play = Play(ZOO["chatml"])
    ids = [*play.characters("low"), play.end]
    sides: dict[int, SessionPlayer] = {}

    def turn(game: int, told: Any, chosen: list[int] = ids) -> Any:
        active = sides.setdefault(game, SessionPlayer(templated, game))
        call = active.place_observation(play.session, told, (), 0.0)
        play.draw(call, chosen, "stop")
        active.on_answer(call)
        assert call.aside == (game > 0)
        return call

    said = [{"role": "user", "content": "go"}, *([] if templated else [{"role": "user"}])]
    first = [turn(0, "go"), turn(1, said)]
    second = [turn(0, "lower"), turn(1, "lower")]
    third = [turn(0, "slow", [*ids[1:]]), turn(1, "slow")]
    assert [call.parent for call in first] == [None, None]
    assert [call.parent for call in second] == first
    assert [call.parent for call in third] == second
    for own, other in zip([first, second], [first, second], strict=True):
        assert own[0].prompt_ids.tolist() == other[1].prompt_ids.tolist()
        assert own[0].stream_key != other[1].stream_key
    again = turn(2, "go")
    assert again.parent is None and again.prompt_ids.tolist() == first[0].prompt_ids.tolist()
    assert turn(2, "slow").parent is again
    assert sides[0].last_node is third[0] and sides[0].game == 0
    (row,) = play.session.build_training_rows()
    trained = np.frombuffer(row.tokens, "<i4")[np.frombuffer(row.mask, np.uint8) > 0]
    assert trained.tolist() == [*ids, *ids, *ids[1:]] and play.session.aside == 5 * len(ids)


THINKS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}",
)


@pytest.mark.parametrize(
    ("template", "how", "forks"),
    [
        (STRIPS, {"history": "template"}, {"template": 1}),
        (STRIPS, {"history": "keep"}, {}),
        (THINKS, {"parser": parse_hermes}, {}),
    ],
)
def test_a_template_that_strips_thinking_forks_or_keeps_and_a_parser_s_is_put_back(
    template: str, how: Any, forks: dict[str, int]
) -> None:
    play = Play(Kind(template, "", chatml_head, "<|im_end|>", "\n"), **how)
    ids = [*play.characters("<think>low</think>slow"), play.end]
    messages = [{"role": "user", "content": "go"}]
    answer = play.draw(play.ask(messages), ids, "stop")
    text = "slow" if template is THINKS else "<think>low</think>slow"
    assert answer == {"role": "assistant", "content": text}
    messages += [answer, {"role": "user", "content": "lower"}]
    call = play.ask(messages)
    own = Said("assistant", "slow") if forks else Said("assistant", "", ids)
    expected = play.reference([Said("user", "go"), own, Said("user", "lower")])
    assert call.prompt_ids.tolist() == expected and play.session.tree.forks == forks
    # a turn that is no user's strips nothing: it goes on
    answer = play.draw(call, [*play.characters("<think>er</think>low"), play.end], "stop")
    play.ask([*messages, answer, {"role": "tool", "content": "3"}])
    assert play.session.tree.forks == forks


def test_a_history_that_was_changed_keeps_the_thinking_of_the_answers_behind_the_change() -> None:
    """Clients send no thinking back.  What the agent wrote itself gets none, even if the policy
    answered the same later."""
    play = Play(Kind(THINKS, "", chatml_head, "<|im_end|>", "\n"), parser=parse_hermes)
    example = [{"role": "user", "content": "ex"}, {"role": "assistant", "content": "slow"}]
    messages = [*example, {"role": "user", "content": "go"}]
    thoughts = ["low", "er", "o"]
    for thought, text in zip(thoughts, ("slow", "lower", "slower"), strict=True):
        ids = [*play.characters(f"<think>{thought}</think>{text}"), play.end]
        answer = play.draw(play.ask(messages), ids, "stop")
        messages += [answer, {"role": "user", "content": "more"}]
    assert not play.session.tree.forks
    for changed, kept in (([*messages[:2], *messages[4:]], "er o"), (messages[1:], "er o")):
        text = play.tokenizer.decode(play.ask(changed).prompt_ids.tolist())
        assert re.findall("<think>(.*?)</think>", text) == kept.split(), text
    edited = [*messages[:4], {"role": "user", "content": "else"}, *messages[5:]]
    text = play.tokenizer.decode(play.ask(edited).prompt_ids.tolist())
    assert re.findall("<think>(.*?)</think>", text) == thoughts, "before the change and after it"


def test_a_tool_call_that_the_template_writes_otherwise_stays_as_drawn() -> None:
    play = Play(Kind(CHATML, "", chatml_head, "<|im_end|>", "\n"), parser=parse_hermes)
    drawn = 'ok <tool_call>{"arguments":{"b":2,  "a":1},"name":"add"}</tool_call>'
    for tail, finish in (([play.end], "stop"), ([], "length")):
        ids = play.characters(drawn) + tail
        messages = [{"role": "user", "content": finish}]
        answer = play.draw(play.ask(messages), ids, finish)
        assert answer["content"] == "ok" and answer["tool_calls"][0]["function"]["name"] == "add"
        # a client that writes the arguments anew
        function = answer["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(json.loads(function["arguments"]), sort_keys=True)
        tool = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}
        call = play.ask([*messages, answer, tool])
        said = [Said("user", finish), Said("assistant", "", ids), Said("tool", "3")]
        assert call.prompt_ids.tolist() == play.reference(said)
    assert play.session.tree.forks == {"message 0": 1}


def test_a_history_that_was_changed_forks_and_says_where() -> None:
    play = Play(ZOO["chatml"])
    one = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    answer = play.draw(play.ask(one), [*play.characters("low"), play.end], "stop")
    more = {"role": "user", "content": "er"}
    for messages in (
        [one[0], {"role": "user", "content": "gone"}, answer, more],  # message 1
        [*one, {"role": "assistant", "content": "lower"}, more],  # message 2
        one,  # asked again
    ):
        call = play.ask(messages)
        assert call.parent is None
        assert call.prompt_ids.tolist() == play.reference(
            [Said(m["role"], m["content"]) for m in messages]
        )
    assert play.session.tree.forks == {"message 1": 1, "message 2": 1, "again": 1}
    # a template that writes the tools: others than before are another prompt
    told = Play(Kind("{{ tools | tojson }}" + CHATML, "", chatml_head, "<|im_end|>", "\n"))
    answer = told.draw(told.ask(one, tools=tools), [*play.characters("low"), play.end], "stop")
    assert told.ask([*one, answer, more], tools=tools).parent is not None
    assert told.chat.write(one, tools).startswith(json.dumps(tools) + "<|im_start|>system\ns")
    assert told.chat.write(one, []).startswith("null<|im_start|>"), "no list, not an empty one"
    assert told.ask([*one, answer, more]).parent is None
    assert told.session.tree.forks == {"tools": 1}


def test_of_two_equal_answers_the_newest_goes_on_and_calls_have_ids_of_their_own() -> None:
    play = Play(Kind(CHATML, "", chatml_head, "<|im_end|>", "\n"), parser=parse_hermes)
    one = [{"role": "user", "content": "go"}]
    calls = [play.ask(one) for _ in range(4)]
    plain, said = [*play.characters("low"), play.end], '<tool_call>{"name": "f"}</tool_call>'
    first, _ = [play.draw(call, plain, "stop") for call in calls[:2]]
    named = [play.draw(call, [*play.characters(said), play.end], "stop") for call in calls[2:]]
    more = {"role": "user", "content": "er"}
    assert play.ask([*one, first, more]).parent is calls[1]
    assert [play.ask([*one, x, more]).parent for x in named] == list(calls[2:])


def test_a_session_past_midnight_keeps_its_date() -> None:
    play = Play(ZOO["dated"])
    assert play.chat.write([{"role": "user", "content": "x"}], ()) == (
        "<|im_start|>system\nToday is 03 Feb 2026.<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    other = play.chat.with_date(datetime(2027, 2, 3))
    assert "2027" in other.write([{"role": "user", "content": "x"}], ())
    assert "2026" in play.chat.write([{"role": "user", "content": "x"}], ())


def test_text_without_a_template_goes_on_from_its_answer() -> None:
    play = Play(ZOO["chatml"])
    end = play.tokenizer.convert_tokens_to_ids("</s>")
    first = play.session.place(text="1+1=", now=0.0)
    play.draw(first, [*play.characters("low"), end], "stop")
    second = play.session.place(text="1+1=lower", now=0.0)
    assert second.parent is first
    answered = [*play.characters("low"), end]
    assert second.prompt_ids.tolist() == [*play.encode("1+1="), *answered, *play.encode("er")]
    play.draw(second, play.characters("x"), "length")
    third = play.session.place(text="1+1=lowerx!", now=0.0)
    assert third.parent is second
    assert play.session.place(text="1+1=slow", now=0.0).parent is None
    assert play.session.tree.forks == {"text": 1}


def test_a_stop_string_is_cut_from_the_text_and_its_ids_stay() -> None:
    play = Play(ZOO["chatml"])
    one = [{"role": "user", "content": "go"}]
    ids = play.characters("slow STOP")
    call = play.ask(one, stop=[" STOP"])
    answer = play.draw(call, ids, "stop")
    assert answer["content"] == "slow"
    call = play.ask([*one, answer, {"role": "user", "content": "er"}])
    said = [Said("user", "go"), Said("assistant", "", ids), Said("user", "er")]
    assert call.prompt_ids.tolist() == play.reference(said)


def test_what_lies_behind_a_stop_string_is_set_aside() -> None:
    """As if it had not been drawn: tokens, logprobs, spans, the row, and what follows."""
    plays = Play(ZOO["chatml"]), Play(ZOO["chatml"])
    one = [{"role": "user", "content": "go"}]
    for play, said in zip(plays, ("slow STOPower", "slow STOP"), strict=True):
        ids = np.array(play.characters(said), np.int32)
        call = play.ask(one, stop=["zzz", "TOP"])
        cuts = [0, 4, *([10] if len(ids) > 10 else []), len(ids)]
        spans = [
            VersionSpan(Label(1, n), "", first, end, Label(1, 0))
            for n, (first, end) in enumerate(itertools.pairwise(cuts))
        ]
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        node = play.session.on_result(call, ids, logprobs, spans, "length", past=1)
        assert node is not None and node.finish == "stop" and not play.session.shortened
        answer = {"role": "assistant", "content": "slow S"}
        assert play.ask([*one, answer, {"role": "user", "content": "er"}]).parent is node
        assert play.session.tokens == len(ids) + 1
        assert play.session.aside == len(ids) + 1 - len("slow STOP")
    long, short = (play.session.tree.nodes for play in plays)
    assert build_rows(long[:1]) == build_rows(short[:1])
    assert long[1].tail.tolist() == short[1].tail.tolist()


def test_an_answer_s_turn_closes_behind_its_last_end_token() -> None:
    play = Play(ZOO["chatml"])
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": " low "}]
    nodes = []
    for ids in ([*play.characters("low"), play.end], play.characters("low")):
        call = play.ask(messages[:1])
        play.draw(call, ids, "stop")
        nodes.append(call)
    prompt = play.chat.write(messages[:1], [])
    turn = f"{prompt}a<|im_end|>b<|im_end|>c"
    assert [play.chat._find_closing(node, messages, turn) for node in nodes] == ["c", "<|im_end|>c"]
    closings = {"x low y": "y", "x low": "", "xlow.": ".", "low low.": ".", "x": ""}
    for text, closing in closings.items():
        found = play.chat._find_closing(nodes[1], messages, prompt + text)
        assert found == closing, (text, found)
    # where the template writes the prompt otherwise: what both have in common is skipped
    assert play.chat._find_closing(nodes[0], messages, prompt[:5] + "x<|im_end|>y") == "y"


def test_a_template_that_fails_is_a_refusal_and_changes_nothing() -> None:
    play = Play(Kind("{{ raise_exception('roles\n alternate') }}", "", chatml_head, "", ""))
    with pytest.raises(CallRefused) as caught:
        play.ask([{"role": "user", "content": "go"}])
    why = "the model's chat template fails on these messages: TemplateError: roles alternate"
    assert refusal(caught.value) == (400, "chat_template", None, why) and play.session.calls == 0
    bare = Play(Kind("", "", chatml_head, "", ""))
    bare.tokenizer.chat_template = None
    with pytest.raises(CallRefused, match="chat template"):
        bare.ask([{"role": "user", "content": "go"}])


def refusal(found: CallRefused) -> tuple[int, str, str | None, str]:
    return found.status, found.code, found.param, str(found)


def test_messages_as_templates_take_them() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    called = {"role": "assistant", "content": None}
    called |= {"tool_calls": [{"id": "1", "function": function}]}
    made = normalize_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
            called,
            {"role": "assistant", "content": "x", "tool_calls": None},
        ]
    )
    assert made[0] == {"role": "system", "content": "ab"} and made[1]["content"] == ""
    assert made[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert made[2] == {"role": "assistant", "content": "x"}
    arguments = ["[1]", "no JSON", '{"a": [1]}', {"b": 2}]
    calls = [{"id": "c", "function": {"name": "f"}}]
    calls += [{"id": "c", "function": {"name": "f", "arguments": given}} for given in arguments]
    (made_one,) = normalize_messages([{"role": "assistant", "tool_calls": calls, "name": "n"}])
    wanted = [{}, "[1]", "no JSON", {"a": [1]}, {"b": 2}]
    assert made_one == {
        "role": "assistant",
        "content": "",
        "name": "n",
        "tool_calls": [
            {"id": "c", "function": {"name": "f", "arguments": given}} for given in wanted
        ],
    }


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "messages: give a list of at least one message"),
        ({"role": "user"}, "messages: give a list of at least one message"),
        ([{"content": "x"}], "messages[0]: give an object with `role` and `content`"),
        (["x"], "messages[0]: give an object with `role` and `content`"),
        (
            [{"role": "user", "content": 3}],
            "messages[0]: content is int; give text, or a list of text parts",
        ),
        (
            [{"role": "user", "content": [{"type": "audio"}]}],
            "messages[0]: a content part of type 'audio': only text is supported",
        ),
        (
            [{"role": "user", "content": [3]}],
            "messages[0]: a content part of type 'int': only text is supported",
        ),
        *(
            (
                [{"role": "user"}, {"role": "assistant", "tool_calls": calls}],
                "messages[1].tool_calls: give a list of objects with `id` and `function`",
            )
            for calls in ([{"id": "c"}], 3, ["x"])
        ),
    ],
)
def test_messages_that_no_template_takes(messages: Any, why: str) -> None:
    with pytest.raises(CallRefused) as refused:
        normalize_messages(messages)
    error = refused.value
    assert (error.status, error.code, error.param, str(error)) == (400, INVALID, "messages", why)


def mine(text: str) -> dict[str, Any]:
    if text == "broken":
        raise RuntimeError
    return {"content": "", "tool_calls": [{"function": {"name": text, "arguments": {}}}]}


def test_parsers() -> None:
    assert find_parser("none") is parse_plain_text and find_parser("hermes") is parse_hermes
    play = Play(ZOO["chatml"], parser=find_parser(f"{__file__}:mine"))
    read = play.chat.read(np.array(play.characters("go")), (), "1.0.1-0")
    assert read["tool_calls"][0]["function"]["name"] == "go"
    assert read["tool_calls"][0]["id"] == make_call_id("1.0.1-0", 0) != make_call_id("1.0.1-0", 1)
    assert (read["tool_calls"][0]["id"], make_call_id("1.0.1-0", 1)) == ("0prc7fubq", "o2vbxpttz")
    assert read == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "0prc7fubq", "function": {"name": "go", "arguments": {}}}
        ],
    }
    # what does not parse is content
    read = play.chat.read(np.array(play.characters("broken")), (), "1.0.1-0")
    assert read == {"role": "assistant", "content": "broken"}
    for text in ("<tool_call>[1]</tool_call>", '<tool_call>{"name": 1}</tool_call>', "<tool_call>"):
        assert parse_hermes(text) == {"content": text}
    two = parse_hermes(
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": 3}</tool_call>'
    )
    assert len(two["tool_calls"]) == 1 and '"g"' in two["content"]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}} </tool_call>'
    assert parse_hermes(f"<think>\n hm \n</think>\n\n {call} and\n{call}\n") == {
        "reasoning_content": " hm ",
        "content": "and",
        "tool_calls": [
            {"id": "", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ]
        * 2,
    }
    assert parse_hermes("hm</think>\n\n so\n") == {"reasoning_content": "hm", "content": " so\n"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "'nothing' is not one of none, hermes, module:function"),
        ("no.such.module:f", "ModuleNotFoundError: No module named 'no'"),
        ("json:absent", "AttributeError: module 'json' has no attribute 'absent'"),
        ("json:__name__", "TypeError: __name__ is not a function"),
    ],
)
def test_parsers_that_are_none(name: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_parser(name)
    place = "agent.parser: " if ":" not in name else f"agent.parser = {name}: importing it raised "
    assert str(error.value).startswith(f"{place}{why}")


def test_what_a_parser_returns_is_an_assistants_message() -> None:
    def parse(text: str) -> dict[str, Any]:
        made: dict[str, dict[str, Any]] = {
            "role": {"role": "user", "content": "x", "reasoning_content": "hm", "tool_calls": []},
            "name": {"content": "x", "tool_calls": [{"function": {"name": 3, "arguments": {}}}]},
            "arguments": {"tool_calls": [{"function": {"name": "f", "arguments": {1, 2}}}]},
            "function": {"content": "x", "tool_calls": [{"name": "f"}]},
        }
        return made[text]

    play = Play(ZOO["chatml"], parser=parse)

    def read(text: str) -> Any:
        return play.chat.read(np.array(play.characters(text)), (), "1.0.1-0")

    assert read("role") == {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    for text in ("name", "arguments", "function", "other"):
        assert read(text) == {"role": "assistant", "content": text}, "no valid call: all is text"


def test_an_answer_is_seen_up_to_its_end_or_a_stop() -> None:
    play = Play(ZOO["chatml"])
    start = play.tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = np.array([start, *play.characters("ab abc."), play.end], np.int32)
    seen = [play.chat.decode_visible(ids, stop) for stop in ((), ("",), ("c", "b "), ("z", "abc"))]
    seen = [text.removeprefix("<|im_start|>") for text in seen if text.startswith("<|im_start|>")]
    assert seen == ["ab abc.", "ab abc.", "a", "ab "], "special tokens are a part of an answer"
    assert play.chat.decode_visible(ids[:-1]) == "<|im_start|>ab abc."
    assert play.chat.decode_visible(np.array([], np.int32)) == ""
    found = [play.chat.find_stop(ids, stop) for stop in (("abc", "."), ("b",), ("", "z"), ())]
    assert found == [7, 3, None, None]
    assert play.chat.decode_text(ids.tolist()) == "<|im_start|>ab abc.<|im_end|>"


def test_a_text_is_encoded_as_far_as_it_may_fit() -> None:
    """At most 64 tokens of its beginning may become fewer in the whole text."""
    chat = ChatFormat(tokenizer(CHATML), (101,), context=2)
    asked: list[str] = []
    encode = chat.tokenizer.encode

    def noted(text: str, **how: Any) -> Any:
        asked.append(text)
        return encode(text, **how)

    chat.tokenizer.encode = noted
    found = chat.encode("x" * 66)
    assert found.dtype == np.int32 and found.tolist() == encode("x" * 66, add_special_tokens=False)
    assert [len(text) for text in asked] == [16, 32, 64, 66]
    asked.clear()
    with pytest.raises(CallRefused) as caught:
        chat.encode("x" * 1000)
    assert [len(text) for text in asked] == [16, 32, 64, 128]
    why = (
        "This model's maximum context length is 2 tokens, prompt and answer (generator.context = "
        "2), but the prompt has over 64: shorten the history"
    )
    assert refusal(caught.value) == (400, "context_length_exceeded", "messages", why)
    with pytest.raises(CallRefused) as caught:
        chat.encode("a\ud800")
    why = "the prompt has \\ud800, half of a character: UTF-8 cannot encode it"
    assert refusal(caught.value) == (400, "invalid_text", "messages", why)
    asked.clear()
    free = ChatFormat(chat.tokenizer, (101,))
    assert len(free.encode("x" * 1000)) == 1000 and len(asked) == 1 and free.context == 0
    assert free.ends == {101: "</s>"} and free.when is None and not free.keeps_history
