"""Protect a listening socket from running out of file descriptors.

Without a free descriptor, zmq aborts the process (ipc) or spins (tcp). Before that, all connections
are closed; peers connect again by themselves.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

import zmq

from asyncrl.contract.errors import AsyncrlError
from asyncrl.transport import keys

DESCRIPTORS = 65536  # requested from the system
CONNECTIONS = 6000  # more count as a flood
LEAST = 64
LOOK_S = 0.01
LOOKS = 6000  # tries to bind again; a count instead of a deadline survives a suspended process


def next_descriptor() -> int:
    """Return the number of the next descriptor, the lowest free one.

    It is about how many are open.
    """
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return sys.maxsize
    os.close(descriptor)
    return descriptor


class ConnectionGuard:
    """Watches a listening socket; used by the thread that reads it.

    Raises AsyncrlError when the process may hardly open any file.
    """

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.closed = 0  # how often all connections were closed
        self.lost = False  # the address is unbound and could not be bound again
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
        open_now = next_descriptor()
        allowed = DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
        if allowed - open_now < LEAST:
            raise AsyncrlError(
                f"this process may open {allowed} files and has {open_now}: raise the limit "
                "(`ulimit -n`)"
            )
        # half of the rest stays free for connections before the next check
        self.most = open_now + min(CONNECTIONS, (allowed - open_now) // 2)

    def close_excess(self, address: str) -> bool:
        """Close all connections when there are too many; return whether it was necessary.

        Raises AsyncrlError when the address cannot be bound again.
        """
        if next_descriptor() < self.most and not self.lost:
            return False
        self.closed += not self.lost
        if self.closed < 4 and not self.lost:
            print(
                f"too many connections at {address}: closed all; real peers reconnect",
                file=sys.stderr,
                flush=True,
            )
        if not self.lost:
            self.socket.unbind(address)
        self.lost = True
        for _ in range(LOOKS):
            time.sleep(LOOK_S)  # zmq's thread closes the old listener and its connections
            if next_descriptor() >= self.most:
                continue
            try:
                with keys.private_umask():
                    self.socket.bind(address)
                self.lost = False
                return True
            except zmq.ZMQError:
                continue
        raise AsyncrlError(
            f"{address} was closed because of too many connections and cannot be opened again"
        )
