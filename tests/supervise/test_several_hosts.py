"""A run whose generator shares only a tcp address and keys, as on another machine."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from bad_input_kit import refused
from process_kit import ENV, ROOT
from several_hosts_kit import asyncrl, free_address, other_machine

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import RunStatus
from asyncrl.records import rundir
from asyncrl.supervise import live
from asyncrl.transport.keys import make_keys
from asyncrl.transport.sockets import BufferSocket

SMALL_TEXT = (
    "learner.steps=3 learner.groups=4 learner.group_size=4 evaluation.prompts=4 "
    "evaluation.final_prompts=4 evaluation.ood_prompts=0 learner.checkpoint_every=100 "
    "weights.transport='tcp' wires.connect_s=600"
)
SMALL = [*SMALL_TEXT.split()]


def test_a_generator_elsewhere_joins_over_tcp_with_keys(tmp_path: Path, sort_model: Path) -> None:
    made = asyncrl("keys", str(tmp_path / "keys"), "--json").check()
    copied = other_machine(tmp_path / "keys", tmp_path / "copied")
    assert [Path(x).name for x in made.json["copy"]] == [f"generator-{n}" for n in range(4)]
    address, weights = free_address(), free_address()

    def start(part: str, where: str, keys: Path) -> subprocess.Popen[str]:
        sets = [
            *SMALL,
            f"model.path={str(sort_model)!r}",
            f"wires.address={address!r}",
            f"wires.weights_address={weights!r}",
            f"wires.curve_dir={str(keys)!r}",
        ]
        argv = [
            sys.executable,
            "-m",
            "asyncrl.cli",
            part,
            "configs/demo.toml",
            "--run-dir",
            str(tmp_path / where),
            *[x for s in sets for x in ("--set", s)],
        ]
        return subprocess.Popen(
            argv, cwd=ROOT, env=ENV, stderr=(tmp_path / f"{part}.log").open("w"), text=True
        )

    # first: it waits for the buffer to say which run it is
    generator = start("generator", "there", copied)
    parts = {"generator": generator} | {
        part: start(part, "here", tmp_path / "keys") for part in ("buffer", "learner")
    }
    try:
        codes = {name: p.wait(timeout=600) for name, p in parts.items()}
    finally:
        for p in parts.values():
            p.kill()
    assert codes == dict.fromkeys(parts, 0), {
        name: (tmp_path / f"{name}.log").read_text()[-2000:] for name in parts
    }
    assert rundir.read_run_id(tmp_path / "there") == rundir.read_run_id(tmp_path / "here")
    summary = json.loads((tmp_path / "here" / "buffer_summary.json").read_text())
    assert summary["finished"] and summary["steps"] == 3 and summary["trajectories"] == 3 * 16
    assert not (tmp_path / "there" / "model").exists()
    assert (tmp_path / "here" / "model" / "model.safetensors").exists()
    for where in ("here", "there"):
        rundir.clean(tmp_path / where)


def test_only_keys_on_the_list_are_let_in(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    make_keys(mine)
    make_keys(other)
    stranger = other_machine(other, tmp_path / "stranger")
    # knows whom to ask, is not on the list
    (stranger / "server.key").write_bytes((mine / "server.key").read_bytes())
    buffer, end = BufferSocket("tcp://127.0.0.1:*", str(mine)), threading.Event()

    def serve() -> None:
        while not end.is_set():
            if (got := buffer.recv(0.05)) is not None:
                buffer.send(got[0], RunStatus("r", 0, 1, 1, {}, {}, [], {}, False, "", 0))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        values = live.request_status(
            buffer.address, str(other_machine(mine, tmp_path / "friend")), 600.0
        )
        assert values is not None
        assert live.request_status(buffer.address, str(stranger), 1.0) is None
        assert live.request_status(buffer.address, "", 1.0) is None
    finally:
        end.set()
        thread.join()
        buffer.close()


def test_keys_are_made_once_and_missing_ones_named(tmp_path: Path, sort_model: Path) -> None:
    make_keys(tmp_path / "keys")
    before = (tmp_path / "keys" / "server.key_secret").read_bytes()
    with pytest.raises(ConfigError, match="already has keys"):
        make_keys(tmp_path / "keys")
    assert (tmp_path / "keys" / "server.key_secret").read_bytes() == before
    where = str(tmp_path / "empty")
    sets = [
        f"wires.curve_dir={where!r}",
        f"model.path={str(sort_model)!r}",
        "wires.address='tcp://127.0.0.1:5999'",
    ]
    done = asyncrl(
        "buffer",
        "configs/demo.toml",
        "--run-dir",
        str(tmp_path / "r"),
        *[x for s in sets for x in ("--set", s)],
    )
    refused(done, 2, "wires.curve_dir", "server.key_secret is missing", f"asyncrl keys {where}")


def test_a_generator_that_finds_no_buffer_says_where_it_looked(tmp_path: Path) -> None:
    address = free_address()
    sets = [f"wires.address={address!r}", "wires.connect_s=1"]
    done = asyncrl(
        "generator",
        "configs/demo.toml",
        "--run-dir",
        str(tmp_path / "r"),
        *[x for s in sets for x in ("--set", s)],
    )
    refused(done, 4, f"no reply from a buffer at {address} within 1 s", "wires.connect_s")
    assert not (tmp_path / "r").exists()
