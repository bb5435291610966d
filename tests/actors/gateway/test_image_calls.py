"""Images over HTTP: by OpenAI's client and in the other APIs' forms, refusals, sessions that go on
only with the same images, their journal, and a run whose agents send pictures."""

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gateway_door_kit import ticket
from gateway_kit import CHATML, Served, tokenizer
from gateway_web_kit import client, opened, post  # noqa: F401
from process_kit import ROOT, RUN_SEED, run_command
from vision_kit import picture, seeing_model

from actors.gateway.call_tree import build_rows
from actors.gateway.chat import ChatFormat, find_digests, make_mark, replace_marks, restore_marks
from actors.gateway.recovery.session_journal import (
    SessionJournal,
    SessionOpening,
    read_records,
    restore,
)
from actors.gateway.refusals import CallRefused
from actors.gateway.sessions import Session, SessionLimits
from asyncrl.cli import main
from asyncrl.contract import messages as m
from asyncrl.contract.blobs import images
from asyncrl.contract.blobs.images import MARKER
from asyncrl.contract.versions import Label
from asyncrl.models import image_tokens
from asyncrl.records import stream

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
URLS = [images.to_data_url(picture(n)) for n in range(3)]
ONE, TWO = "0123456789abcdef" * 2, "f" * 32
NAMES = [images.digest(picture(n)) for n in range(3)]


def seeing(template: str) -> Any:
    tokens = tokenizer(template)
    tokens.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokens.image_shape = images.ImageShape(tokens.convert_tokens_to_ids("<image>"), 3)
    return tokens


@pytest.fixture(scope="module", params=[CHATML, PARTS], ids=["text", "parts"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(tokens=seeing(request.param), images=True)
    yield made
    made.close()


def user(*parts: Any) -> dict[str, Any]:
    """A message: numbers are images, texts are text."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": URLS[part], "detail": "low"}}
            for part in parts
        ],
    }


def prompt_of(session: Session, number: int) -> str:
    """The text of a call's prompt, with one token for each image."""
    assert isinstance(session.composer, ChatFormat)
    shape = session.composer.image_shape
    assert shape is not None
    ids = session.tree.nodes[number].prompt_ids
    return session.composer.decode_text(image_tokens.contract(ids, shape).tolist())


def test_openais_client_sends_images_and_goes_on_with_them(served: Served) -> None:
    policy, session = client(served)

    def ask(*messages: Any) -> str:
        answer = policy.chat.completions.create(model="policy", messages=messages)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(session.tree.nodes[-1].prompt_ids)
        return str(answer.choices[0].message.content)

    first = user("see ", 0, " and ", 1)
    said = ask(first)
    head = "<|im_start|>user\nsee <image> and <image><|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(session, 0) == head
    node = session.tree.nodes[0]
    assert node.images == NAMES[:2]
    assert session.images == images.index_by_digest(map(picture, range(2)))
    history = (first, {"role": "assistant", "content": said})
    ask(*history, user("more ", 2))
    below = session.tree.nodes[1]
    assert below.parent is node and below.images == [NAMES[2]] and below.list_images() == NAMES
    ask(user("see ", 1, " and ", 0), history[1], user("more ", 2))  # the same words
    other = session.tree.nodes[2]
    assert other.parent is None and other.images == [NAMES[1], NAMES[0], NAMES[2]]
    rows = build_rows(session.tree.nodes)
    assert [row.images for row in rows] == [NAMES, other.images]
    shape = session.composer.image_shape
    for row in rows:
        ids = np.frombuffer(row.prompt_tokens + row.tokens, "<i4")
        assert image_tokens.count(ids, shape) == 3 * len(row.images)


def test_the_other_apis_take_their_own_forms(served: Served, opened: Session) -> None:
    data = base64.b64encode(picture(0)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "?"}]
    parts = [{"type": "input_image", "image_url": URLS[0]}, {"type": "input_text", "text": "?"}]
    turns: dict[str, dict[str, Any]] = {
        "/v1/messages": {"messages": [{"role": "user", "content": blocks}], "max_tokens": 9},
        "/v1/responses": {"input": [{"role": "user", "content": parts}]},
    }
    for path, body in turns.items():
        answer = post(served, opened, path, {"model": "policy", **body})
        assert answer.status_code == 200, answer.text
    result = {"type": "tool_result", "tool_use_id": "a", "content": blocks}
    body = {"messages": [{"role": "user", "content": [result]}], "max_tokens": 9}
    assert post(served, opened, "/v1/messages", {"model": "policy", **body}).status_code == 200
    assert [node.images for node in opened.tree.nodes] == [NAMES[:1]] * 3
    assert "<image>?" in prompt_of(opened, 2)
    counted = post(
        served, opened, "/v1/messages/count_tokens", {"model": "policy", **turns["/v1/messages"]}
    )
    assert counted.json() == {"input_tokens": len(opened.tree.nodes[0].prompt_ids)}


def url_part(url: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


MANY = [part for n in range(65) for part in url_part(images.to_data_url(picture(n)))["content"]]
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"role": "user", "content": MANY}, "65 images in a prompt"),
    ("chat", url_part("https://example.org/a.png"), "https://example.org/a.png is not fetched"),
    ("chat", url_part("file:///etc/passwd"), "file:///etc/passwd is not fetched"),
    ("chat", url_part(None), "give the image as a data: URL"),
    ("chat", url_part("data:image/png;base64,AAAA"), "neither a PNG nor a JPEG"),
    ("chat", url_part("data:image/png;base64,%%"), "its base64 is damaged"),
    ("chat", url_part("data:text/html;base64,AAAA"), "a data: URL of an image is"),
    ("chat", url_part(URLS[0][:222]), "cannot be read"),
    ("chat", {"role": "user", "content": "look: <image>"}, "the model's token of an image"),
    ("chat", {"role": "user", "content": f"\ue002{'0' * 32}\ue003"}, "names the unknown image"),
    ("text", {"prompt": "<image>r="}, "the model's token of an image"),
    ("text", {"prompt": f"\ue002{'0' * 32}\ue003="}, "names the unknown image"),
    ("responses", {"input": "look: <image>"}, "the model's token of an image"),
]
PATHS = {"chat": "chat/completions", "text": "completions", "responses": "responses"}
PROMPT_KEYS = {"chat": "messages", "text": "prompt", "responses": "input"}


