"""Keys: who is let in, what the holder of each may say; a readable secret is refused."""

import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from several_hosts_kit import other_machine
from trajectory_kit import trajectory

from asyncrl.contract import messages as m
from asyncrl.contract.errors import ConfigError, PeerUnreachable
from asyncrl.contract.versions import Label
from asyncrl.transport import keys
from asyncrl.transport.chunks import ChunkClient, ChunkServer
from asyncrl.transport.sockets import BufferSocket, PeerSocket
from buffer import checks

WAIT_S = 600.0
LEARNER_HELLO = m.LearnerHello(
    m.PROTOCOL, "run", 1, Label(1, 0), None, "d", 0, 0, 1.0, m.WeightsSource(1, "here", "", ""), []
)
OF_THE_LEARNER: list[Any] = [
    LEARNER_HELLO,
    m.BatchRequest(1, 0),
    m.Commit(1, 0, Label(1, 1), "d", {}),
    m.CheckpointNotice(1, 0),
    m.LearnerGoodbye(1, 0),
    m.LearnerProgress("learner", None, {}),
]
OF_GENERATOR_0: list[Any] = [
    m.GeneratorHello(m.PROTOCOL, "run", "generator-0", 7, 8, "here", 1),
    m.TicketRequest("generator-0", 7, 1, 8, None),
    m.Delivery("generator-0", 7, 1, []),
    m.LeaseRenewal("generator-0", 7, [], {}, None),
    m.GeneratorGoodbye("generator-0", 7),
    m.JoinRequest("generator-0"),
]


@pytest.fixture(scope="module")
def key_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("roles") / "keys"
    keys.make_keys(path, 2)
    return path


@pytest.fixture
def said(key_dir: Path) -> Iterator[Callable[[str, Any], Any]]:
    """said(NAME, MESSAGE): what a buffer with these keys reads, or what it answers."""
    buffer = BufferSocket("tcp://127.0.0.1:*", str(key_dir))
    refused: list[tuple[str, str]] = []
    buffer.refused = lambda *why: refused.append(why)
    peers: dict[str, PeerSocket] = {}

    def say(name: str, message: Any) -> Any:
        peer = peers.setdefault(name, PeerSocket(buffer.address, str(key_dir), name))
        refused.clear()
        peer.send(message)
        for _ in range(int(WAIT_S / 0.05)):
            if (got := buffer.recv(0.05)) is not None:
                return got[1]
            if refused:
                reply = peer.recv(WAIT_S)
                assert refused == [("role", f"refused a message: {reply.reason}")]
                return reply
        raise AssertionError("nothing came")

    yield say
    for peer in peers.values():
        peer.close()
    buffer.close()


def test_every_message_belongs_to_one_role() -> None:
    named = {type(x) for x in OF_THE_LEARNER + OF_GENERATOR_0} | {m.StatusRequest}
    assert named == set(m.FromPeer.__args__)
    for message in OF_THE_LEARNER:
        assert [
            n for n in ("learner", "viewer", "generator-0", "") if keys.is_allowed(n, message)
        ] == ["learner"]
    for message in OF_GENERATOR_0:
        told = ("learner", "viewer", "generator-0", "generator-1", "generator-00", "")
        assert [n for n in told if keys.is_allowed(n, message)] == ["generator-0"]
        assert not keys.is_allowed("learner", msgspec.structs.replace(message, producer="learner"))
    # what only a buffer can have given: a batch, tickets, weights
    assert [checks.has_state(x) for x in OF_THE_LEARNER] == [False, *[True] * 5]
    assert not any(map(checks.has_state, [*OF_GENERATOR_0, m.StatusRequest()]))
    replace, renewal = msgspec.structs.replace, OF_GENERATOR_0[3]
    for message in (
        replace(OF_GENERATOR_0[1], holding=Label(1, 0)),
        replace(OF_GENERATOR_0[2], samples=[trajectory((0, 0, 1))]),
        replace(renewal, progress=[(0, 1, 0)]),
        *(replace(renewal, **{name: [(0, 1)]}) for name in ("judging", "written")),
    ):
        assert checks.has_state(message)


