"""The exception hierarchy, and the exit codes.

A message names the problem, its place and the remedy.
"""

from __future__ import annotations

EXIT_CODES = {
    0: "done",
    1: "the run failed, or a check does not hold",
    2: "usage or config: one line names file, line, key and the allowed values",
    3: "a process was lost for good",
    4: "a peer cannot be reached",
    5: "stored data is damaged",
    6: "nothing left to do",
    7: "another process has taken this one's place",
    130: "interrupted",
}


class AsyncrlError(Exception):
    """An expected failure, shown to the user as one line and never as a traceback."""

    exit_code = 1

    def __init__(self, text: str = "", exit_code: int = 0) -> None:
        super().__init__(text)
        self.exit_code = exit_code or self.exit_code


class ConfigError(AsyncrlError):
    """A config, a command line or a dataset that cannot work."""

    exit_code = 2


class ProcessLost(AsyncrlError):
    """A process crashed and has no restarts left."""

    exit_code = 3


class PeerUnreachable(AsyncrlError):
    """A peer did not reply within its deadline."""

    exit_code = 4


class DamagedDataError(AsyncrlError):
    """A checkpoint, a journal or a recording that does not match its checksum or its shape."""

    exit_code = 5


class NothingToDo(AsyncrlError):
    """A finished run was started again."""

    exit_code = 6


class BufferTakenOver(AsyncrlError):
    """Another buffer has taken over the run: this one must not send anything."""

    exit_code = 7


class ProtocolError(AsyncrlError):
    """A peer violated the protocol, or an internal invariant does not hold: the run stops."""


class NotFiniteError(AsyncrlError):
    """The training has diverged: a loss, a gradient or a weight is infinite or NaN.

    An experiment records this as its result."""


class NotFiniteLogprob(NotFiniteError, ProtocolError):
    """An engine returned a logprob that is not finite."""


# reasons why the buffer refuses a message, each with the metric `refused/REASON`
REFUSALS = {
    "frame": "frames that do not decode, have a value out of its range, or are too large",
    "stranger": "messages of another run or another protocol",
    "role": "messages that their sender's key may not send",
    "message": "impossible names, counts, commits and hellos",
    "ticket": "samples of tickets, attempts or numbers that were not granted",
    "version": "samples by weights that no learner has announced",
    "limit": "samples by weights older than their ticket allows, or other than it names",
    "shape": "samples whose arrays, spans or segments do not fit together",
    "length": "samples longer than generator.max_new_tokens or generator.context",
    "number": "samples with an impossible reward, part, log-probability or temperature",
    "token": "samples with tokens that the model does not have",
    "text": "messages with texts or lists that are too long",
    "image": "samples whose images are missing, damaged, or not as many as their tokens say",
}


class BadMessage(ProtocolError, ValueError):
    """A peer sent an invalid message, or user code returned what cannot be sent.

    The sender is refused with this text; nothing was changed, and the run continues.

    reason: a key of REFUSALS.
    """

    def __init__(self, text: str, reason: str = "message") -> None:
        super().__init__(text)
        self.reason = reason


class LearnerFenced(AsyncrlError):
    """A learner of a newer epoch has taken over; this one exits quietly."""
