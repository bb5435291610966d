"""CURVE keys, one per role. A peer's key decides which messages it may send.

```
DIR/server.key, server.key_secret   of the buffer and the chunk server
DIR/clients/NAME.key                permitted peers; NAME: learner, viewer, gateway-0, generator-0
DIR/NAME/                           the files of NAME on another machine: server.key and
                                    client.key_secret
```

`wires.curve_dir` names DIR on the machine of buffer and learner, a copy of DIR/NAME elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
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
PRODUCER = re.compile(r"(generator|gateway)-\d+")
ROLES = f"{LEARNER}, {VIEWER}, gateway-N, generator-N"


def is_allowed(name: str, message: m.FromPeer | m.FromGenerator) -> bool:
    """Whether the holder of `name`'s key may send this message, to the buffer or a gateway.

    A generator or a gateway sends only its own messages; a viewer only watches.

    >>> is_allowed("generator-0", m.GeneratorGoodbye("generator-0", 7))
    True
    >>> is_allowed("generator-0", m.GeneratorGoodbye("generator-1", 7))
    False
    >>> is_allowed("viewer", m.BatchRequest(1, 0))
    False
    """
    is_generator = GENERATOR.fullmatch(name) is not None
    if isinstance(message, m.StatusRequest):
        return True
    if isinstance(message, m.JoinRequest):
        return message.producer in ("", name) and is_generator
    if isinstance(message, m.GeneratorHello | m.ProducerMessage):
        return name == message.producer and PRODUCER.fullmatch(name) is not None
    if isinstance(message, m.ServingReport):
        return name == message.producer and is_generator
    return is_generator if isinstance(message, m.CallResult) else name == LEARNER


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Create files with mode 0600, sockets and directories with 0700."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)


def make_keys(directory: Path, generators: int = 4) -> list[Path]:
    """Write keys for a run, or add generators to existing keys.

    Returns the generators' directories, one for each machine. Raises ConfigError when nothing is
    missing: replaced keys would lock out their holders.
    """
    import zmq.auth

    existing = (directory / "server.key").exists()
    names = [LEARNER, VIEWER, "gateway-0", *(f"generator-{n}" for n in range(generators))]
    missing = [name for name in names if not (directory / "clients" / f"{name}.key").exists()]
    if existing and not missing:
        raise ConfigError(
            f"{directory} already has keys of {generators} generators: add some by "
            "--generators, choose another directory, or remove it first"
        )
    with private_umask():
        private.create_directory(directory)
        private.create_directory(directory / "clients")
        if not existing:
            zmq.auth.create_certificates(directory, "server")
        for name in missing:
            folder = private.create_directory(directory / name)
            (folder / "server.key").write_bytes((directory / "server.key").read_bytes())
            public, _ = zmq.auth.create_certificates(folder, "client")
            os.replace(public, directory / "clients" / f"{name}.key")
    return [directory / name for name in names if GENERATOR.fullmatch(name)]


def read_certificate(path: Path, curve_dir: str, *, secret: bool) -> tuple[bytes, bytes | None]:
    """Read (public key, secret key) of a key file.

    secret: whether the file must have a secret key.
    Raises ConfigError for a file that is missing, damaged, or readable by other users.
    """
    import zmq.auth

    try:
        pair = zmq.auth.load_certificate(private.require_private(path) if secret else path)
    except OSError as error:
        raise ConfigError(
            f"wires.curve_dir: {path} is missing; `asyncrl keys {curve_dir}` makes keys "
            "(--generators: for how many)"
        ) from error
    except ValueError as error:
        raise ConfigError(f"wires.curve_dir: {path} has no key: {error}") from error
    if secret and pair[1] is None:
        raise ConfigError(f"wires.curve_dir: {path} has no secret key")
    return pair


def authenticate_client(socket: Any, curve_dir: str, name: str) -> None:
    """Authenticate a client's socket as `name` with the key in DIR/NAME or a copy.

    Raises ConfigError for a key that is missing or damaged.
    """
    if not curve_dir:
        return
    folder = Path(curve_dir)
    folder = folder / name if (folder / name).is_dir() else folder
    socket.curve_publickey, socket.curve_secretkey = read_certificate(
        folder / "client.key_secret", curve_dir, secret=True
    )
    socket.curve_serverkey, _ = read_certificate(folder / "server.key", curve_dir, secret=False)


class KeyAuthenticator:
    """The server's end: admits keys in DIR/clients and identifies senders."""

    def __init__(self, socket: Any, curve_dir: str) -> None:
        # imported late: it brings asyncio and starts a thread
        from zmq.auth.thread import ThreadAuthenticator

        directory = Path(curve_dir)
        public, secret = read_certificate(directory / "server.key_secret", curve_dir, secret=True)
        socket.curve_publickey, socket.curve_secretkey = public, secret
        self.names: dict[str, str] = {}
        for path in sorted((directory / "clients").glob("*.key")):
            if path.stem not in (LEARNER, VIEWER) and not PRODUCER.fullmatch(path.stem):
                raise ConfigError(
                    f"wires.curve_dir: {path} belongs to no role ({ROLES}): remove it, and make "
                    "new keys if these are from an earlier version"
                )
            key, _ = read_certificate(path, curve_dir, secret=False)
            self.names[key.decode()] = path.stem
        self.authenticator = ThreadAuthenticator(socket.context)
        self.authenticator.start()
        self.authenticator.configure_curve(domain="*", location=str(directory / "clients"))
        socket.curve_server = True

    def get_name(self, frame: zmq.Frame) -> str:
        """Return the name of a frame's key; "" for an unknown key."""
        try:
            return self.names.get(str(frame.get("User-Id")), "")
        except zmq.ZMQError:
            return ""

    def stop(self) -> None:
        """Stop the thread that authenticates."""
        self.authenticator.stop()
