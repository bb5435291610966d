import fcntl
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from process_kit import ROOT

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError, DamagedDataError, PeerUnreachable
from asyncrl.transport import file_server
from asyncrl.transport.file_server import FileEntry, FileServer

TEXT = b"0123456789"


class Source:
    """Bytes by digest, `size` in a piece; `breaks` times, the connection breaks after a piece."""

    def __init__(self, *files: bytes, size: int = 4, breaks: int = 0) -> None:
        self.files = {sha(data): data for data in files}
        self.size, self.breaks = size, breaks
        self.asked: list[tuple[str, int, int]] = []

    def read_file(self, digest: str, begin: int, size: int) -> Iterator[bytes]:
        self.asked.append((digest, begin, size))
        for at in range(begin, size, self.size):
            yield self.files[digest][at : min(at + self.size, size)]
            if self.breaks:
                self.breaks -= 1
                raise PeerUnreachable("broken")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry(data: bytes, name: str = "a.json", part: str = "model") -> FileEntry:
    return FileEntry(part, name, len(data), sha(data), True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "run"
    (here / "model" / "sub.json").mkdir(parents=True)
    for name in ("b.safetensors", "a.json", "c.model", "d.txt", "e.jinja", "f.bin", "g.py"):
        (here / "model" / name).write_text(name)
    monkeypatch.chdir(here)
    return here


def config(*sets: str) -> Config:
    return load.load(ROOT / "configs" / "demo.toml", ["model.path='model'", *sets])


def test_of_a_model_the_files_without_code_are_served(place: Path) -> None:
    names = ["a.json", "b.safetensors", "c.model", "d.txt", "e.jinja"]
    listed = file_server.list_served_files(config())
    assert listed == [("model", Path("model") / name, True) for name in names]


def test_a_directory_of_prompts_is_refused(place: Path) -> None:
    (place / "rows").mkdir()
    with pytest.raises(ValueError) as error:
        file_server.list_served_files(config("task.name='file'", "task.prompts='rows'"))
    assert str(error.value) == (
        "task.prompts = rows is not a single file; a machine that joins gets files"
    )


def test_a_listing_is_made_once_and_read_by_digest(place: Path) -> None:
    (place / "own.py").write_text("def reward(prompt, text): return 1.0\n")
    server = FileServer(config("reward.function='own.py:reward'"))
    server.list_files()
    thread = server._thread
    assert thread is not None and thread.daemon and thread.name == "library"
    thread.join()
    entries = server.list_files()
    assert entries is not None and server._thread is thread and server.error == ""
    assert entries[0] == FileEntry("model", "a.json", 6, sha(b"a.json"), True)
    code = (place / "own.py").read_bytes()
    assert entries[-1] == FileEntry("reward", "own.py", len(code), sha(code), False)
    assert server.read(entries[0].digest, 2, 3) == b"jso"
    assert server.read(entries[-1].digest, 0, 3) == b"", "the run does not share its code"
    assert server.read("unknown", 0, 3) == b""
    (place / "model" / "a.json").unlink()
    with pytest.raises(OSError):
        server.read(entries[0].digest, 0, 3)


def test_what_prevents_a_listing_is_said(place: Path) -> None:
    server = FileServer(config("task.name='file'", "task.prompts='none.jsonl'"))
    server.list_files()
    assert server._thread is not None
    server._thread.join()
    assert server.entries is None and server.list_files() is None
    assert server.error == (
        "ValueError: task.prompts = none.jsonl is not a single file; "
        "a machine that joins gets files"
    )


def test_the_file_of_a_function(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "own_single.py").write_text("")
    (place / "own_package").mkdir()
    (place / "own_package" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert file_server.find_code("any/where.py:f") == Path("any/where.py")
    assert file_server.find_code("own_single:f") == place / "own_single.py"
    for installed in ("own_package:f", "own_package.part:f", "no_such_module:f", "f"):
        assert file_server.find_code(installed) is None, installed


def test_a_file_as_it_is_listed_on_the_wire() -> None:
    one = entry(TEXT)
    wire = ["model", "a.json", 10, sha(TEXT), True]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one)) == wire
    decode = msgspec.msgpack.Decoder(FileEntry).decode
    parts = ["model", "reward_model", "prompts", "heldout", "ood", "template", "reward"]
    parts += [f"mixture.a-1.{part}" for part in parts[2:]]
    for part in parts:
        assert decode(msgspec.msgpack.encode([part, *wire[1:]])).part == part
    for part in ("Model", "mixture.a.model", "mixture.A.reward", "model\n", "models", "a.prompts"):
        with pytest.raises(msgspec.ValidationError):
            decode(msgspec.msgpack.encode([part, *wire[1:]]))


def test_a_file_comes_in_pieces_from_where_it_broke(tmp_path: Path) -> None:
    source = Source(TEXT, breaks=2)
    file_server.fetch(source.read_file, entry(TEXT), tmp_path / "a.json")
    digest = sha(TEXT)
    assert source.asked == [(digest, 0, 10), (digest, 4, 10), (digest, 8, 10)]
    assert (tmp_path / "a.json").read_bytes() == TEXT
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_after_five_connections_it_gives_up_and_goes_on_later(tmp_path: Path) -> None:
    source = Source(TEXT, size=1, breaks=6)
    with pytest.raises(PeerUnreachable):
        file_server.fetch(source.read_file, entry(TEXT), tmp_path / "a.json")
    assert len(source.asked) == file_server.TRIES == 5
    assert [path.name for path in tmp_path.iterdir()] == ["a.json.part"]
    file_server.fetch(source.read_file, entry(TEXT), tmp_path / "a.json")
    assert [begin for _, begin, _ in source.asked] == [0, 1, 2, 3, 4, 5, 6]
    assert (tmp_path / "a.json").read_bytes() == TEXT


