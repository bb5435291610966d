"""Main program of the training and sampling processes: `worker.py ROLE CONFIG`.

It reads frames of calls from standard input (asyncrl/tinker/messages.py) and writes that of each
reply to standard output. A thread reads the calls, so that the sampling process sees new ones
between decode steps, and so that either process ends as soon as the server's end is closed.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from msgspec import DecodeError

from asyncrl.contract.importing import pause_collection
from asyncrl.tinker import settings
from asyncrl.tinker.messages import LENGTH_BYTES, decode_frame, encode_frame

# number, method and arguments of each
Calls = queue.SimpleQueue[tuple[int, str, tuple[Any, ...], dict[str, Any]]]
Reply = Callable[[int, Any], None]


def receive_calls(calls: Calls) -> None:
    """Queue the calls that arrive; exit the process when the server's end is closed."""
    try:
        while True:
            length = int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES))
            calls.put(tuple(decode_frame(sys.stdin.buffer.read(length))))
    except (DecodeError, ConnectionError):
        os._exit(0)


def train(config: settings.TinkerConfig, calls: Calls, reply: Reply) -> None:
    """Carry out the training calls in order."""
    with pause_collection():
        from asyncrl.tinker.workers.trainer import ServedModels
    trainer = ServedModels(config)
    while True:
        number, method, arguments, options = calls.get()
        reply(number, trainer.handle(method, *arguments, **options))


def sample(config: settings.TinkerConfig, calls: Calls, reply: Reply) -> None:
    """Carry out all sampling calls at the same time."""
    with pause_collection():
        from asyncrl.tinker.workers.sampler import Sampler
    sampler = Sampler(config, reply)
    while True:
        while not (sampler.is_busy and calls.empty()):
            number, method, arguments, _ = calls.get()
            getattr(sampler, method)(number, *arguments)
        sampler.work()


ROLES = {"training": train, "sampling": sample}


def main(role: str, config: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends the process when it stops
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to the log
    calls: Calls = queue.SimpleQueue()
    threading.Thread(target=receive_calls, args=(calls,), daemon=True).start()

    def reply(number: int, result: Any) -> None:
        replies.write(encode_frame(number, result))
        replies.flush()

    ROLES[role](settings.read(config), calls, reply)


if __name__ == "__main__":
    main(*sys.argv[1:])
