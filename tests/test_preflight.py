"""What is known before a run starts: where a warm start may build a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.cli import new
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.supervise import preflight
from asyncrl.tasks import warm_start


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project, seen from a folder beside it; its warm start is cut short."""
    new.write(tmp_path / "mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    whole = warm_start.warm_start
    monkeypatch.setattr(
        warm_start, "warm_start", lambda config, path: whole(config, path, steps=1, threads=1)
    )
    return tmp_path / "mine"


def at(project: Path, path: str | Path, *sets: str) -> Config:
    return load.load(project / "config.toml", [f"model.path='{path}'", *sets])


def test_a_name_of_the_hub_is_not_warm_started(project: Path) -> None:
    with pytest.raises(ConfigError) as error:
        preflight.preflight(at(project, "Qwen/Qwen2.5-0.5B"))
    said = str(error.value)
    assert "Qwen/Qwen2.5-0.5B is not a directory" in said
    assert "`asyncrl model get hf://Qwen/Qwen2.5-0.5B models/Qwen2.5-0.5B`" in said
    assert 'model.path = "hf://Qwen/Qwen2.5-0.5B"' in said
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    "place", ["{tmp}/data/models/real", "{tmp}/data/real", "{tmp}/mine/lama", "m"]
)
def test_a_misspelled_place_of_a_model_is_not_warm_started(project: Path, place: str) -> None:
    path = place.format(tmp=project.parent)
    with pytest.raises(ConfigError) as error:
        preflight.preflight(at(project, path))
    assert "is no model directory" in str(error.value) and not Path(path).exists()
    assert f'write "models/{Path(path).name}"' in str(error.value)
    assert str(Path(path) / preflight.MARKER) in str(error.value)


def test_a_run_directory_without_its_model_is_not_filled(project: Path) -> None:
    run_dir = project / "runs" / "r"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="is no model directory"):
        preflight.preflight(at(project, run_dir / "model"))


@pytest.mark.parametrize("place", ["{here}/model", "{here}/models/small", "models/small", "marked"])
def test_a_project_builds_its_own_model(project: Path, place: str) -> None:
    if place == "marked":
        Path(place).mkdir()
        (Path(place) / preflight.MARKER).touch()
    path = Path(place.replace("{here}", str(project)))
    preflight.preflight(at(project, path))
    assert (path / "config.json").is_file()


def test_runs_elsewhere_leave_the_project_its_model(project: Path, tmp_path: Path) -> None:
    preflight.preflight(at(project, project / "model", f"runs='{tmp_path / 'scratch'}'"))
    assert (project / "model" / "config.json").is_file()
