"""Runs a gateway with sessions over HTTP, of a harness or of agents that it starts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from actors.gateway.agents.agent_pool import AgentPool
from actors.gateway.endpoint.server import ListenAddress
from actors.gateway.endpoint.web import Endpoint
from actors.gateway.mixing.mixed_sources import MixedSource
from actors.gateway.service import Gateway
from actors.gateway.session_api import SessionApi, kept_port, write_endpoint_files
from asyncrl.contract.errors import ConfigError
from asyncrl.transport.sockets import BufferSocket, PeerSocket

POLL_S = 0.05  # longest wait between two turns
OVER_S = 1.0  # how long the endpoint still answers, with 410, after the run's end


class SocketWatcher:
    """Wakes a gateway when one of its sockets is readable, and every POLL_S."""

    def __init__(self, gateway: Gateway, sessions: SessionApi, agents: list[AgentPool]) -> None:
        self.gateway = gateway
        self.sessions = sessions
        self.agents = agents
        self.loop = asyncio.get_running_loop()
        self.watched: dict[int, Any] = {}  # descriptor -> its socket
        self.clock = self.loop.call_later(POLL_S, self.tick)

    def tick(self) -> None:
        self.sessions.wake()
        self.clock = self.loop.call_later(POLL_S, self.tick)

    def listen(self) -> None:
        """Register the current descriptors with the event loop.

        Sockets and processes are replaced at times, by others that may get the same descriptor.
        """
        wires = [*self.gateway.source.wires, *(wire for pool in self.agents for wire in pool.wires)]
        current: dict[int, Any] = {wire.fileno(): wire for wire in wires}
        callbacks = dict.fromkeys(current, self.sessions.wake)
        for peer in (self.gateway.socket, self.gateway.calls_socket):
            descriptor = peer.socket.fileno()
            current[descriptor] = peer.socket
            callbacks[descriptor] = partial(self.on_readable, peer)
        for descriptor, watched in list(self.watched.items()):
            if current.get(descriptor) is not watched:
                self.loop.remove_reader(descriptor)
                del self.watched[descriptor]
        for descriptor in current.keys() - self.watched.keys():
            self.loop.add_reader(descriptor, callbacks[descriptor])
        self.watched = current

    def on_readable(self, peer: BufferSocket | PeerSocket) -> None:
        """Wake the gateway if the socket has a message, which zmq does not promise."""
        if peer.waiting:
            self.sessions.wake()

    async def notify(self) -> None:
        """Wait until the next turn is due."""
        self.listen()
        waiting = (self.gateway.socket.waiting, self.gateway.calls_socket.waiting)
        if any(waiting):  # zmq's descriptors signal new messages only, not those already there
            await asyncio.sleep(0)
        else:
            await self.sessions.due.wait()
        self.sessions.due.clear()

    def close(self) -> None:
        self.clock.cancel()
        for descriptor in self.watched:
            self.loop.remove_reader(descriptor)


async def serve(gateway: Gateway) -> None:
    """Run a gateway's turns and its endpoint until the run or the process ends."""
    agent, source = gateway.config.agent, gateway.source
    sessions = source.http if isinstance(source, MixedSource) else source
    assert isinstance(sessions, SessionApi)
    bind = ListenAddress(
        agent.host,
        agent.port,
        agent.certificate,
        agent.private_key,
        agent.behind_proxy,
    )
    endpoint = listen(sessions, bind, kept_port(gateway.run_dir))
    sessions.restore_sessions()
    await endpoint.start()
    write_endpoint_files(gateway.run_dir, endpoint.url, sessions.run_key)
    gateway.greet()
    agents: list[AgentPool] = []
    watcher = SocketWatcher(gateway, sessions, agents)
    try:
        for part, own in gateway.agents.items():
            if own.starts_agents:
                agents.append(AgentPool(sessions, endpoint.url, part))
        while True:
            await watcher.notify()
            if gateway.step():
                break
            for pool in agents:
                pool.step()
            sessions.after_turn()
        gateway.finish()
        sessions.news.set()
        if gateway.over:
            if sessions.journal is not None:
                sessions.journal.clear()
            await asyncio.sleep(OVER_S)
    finally:
        for pool in agents:
            pool.close()
        await endpoint.stop()
        watcher.close()


def listen(sessions: SessionApi, bind: ListenAddress, kept: int) -> Endpoint:
    """Bind the endpoint to its port.

    Without agent.port it is the earlier process's port, if that is still free.  Raises ConfigError
    when the port cannot be bound.
    """
    if kept and not bind.port:
        with suppress(ConfigError):
            return Endpoint(sessions, replace(bind, port=kept))
    return Endpoint(sessions, bind)