@pytest.mark.parametrize(("kind", "given", "said"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_what_is_no_image_is_refused_and_nothing_is_fetched(
    served: Served, kind: str, given: dict[str, Any], said: str
) -> None:
    opened = served.do(served.service.open)
    body = {"messages": [given]} if kind == "chat" else given
    answer = post(served, opened, f"/v1/{PATHS[kind]}", {"model": "policy", **body})
    error = answer.json()["error"]
    code = "too_many_images" if given.get("content") is MANY else "invalid_image"
    assert answer.status_code == 400 and error["code"] == code, answer.text
    assert said in error["message"] and "\n" not in error["message"]
    assert error["param"] == PROMPT_KEYS[kind]
    assert not opened.tree.nodes and not opened.images


def test_token_ids_hold_no_images_of_their_own(served: Served) -> None:
    policy, opened = client(served)
    shape = served.service.tokenizer.image_shape
    policy.chat.completions.create(model="policy", messages=[user(0)])
    known = opened.tree.nodes[0].build_token_ids().tolist()
    again = post(served, opened, "/v1/completions", {"model": "policy", "prompt": [*known, 5]})
    assert again.status_code == 200 and opened.tree.nodes[1].list_images() == NAMES[:1]
    ids = [*known, *[shape.token] * shape.length]
    refused = post(served, opened, "/v1/completions", {"model": "policy", "prompt": ids})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "invalid_image")
    assert error["message"] == (
        "the token ids hold image tokens: send the image as a data: URL in the content of a message"
    )


def test_a_session_has_a_bound_of_images() -> None:
    chat = ChatFormat(seeing(CHATML), [0])
    session = Session(ticket(1), 0, 1, SessionLimits(max_calls=0, rows=0), chat)
    blobs = {name: bytes(images.MOST_SESSION_BYTES // 2 + 1) for name in NAMES[:2]}
    text = "".join(f"\ue002{name}\ue003" for name in NAMES[:2])
    with pytest.raises(CallRefused) as refused:
        session.place(text=text, now=0.0, images=blobs)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "too_many_images", "messages")
    assert str(error) == (
        f"session {session.name} would have 2 images in a prompt and 16777218 bytes of images; at "
        "most 64 and 16777216 are served"
    )
    assert not session.images and not session.tree.nodes
    many = f"\ue002{NAMES[0]}\ue003" * 65
    with pytest.raises(CallRefused, match="65 images in a prompt"):
        session.place(text=many, now=0.0, images={NAMES[0]: picture(0)})


def test_a_restored_session_has_its_images(tmp_path: Path) -> None:
    chat = ChatFormat(seeing(CHATML), [0])
    session = Session(ticket(1), 0, 1, SessionLimits(), chat)
    opening = SessionOpening("1.0.1", 0, "key", "lease", 3, True, "2026-11-24T00:00:00", 5.0)
    journal = SessionJournal(tmp_path)
    journal.open(opening, session.ticket)
    at = Label(1, 0)
    for number, text in enumerate((f"\ue002{NAMES[0]}\ue003a", f"\ue002{NAMES[0]}\ue003b")):
        request = session.register_request(str(number).encode())
        request.call = session.place(text=text, now=6.0, images={NAMES[0]: picture(0)})
        ids = np.array([5, 6], np.int32)
        spans = [m.VersionSpan(at, "d", 0, 2, at)]
        session.on_result(request.call, ids, np.zeros(2, np.float32), spans, "stop", now=7.0)
        request.answer = b"answer"
        journal.append_answer(session, request)
    path = tmp_path / "1.0.1"
    assert path.read_bytes().count(picture(0)) == 1
    again = Session(ticket(1), 0, 1, SessionLimits(), chat)
    restore(again, read_records(path), 8.0)
    assert again.images == session.images == {NAMES[0]: picture(0)}
    assert build_rows(again.tree.nodes) == build_rows(session.tree.nodes)
    assert [row.images for row in build_rows(again.tree.nodes)] == [NAMES[:1]] * 2


@pytest.mark.slow
def test_agents_that_send_pictures_are_trained_on_them(tmp_path: Path) -> None:
    """By OpenAI's client in exact mode: the sample's own picture, which the buffer has, and one
    that only the agent has. The replay learns the same."""
    seeing_model(tmp_path / "m", template="parts", layers=1, max_positions=512)
    sets = (
        *(f"seed={RUN_SEED}", "exact=true", "weights.in_flight='recompute_kv'", "model.path=m"),
        *("model.warm_start=false", "staleness.max_lag=0", "learner.steps=1", "learner.groups=1"),
        *("learner.group_size=4", "generator.slots=4", "generator.context=96", "agent.at_once=4"),
        *("evaluation.every=0", "evaluation.prompts=1", "evaluation.final_prompts=1"),
        *("evaluation.ood_prompts=1", "record.stream=true", "record.split_every=1"),
        *("wires.lease_s=3600", "durability.mode='process'", "name=seen"),
        f"agent.function='{ROOT}/tests/support/image_agents.py:look_twice'",
    )
    words = [word for each in sets for word in ("--set", each)]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", str(ROOT / "configs" / "count.toml")]
    done = run_command([*argv, "--json", *words], cwd=tmp_path, timeout=600).check()
    folder = tmp_path / "runs" / "seen"
    ledger = done.json["ledger"]
    assert ledger["trained"] == ledger["generated"] and not ledger["failed"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    exact = [row["mismatch/max_at_lag_0"] for row in rows if "mismatch/max_at_lag_0" in row]
    assert exact == [0.0]
    recording = stream.read(folder)
    for number in range(recording.end):
        batch = recording.read_step(number).batch
        (own,) = {sample.images[0] for sample in batch.samples}
        sent = images.digest(picture(7))
        assert set(batch.images) == {own, sent} and len(batch.samples) == 4
        for sample in batch.samples:  # of one training sequence, or two
            assert sample.list_rows()[-1].images == [own, sent] and sample.calls == 2
    replayed = CliRunner().invoke(main, ["replay", str(folder), "--json"])
    assert replayed.exit_code == 0 and '"equal": true' in replayed.output, replayed.output


def test_marks_become_markers_and_come_back_in_order() -> None:
    text = f"a{make_mark(ONE)}b{make_mark(TWO)}{make_mark(ONE)}"
    assert find_digests(text) == [ONE, TWO, ONE] and find_digests("none") == []
    written = replace_marks(text)
    assert written == f"a{MARKER}b{MARKER}{MARKER}"
    assert restore_marks(f"<{written}>", [ONE, TWO, ONE]) == f"<{text}>"
    assert restore_marks(written, [ONE, TWO]) is None
    assert restore_marks(written, [ONE, TWO, ONE, TWO]) is None
    assert restore_marks("none", []) == "none"
    for text in (make_mark(ONE[:-1]), make_mark(ONE + "0"), make_mark(ONE.upper()), ONE):
        assert find_digests(text) == [] and replace_marks(text) == text  # digests are whole
    with pytest.raises(CallRefused) as refused:
        replace_marks(f"see {MARKER}")
    assert str(refused.value) == (
        f"a text has {MARKER}, which is the model's token of an image: send the image as a data: "
        "URL in the content of a message"
    )
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "invalid_image", "messages")
