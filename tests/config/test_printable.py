"""Text from outside reaches terminals, logs and events on one line, with nothing that acts."""

import json
import re
import sys
import tomllib
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hostile_messages_kit import greeting
from hypothesis import example, given
from hypothesis import strategies as st
from refused_samples_kit import Bench, bench, sample

from actors.gateway import service
from asyncrl.cli import base, result
from asyncrl.config import engines, load
from asyncrl.config.agents import AgentConfig
from asyncrl.contract import messages as m
from asyncrl.contract import toml_writer
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import describe_exit, escape_line, format_last_frame
from asyncrl.contract.waits import ProcessWait, WaitLog
from asyncrl.records import process_log
from asyncrl.supervise import doctor, hosts, live

__all__ = ["bench"]
# an escape code, a forged line, marks of direction, separators, half of a character, a bell
EVIL = "no\x1b[2J\x1b]0;x\x07\r\nbuffer: all is well\u202e\u2066\u2028\u2029\x85\x9b1m\u200b\ud800"


def harmless(text: str) -> bool:
    """Each line of ours is printable, and none begins as the forged one does."""
    return all(x.isprintable() and not x.startswith("buffer: all") for x in text.split("\n"))


def test_every_character_that_acts_is_escaped() -> None:
    rare = (0xE000, 0xFEFF, 0xFFF9, 0x1D173, 0xE0001, sys.maxunicode)
    for code in (*range(0x3000), *range(0xD800, 0xE000, 64), *rare):
        if not (c := chr(code)).isprintable():
            shown = escape_line(f"a{c}b")
            assert shown.isprintable() and re.fullmatch(r"a\\[xunrtU0-9a-f]+b", shown), ascii(c)
    assert escape_line("na\u00efve \u6f22\u5b57") == "na\u00efve \u6f22\u5b57"
    assert format_last_frame(ValueError("never raised")) == ""
    assert [describe_exit(code) for code in (0, 3, -9)] == ["exit code 0", "exit code 3", "SIGKILL"]
    assert [len(escape_line("x" * length)) for length in (300, 301)] == [300, 303]
    assert escape_line("\x1b" * 1000).count("x1b") <= 76 and escape_line(EVIL * 99).endswith("...")


def test_no_peer_writes_to_log_or_terminal(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    at: Bench = bench("durability.mode='memory'")
    (ticket, *_) = at.tickets(8)
    evil = EVIL.encode("utf-8", "replace").decode()
    at.deliver(sample(ticket, 0, reward=1e19, reward_parts={evil: 1e19}))
    at.service.handle(b"x", msgspec.structs.replace(greeting(at.service), producer=evil))
    at.service.refuse("message", f"refused: {EVIL}")
    assert harmless(capsys.readouterr().err)
    # a failure that ends the run, by its budget
    with pytest.raises(Exception, match=r"reward\.error_budget") as caught:
        for ticket in at.tickets(60):
            at.deliver(sample(ticket, 0, failed=m.RewardFailure("data", evil)))
    assert str(caught.value).isprintable()


def test_what_is_shown_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wait = ProcessWait(EVIL, EVIL, "buffer", 99.0)
    assert all(line.isprintable() for line in WaitLog(1.0).make_lines([wait]))
    log = tmp_path / "log"
    log.write_bytes(EVIL.encode("utf-8", "replace") + b"\n")
    assert doctor.describe_process("learner", {}, None, log)["last_line"].isprintable()
    assert all(line.isprintable() for line in hosts.read_last_lines(log, 9))
    row = {"at": 0.0, "name": "gateway-0", "pid": 7, "event": "ended", "code": 1, "why": EVIL}
    assert process_log.describe_end(row).isprintable()
    with pytest.raises(SystemExit):
        base.fail(EVIL, 1)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and harmless(shown)
    status = m.RunStatus(
        run="r",
        committed=1,
        steps=9,
        epoch=1,
        metrics={},
        ledger={},
        waits=[wait],
        peers={},
        finished=False,
    )
    assert live.format_status(status).isprintable()


def test_a_reason_from_an_agent_is_one_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    gateway: Any = SimpleNamespace(
        agents={"": AgentConfig(serve=True)},
        tallies={"": service.SessionTally(deque())},
        get_source_name=lambda part: gateway.agents[part].source_name,
        name="gateway-0",
        run_dir=Path("r"),
    )
    gateway.log_change = lambda text: service.Gateway.log_change(gateway, text)
    session: Any = SimpleNamespace(name="1.0.1", part="")
    service.Gateway.count(gateway, session, m.RewardFailure("data", EVIL))
    shown = capsys.readouterr().err
    assert shown.startswith("gateway-0: session 1.0.1: data: no") and shown.count("\n") == 1
    assert harmless(shown)
    # and one that ends the run
    gateway.agents[""] = AgentConfig(function="a:b")
    gateway.tallies[""].failed = gateway.tallies[""].begun = 99
    with pytest.raises(ConfigError) as caught:
        service.Gateway.count(gateway, session, m.RewardFailure("data", EVIL))
    assert str(caught.value).isprintable()


def test_a_result_is_without_what_was_not_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result, "as_json", False)
    found = {"steps": 20, "loss_end": 0.022974684834480286, "heldout_end": None, "equal": False}
    base.emit(found | {"rows": dict.fromkeys(map(str, range(12)), 0)})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["steps", "20"], ["loss_end", "0.022975"], ["equal", "False"]]
    monkeypatch.setattr(result, "as_json", True)
    base.emit(found)
    assert json.loads(capsys.readouterr().out) == found


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4))
@example({"a": {"b.c": {}, "d": [{"e": [1e-05, float("inf")]}], "\x7f\t": '\x7f\n"\\'}, "z": True})
def test_the_plain_form_reads_back_equal(table: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tomli_w", None)
        text = toml_writer.dumps(table)
    assert tomllib.loads(text) == table and tomllib.loads(toml_writer.dumps(table)) == table


def test_a_config_without_tomli_w_loads_back_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load.load("demo", ["learner.clip_norm=0.5", "generator.gpus=[0, 1]"])
    usual = load.dump(config)
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    plain = load.dump(config)
    assert "gpus = [0, 1]\n" in plain != usual
    assert toml_writer.find_differences(
        {"a": 1, "b": {"c": 1, "d": {}}, "e": 1, "f": {}}, {"a": 2, "b": {"c": 3, "d": {}}, "f": 4}
    ) == {"a": (1, 2), "b.c": (1, 3), "e": (1, None), "f": (None, 4)}
    assert toml_writer.read_table(engines.__file__)["vllm"]
    assert load.build(tomllib.loads(plain)) == load.build(tomllib.loads(usual)) == config
    assert load.format_value(["a", 2]) == '["a", 2]'
    shown = toml_writer.format_value({"a b": [1, "x\x7f"], "c": True})
    assert shown == '{"a b" = [1, "x\\u007f"], c = true}'
    assert tomllib.loads(f"v = {shown}") == {"v": {"a b": [1, "x\x7f"], "c": True}}