def test_wrong_bytes_are_refused_and_a_partial_file_that_is_too_long_goes(tmp_path: Path) -> None:
    (tmp_path / "a.json.part").write_bytes(TEXT + b"more")
    source = Source(TEXT)
    with pytest.raises(DamagedDataError) as error:
        file_server.fetch(source.read_file, entry(TEXT), tmp_path / "a.json")
    assert source.asked == [(sha(TEXT), 10, 10)] and not list(tmp_path.iterdir())
    assert str(error.value) == (
        "model: a.json does not match its digest: was the file changed since the run began? Stop "
        "the run and continue it with --resume"
    )
    source.files[sha(TEXT)] = b"x" * len(TEXT)
    with pytest.raises(DamagedDataError, match="does not match its digest"):
        file_server.fetch(source.read_file, entry(TEXT), tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_a_cache_has_a_folder_for_each_set_of_files(tmp_path: Path) -> None:
    one, two = entry(TEXT), entry(b"two", "b.json")
    source, lines = Source(TEXT, b"two"), list[str]()
    cache = tmp_path / "cache"
    where = file_server.fetch_files(source.read_file, [one, two], cache, lines.append)
    rows = "".join(sorted(f"{each.digest} {each.name}\n" for each in (one, two)))
    assert where == cache / f"model-{sha(rows.encode())[:32]}"
    assert file_server.name_folder([two, one]) == where.name, "in any order"
    assert lines == ["fetching model: a.json, 0.0 MiB", "fetching model: b.json, 0.0 MiB"]
    assert sorted(path.name for path in cache.iterdir()) == [where.name, f"{where.name}.lock"]
    assert file_server.fetch_files(source.read_file, [one, two], cache, lines.append) == where
    assert lines[2:] == [f"model: from the cache, {where}"] and len(source.asked) == 2
    (where / "b.json").write_bytes(b"owt")  # as long, with other bytes
    file_server.fetch_files(source.read_file, [one, two], cache, lines.append)
    assert lines[3:] == ["fetching model: b.json, 0.0 MiB"]
    assert (where / "b.json").read_bytes() == b"two"
    large = bytes(3 << 19)
    source = Source(large, size=1 << 20)
    file_server.fetch_files(source.read_file, [entry(large, "c.json")], cache, lines.append)
    assert lines[-1] == "fetching model: c.json, 1.5 MiB"


def test_a_broken_fetch_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    source = Source(TEXT, b"two", size=1, breaks=8)
    files = [entry(b"two", "b.json"), entry(TEXT)]
    with pytest.raises(PeerUnreachable):
        file_server.fetch_files(source.read_file, files, tmp_path, print)
    name = file_server.name_folder(files)
    (part,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert part.name == f"{name}.part" and (part / "b.json").read_bytes() == b"two"
    asked = len(source.asked)
    where = file_server.fetch_files(source.read_file, files, tmp_path, print)
    assert {digest for digest, *_ in source.asked[asked:]} == {sha(TEXT)}
    assert where.name == name and not part.exists()


def test_two_that_join_do_not_fetch_at_once(tmp_path: Path) -> None:
    class Looks(Source):
        def read_file(self, digest: str, begin: int, size: int) -> Iterator[bytes]:
            (lock,) = tmp_path.glob("model-*.lock")
            with lock.open("w") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return super().read_file(digest, begin, size)

    source = Looks(TEXT)
    file_server.fetch_files(source.read_file, [entry(TEXT)], tmp_path, print)
    assert len(source.asked) == 1


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "..", ".", "", "a/b", "a\n", "x" * 90 + "/"]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(DamagedDataError) as error:
        file_server.fetch_files(Source(TEXT), [entry(TEXT), entry(TEXT, name)], cache, print)
    assert str(error.value) == f"the run has a file with an unsafe name: {name[:80]!r}"


def test_code_that_is_not_shared_must_be_the_runs(place: Path) -> None:
    code = b"def reward(prompt, text): return 1.0\n"
    ours = entry(code, "mine.py", "reward")
    (place / "mine.py").write_bytes(code)
    file_server.check_local_code("mine.py:reward", ours)
    file_server.check_local_code("package.module:reward", None)
    (place / "mine.py").write_bytes(b"")
    asks = "; copy it here, or let the run share it: reward.share = true"
    with pytest.raises(ConfigError) as error:
        file_server.check_local_code("mine.py:reward", ours)
    assert str(error.value) == (
        f"reward.function = mine.py:reward: the run's mine.py differs from mine.py{asks}"
    )
    for function in ("none.py:reward", "no_such_module:reward", "package.module:f"):
        with pytest.raises(
            ConfigError, match=re.escape(f"task.mixture.a.reward = {function}: the")
        ):
            file_server.check_local_code(function, ours, "task.mixture.a.reward")
        with pytest.raises(ConfigError, match=rf"the run's mine\.py is not here{re.escape(asks)}$"):
            file_server.check_local_code(function, ours)
