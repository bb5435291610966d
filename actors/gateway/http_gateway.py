"""The event loop of a gateway with sessions over HTTP."""

from __future__ import annotations

import asyncio
import select
from contextlib import suppress

from actors.gateway.endpoint.web import Endpoint
from actors.gateway.recovery.session_journal import read_kept_port, write_endpoint_files
from actors.gateway.service import Gateway
from actors.gateway.session_api import SessionApi
from asyncrl.transport.http_server import ListenAddress

POLL_S = 0.05  # longest wait between two turns
OVER_S = 1.0  # from the run's end to the endpoint's: requests get the status 410


class SocketWatcher:
    """A watcher that sets `due` when a socket of the gateway is readable."""

    def __init__(self, gateway: Gateway, due: asyncio.Event) -> None:
        self.gateway = gateway
        self.due = due
        self.epoll = select.epoll()  # which forgets closed sockets
        asyncio.get_running_loop().add_reader(self.epoll.fileno(), self.on_readable)

    def has_message(self) -> bool:
        """Whether zmq has a message, which its descriptors do not promise."""
        return any([self.gateway.socket.has_message, self.gateway.calls_socket.has_message])

    def list_peers(self) -> list[int]:
        """List zmq's descriptors."""
        return [x.socket.fileno() for x in (self.gateway.socket, self.gateway.calls_socket)]

    def on_readable(self) -> None:
        """Set `due` if there is something to read."""
        peers = self.list_peers()
        if self.has_message() or any(fd not in peers for fd, _ in self.epoll.poll(0)):
            self.due.set()

    async def wait_until_due(self) -> None:
        """Wait until the next turn is due, at most POLL_S."""
        # a new socket or process may have the descriptor of an old one
        for descriptor in (*self.list_peers(), *(wire.fileno() for wire in self.gateway.wires)):
            with suppress(FileExistsError):
                self.epoll.register(descriptor, select.EPOLLIN)
        if self.has_message():  # the descriptors signal new messages only, not those already there
            await asyncio.sleep(0)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self.due.wait()
        self.due.clear()

    def close(self) -> None:
        """Stop watching."""
        asyncio.get_running_loop().remove_reader(self.epoll.fileno())
        self.epoll.close()


async def serve(gateway: Gateway) -> None:
    """Run a gateway's turns and its endpoint until the run or the process ends."""
    agent = gateway.config.agent
    sessions = next(x for x in gateway.sources.values() if isinstance(x, SessionApi))
    bind = ListenAddress(
        agent.host,
        agent.port or read_kept_port(gateway.run_dir),
        agent.certificate,
        agent.private_key,
        agent.behind_proxy,
        further_ports=() if agent.port else (0,),
    )
    endpoint = Endpoint(sessions, bind)
    sessions.restore_sessions()
    await endpoint.start()
    sessions.url = endpoint.url
    write_endpoint_files(gateway.run_dir, endpoint.url, sessions.run_key)
    gateway.greet()
    watcher = SocketWatcher(gateway, sessions.due)
    try:
        while True:
            await watcher.wait_until_due()
            if gateway.step():
                break
        gateway.finish()
        sessions.news.set()
        if gateway.over:
            sessions.journal.clear()
            await asyncio.sleep(OVER_S)
    finally:
        sessions.close()
        await endpoint.stop()
        watcher.close()
