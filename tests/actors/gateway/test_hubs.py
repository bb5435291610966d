"""Environments of gymnasium and OpenEnv by name, with the real packages in the environment of the
clients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from clients_kit import python_of
from hubs_kit import PATIENCE_S, Player

from actors.gateway.hubs.stepped import choose_text_field
from asyncrl.config import load, rules
from asyncrl.contract.errors import ConfigError

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[2] / "support"


@pytest.fixture()
def in_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.transport.worker_pool.GRACE_S", PATIENCE_S)
    monkeypatch.chdir(HERE)


def test_an_environment_of_gymnasium_is_played_by_its_id(in_support: None) -> None:
    player = Player(env="gymnasium:gym_words:Count-v0", args={"rounds": 2})
    try:
        first, again = player.reset(1, seed=7), player.reset(2, seed=7)
        assert first.obs == again.obs and first.tools == [] and first.parts == {}
        number = int(str(first.obs))
        event = player.step(1, str(number + 1))
        assert (event.obs, event.reward, event.ended) == (str(number + 1), 1.0, False)
        event = player.step(1, str(number + 2))
        assert (event.reward, event.ended, event.truncated) == (1.0, True, True)
        event = player.step(2, "no")
        assert (event.reward, event.ended, event.truncated) == (0.0, True, False)
        player.pool.end(1)
        assert player.reset(3, seed=8).kind == "ok"
    finally:
        player.pool.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    argv = [python_of("clients"), str(HERE / "openenv_server.py")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.kill()
    process.wait()


def test_a_server_of_openenv_is_played_by_its_url(in_support: None, server: str) -> None:
    player = Player(env=f"openenv:{server}/", args={"observation": "text"})
    try:
        # each session has a connection of its own
        assert [player.reset(each, seed=each).obs for each in (1, 2)] == ["seed 1", "seed 2"]
        event = player.step(1, "hello")
        assert (event.obs, event.reward, event.ended) == ("HELLO", 5.0, False)
        assert (event := player.step(1, "bye")).ended and event.reward == 3.0
        assert player.step(2, "x").obs == "X"
    finally:
        player.pool.close()


def test_a_field_is_named_where_the_schema_has_several(server: str) -> None:
    fields = {"text": {"type": "string"}, "note": {"type": "string"}, "metadata": {}}
    assert choose_text_field("observation", fields, "note") == "note"
    assert choose_text_field(
        "action", {"word": {"type": "string"}, "n": {"type": "integer"}}, ""
    ) == ("word")
    for given in ("", "other", "metadata"):
        with pytest.raises(ConfigError, match=r"its observation has the text fields text, note"):
            choose_text_field("observation", fields, given)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"env": "gymnasium:gym_words:No-v0"}, "making it raised NameNotFound"),
        ({"env": "gymnasium:gym_words:Numbers-v0"}, "its observations are Discrete and not Text"),
        ({"env": "gymnasium:A-v0", "python": sys.executable}, "install gymnasium into the Python"),
        ({"env": "gem:game:A-v0"}, "install gem-llm into the Python of agent.python"),
        ({"env": "openenv:http://127.0.0.1:9"}, "making it raised URLError: .*refused"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_in_one_line(
    agent: Mapping[str, Any], said: str, in_support: None
) -> None:
    player = Player(**agent)
    try:
        with pytest.raises(ConfigError, match=said) as refused:
            player.event()
        assert str(refused.value).startswith(f"agent.env = {agent['env']}: ")
    finally:
        player.pool.close()


def test_an_environment_of_a_hub_gives_the_prompts() -> None:
    def problems(**agent: Any) -> list[str]:
        raw = {"model": {"path": "m"}, "task": {"name": agent.pop("task", "seeds")}}
        return rules.check(load.build(raw | {"agent": agent}))

    assert not problems(env="gem:game:A-v0", args={"rounds": 1})
    for agent, said in (
        ({"env": "gem:A", "task": "sort"}, "task.name: gem:A gives its own prompts"),
        ({"env": "gem:"}, "agent.env: gem: names no environment"),
        ({"env": "textarena:A", "args": {"a": 1}}, "agent.args: textarena:A takes none"),
    ):
        assert any(each.startswith(said) for each in problems(**agent)), problems(**agent)
