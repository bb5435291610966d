"""Kill a Tinker server and its processes under two clients, and judge by the files alone."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import safetensors.torch
import torch
import xxhash
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.models import adapter_files
from asyncrl.models.policy import build_model
from asyncrl.records import jsonl, metrics
from asyncrl.tinker.workers import trainer
from lib import results_file

SYMBOLS = "0123456789+-*=? abcdefghijklmnopqrstuvwxyz:\n"
PROMPT = [5, 13, 5, 16]
VICTIMS = ("server", "training", "sampling")
CLIENTS = 2
AWAIT_S = 90.0  # longest wait for steps between two kills
SAMPLES = 2  # sequences of an optimizer step; the second is trained one step later
ARRAYS = {"target_tokens": ("<i8", pb.DTYPE_INT64)}
FLOATS = ("<f4", pb.DTYPE_FLOAT32)


class RestartedServer:
    """`asyncrl tinker` at one port."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        build_model(work / "tiny", SYMBOLS, hidden=32, layers=1, heads=2, max_positions=256)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.config = work / "server.toml"
        self.config.write_text(
            f'name = "server"\nruns = "{work}"\nrestarts = 100\n[model]\npath = "{work / "tiny"}"\n'
            f"[server]\nport = {self.port}\n[sampling]\ncontext = 64\n[lora]\nrank = 4\n"
            "[training]\ncheckpoint_every = 3\n"
        )
        self.folder = work / "server"
        self.errors = (work / "stderr").open("ab")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.cli", "tinker", str(self.config)],
            cwd=results_file.ROOT,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(600)
        self.errors.close()