def test_a_key_says_what_its_role_says_and_no_more(said: Callable[[str, Any], Any]) -> None:
    assert said("learner", LEARNER_HELLO) == LEARNER_HELLO
    want = OF_GENERATOR_0[1]
    assert said("generator-0", want) == want
    assert said("viewer", m.StatusRequest()) == m.StatusRequest()
    refused = said("generator-0", LEARNER_HELLO)
    assert isinstance(refused, m.Refusal) and refused.exit_code == 2
    assert refused.reason == (
        "wires.curve_dir: the key of generator-0 may not send a LearnerHello of 'a learner': use "
        "the key of that role"
    )
    refused = said("generator-1", want)
    assert "the key of generator-1 may not send a TicketRequest of 'generator-0'" in refused.reason
    expected = "the key of viewer may not send a BatchRequest"
    assert expected in said("viewer", m.BatchRequest(1, 0)).reason
    # and they go on
    assert said("generator-1", m.StatusRequest()) == m.StatusRequest()


def test_weights_go_to_generators_alone(key_dir: Path, tmp_path: Path) -> None:
    rows = [("w", "float32", [4], 0, 16)]
    server = ChunkServer("tcp://127.0.0.1:*", rows, lambda *_: ("", b"", b""), str(key_dir))
    try:
        copied = str(other_machine(key_dir, tmp_path / "copied", "generator-1"))
        friend = ChunkClient(server.address, WAIT_S, copied, "generator-1")
        assert friend.fetch_layout() == [rows[0]]
        friend.close()
        viewer = ChunkClient(server.address, 1.0, str(key_dir), "viewer")
        with pytest.raises(PeerUnreachable, match="has not answered"):
            viewer.fetch_layout()
        viewer.close()
        assert server.refused == 1 and server.answered == 1
    finally:
        server.close()


