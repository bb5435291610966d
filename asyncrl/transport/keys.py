"""CURVE keys, one for each role: who may say what is decided by the key that it was said with.

```
DIR/server.key, server.key_secret   the buffer's and the chunk server's
DIR/clients/NAME.key                who is let in; NAME: learner, viewer, generator-0, ...
DIR/NAME/                           all that NAME needs on another machine: server.key and
                                    client.key_secret
```

`wires.curve_dir` names DIR on the machine of buffer and learner, a copy of DIR/NAME elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from asyncrl.contract import messages as m
from asyncrl.contract.errors import ConfigError
from asyncrl.records import private

LEARNER = "learner"
VIEWER = "viewer"
GENERATOR = re.compile(r"generator-\d+")
TOLD_S = 20.0  # for the learner's answer; zmq itself gives up a handshake after 30
ROLES = f"{LEARNER}, {VIEWER}, generator-N"


def is_allowed(name: str, message: m.FromPeer) -> bool:
    """May the holder of `name`'s key say this?  A generator speaks for itself alone, a viewer only
    watches.

    >>> is_allowed("generator-0", m.GeneratorGoodbye("generator-0", 7))
    True
    >>> is_allowed("generator-0", m.GeneratorGoodbye("generator-1", 7))
    False
    >>> is_allowed("viewer", m.BatchRequest(1, 0))
    False
    """
    if isinstance(message, m.StatusRequest):
        return True
    if isinstance(message, m.JoinRequest):
        return message.producer in ("", name) and GENERATOR.fullmatch(name) is not None
    if isinstance(
        message,
        m.GeneratorHello | m.TicketRequest | m.Delivery | m.LeaseRenewal | m.GeneratorGoodbye,
    ):
        return name == message.producer and GENERATOR.fullmatch(name) is not None
    return name == LEARNER


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Files made meanwhile have mode 0600, sockets and directories 0700."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_keys(directory: Path, generators: int = 4) -> list[Path]:
    """Write keys for a run, or those of further generators to keys that are there; returns the
    generators' directories, one for each machine.

    Raises ConfigError where nothing is to be added: whoever holds the old ones would be locked out.
    """
    import zmq.auth

    there = (directory / "server.key").exists()
    names = [LEARNER, VIEWER, *(f"generator-{n}" for n in range(generators))]
    missing = [name for name in names if not (directory / "clients" / f"{name}.key").exists()]
    if there and not missing:
        raise ConfigError(
            f"{directory} holds keys already, of {generators} generators: add some by "
            "--generators, choose another directory, or remove it first"
        )
    with private_umask():
        private.directory(directory)
        private.directory(directory / "clients")
        if not there:
            zmq.auth.create_certificates(directory, "server")
        for name in missing:
            own = private.directory(directory / name)
            (own / "server.key").write_bytes((directory / "server.key").read_bytes())
            public, _ = zmq.auth.create_certificates(own, "client")
            os.replace(public, directory / "clients" / f"{name}.key")
    return [directory / name for name in names if GENERATOR.fullmatch(name)]


def certificate(path: Path, curve_dir: str, *, secret: bool) -> tuple[bytes, bytes | None]:
    """(public, secret) of a key file.  Raises ConfigError for one that is missing, damaged, or that
    others can read.
    """
    import zmq.auth

    try:
        found = zmq.auth.load_certificate(private.require_private(path) if secret else path)
    except OSError as error:
        raise ConfigError(
            f"wires.curve_dir: {path} is missing; `asyncrl keys {curve_dir}` makes keys "
            "(--generators: for how many)"
        ) from error
    except ValueError as error:
        raise ConfigError(f"wires.curve_dir: {path} holds no key: {error}") from error
    if secret and found[1] is None:
        raise ConfigError(f"wires.curve_dir: {path} holds no secret key")
    return found


def lock(socket: Any, curve_dir: str, name: str, server: str = "") -> None:
    """The client's end: prove to be `name` with the key in DIR/NAME, or in a copy of it.

    server: public key of another server than the run's."""
    if not curve_dir:
        return
    own = Path(curve_dir)
    own = own / name if (own / name).is_dir() else own
    socket.curve_publickey, socket.curve_secretkey = certificate(
        own / "client.key_secret", curve_dir, secret=True
    )
    if server:
        try:
            socket.curve_serverkey = server.encode()
        except (zmq.ZMQError, ValueError) as error:
            raise ConfigError(f"{server[:80]!r} is no public key: {error}") from error
        return
    socket.curve_serverkey, _ = certificate(own / "server.key", curve_dir, secret=False)


class KeyAuthenticator:
    """The server's end: only keys in DIR/clients get in, and each message says whose it was."""

    def __init__(self, socket: Any, curve_dir: str) -> None:
        # with asyncio and threads of its own: only for those who encrypt
        from zmq.auth.thread import ThreadAuthenticator

        where = Path(curve_dir)
        public, secret = certificate(where / "server.key_secret", curve_dir, secret=True)
        socket.curve_publickey, socket.curve_secretkey = public, secret
        self.names: dict[str, str] = {}
        for path in sorted((where / "clients").glob("*.key")):
            if path.stem not in (LEARNER, VIEWER) and not GENERATOR.fullmatch(path.stem):
                raise ConfigError(
                    f"wires.curve_dir: {path} is of no role ({ROLES}): remove it, and make keys "
                    "anew if they are of an earlier version"
                )
            key, _ = certificate(path, curve_dir, secret=False)
            self.names[key.decode()] = path.stem
        self.authenticator = ThreadAuthenticator(socket.context)
        self.authenticator.start()
        self.authenticator.configure_curve(domain="*", location=str(where / "clients"))
        socket.curve_server = True

    def name(self, frame: zmq.Frame) -> str:
        """Whose key a frame came with; "" for none that is known."""
        try:
            return self.names.get(str(frame.get("User-Id")), "")
        except zmq.ZMQError:
            return ""

    def stop(self) -> None:
        self.authenticator.stop()


class RelayAuthenticator(KeyAuthenticator):
    """Of a generator that hands weights on: a key of its own, made now, and the learner says by
    `names` (public key -> name) who gets in.

    Others may be sent here before the learner's answer has come: who knocks so early waits for it,
    as zmq does not knock again for one who was turned away.
    """

    def __init__(self, socket: Any) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        public, secret = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey = public, secret
        self.key = public.decode()
        self.names: dict[str, str] = {}
        self._told = threading.Event()
        self.authenticator = ThreadAuthenticator(socket.context)
        self.authenticator.start()
        self.authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        socket.curve_server = True

    def callback(self, domain: str, key: bytes) -> bool:
        """What zmq asks of each that knocks."""
        self._told.wait(TOLD_S)
        return key.decode() in self.names

    def allow_peers(self, names: dict[str, str]) -> None:
        """Who gets in, from now on."""
        self.names = names
        self._told.set()

    def stop(self) -> None:
        self._told.set()  # else its thread, which waits, cannot end
        super().stop()


def guard(socket: Any, curve_dir: str) -> KeyAuthenticator | None:
    """What a server asks who speaks; None without keys, where everybody may say everything."""
    return KeyAuthenticator(socket, curve_dir) if curve_dir else None