class TinkerClient(threading.Thread):
    """A client that repeats every request until it has the result, and notes what it was told.

    ended: set to let it stop after its step.  steps: at most so many."""

    def __init__(self, server: RestartedServer, index: int, steps: int) -> None:
        super().__init__(name=f"client {index}")
        self.server = server
        self.index = index
        self.steps = steps
        self.ended = threading.Event()
        self.number = 0  # seq_id of the last training call
        self.sampled = 0  # seq_id of the last request to sample
        self.model = ""
        self.told: list[dict[str, Any]] = []  # a row of each optimizer step
        self.failure = ""
        self.http = httpx.Client(timeout=60)

    def post(self, route: str, body: Any) -> httpx.Response:
        """Post until the server answers."""
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        while True:
            with contextlib.suppress(httpx.HTTPError, OSError):
                key = (self.server.folder / "api_key").read_text().strip()
                reply = self.http.post(
                    f"http://127.0.0.1:{self.server.port}/api/v1/{route}",
                    content=data,
                    headers={"X-API-Key": key, "content-type": kind},
                )
                if reply.status_code not in (408, 503):
                    return reply
            time.sleep(0.2)  # a server that starts needs the processor

    def call(self, route: str, body: Any) -> httpx.Response:
        """Make a training call."""
        promise = self.post(route, body)
        if promise.status_code != 200:
            raise RuntimeError(f"{route}: {promise.status_code} {promise.text}")
        reply = self.post("retrieve_future", {"request_id": promise.json()["request_id"]})
        is_json = "json" in reply.headers["content-type"]
        if reply.status_code != 200 or (is_json and "error" in reply.json()):
            raise RuntimeError(f"{route}: {reply.status_code} {reply.text}")
        return reply

    def next_call(self) -> dict[str, Any]:
        self.number += 1
        return {"model_id": self.model, "seq_id": self.number}

    def sample(self, sampler: str, version: int) -> list[dict[str, Any]]:
        """Sample; after the server was killed, sample again."""
        while True:
            self.sampled += 1
            promise = self.post(
                "asample",
                {
                    "sampling_session_id": sampler,
                    "seq_id": self.sampled,
                    "num_samples": SAMPLES,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
                    "sampling_params": {"max_tokens": 6, "seed": version},
                },
            ).json()
            reply = self.post("retrieve_future", {"request_id": promise["request_id"]})
            if reply.status_code == 410:
                continue
            message = pb.SampleResponse()
            message.ParseFromString(reply.content)
            return [
                {"id": id, "tokens": x.tokens, "logprobs": x.logprobs, "version": version}
                for id, x in zip(promise["sample_sequence_ids"], message.sequences, strict=True)
            ]

    def build_loss(self, sequences: list[dict[str, Any]]) -> bytes:
        message = pb.ForwardBackwardRequest(loss_fn="importance_sampling", **self.next_call())
        before = len(PROMPT) - 1
        for index, sequence in enumerate(sequences):
            tokens = np.frombuffer(sequence["tokens"], "<i4").tolist()
            datum = message.data.add()
            inputs = np.array([*PROMPT, *tokens[:-1]], "<i4")
            datum.model_input.add().encoded_text.tokens = inputs.tobytes()
            logprobs = np.frombuffer(sequence["logprobs"], "<f4").tolist()
            for name, values in (
                ("target_tokens", [0] * before + tokens),
                ("logprobs", [0.0] * before + logprobs),
                ("advantages", [0.0] * before + [1.0 - 1.5 * index] * len(tokens)),
            ):
                dtype, code = ARRAYS.get(name, FLOATS)
                array = np.array(values, dtype)
                datum.loss_fn_inputs[name].CopyFrom(
                    pb.Tensor(dense=array.tobytes(), dtype=code, shape=[len(array)])
                )
            prompt = datum.loss_fn_input_spans.add().prompt_tokens
            prompt.sequence_id, prompt.length = sequence["id"], before
            sampled = datum.loss_fn_input_spans.add().sampled_tokens
            sampled.sequence_id, sampled.length = sequence["id"], len(tokens)
        return bytes(message.SerializeToString())

    def run(self) -> None:
        try:
            self.train()
        except Exception as error:
            self.failure = f"client {self.index}: {error!r}"

    def create_model(self) -> None:
        session = self.post(
            "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}
        ).json()["session_id"]
        new = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        self.model = f"{session}:train:0"
        self.call("create_model", new | {"lora_config": {"rank": 4, "seed": self.index}})

    def save_sampler(self, version: int) -> str:
        save = self.next_call() | {"sampling_session_seq_id": version}
        return str(self.call("save_weights_for_sampler", save).json()["sampling_session_id"])

    def train(self) -> None:
        self.create_model()
        late: list[dict[str, Any]] = []
        for version in range(self.steps):
            fresh = self.sample(self.save_sampler(version), version)
            trained = [fresh[0], *late]
            late = fresh[1:]
            self.call("forward_backward", self.build_loss(trained))
            call = self.next_call()
            self.call("optim_step", call | {"adam_params": {"learning_rate": 1e-3}})
            self.told.append({"call": call["seq_id"], "sampled": fresh, "trained": trained})
            if self.ended.is_set():
                break
        self.call("save_weights", self.next_call() | {"path": "final"})


