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
CONNECTIONS = 6000  # more connections are a flood
LEAST = 64  # free descriptors that a process needs
BIND_WAIT_S = 0.01
# tries to bind again, each after BIND_WAIT_S; a count instead of a deadline survives a suspension
BIND_TRIES = 6000


def next_descriptor() -> int:
    """Return the lowest free descriptor, about the number of open descriptors."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return sys.maxsize
    os.close(descriptor)
    return descriptor


def raise_descriptor_limit() -> int:
    """Return how many files this process may open, after raising the limit up to DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS
    limit = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(soft, limit)


class ConnectionGuard:
    """Watches a listening socket; for the thread that reads it.

    Raises AsyncrlError if the process may open only a few further files.
    """

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.closings = 0  # times that all connections were closed
        self.is_unbound = False  # the address could not be bound again
        allowed = raise_descriptor_limit()
        used = next_descriptor()
        if allowed - used < LEAST:
            raise AsyncrlError(
                f"this process may open {allowed} files and has {used}: raise the limit "
                "(`ulimit -n`)"
            )
        # half of the rest stays free for connections before the next check
        self.most = used + min(CONNECTIONS, (allowed - used) // 2)

    def close_excess(self, address: str) -> bool:
        """Close all connections if there are too many; return whether it did.

        Raises AsyncrlError when the address cannot be bound again.
        """
        if next_descriptor() < self.most and not self.is_unbound:
            return False
        if not self.is_unbound:
            self.closings += 1
            if self.closings < 4:
                print(
                    f"too many connections at {address}: closed all; real peers reconnect",
                    file=sys.stderr,
                )
            self.socket.unbind(address)
        self.is_unbound = True
        for _ in range(BIND_TRIES):
            time.sleep(BIND_WAIT_S)  # zmq's thread closes the old listener and its connections
            if next_descriptor() >= self.most:
                continue
            try:
                with keys.private_umask():
                    self.socket.bind(address)
                self.is_unbound = False
                return True
            except zmq.ZMQError:
                continue
        raise AsyncrlError(
            f"{address} was closed because of too many connections and cannot be opened again"
        )
