"""One exception hierarchy.  A message says what, where and what to do; the exit code says which
kind (see EXIT_CODES).
"""

from __future__ import annotations

EXIT_CODES = {
    0: "done",
    1: "the run failed, or a check does not hold",
    2: "usage or config: one line names file, line, key and what is allowed",
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


class ConfigError(AsyncrlError):
    """A config, a command line or a dataset that cannot work."""

    exit_code = 2


class ProcessLost(AsyncrlError):
    """A process died and its restarts are used up."""

    exit_code = 3


class PeerUnreachable(AsyncrlError):
    """No answer from a peer within its deadline."""

    exit_code = 4


class DamagedDataError(AsyncrlError):
    """A checkpoint, a journal or a recording that does not match its checksum or its shape."""

    exit_code = 5


class NothingToDo(AsyncrlError):
    """A finished run was asked to go on."""

    exit_code = 6


class BufferTakenOver(AsyncrlError):
    """Another buffer speaks for the run: this one says nothing any more."""

    exit_code = 7


class ProtocolError(AsyncrlError):
    """A peer broke the protocol, or one of our own invariants does not hold: the run stops."""


class NotFiniteError(AsyncrlError):
    """The training has diverged: a loss, a gradient or the weights hold infinity or no number.  An
    experiment records that as its result.
    """


class NotFiniteLogprob(NotFiniteError, ProtocolError):
    """An engine gave a logprob that no token can have."""


# why a message was refused at the buffer's door, each with a counter: `refused/REASON`
REFUSALS = {
    "frame": "frames that do not decode, or are too large",
    "stranger": "messages of another run or another protocol",
    "role": "messages that their sender's key may not say",
    "message": "names, counts, commits and hellos that cannot be",
    "ticket": "answers to tickets, attempts or samples that were not granted",
    "version": "answers by weights that no learner has announced",
    "limit": "answers by weights older than their ticket allows, or not those it names",
    "shape": "answers whose arrays, spans or segments do not fit together",
    "length": "answers longer than generator.max_new_tokens or generator.context",
    "number": "answers with a reward, part, log-probability or temperature that cannot be",
    "token": "answers with tokens that the model does not have",
    "text": "messages with texts or lists without end",
}


class BadMessage(ProtocolError):
    """A peer sent what cannot be.  Its sender is refused with this line; nothing was changed, and
    the run goes on.

    reason: a key of REFUSALS.
    """

    def __init__(self, what: str, reason: str = "message") -> None:
        super().__init__(what)
        self.reason = reason


class LearnerFenced(AsyncrlError):
    """A newer epoch of the learner has taken over; this one ends quietly."""
