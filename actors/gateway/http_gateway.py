"""The event loop of a gateway with sessions over HTTP.

A harness plays them, or agents that the gateway starts.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from actors.gateway.agents.agent_pool import AgentPool
from actors.gateway.endpoint.web import Endpoint
from actors.gateway.service import Gateway
from actors.gateway.session_api import SessionApi, read_kept_port, write_endpoint_files
from asyncrl.transport.http_server import ListenAddress
from asyncrl.transport.sockets import BufferSocket, PeerSocket

POLL_S = 0.05  # longest wait between two turns
OVER_S = 1.0  # from the run's end to the endpoint's: requests get the status 410


class SocketWatcher:
    """A watcher that wakes a gateway when a socket is readable, and every POLL_S."""

    def __init__(self, gateway: Gateway, sessions: SessionApi, agents: list[AgentPool]) -> None:
        self.gateway = gateway
        self.sessions = sessions
        self.agents = agents
        self.loop = asyncio.get_running_loop()
        self.watched: dict[int, Any] = {}  # descriptor -> its socket
        self.timer = self.loop.call_later(POLL_S, self.tick)

    def tick(self) -> None:
        """Wake the gateway, now and every POLL_S."""
        self.sessions.wake()
        self.timer = self.loop.call_later(POLL_S, self.tick)

    def watch_sockets(self) -> None:
        """Register the current descriptors with the event loop.

        A new socket or process may get the descriptor of an old one.
        """
        wires = [*self.gateway.wires, *(wire for pool in self.agents for wire in pool.wires)]
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
        if peer.has_message:
            self.sessions.wake()

    async def wait_until_due(self) -> None:
        """Wait until the next turn is due."""
        self.watch_sockets()
        waiting = (self.gateway.socket.has_message, self.gateway.calls_socket.has_message)
        if any(waiting):  # zmq's descriptors signal new messages only, not those already there
            await asyncio.sleep(0)
        else:
            await self.sessions.due.wait()
        self.sessions.due.clear()

    def close(self) -> None:
        """Stop watching."""
        self.timer.cancel()
        for descriptor in self.watched:
            self.loop.remove_reader(descriptor)


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
    write_endpoint_files(gateway.run_dir, endpoint.url, sessions.run_key)
    gateway.greet()
    agents: list[AgentPool] = []
    watcher = SocketWatcher(gateway, sessions, agents)
    try:
        for part, part_agent in gateway.agents.items():
            if part_agent.starts_agents:
                agents.append(AgentPool(sessions, endpoint.url, part))
        while True:
            await watcher.wait_until_due()
            if gateway.step():
                break
            for pool in agents:
                pool.step()
            sessions.wake_leases()
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