def test_keys_are_private_and_a_wider_secret_is_refused(key_dir: Path, tmp_path: Path) -> None:
    secrets = sorted(key_dir.rglob("*.key_secret"))
    assert [str(p.relative_to(key_dir)) for p in secrets] == [
        *(f"{n}/client.key_secret" for n in ("gateway-0", "generator-0", "generator-1", "learner")),
        "server.key_secret",
        "viewer/client.key_secret",
    ]
    assert {stat.S_IMODE(p.stat().st_mode) for p in secrets} == {0o600}
    for path in (key_dir, *(p for p in key_dir.rglob("*") if p.is_dir())):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    copied = shutil.copytree(key_dir, tmp_path / "wide")
    (copied / "server.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match=r"server\.key_secret has mode 0640.*chmod 600"):
        BufferSocket("tcp://127.0.0.1:*", str(copied))
    (copied / "learner" / "client.key_secret").chmod(0o604)
    with pytest.raises(ConfigError, match=r"client\.key_secret has mode 0604"):
        PeerSocket("tcp://127.0.0.1:1", str(copied), "learner")


def test_keys_of_no_role_are_refused_and_missing_ones_named(key_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generator-7/?.*missing|--generators"):
        PeerSocket("tcp://127.0.0.1:1", str(key_dir), "generator-7")
    PeerSocket("tcp://192.0.2.1:1", str(key_dir), "learner").close()  # open to the network
    copied = shutil.copytree(key_dir, tmp_path / "old")
    (copied / "clients" / "client.key").write_bytes((copied / "server.key").read_bytes())
    with pytest.raises(
        ConfigError, match=r"clients/client\.key belongs to no role .* make new keys if"
    ):
        BufferSocket("tcp://127.0.0.1:*", str(copied))
    (copied / "clients" / "client.key").unlink()
    (copied / "server.key_secret").write_text("nothing")
    with pytest.raises(ConfigError, match=r"server\.key_secret has no"):
        BufferSocket("tcp://127.0.0.1:*", str(copied))


def test_further_generators_get_keys_and_the_others_keep_theirs(tmp_path: Path) -> None:
    made = keys.make_keys(tmp_path / "keys", 1)
    before = (made[0] / "client.key_secret").read_bytes()
    assert [p.name for p in keys.make_keys(tmp_path / "keys", 3)] == [
        f"generator-{n}" for n in range(3)
    ]
    assert (made[0] / "client.key_secret").read_bytes() == before
    assert (tmp_path / "keys" / "generator-2" / "server.key").read_bytes() == (
        tmp_path / "keys" / "server.key"
    ).read_bytes()


def test_keys_are_not_made_twice(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    keys.make_keys(directory, 1)
    server = (directory / "server.key").read_bytes()
    with pytest.raises(ConfigError) as error:
        keys.make_keys(directory, 1)
    assert str(error.value) == (
        f"{directory} already has keys of 1 generators: add some by --generators, choose "
        "another directory, or remove it first"
    )
    # all clients are there and the server's key is not: it is made, and nobody else's
    (directory / "server.key").unlink()
    client = (directory / "learner" / "client.key_secret").read_bytes()
    keys.make_keys(directory, 1)
    assert (directory / "server.key").read_bytes() != server
    assert (directory / "learner" / "client.key_secret").read_bytes() == client


def test_a_key_file_says_what_is_wrong_with_it(key_dir: Path, tmp_path: Path) -> None:
    def why(path: Path, *, secret: bool = True) -> str:
        with pytest.raises(ConfigError) as error:
            keys.read_certificate(path, "DIR", secret=secret)
        return str(error.value)

    assert why(tmp_path / "none") == (
        f"wires.curve_dir: {tmp_path / 'none'} is missing; `asyncrl keys DIR` makes keys "
        "(--generators: for how many)"
    )
    (tmp_path / "torn").write_text("nothing")
    (tmp_path / "torn").chmod(0o600)
    assert why(tmp_path / "torn").startswith(f"wires.curve_dir: {tmp_path / 'torn'} has no key: ")
    public = tmp_path / "public"
    public.write_bytes((key_dir / "server.key").read_bytes())
    public.chmod(0o600)
    assert why(public) == f"wires.curve_dir: {public} has no secret key"
    pair = keys.read_certificate(public, "DIR", secret=False)
    assert len(pair[0]) == 40 and pair[1] is None


class Socket:
    context = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "curve_serverkey" and len(value) != 40:
            raise ValueError("not 40 characters")
        super().__setattr__(name, value)


def test_a_client_locks_its_socket_with_its_own_key(key_dir: Path) -> None:
    open_socket = Socket()
    keys.authenticate_client(open_socket, "", "generator-0")
    assert vars(open_socket) == {}
    server, _ = keys.read_certificate(key_dir / "server.key", "", secret=False)
    own = key_dir / "generator-0"
    pair = keys.read_certificate(own / "client.key_secret", "", secret=True)
    for directory in (key_dir, own):  # in the run's directory, or a copy of its own folder
        locked = Socket()
        keys.authenticate_client(locked, str(directory), "generator-0")
        assert vars(locked) == {
            "curve_publickey": pair[0],
            "curve_secretkey": pair[1],
            "curve_serverkey": server,
        }


class Authenticator:
    """What zmq's thread of authentication is told."""

    def __init__(self, context: Any) -> None:
        self.events: list[Any] = [("made", context)]

    def start(self) -> None:
        self.events.append("started")

    def stop(self) -> None:
        self.events.append("stopped")

    def configure_curve(self, **how: Any) -> None:
        self.events.append(how)


def test_servers_admit_the_keys_they_know(key_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq.auth.thread.ThreadAuthenticator", Authenticator)
    socket = Socket()
    guard = keys.KeyAuthenticator(socket, str(key_dir))  # type: ignore[arg-type]
    pair = keys.read_certificate(key_dir / "server.key_secret", "", secret=True)
    assert vars(socket) == {
        **{"curve_publickey": pair[0], "curve_secretkey": pair[1], "curve_server": True}
    }
    names = sorted(path.stem for path in (key_dir / "clients").glob("*.key"))
    assert sorted(guard.names.values()) == names and len(guard.names) == len(names)
    clients = {"domain": "*", "location": str(key_dir / "clients")}
    assert guard.authenticator.events == [("made", None), "started", clients]
    key = next(key for key, name in guard.names.items() if name == "learner")
    assert guard.get_name({"User-Id": key}) == "learner" and guard.get_name({"User-Id": "x"}) == ""  # type: ignore[arg-type]
    assert guard.get_name({}) == ""  # type: ignore[arg-type]
    guard.stop()
    assert guard.authenticator.events[-1] == "stopped"


@pytest.mark.parametrize("name", ["generator-12", "generator-", "xgenerator-1", "generator-1x"])
def test_who_may_serve_calls(name: str) -> None:
    role = name == "generator-12"
    assert keys.is_allowed(name, m.CallResult(1, b"", b"", [], "stop")) is role
    report = m.ServingReport(m.PROTOCOL, "run", name, 1, 1, [], 0)
    assert keys.is_allowed(name, report) is role
    assert not keys.is_allowed("generator-3", report) and not keys.is_allowed("learner", report)
    assert keys.is_allowed(name, m.StatusRequest())
