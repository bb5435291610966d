"""A client of a Tinker server whose requests are wrong.

Raises AssertionError where the server answers otherwise than with a result or one line."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import fuzz
import httpx
from tinker.proto import tinker_public_pb2 as pb


class MisbehavingClient:
    """A client whose requests are wrong, in its own session."""

    def __init__(self, url: str, key: str, bodies: dict[str, bytes]) -> None:
        """bodies: route -> body of a request that the client has made."""
        headers = {"X-API-Key": key}
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers=headers, timeout=120)
        self.bodies = bodies
        self.fresh = itertools.count(1000)  # numbers of requests to sample and of new models
        self.model: str = json.loads(bodies["optim_step"])["model_id"]
        self.next = pb.ForwardBackwardRequest.FromString(bodies["forward_backward"]).seq_id + 2
        self.ahead: set[int] = set()  # accepted calls that wait for self.next
        self.results: Counter[str] = Counter()

    def build(self, route: str, change: Callable[[Any], Any]) -> bytes:
        """Return the next request of a route, changed."""
        body = self.bodies[route]
        if not body.startswith(b"{"):
            message = pb.ForwardBackwardRequest.FromString(body)
            message.seq_id = self.next
            return change(message) or message.SerializeToString()
        values = json.loads(body)
        for key in ("seq_id", "model_seq_id", "sampling_session_seq_id"):
            if values.get(key) is not None:
                values[key] = self.next if "model_id" in values else next(self.fresh)
        return change(values) or json.dumps(values).encode()

    def post(self, route: str, body: bytes) -> httpx.Response:
        is_json = self.bodies[route].startswith(b"{")
        kind = "application/json" if is_json else "application/x-protobuf"
        reply = self.http.post(f"/{route}", content=body, headers={"content-type": kind})
        assert reply.status_code < 500, (route, body, reply.text)
        if reply.status_code >= 400 and reply.status_code != 408:
            assert len(reply.json()["error"].splitlines()) == 1, (route, body, reply.text)
        return reply

    def act(self, route: str, change: Callable[[Any], Any]) -> None:
        """Make a request and wait for its result: a valid one, or one line of the client's own."""
        body = self.build(route, change)
        reply = self.post(route, body)
        promised = "request_id" in reply.text and reply.json().get("request_id")
        if reply.status_code != 200 or not promised:
            self.results[f"{route}: {reply.status_code}"] += 1
            return
        if promised.startswith(f"{self.model}:call:"):
            number = int(promised.rpartition(":")[2])
            self.ahead.add(number)
            if number > self.next:
                return
            while self.next in self.ahead:
                self.next += 1
        result = self.post("retrieve_future", json.dumps({"request_id": promised}).encode())
        is_error = "json" in result.headers["content-type"] and "error" in result.json()
        self.results[f"{route}: {'failed' if is_error else 'done'}"] += 1
        if is_error:
            assert result.json()["category"] == "user", (route, body, result.text)

    def misbehave(self, mutants: int, seed: int) -> None:
        """Make every kind of mistake, then `mutants` random ones."""
        for name, value in (("temperature", math.nan), ("temperature", 1e-300), ("top_p", -1.0)):
            self.act("asample", lambda x, n=name, v=value: x["sampling_params"].update({n: v}))
        for rate in (math.nan, 1e300, 1e38):
            adam = {"learning_rate": rate, "weight_decay": 1e38}
            self.act("forward_backward", lambda message: None)
            self.act("optim_step", lambda x, adam=adam: x["adam_params"].update(adam))
        self.act("forward_backward", lambda message: message.ClearField("data"))
        self.act("forward_backward", lambda message: message.data[0].ClearField("model_input"))
        for name in ("z", "z", "z.json"):
            self.act("save_weights", lambda x, name=name: x.update(path=name))
            self.http.delete(f"/training_runs/{self.model}/checkpoints/weights/{name}")
        for _ in range(100):
            self.post("asample", self.build("asample", lambda x: None))
        chance = random.Random(seed)

        def mutate(values: Any) -> bytes:
            is_json = isinstance(values, dict)
            body = json.dumps(values).encode() if is_json else values.SerializeToString()
            other = chance.choice([*self.bodies.values()])
            with contextlib.suppress(ValueError):  # values that fit no field
                if chance.random() < 0.7 and is_json:
                    return json.dumps(fuzz.of_values(chance, values), default=repr).encode()
                if chance.random() < 0.7:
                    return fuzz.of_protobuf(chance, body)
            return fuzz.mutant(chance, body, other, fuzz.TEXT_EDGES)

        for number in range(mutants):
            self.act([*self.bodies][number % len(self.bodies)], mutate)
