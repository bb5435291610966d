"""Weights through relays: what leaves the learner; relays that die, starve or lie; who gets in."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chunks_kit import until
from process_kit import ROOT

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError, PeerUnreachable
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.transport import chunks, fan_out, keys, tcp
from asyncrl.transport.chunks import CHUNK_BYTES, ChunkClient, ChunkServer, VersionPending
from asyncrl.transport.fan_out import LEARNER, RelayPeer, RelayTrees
from asyncrl.transport.file_server import FileServer
from asyncrl.transport.relay import RelayCache, RelayClient
from asyncrl.transport.ring import WeightRing

CHUNKS = 6
SIZE = CHUNKS * CHUNK_BYTES - 5
WAIT_S = 120.0
TOLD = 4096  # bytes of a place in a tree, at most


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


# ---- the tree ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fan_out_of", [1, 2, 3])
def test_no_tree_has_a_circle_or_more_copies_than_it_may(fan_out_of: int) -> None:
    rng = random.Random(fan_out_of)
    trees = RelayTrees(fan_out_of)
    parents: dict[tuple[int, str], str] = {}
    failed: dict[tuple[int, str], list[str]] = {}
    for _ in range(3000):
        number, which = rng.randrange(3), rng.randrange(40)
        name = f"generator-{which}"
        asking = RelayPeer(name, f"10.0.0.{which % 9}", 5000 + (rng.random() < 0.02), "")
        tried = failed.setdefault((number, name), [])
        before = parents.get((number, name))
        if before and rng.random() < 0.5:
            tried.append(before)
        chosen = trees.assign_source((Label(1, number), "d"), asking, tried)
        parents[number, name] = chosen
        assert chosen not in tried
        at, seen = chosen, {name}
        while at != LEARNER:
            assert at not in seen, "a circle: nobody in it ever gets a byte"
            seen.add(at)
            at = trees._trees[Label(1, number), "d"].parent.get(at, LEARNER)
        tree = trees._trees[Label(1, number), "d"]
        host = {f"generator-{n}": f"10.0.0.{n % 9}" for n in range(40)}
        of = Counter((place, host[who] == host.get(place)) for who, place in tree.parent.items())
        assert all(count <= fan_out_of for (place, _), count in of.items() if place != LEARNER)
        assert of[LEARNER, False] == tree.remote_children[LEARNER]
    assert trees.beyond > 0  # so many failures


def test_a_thousand_cost_the_learner_its_copies_and_a_host_one() -> None:
    trees = RelayTrees(2)
    hosts = [f"10.0.{n // 200}.{n % 200}" for n in range(250)]
    crossed: Counter[str] = Counter()
    where = {}
    for number in range(1000):
        asking = RelayPeer(f"generator-{number}", hosts[number % 250], 5000, "")
        where[asking.name] = asking.host
        giver = trees.assign_source((Label(1, 1), "d"), asking)
        crossed[asking.host] += where.get(giver, "") != asking.host
    assert trees._trees[Label(1, 1), "d"].remote_children[LEARNER] == 2 and trees.beyond == 0
    assert set(crossed.values()) == {1}  # over each host's link, once
    depth = max(len(trees._trees[Label(1, 1), "d"].list_ancestors(name)) for name in where)
    assert depth <= 12, depth


def test_one_that_fails_others_comes_last_and_is_forgiven() -> None:
    trees = RelayTrees(1)

    def place(version: int, name: str, *failed: str) -> str:
        relay = RelayPeer(name, f"10.0.0.{name}", 5000, "")
        return trees.assign_source((Label(1, version), "d"), relay, failed)

    assert [place(1, "1"), place(1, "2"), place(1, "3")] == [LEARNER, "1", "2"]
    assert place(1, "3", "1") == "2" and trees.strikes["1"] == 0  # not whom it was sent to
    assert place(1, "2", "1") == LEARNER and (trees.strikes["1"], trees.beyond) == (1, 1)
    trees = RelayTrees(2)
    assert [place(1, name) for name in "1234"] == [LEARNER, LEARNER, "1", "1"]
    assert place(1, "3", "1") == "2"
    assert [place(2, name) for name in "2134"] == [LEARNER, LEARNER, "2", "2"]  # 1 has struck out
    assert [place(3, name) for name in "1234"] == [LEARNER, LEARNER, "1", "1"]
    # who has tried enough gets it from the learner
    assert place(3, "4", *(f"x{n}" for n in range(fan_out.FAILED))) == LEARNER


def test_who_came_by_loopback_gives_to_loopback_alone() -> None:
    trees = RelayTrees(1)
    version = Label(1, 1), "d"
    assert trees.assign_source(version, RelayPeer("generator-0", "127.0.0.1", 5000, "")) == LEARNER
    assert trees.assign_source(version, RelayPeer("generator-1", "10.0.0.1", 5000, "")) == LEARNER
    assert (
        trees.assign_source(version, RelayPeer("generator-2", "127.0.0.1", 0, "")) == "generator-0"
    )
    assert (
        trees.assign_source(version, RelayPeer("generator-3", "127.0.0.1", 5000, ""))
        == "generator-1"
    )
    # one that hands nothing on, and one whose host nobody knows
    assert (
        trees.assign_source((Label(1, 2), "d"), RelayPeer("generator-2", "127.0.0.1", 0, ""))
        == LEARNER
    )
    assert (
        trees.assign_source((Label(1, 2), "d"), RelayPeer("generator-4", "", 5000, "")) == LEARNER
    )
    assert (
        trees.assign_source((Label(1, 2), "d"), RelayPeer("generator-0", "127.0.0.1", 5000, ""))
        == LEARNER
    )
    assert trees.beyond == 3


def test_a_generator_started_again_hands_on_nothing_that_it_had() -> None:
    trees = RelayTrees(1)
    version = Label(1, 1), "d"
    for number in range(2):
        trees.assign_source(version, RelayPeer(f"generator-{number}", "10.0.0.1", 5000, ""))
    trees.assign_source((Label(1, 2), "d"), RelayPeer("generator-1", "10.0.0.1", 5001, ""))
    chosen = trees.assign_source(version, RelayPeer("generator-2", "10.0.0.1", 5000, ""))
    assert chosen == "generator-0"


def test_a_shelf_keeps_two_versions_and_what_has_come_of_them() -> None:
    shelf = RelayCache()
    for number in range(3):
        held = shelf.begin_version((Label(1, number), "d"), 8, b"p")
        held.data[:], held.received = bytes([number]) * 8, 4 + 4 * (number < 2)
    with pytest.raises(VersionPending):
        shelf.read(Label(1, 0), "d", 0, 8)
    with pytest.raises(VersionPending):
        shelf.read(Label(1, 1), "another", 0, 8)
    assert shelf.read(Label(1, 1), "d", 4, 100) == ("d", bytes([1]) * 4, b"p")
    assert shelf.read(Label(1, 2), "d", 0, 4) == ("d", bytes([2]) * 4, b"p")
    with pytest.raises(VersionPending):
        shelf.read(Label(1, 2), "d", 0, 5)
    assert shelf.begin_version((Label(1, 2), "d"), 8, b"p") is held
    shelf.begin_version(
        (Label(1, 0), "d"), 8, b"p"
    )  # an older one, for an evaluation: the newest stays
    assert shelf.read(Label(1, 2), "d", 0, 4)


# ---- real sockets --------------------------------------------------------------------------------


class Net:
    """A learner's chunk server with keys, and generators that ask from addresses of their own."""

    def __init__(self, tmp_path: Path, copies: int) -> None:
        self.keys = tmp_path / "keys"
        keys.make_keys(self.keys, 8)
        self.ring = WeightRing(tmp_path / "ring", SIZE, 4, [("w", "uint8", [SIZE], 0, SIZE)], 1)
        self.digests: dict[int, str] = {}
        self.server = ChunkServer(
            "tcp://127.0.0.1:*", self.ring.rows, self.ring.read_part, str(self.keys)
        )
        self.server.start_trees(copies, SIZE)
        self.pullers: list[RelayClient] = []

    def publish(self, number: int) -> None:
        def fill(into: memoryview) -> None:
            into[:] = content(number)

        self.digests[number] = self.ring.write(Label(1, number), fill, probe=bytes(4 * number))

    def puller(self, number: int) -> RelayClient:
        port = self.server.address.rpartition(":")[2]
        learner = f"tcp://127.0.0.{number + 2}:0;127.0.0.1:{port}"
        made = RelayClient(learner, WAIT_S, str(self.keys), f"generator-{number}")
        made.silent_s = made.starved_s = WAIT_S
        self.pullers.append(made)
        return made

    def fetch(self, puller: RelayClient, number: int, into: bytearray | None = None) -> bytes:
        into = into or bytearray(SIZE)
        got = puller.fetch(Label(1, number), self.digests[number], memoryview(into))
        assert got == self.digests[number] and puller.probe == bytes(4 * number)
        return bytes(into)

    def close(self) -> None:
        for puller in self.pullers:
            puller.close()
        self.server.close()
        self.ring.close()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Callable[[int], Net]]:
    made: list[Net] = []

    def make(copies: int) -> Net:
        made.append(Net(tmp_path, copies))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_seven_generators_cost_the_learner_two_copies(
    net: Callable[[int], Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    # else one that stands still answers late what was given up meanwhile, and gives it twice
    monkeypatch.setattr(chunks, "PENDING_S", WAIT_S)
    run = net(2)
    pullers = [run.puller(number) for number in range(7)]
    for version in (1, 2):
        run.publish(version)
        before = run.server.bytes_sent
        got: dict[int, bytes] = {}

        def pull(number: int, version: int = version, got: dict[int, bytes] = got) -> None:
            got[number] = run.fetch(pullers[number], version)

        threads = [threading.Thread(target=pull, args=(number,)) for number in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert got == dict.fromkeys(range(7), content(version))
        assert 2 * SIZE <= run.server.bytes_sent - before <= 2 * SIZE + 7 * TOLD
    assert run.server.trees is not None and run.server.trees.beyond == 0
    assert [p.bytes_received for p in pullers] == [2 * SIZE] * 7
    handed_on = [p.server.bytes_sent // SIZE for p in pullers if p.server is not None]
    assert sum(handed_on) == 10 and max(handed_on) <= 4  # two versions, two each
    assert not any(p.abandoned for p in pullers)


def test_who_knocks_before_the_relay_knows_its_guests_waits_for_them(
    net: Callable[[int], Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "LIST_WAIT_S", WAIT_S)
    run = net(1)
    run.publish(1)
    first, second = run.puller(0), run.puller(1)
    placed, knocked = threading.Event(), threading.Event()
    place, allowed = first.learner.request_source, keys.RelayAuthenticator.callback

    def answered_late(*asked: Any) -> Any:
        answer = place(*asked)
        placed.set()  # from now on others are sent to it
        assert knocked.wait(WAIT_S)
        return answer

    def asked(door: keys.RelayAuthenticator, domain: str, key: bytes) -> bool:
        knocked.set()
        return allowed(door, domain, key)

    monkeypatch.setattr(first.learner, "request_source", answered_late)
    monkeypatch.setattr(keys.RelayAuthenticator, "callback", asked)
    fetching = threading.Thread(target=run.fetch, args=(first, 1))
    fetching.start()
    assert placed.wait(WAIT_S)
    assert run.fetch(second, 1) == content(1)
    fetching.join(WAIT_S)
    assert second.abandoned == 0 and run.server.bytes_sent <= SIZE + 2 * TOLD
    # one that has never been told lets nobody in, and closes all the same
    third = run.puller(2)
    assert third.server is not None and third.authenticator is not None
    knocked.clear()
    address = third.server.address.replace("0.0.0.0", "127.0.0.1")
    client = ChunkClient(address, 0.5, str(run.keys), "generator-1", third.authenticator.key)
    with pytest.raises(PeerUnreachable):
        next(client.fetch_chunks(Label(1, 1), run.digests[1], 0, SIZE))
    assert knocked.wait(WAIT_S)
    client.close()
    closing = threading.Thread(target=third.close)
    closing.start()
    closing.join(WAIT_S / 2)
    assert not closing.is_alive()
    run.pullers.remove(third)


def cut_after(puller: RelayClient, answers: int, heard: RelayClient) -> threading.Event:
    """It dies within the chunk after so many that `heard` has got; the event says that it has."""
    server, dead = puller.server, threading.Event()
    assert server is not None
    read = server.read
    left = iter(range(answers))

    def reads(*asked: Any) -> Any:
        if next(left, None) is None:
            until(lambda: heard.bytes_received >= answers * CHUNK_BYTES)  # else they die with it
            server._end = True
            dead.set()
            raise VersionPending(asked[1])
        return read(*asked)

    server.read = reads
    return dead


def test_a_relay_that_dies_in_mid_version_costs_no_chunk_twice(net: Callable[[int], Net]) -> None:
    run = net(1)
    run.publish(1)
    first, second, third = (run.puller(number) for number in range(3))
    assert run.fetch(first, 1) == content(1)
    dead = cut_after(first, 3, second)

    def close() -> None:
        dead.wait(WAIT_S)
        first.close()

    closing = threading.Thread(target=close)
    closing.start()
    run.pullers.remove(first)
    assert run.fetch(second, 1) == content(1)
    closing.join(WAIT_S)
    assert second.abandoned == 1 and second.bytes_received == SIZE
    sent = 2 * SIZE - 3 * CHUNK_BYTES  # one copy, and what the dead one had not given
    assert sent <= run.server.bytes_sent <= sent + 5 * TOLD
    # the next one is sent to who lives, and so is the second with the next version
    assert run.fetch(third, 1) == content(1)
    assert third.abandoned == 0 and run.server.bytes_sent <= sent + 6 * TOLD


def test_a_relay_that_has_nothing_itself_is_left(net: Callable[[int], Net]) -> None:
    run = net(1)
    run.publish(1)
    first, second, third = (run.puller(number) for number in range(3))
    digest = run.digests[1]
    # it asks for its place and stands still
    placed = first._request_source(Label(1, 1), digest, [])
    assert placed is not None and placed.name == LEARNER
    first.cache.begin_version((Label(1, 1), digest), SIZE, placed.probe)
    second.starved_s = 0.1
    assert run.fetch(second, 1) == content(1) and second.abandoned == 1
    # one that has never begun says so
    third._request_source(Label(1, 1), digest, [])
    assert third.server is not None and first.server is not None
    fourth = run.puller(3)
    fourth.starved_s = 0.1
    assert run.fetch(fourth, 1) == content(1)
    assert fourth.abandoned <= 2 and fourth.bytes_received == SIZE


def test_what_a_relay_makes_up_is_neither_used_nor_handed_on(net: Callable[[int], Net]) -> None:
    run = net(1)
    run.publish(1)
    liar, honest, third = (run.puller(number) for number in range(3))
    assert run.fetch(liar, 1) == content(1)
    held = liar.cache._versions[Label(1, 1), run.digests[1]]
    held.data[2 * CHUNK_BYTES + 7] ^= 1
    assert run.fetch(honest, 1) == content(1) and honest.abandoned == 1
    assert honest.bytes_received == SIZE + CHUNK_BYTES  # the third chunk twice, the others once
    assert run.fetch(third, 1) == content(1) and third.abandoned == 0
    mine = honest.cache._versions[Label(1, 1), run.digests[1]]
    assert bytes(mine.data) == content(1) and mine.received == SIZE
    # too little of a chunk, and another version's under this one's name
    run.publish(2)
    assert run.fetch(liar, 2) == content(2)
    assert liar.server is not None
    for lie in (lambda *asked: (asked[1], b"x", b""), lambda *asked: ("0" * 16, b"x" * 9, b"")):
        liar.server.read = lie
        assert run.fetch(run.puller(len(run.pullers)), 2) == content(2)
    assert [each.abandoned for each in run.pullers[3:]] == [1, 0]  # the first of them hands on


def test_a_fetch_goes_on_after_the_learner_was_away(
    net: Callable[[int], Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = net(1)
    run.publish(1)
    puller, into = run.puller(0), bytearray(SIZE)
    receive, answers = puller.learner._receive, iter([True] * 4 + [False])

    def breaks() -> Any:
        if not next(answers, True):
            puller.learner.reconnect()
            raise PeerUnreachable("the cable")
        return receive()

    monkeypatch.setattr(puller.learner, "_receive", breaks)
    with pytest.raises(PeerUnreachable, match="the cable"):
        run.fetch(puller, 1, into)
    assert run.fetch(puller, 1, into) == content(1) and puller.bytes_received == SIZE
    # what is gone is gone, and another version begins at its beginning
    assert puller.fetch(Label(1, 9), "", memoryview(into)) == ""
    assert puller.fetch(Label(1, 1), "another", memoryview(into)) == ""
    assert puller.fetch(Label(1, 1), "", memoryview(into)) == run.digests[1]
    assert puller.bytes_received == 2 * SIZE


def test_a_door_opens_for_generators_of_the_run_alone(
    net: Callable[[int], Net], tmp_path: Path
) -> None:
    run = net(1)
    run.publish(1)
    first = run.puller(0)
    assert run.fetch(first, 1) == content(1)
    assert first.server is not None and first.authenticator is not None
    assert sorted(first.authenticator.names.values()) == [f"generator-{n}" for n in range(8)]
    address = first.server.address.replace("0.0.0.0", "127.0.0.1")
    keys.make_keys(tmp_path / "other", 2)

    def asks(curve_dir: Path, name: str, key: str, patience_s: float = 0.5) -> bytes:
        client = ChunkClient(address, patience_s, str(curve_dir), name, server_key=key)
        try:
            found = client.fetch_chunks(Label(1, 1), run.digests[1], 0, SIZE)
            return next(found).data
        except PeerUnreachable:
            return b""
        finally:
            client.close()

    assert (
        asks(run.keys, "generator-1", first.authenticator.key, WAIT_S) == content(1)[:CHUNK_BYTES]
    )
    assert asks(run.keys, "viewer", first.authenticator.key) == b""
    assert asks(tmp_path / "other", "generator-1", first.authenticator.key) == b""
    # whoever listens there instead has another key
    assert asks(run.keys, "generator-1", "") == b""
    with pytest.raises(ConfigError, match="is not a public key"):
        asks(run.keys, "generator-1", "nonsense")


def unanswered(run: Net, client: ChunkClient, asking: fan_out.RelayRequest) -> None:
    """It asks for its place, is heard, and gets no answer."""
    before, receive = run.server.refused, client._receive

    def receives() -> Any:
        until(lambda: run.server.refused > before)
        client.timeout = 0.5  # from here on no answer is on its way
        return receive()

    client._receive = receives  # type: ignore[method-assign]
    with pytest.raises(PeerUnreachable):
        client.request_source(Label(1, 1), "", asking)
    client._receive, client.timeout = receive, WAIT_S  # type: ignore[method-assign]
    assert run.server.refused == before + 1


def test_only_generators_have_a_place_and_only_where_the_run_says_so(
    net: Callable[[int], Net],
) -> None:
    run = net(1)
    run.publish(1)
    viewer = ChunkClient(run.server.address, WAIT_S, str(run.keys), "viewer")
    asking = fan_out.RelayRequest("generator-0")
    unanswered(run, viewer, asking)
    viewer.close()
    mine = ChunkClient(run.server.address, WAIT_S, str(run.keys), "generator-3")
    placed = mine.request_source(Label(1, 1), "", asking)
    assert placed is not None and placed.digest == run.digests[1] and placed.guests == {}
    assert run.server.trees is not None
    assert set(run.server.trees.relays) == {"generator-3"}  # whom the key says
    for wrong in (fan_out.RelayRequest("", port=1 << 16), fan_out.RelayRequest("", port=-1)):
        unanswered(run, mine, wrong)
    run.server.trees = None
    unanswered(run, mine, asking)
    mine.close()


@pytest.mark.parametrize("copies", [0, 2])
def test_addresses_and_keys_of_the_config_reach_both_ends(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []
    trees: list[tuple[int, int]] = []

    def serve(*words: Any) -> SimpleNamespace:
        made.append(words)
        return SimpleNamespace(start_trees=lambda *sizes: trees.append(sizes))

    monkeypatch.setattr(tcp, "ChunkServer", serve)
    monkeypatch.setattr(tcp, "FileServer", lambda config: ("files of", config))
    for kind in ("ChunkClient", "RelayClient"):
        monkeypatch.setattr(tcp, kind, lambda *words, kind=kind: (kind, *words))
    monkeypatch.setattr(tcp, "reachable_address", lambda *words: ("reachable", *words))
    wires = SimpleNamespace(
        weights_address="tcp://0.0.0.0:7",
        address="tcp://trainer:5",
        curve_dir="keys",
        connect_s=3.5,
    )
    config: Any = SimpleNamespace(wires=wires, weights=SimpleNamespace(fan_out=copies))
    ring: Any = SimpleNamespace(rows=[1], read_part=print, size=99)
    assert tcp.serve(config, ring) is not None
    assert made == [("tcp://0.0.0.0:7", [1], print, "keys", ("files of", config))]
    assert trees == ([(2, 99)] if copies else [])
    source = WeightsSource(1, "elsewhere", "ring", "tcp://0.0.0.0:4321")
    assert tcp.connect(config, source, "generator-3") == (
        "RelayClient" if copies else "ChunkClient",
        ("reachable", "tcp://0.0.0.0:4321", "tcp://trainer:5"),
        3.5,
        "keys",
        "generator-3",
    )
    wires.weights_address = ""
    assert tcp.serve(config, ring) is None and len(made) == 1
    with pytest.raises(PeerUnreachable) as error:
        tcp.connect(config, WeightsSource(1, "elsewhere", "ring", ""), "generator-3")
    assert str(error.value) == (
        "the learner's weights are on host elsewhere in ring, which this host cannot read; set "
        "wires.weights_address to a tcp address of the learner"
    )


def test_the_config_says_which_client(tmp_path: Path) -> None:
    sets = ["wires.weights_address='tcp://127.0.0.1:1'", "weights.transport='tcp'"]
    source = WeightsSource(1, "elsewhere", "", "tcp://127.0.0.1:1")
    for copies, kind in ((0, ChunkClient), (2, RelayClient)):
        config = load.load(ROOT / "configs" / "demo.toml", [*sets, f"weights.fan_out={copies}"])
        client = tcp.connect(config, source, "generator-0")
        assert type(client) is kind
        client.close()
        address = "wires.weights_address='tcp://127.0.0.1:0'"
        served = load.load(
            ROOT / "configs" / "demo.toml", [*sets, address, f"weights.fan_out={copies}"]
        )
        ring = WeightRing(tmp_path / f"ring{copies}", 8, 2, [("w", "uint8", [8], 0, 8)], 1)
        server = tcp.serve(served, ring)
        assert server is not None and (server.trees is not None) == (copies > 0)
        assert isinstance(server.files, FileServer), "other machines fetch the model and the code"
        assert server.trees is None or server.trees.fan_out == 2
        server.close()
        ring.close()
    with pytest.raises(ConfigError, match=r"weights\.fan_out: weights\.transport = gloo"):
        load.load(ROOT / "configs" / "demo.toml", ["weights.transport='gloo'", "weights.fan_out=1"])
