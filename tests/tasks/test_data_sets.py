"""Prompts from CSV, from directories of data sets, and from the hub by its own client."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_kit import COMMIT, serving

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.supervise import preflight
from asyncrl.tasks.data.rows import find_files
from asyncrl.tasks.file import FileTask, read_prompts

# written by datasets 5.2.0: a DatasetDict whose train split was filtered and saved in two shards
SAVED = Path(__file__).parents[1] / "data" / "saved_data_set"
COLUMNS = {"prompt": "question"}


def texts(source: str, split: str = "train") -> list[str]:
    return [prompt.text for prompt in read_prompts(source, split, COLUMNS)]


def test_a_saved_data_set() -> None:
    assert texts(str(SAVED)) == ["0+1=", "1+1=", "3+1=", "4+1="]
    assert texts(f"{SAVED}#test") == ["90+1=", "91+1="]
    assert texts(str(SAVED / "test")) == ["90+1=", "91+1="]  # one split by itself
    (first, *_) = read_prompts(str(SAVED), "train", COLUMNS)
    assert first.answer == "1" and json.loads(first.meta["level"]) == {"grade": 0}
    task = FileTask(str(SAVED), f"{SAVED}#test", columns=COLUMNS)
    assert len(task.sets["train"]) == 4 and len(task.sets["heldout"]) == 2


def repository(folder: Path) -> Path:
    """Files as in a repository of the hub: splits by their names and folders."""
    rows = {"train-00000-of-00002": "ab", "train-00001-of-00002": "cd", "validation": "ef"}
    (folder / "data").mkdir(parents=True)
    for name, values in rows.items():
        table = pa.table({"question": list(values), "answer": list(values)})
        pq.write_table(table, folder / "data" / f"{name}.parquet")
    (folder / "test").mkdir()
    (folder / "test" / "0.csv").write_text('question,answer\n"g,h",1\n', encoding="utf-8-sig")
    (folder / "extra.jsonl").write_text('{"question": "i"}\n')
    (folder / "README.md").write_text("# no data")
    return folder


def test_a_directory_of_files_has_the_splits_of_their_names(tmp_path: Path) -> None:
    source = str(repository(tmp_path / "repository"))
    assert texts(source) == ["a", "b", "c", "d", "i"]
    assert texts(f"{source}#validation") == ["e", "f"]
    assert texts(f"{source}#test") == ["g,h"]
    assert texts(f"{source}/data/validation.parquet") == ["e", "f"]
    with pytest.raises(ConfigError, match=r"has no split dev; write .*#SPLIT with one of train, "):
        find_files(f"{source}#dev")


def test_what_is_no_data_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(name: str, content: bytes, said: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=said) as error:
            read_prompts(str(tmp_path / name), "train")
        assert "\n" not in str(error.value)

    refused("long.csv", b"prompt,answer\na,1\nb,2,3\n", "long.csv:3: has another number of fields")
    refused("short.csv", b"prompt,answer\na\n", "short.csv:2: has another number of fields")
    refused("open.csv", b'prompt\n"a\n', r"open.csv:2: not CSV: unexpected end of data")
    refused("latin.csv", b"prompt\n\xff\n", "latin.csv: not UTF-8 at byte 8")
    refused("bad.arrow", b"ARROW", "bad.arrow: not an Arrow file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: has no data files \(.parquet, "):
        find_files(str(tmp_path / "empty"))
    (tmp_path / "empty" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"empty: not a saved data set: '_data_files'"):
        find_files(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"task.prompts: none#train is not a file"):
        read_prompts("none#train", "train")


def test_the_hubs_client_fetches_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a mixture and evaluation sets, too; then, without a hub, from its cache."""
    part = "{name='file', label='mine', prompts='hf://datasets/org/name/data/validation.parquet'}"
    sets = [
        "task.name='file'",
        "task.prompts='hf://datasets/org/name'",
        "task.heldout='hf://datasets/org/name#test'",
        "evaluation.sets=[{name='x', file='hf://datasets/org/name#validation'}]",
    ]
    wait = {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", **wait}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    config = load.load("configs/demo.toml", sets)
    mixed = load.load("configs/demo.toml", ["task.name='mixture'", f"task.mixture=[{part}]"])
    said: list[str] = []
    monkeypatch.setattr(preflight, "say", said.append)
    with serving(repository(tmp_path / "repository"), "datasets") as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        local = preflight.localize(config)
        assert texts(local.task.prompts) == ["a", "b", "c", "d", "i"]
        assert texts(local.task.heldout) == ["g,h"]
        assert texts(local.evaluation.sets[0].file) == ["e", "f"]
        assert said[0] == "fetching hf://datasets/org/name" and len(said) == 3
        assert Path(local.task.prompts).name == COMMIT
        words = preflight.localize_sets(mixed, ["seed=1"])
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ConfigError, match="hf://datasets/org/none: the hub does not provide"):
            preflight.localize(
                load.load("configs/demo.toml", [*sets, "task.prompts='hf://datasets/org/none'"])
            )
    shutil.rmtree(tmp_path / "repository")
    (mine,) = load.load("configs/demo.toml", ["task.name='mixture'", *words]).task.mixture
    assert texts(mine.prompts) == ["e", "f"] and mine.label == "mine"
    assert preflight.localize(config) == local
    for name in ("hf://datasets/org", "hf://datasets/org/name/none.csv"):
        with pytest.raises(ConfigError, match=f"{name}: "):
            preflight.localize(load.load("configs/demo.toml", [*sets, f"task.prompts='{name}'"]))