def find_children(parent: int) -> dict[str, int]:
    """Return role -> pid of a server's processes, read from /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found |= {role: int(path.name) for role in VICTIMS[1:] if role in words}
    return found


def train_clients(work: Path, steps: list[int]) -> tuple[RestartedServer, list[TinkerClient]]:
    server = RestartedServer(work)
    clients = [TinkerClient(server, index, most) for index, most in enumerate(steps)]
    for client in clients:
        client.start()
    return server, clients


def run(work: Path, kills: int, seed: int, seconds: float) -> dict[str, Any]:
    """Kill `kills` times, or for `seconds`; then train as many steps without a kill and compare."""
    r = random.Random(seed)
    server, clients = train_clients(work / "killed", [10**6] * CLIENTS)
    done: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + seconds
    while done.total() < kills and time.monotonic() < end:
        due = sum(len(client.told) for client in clients) + r.randint(0, 3)
        patience = time.monotonic() + AWAIT_S
        while sum(len(client.told) for client in clients) < due and time.monotonic() < patience:
            time.sleep(0.02)
        time.sleep(r.uniform(0.0, 1.0))
        if any(not client.is_alive() for client in clients):
            break
        victim = r.choice(VICTIMS)
        pid = (
            server.process.pid
            if victim == "server"
            else find_children(server.process.pid).get(victim)
        )
        if pid is None:  # the server or the process has not started yet
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            done[victim] += 1
        if victim == "server":
            server.process.wait()
            server.start()
    for client in clients:
        client.ended.set()
    for client in clients:
        client.join()
    server.stop()
    problems = [client.failure for client in clients if client.failure]
    for client in clients:
        problems += list(judge(server.folder, client))
    steps = [len(client.told) for client in clients]
    if not problems:
        other, unharmed = train_clients(work / "unharmed", steps)
        for client in unharmed:
            client.join()
        other.stop()
        for killed, whole in zip(clients, unharmed, strict=True):
            state, expected = read_state(server.folder, killed), read_state(other.folder, whole)
            names = sorted(state.keys() | expected.keys())
            if wrong := [name for name in names if state.get(name) != expected.get(name)]:
                problems.append(f"client {killed.index}: other {wrong[0]} than without a kill")
    return {"kills": dict(done), "steps": steps, "wrong": problems}


def locate_model(folder: Path, client: TinkerClient) -> Path:
    return folder / client.model.replace(":", "-")


def read_state(folder: Path, client: TinkerClient) -> dict[str, bytes]:
    """Return the tensors of the weights and of the optimizer that a client saved at its end.

    The bytes of a file are no measure: safetensors writes its metadata in a random order."""
    saved = locate_model(folder, client) / "weights" / "final"
    tensors = safetensors.torch.load_file(saved / "model" / adapter_files.WEIGHTS)
    optimizer = torch.load(saved / trainer.STATE, weights_only=True)["optimizer"]
    for index, moments in optimizer["state"].items():
        tensors |= {f"{index}.{name}": moment for name, moment in moments.items()}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def judge(folder: Path, client: TinkerClient) -> Iterator[str]:
    """Yield what the files say otherwise than the client was told."""
    model = locate_model(folder, client)
    who = f"client {client.index}"
    rows = jsonl.read(model / "trained.jsonl")
    if [row["batch"] for row in rows] != list(range(len(client.told))):
        yield f"{who}: steps {[row['batch'] for row in rows]}, told {len(client.told)}"
    if [row["step"] for row in metrics.read(model)] != list(range(len(client.told))):
        yield f"{who}: metrics.jsonl has other steps"
    known = [
        row for row in jsonl.read(folder / "sequences.jsonl") if row.get("model") == client.model
    ]
    count = collections.Counter(row["id"] for row in known)
    if any(n != 1 for n in count.values()):
        yield f"{who}: sequences are recorded more than once"
    by_id = {row["id"]: row for row in known}
    for version, (row, told) in enumerate(zip(rows, client.told, strict=False)):
        lags: collections.Counter[str] = collections.Counter()
        for sequence in told["trained"]:
            lags[str(version - sequence["version"])] += len(sequence["tokens"]) // 4
        if (row["call"], row["lags"], row["unknown"]) != (told["call"], dict(lags), 0):
            yield f"{who}: step {version} is {row}, told call {told['call']} with lags {lags}"
        if row["sequences"] != sorted(sequence["id"] for sequence in told["trained"]):
            yield f"{who}: step {version} trained {row['sequences']}"
        for sequence in told["sampled"]:
            digest = xxhash.xxh3_64(sequence["tokens"])
            digest.update(sequence["logprobs"])
            recorded = by_id.get(sequence["id"], {})
            if (recorded.get("version"), recorded.get("fingerprint")) != (
                version,
                digest.hexdigest(),
            ):
                yield f"{who}: {sequence['id']} was sampled at {version}, recorded: {recorded}"
    trained = {id for row in rows for id in row["sequences"]}
    ledger = json.loads((model / "ledger.json").read_text())
    expected = (len(known), len(trained), len(known) - len(trained), 0)
    names = ("sampled", "trained_once", "never_trained", "trained_again")
    if tuple(ledger[name] for name in names) != expected:
        yield f"{who}: the ledger has {ledger}, the files {dict(zip(names, expected, strict=True))}"
