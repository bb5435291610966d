"""An engine in a thread of its own, which many requests share.

Only this thread touches the engine. Other threads queue work and get a future. Requests that arrive
while others are being decoded join them at the next step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from actors.engine import Completion, CompletionRequest, Engine, Key, PromptScores
from asyncrl.contract.errors import AsyncrlError

STEPS = 8  # decode steps between two checks for new work


class EngineThread:
    """The thread that runs the steps of an engine and resolves completions' futures."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.work: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self.futures: dict[Key, Future[Completion]] = {}
        self.news = threading.Condition()
        self.closing = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def complete(self, request: CompletionRequest) -> Future[Completion]:
        """Queue a completion to generate; its key must differ from those of open requests."""
        future: Future[Completion] = Future()

        def add() -> None:
            self.engine.add([request])
            self.futures[request.key] = future

        self._submit(add, future)
        return future

    def score(self, prompts: Sequence[np.ndarray], most_likely: int) -> Future[list[PromptScores]]:
        """Queue token sequences to score; see `Engine.score`."""
        future: Future[list[PromptScores]] = Future()
        self._submit(lambda: future.set_result(self.engine.score(prompts, most_likely)), future)
        return future

    def cancel(self, keys: Sequence[Key]) -> None:
        """Abort completions, for example of a closed connection."""

        def abort() -> None:
            self.engine.abort(keys)
            for key in keys:
                if (future := self.futures.pop(key, None)) is not None:
                    future.set_exception(CancelledError())

        self._submit(abort, Future())

    def close(self) -> None:
        """End the thread. Open requests fail."""
        with self.news:
            self.closing = True
            self.news.notify()
        self.thread.join()

    def _submit(self, work: Callable[[], None], future: Future[Any]) -> None:
        def run() -> None:
            try:
                work()
            except AsyncrlError as error:  # of this request alone
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise

        # a closed connection cancels what it waits for: the thread's result must find it open
        future.set_running_or_notify_cancel()
        with self.news:
            if self.error is not None or self.closing:
                future.set_exception(self._build_end_error())
                return
            self.work.append((run, future))
            self.news.notify()

    def _build_end_error(self) -> AsyncrlError:
        return AsyncrlError(f"the engine has ended: {self.error or 'closed'}")

    def _run(self) -> None:
        try:
            while self._wait():
                while self.work:
                    self.work.popleft()[0]()
                for completion in self.engine.step(STEPS) if self.engine.active else []:
                    self.futures.pop(completion.key).set_result(completion)
        except BaseException as error:
            self.error = error
        with self.news:
            self.closing = True
            for future in (*self.futures.values(), *(future for _, future in self.work)):
                future.set_exception(self._build_end_error())

    def _wait(self) -> bool:
        """Wait for work; False when the thread should end."""
        with self.news:
            while not (self.closing or self.work or self.engine.active):
                self.news.wait()
            return not self.closing
