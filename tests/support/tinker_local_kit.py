"""A server of the Tinker API in this process: its routes on a socket, and both workers' own code
behind them, without processes to start."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types
from tinker_kit import output_logprobs, tuned_datum, write_config

from asyncrl.tinker import settings
from asyncrl.tinker.app import TinkerServer
from asyncrl.tinker.links import WorkerExited
from asyncrl.tinker.messages import (
    LENGTH_BYTES,
    CallFailure,
    SampleCall,
    decode_frame,
    encode_frame,
)
from asyncrl.tinker.server import prepare_directory, run_workers
from asyncrl.tinker.workers.sampler import Sampler
from asyncrl.tinker.workers.trainer import ServedModels
from asyncrl.transport.http_server import HttpServer, ListenAddress

KEY = "tml-local"
ADAM = types.AdamParams(learning_rate=1e-2)
TUNED = [tuned_datum([5, 6, 7, 8, 1])]


def step(client: tinker.TrainingClient, data: list[types.Datum], loss: Any = "ppo") -> Any:
    client.forward_backward(data, loss)
    return client.optim_step(ADAM).result().metrics


def scored(client: tinker.TrainingClient) -> np.ndarray:
    return output_logprobs(client.forward(TUNED, "cross_entropy").result())


def sampler_of(client: tinker.TrainingClient) -> tinker.SamplingClient:
    return client.save_weights_and_get_sampling_client().result()


class DirectLink:
    """A link to a worker's code in this process.

    exits: before which of the next calls the worker is killed, by their count."""

    def __init__(self, act: Callable[..., Any], kill: Callable[[], None]) -> None:
        self.act = act
        self.kill = kill
        self.exits: set[int] = set()
        self.generation = 1
        self.number = 0

    async def start(self) -> None:
        """It runs."""

    close = start

    async def call(self, *call: Any, **options: Any) -> Any:
        self.number += 1
        self.exits = {left - 1 for left in self.exits if left > 0}
        if 0 in self.exits:
            self.kill()
            self.generation += 1
            raise WorkerExited("the process ended")
        call, options = decode_frame(encode_frame(call, options)[LENGTH_BYTES:])
        result = self.act(self.number, *call, **options)
        if isinstance(result, CallFailure):
            raise result
        return result


class LocalServer:
    """`asyncrl tinker`; a second one of the same folder is one that was started again."""

    def __init__(self, folder: Path, *sets: str, remembered: int = 0) -> None:
        self.config_path = str(write_config(folder))
        self.config = settings.read(self.config_path, sets)
        self.folder = prepare_directory(self.config, "server")
        self.trainer = ServedModels(self.config)
        self.results: dict[int, Any] = {}
        self.sampler = Sampler(self.config, self.results.__setitem__)
        self.server = TinkerServer(self.config, self.folder, KEY)
        self.training = DirectLink(self._train, self._kill)
        self.links = self.server.trainer, self.server.sampling
        self.server.trainer = self.training
        link = DirectLink(self._sample, lambda: None)
        self.server.samplers.link = self.server.sampling = link
        if remembered:
            self.server.ledger.remembered = self.server.samplers.remembered = remembered
        self.web = HttpServer(self.server.starlette(), ListenAddress())
        self.url = self.web.url
        self.server.on_failure = self.web.end
        started = threading.Event()
        serve = self.web.serve(lambda url: started.set(), run_workers(self.server))
        self.thread = threading.Thread(target=lambda: asyncio.run(serve))
        self.thread.start()
        assert started.wait(60)

    def _kill(self) -> None:
        self.trainer.models.clear()

    def _train(self, _: int, *call: Any, **options: Any) -> Any:
        return self.trainer.handle(*call, **options)

    def _sample(self, number: int, method: str, asked: SampleCall) -> Any:
        getattr(self.sampler, method)(number, asked)
        while number not in self.results:
            self.sampler.work()
        return self.results.pop(number)

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=KEY)

    def stop(self) -> None:
        self.web.end()
        self.thread.join(60)
