import pytest
from gateway_service_kit import AT

from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config, ModelConfig, TaskConfig
from asyncrl.contract import messages as m
from asyncrl.models.policy import build_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("door") / "m"
    build_model(path, "abcdefgh0123456789=", hidden=32, layers=1)
    return Config(
        model=ModelConfig(path=str(path)),
        task=TaskConfig(name="sort"),
        agent=AgentConfig(serve=True, sessions=2),
    )


def ticket(number: int, kind: str = "train", samples: int = 2) -> m.Ticket:
    prompt, sampling = m.Prompt(5, "ab=", answer="secret"), m.SamplingSettings(max_new_tokens=6)
    return m.Ticket(number, number, kind, prompt, list(range(samples)), sampling, AT, None, 3)
