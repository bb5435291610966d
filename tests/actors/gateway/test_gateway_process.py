"""The main functions of the gateway's process and of a Python in which asyncrl is not installed."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import msgspec
import pytest
from gateway_door_kit import config  # noqa: F401

import asyncrl
from actors.gateway import environment_sessions, service
from actors.gateway.environment_sessions import EnvironmentSource, SingleCompletions
from actors.gateway.session_api import SessionApi
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config
from asyncrl.contract import foreign_start

HANDLED = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in HANDLED]
    yield
    for number, handler in zip(HANDLED, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(params=["http", "env"])
def either(request: pytest.FixtureRequest, config: Config) -> Config:
    """A gateway with sessions over HTTP, and one with environments."""
    if request.param == "http":
        return config
    return msgspec.structs.replace(config, agent=AgentConfig(env="agent_envs:Talks"))


class Gateway(service.Gateway):
    """A gateway that is interrupted, or whose run ends, in its third turn."""

    number = 0
    turns = 0
    closed = False
    by: tuple[type, ...] = ()  # what makes its sessions

    def step(self) -> bool:
        type(self).turns += 1
        type(self).by = tuple(map(type, self.sources.values()))
        if self.turns == 3 and self.number:
            os.kill(os.getpid(), self.number)
        elif self.turns == 3:
            self.over = self.ever_served = True
            for folder in self.run_dir.glob("sessions-*"):
                (folder / "1.0.1").touch()
        return super().step()

    def close(self) -> None:
        type(self).closed = True
        super().close()


def made(monkeypatch: pytest.MonkeyPatch, run_dir: Path, number: int) -> type[Gateway]:
    (run_dir / "run_id").write_text("run")
    kind = type("Gateway", (Gateway,), {"number": number})
    monkeypatch.setattr(environment_sessions, "Gateway", kind)
    monkeypatch.setattr(
        environment_sessions, "gc", Mock()
    )  # which would freeze this process's heap
    return kind


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_ends_the_process_after_its_turn(
    either: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    kind = made(monkeypatch, tmp_path, number)
    monkeypatch.delenv("ASYNCRL_SUPERVISED", raising=False)
    assert environment_sessions.main(either, tmp_path, 2) is False
    assert kind.closed and kind.turns == 3
    assert kind.by == (SessionApi if either.agent.http else EnvironmentSource,)
    assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM)


def test_a_mixture_of_agents_has_a_source_for_each(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = made(monkeypatch, tmp_path, signal.SIGTERM)
    parts = [
        {"name": "sort", "label": "a", "agent": {"env": "agent_envs:Talks"}},
        {"name": "sort", "label": "b"},
    ]
    task = msgspec.convert({"name": "mixture", "mixture": parts}, type(config.task))
    mixture = msgspec.structs.replace(config, task=task, agent=AgentConfig())
    assert environment_sessions.main(mixture, tmp_path, 0) is False
    assert kind.by == (SingleCompletions, EnvironmentSource) and kind.closed


def test_the_run_s_end_ends_the_process(
    either: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = made(monkeypatch, tmp_path, 0)
    monkeypatch.setattr("actors.gateway.http_gateway.OVER_S", 0.01)
    monkeypatch.setenv("ASYNCRL_SUPERVISED", "1")
    kept = tmp_path / "sessions-0" / "1.0.1"
    kept.parent.mkdir(mode=0o700)
    assert environment_sessions.main(either, tmp_path, 0) is True and kind.closed
    assert kept.exists() != either.agent.http, "no session over HTTP goes on"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "its supervisor ends it"
    assert callable(signal.getsignal(signal.SIGTERM))


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a Python that has no asyncrl: modules in it can be run."""
    monkeypatch.setitem(sys.modules, "asyncrl", ModuleType("somebody else's"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_foreign_python_finds_asyncrl_and_runs_a_module(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (foreign / "own_main.py").write_text(
        "import sys, asyncrl\n"
        "print(__name__, sys.argv[1:], asyncrl.__name__, asyncrl.__file__, asyncrl.__path__)\n"
    )
    monkeypatch.setattr(sys, "argv", ["foreign_start.py", "own_main", "3", "4"])
    foreign_start.main()
    inside = Path(asyncrl.__file__).parent
    expected = f"__main__ ['3', '4'] asyncrl {inside / '__init__.py'} {[str(inside)]}\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("name", foreign_start.NEEDED)
def test_a_package_that_a_foreign_python_lacks_is_named(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (foreign / "own_needs.py").write_text(f"raise ModuleNotFoundError(name={name!r})\n")
    monkeypatch.setattr(sys, "argv", ["foreign_start.py", "own_needs"])
    with pytest.raises(SystemExit) as ended:
        foreign_start.main()
    assert ended.value.code == (
        f"agent.python: {sys.executable} has no {name}: {sys.executable} -m pip install msgspec "
        "xxhash"
    )


def test_another_missing_module_is_raised(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (foreign / "own_lacks.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setattr(sys, "argv", ["foreign_start.py", "own_lacks"])
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        foreign_start.main()
