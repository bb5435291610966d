"""Files of an older version are read: an open HTTP session's, and those of a Tinker server.

`tests/data/older_files` was made by commit 4bd30599: `Recorded.play` of
tests/actors/gateway/test_session_journal.py, and a server that sampled two sequences and made two
steps, without its weights.  A run's journal and recording: see test_older_runs.py."""

import json
import shutil
import tarfile
import time
from pathlib import Path

import httpx
import pytest
from process_kit import ROOT

from actors.gateway.recovery.session_journal import SessionJournal

FILES = ROOT / "tests" / "data" / "older_files"


def test_a_session_of_an_older_version_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir(mode=0o700)
    shutil.copy(FILES / "session_1.0.1", folder / "1.0.1")
    ((_, opening, records),) = SessionJournal(folder).read()
    assert (opening.name, opening.key, opening.opened) == ("1.0.1", "key", 5.0)
    assert [x.ticket for x in records if x.ticket][-1].ticket == 1
    calls = [record.call for record in records if record.call is not None]
    assert [call.body for call in calls] == [b"a", b"b", b"c", b"d"]
    assert [call.parent for call in calls] == [None, 0, 0, None] and calls[3].aside
    assert records[-2].sent == 0 and records[-1].progress is not None


@pytest.mark.slow
def test_a_tinker_server_continues_the_files_of_an_older_version(tmp_path: Path) -> None:
    pytest.importorskip("tinker")
    from tinker.proto import tinker_public_pb2 as pb
    from tinker_local_kit import KEY, LocalServer

    with tarfile.open(FILES / "tinker_server.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    server = LocalServer(tmp_path)
    try:
        (model,) = server.server.models.values()
        assert (model.version, model.next, model.recorded) == (2, 6, 5)
        assert model.ledger.sum_totals(model.record.model)["sampled"] == 2
        assert len(server.server.samplers.samplers) == 1
        headers = {"x-api-key": KEY}

        def retrieve(name: str) -> httpx.Response:
            deadline = time.monotonic() + 600
            url = f"{server.url}/api/v1/retrieve_future"
            while time.monotonic() < deadline:
                reply = httpx.post(url, headers=headers, json={"request_id": name}, timeout=60)
                if reply.status_code != 408:
                    return reply
            raise AssertionError(name)

        earlier = json.loads(retrieve(f"{model.record.model}:call:5").content)
        assert earlier["type"] == "optim_step"
        call = model.log.read_call(4)
        assert call is not None and call.route == "forward_backward"
        again = pb.ForwardBackwardRequest.FromString(call.body)
        again.seq_id = 6
        reply = httpx.post(
            f"{server.url}/api/v1/forward_backward",
            headers=headers | {"content-type": "application/x-protobuf"},
            content=again.SerializeToString(),
        )
        scores = pb.ForwardBackwardOutput.FromString(retrieve(reply.json()["request_id"]).content)
        assert scores.metrics["loss:sum"] > 0 and model.next == 7
    finally:
        server.stop()
