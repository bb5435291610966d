import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_kit import COMMIT, serving
from process_kit import TEXTS

from asyncrl.cli import main
from asyncrl.config import load

CACHE = "/home/x/hub/{kind}--org--{name}/snapshots/0123456789abcdef"
LINE = {"tokens": 75.0, "samples": 3, "mean_length": 25.0, "mean_reward": 0.5}
SUMMARY = {
    "steps": 40,
    "lag": {"mean": 1.25, "p95": 2, "max": 3, "limit": 4},
    "ledger": {"generated": 100, "trained": 75, "filtered": 25, "orphaned": 0},
    "certainty": {"heldout": {"n": 64, "half": 0.0625}},
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    model, data = (CACHE.format(kind=k, name=n) for k, n in (("models", "base"), ("datasets", "d")))
    sets = (
        f"model.path='{model}'",
        "task.name='file'",
        f"task.prompts='{data}/main'",
        f"task.heldout='{data}/main#test'",
        "reward.function='rewards.py:exact'",
        "correction.preset='mis'",
        "kl.loss.coefficient=0.01",
        "staleness.max_lag=4",
    )
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "config.toml").write_text(load.dump(load.load("configs/demo.toml", sets)))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    rows = [
        {"step": step, "eval/heldout": value, "eval/heldout_n": 64.0, "eval/heldout_length": 9.0}
        for step, value in ((0, 0.25), (20, 0.4), (40, 0.5))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_card_says_what_was_trained_on_what_with_what_result(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", str(run_dir), str(tmp_path / "out")], standalone_mode=False)
    assert "pushed" not in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "base_model": "org/base",
        "datasets": ["org/d"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["asyncrl", "reinforcement-learning", "ppo"],
    }
    for line in TEXTS["a_card_says_what_was_trained_on_what_with_what_result"]:
        assert line in text, line
    assert "orphaned" not in text.partition("## Config")[0]
    assert (run_dir / "config.toml").read_text().strip() in text


def test_an_export_is_pushed_by_the_hubs_client(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    taken: dict[str, Any] = {}
    words = [str(run_dir), str(tmp_path / "out"), "--json", "--push-to-hub"]
    with serving(tmp_path, taken=taken) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        main(["export", *words, "org/name", "--private"], standalone_mode=False)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["pushed"] == f"{address}/org/name/commit/{COMMIT}"
        words[1] = str(tmp_path / "other")
        with pytest.raises(SystemExit) as ended:
            main(["export", *words, "a/b/c"], standalone_mode=False)
    assert ended.value.code == 2
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert error.startswith("--push-to-hub a/b/c: the hub refuses it: ") and "\n" not in error
    assert f"; {tmp_path / 'other'} is complete" in error
    repository = taken.pop("repository")
    assert (repository["name"], repository["organization"]) == ("name", "org")
    assert repository.get("private") is True or repository.get("visibility") == "private"
    exported = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert taken == exported and set(taken) == {"README.md", "config.json"}
