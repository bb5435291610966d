"""Serve the page of `asyncrl watch`: address, token, uvicorn."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from pathlib import Path

from asyncrl.contract.errors import ConfigError

PORT = 7860
PORTS = 20  # tried from the first one, where the port was not chosen


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket. Raises ConfigError where the port is taken or not ours."""
    tried = [port] if port is not None else [*range(PORT, PORT + PORTS), 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in tried:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            problem = error
    raise ConfigError(
        f"--host {host} --port {port}: {problem.strerror}; choose another port, or leave it out"
    )


def serve(places: list[Path], host: str, port: int | None, *, token: bool) -> None:
    """Serve until interrupted. Raises ConfigError for places without a run, or a bad address.

    token: require the token that is printed with the address. Without one, only an address of this
    machine is allowed.
    """
    import uvicorn

    from asyncrl.watch.app import WatchApp

    if not token and not is_loopback(host):
        raise ConfigError(
            f"--no-token --host {host}: everyone who reaches this address could read prompts and "
            "logs; leave out --no-token, or listen on 127.0.0.1"
        )
    app = WatchApp(places, secrets.token_urlsafe(18) if token else "")
    listener = listen(host, port)
    address = listener.getsockname()
    name = f"[{address[0]}]" if ":" in host else address[0]
    query = f"/?token={app.token}" if app.token else "/"
    print(f"watching {len(app.runs)} run{'s' if len(app.runs) != 1 else ''}:", file=sys.stderr)
    print(f"http://{name}:{address[1]}{query}", flush=True)
    print("stop with Ctrl-C; from another machine: ssh -L PORT:localhost:PORT", file=sys.stderr)
    config = uvicorn.Config(
        app.starlette(), log_level="warning", access_log=False, server_header=False
    )
    uvicorn.Server(config).run(sockets=[listener])
