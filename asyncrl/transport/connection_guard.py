"""So many connections that the process runs out of descriptors: an ipc listener would abort it, a
tcp one spin.  Before that all are closed, and who has something to say connects again."""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

import zmq

from asyncrl.contract.errors import AsyncrlError
from asyncrl.transport import keys

DESCRIPTORS = 65536  # what is asked of the system
CONNECTIONS = 6000  # more are a flood
LEAST = 64
LOOK_S = 0.01
LOOKS = 6000  # for the address to come free: a process that stood still meanwhile looks on


def next_descriptor() -> int:
    """The number that the next descriptor gets, the lowest free one: about how many are open."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return sys.maxsize
    os.close(descriptor)
    return descriptor


class ConnectionGuard:
    """Watches over a listening socket; to be asked by the thread that reads it.

    Raises AsyncrlError where the process may hardly open anything."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.closed = 0  # times that all connections were closed
        self.lost = False  # the address could not be had again
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        open_now = next_descriptor()
        allowed = DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
        if allowed - open_now < LEAST:
            raise AsyncrlError(
                f"this process may open {allowed} files and has {open_now}: raise the limit "
                "(`ulimit -n`)"
            )
        # half of what is left stays free for those that come before the next look
        self.most = open_now + min(CONNECTIONS, (allowed - open_now) // 2)

    def close_excess(self, address: str) -> bool:
        """Close all connections when there are too many; True when it had to be.  Raises
        AsyncrlError when the address cannot be had again.
        """
        if next_descriptor() < self.most and not self.lost:
            return False
        self.closed += not self.lost
        if self.closed < 4 and not self.lost:
            print(
                f"too many connections at {address}: all are closed, and honest peers come again",
                file=sys.stderr,
                flush=True,
            )
        if not self.lost:
            self.socket.unbind(address)
        self.lost = True
        for _ in range(LOOKS):
            time.sleep(LOOK_S)  # the old listener and its connections end in a thread of their own
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
            f"{address} was closed for too many connections and cannot be opened again"
        )
