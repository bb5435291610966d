"""Several learner processes that act as one learner: start, connection, collectives and end.

Every rank holds the whole batch and the same state. Forward and backward passes are assigned by
length. The loss has global denominators, so the ranks' gradients add up to that of the whole batch.
All ranks must make the same number of passes, so ranks with fewer micro-batches add empty ones.
"""

import datetime
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.importing import end_with_parent
from asyncrl.contract.messages import Batch
from asyncrl.contract.printable import describe_exception, describe_exit
from asyncrl.models.policy import PolicyModel, build_manifest, resolve_device
from learner.backend import TorchBackend

START_S = 60.0  # time to connect, imports included, in addition to learner.rank_timeout_s
END_S = 20.0  # time for the other ranks to exit
TRANSPORT = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "broken pipe")


class RankLost(AsyncrlError):
    """A rank has ended or does not respond."""

    exit_code = 137  # like a kill: the supervisor restarts the learner from its checkpoint


def reserve_port() -> socket.socket:
    """Open a socket that holds a free port of this host until it is closed.

    torch's store, which starts some imports later, may listen on the port meanwhile.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


class DistributedBackend(TorchBackend):
    """The base of backends of several ranks; see `TorchBackend`.

    A subclass prepares model and optimizer after this class has connected the ranks.
    """

    def __init__(self, config: Config, model: PolicyModel) -> None:
        learner = config.learner
        self.tensor = learner.mesh.tensor  # successive ranks that pass the same samples
        self.config = config
        self.model = model
        self.device = torch.device(resolve_device(config.model.device))
        self.environment: dict[str, str] = {}
        self.others: list[subprocess.Popen[bytes]] = []
        reserved = reserve_port()
        # without a launcher this process becomes rank 0, and the others are copies of it
        if "WORLD_SIZE" not in os.environ:
            self.environment = {
                "WORLD_SIZE": str(learner.process_count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(reserved.getsockname()[1]),
                "RANK": "0",
                "LOCAL_RANK": "0",  # other ranks choose their own GPU: asyncrl/models/devices.py
            }
            os.environ.update(self.environment)
            self.others = [
                subprocess.Popen(
                    [sys.executable, *sys.orig_argv[1:]],
                    env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    preexec_fn=end_with_parent(),
                )
                for rank in range(1, learner.process_count)
            ]
        elif int(os.environ["WORLD_SIZE"]) != learner.process_count:  # of torchrun
            raise ConfigError(
                f"learner.ranks: {learner.ranks}, but the launcher started "
                f"{os.environ['WORLD_SIZE']}"
            )
        self.layout = build_manifest(model)
        self.last_broadcast_at = time.monotonic()
        self.guarded_since = 0.0
        self.closed = False
        cuda = self.device.type == "cuda"
        if cuda and learner.process_count > 1 and not learner.gpus:
            raise ConfigError(
                f"learner.gpus: {learner.ranks} ranks would share one GPU; give one number each"
            )
        limit = learner.rank_timeout_s + START_S
        try:
            self.connect(
                "cpu:gloo,cuda:nccl" if cuda else "gloo", datetime.timedelta(seconds=limit)
            )
        except (RuntimeError, ValueError) as error:
            raise RankLost(
                f"the ranks of the learner did not come together within {limit:g} s: "
                f"{describe_exception(error)}"
            ) from error
        reserved.close()
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        if self.ranks > 1:
            threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def connect(self, transport: str, timeout: datetime.timedelta) -> None:
        """Join the process group of all ranks.

        transport: torch's name of it, for instance "gloo".
        """
        dist.init_process_group(transport, timeout=timeout)

    # ---- ranks -----------------------------------------------------------------------------------

    def broadcast(self, command: str, payload: Any = None) -> None:
        if self.ranks > 1 and self.rank == 0:
            with self.guard():
                dist.broadcast_object_list([command, msgspec.msgpack.encode(payload)], src=0)
            self.last_broadcast_at = time.monotonic()

    def receive_broadcast(self) -> tuple[str, Any]:
        """Receive the next command of rank 0, on another rank."""
        received: list[Any] = [None, None]
        with self.guard():
            dist.broadcast_object_list(received, src=0)
        command, payload = received
        kind = Batch if command == "train" else str | None
        return command, msgspec.msgpack.decode(payload, type=kind)

    def keep_alive(self) -> None:
        for rank, process in enumerate(self.others, 1):
            if (code := process.poll()) is not None:
                raise RankLost(f"rank {rank} of the learner has ended ({describe_exit(code)})")
        if time.monotonic() - self.last_broadcast_at > self.config.learner.rank_timeout_s / 4:
            self.broadcast("wait")

    def _describe_loss(self) -> str:
        """Name the first rank that has ended, if any has."""
        exited = [r for r, process in enumerate(self.others, 1) if process.poll() is not None]
        if exited:
            return f"rank {exited[0]} of the learner has ended"
        return "a rank of the learner has ended or does not answer"

    def _watch(self) -> None:
        """End this process and its ranks when a collective takes too long (a thread).

        A backend's own process groups have no deadline.
        """
        while not self.closed:
            limit = self.config.learner.rank_timeout_s
            time.sleep(min(1.0, limit / 10))
            guarded_since = self.guarded_since
            if guarded_since and time.monotonic() - guarded_since > limit:
                print(
                    f"error: RankLost: {self._describe_loss()}: rank {self.rank} has waited "
                    f"{limit:g} s for it "
                    f"(learner.rank_timeout_s = {limit:g})",
                    file=sys.stderr,
                )
                for process in self.others:
                    process.kill()
                os._exit(137)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Set a deadline for rank 0, and raise RankLost instead of a transport error.

        The other ranks have no deadline: they may wait as long as rank 0 waits for a batch, and
        exit with it. Guards nest.
        """
        outer = self.guarded_since
        self.guarded_since = self.guarded_since or (time.monotonic() if self.rank == 0 else 0.0)
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not any(
                word in str(error).lower() for word in TRANSPORT
            ):
                raise  # this rank's own error
            time.sleep(0.2)  # a process's end becomes visible shortly after its connection's
            raise RankLost(
                f"{self._describe_loss()} (learner.rank_timeout_s = "
                f"{self.config.learner.rank_timeout_s:g}): {describe_exception(error)}"
            ) from error
        finally:
            self.guarded_since = outer

    def split_samples(self, samples: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        order = sorted(samples, key=lambda i: (lengths[i], i))
        return [order[r // self.tensor :: self.ranks // self.tensor] for r in range(self.ranks)]

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        # NaN on any rank remains
        return self.add_up(value * 0 if self.rank % self.tensor else value)

    def add_up(self, value: Tensor) -> Tensor:
        """Return the sum of all ranks' values, also of those in one tensor group."""
        if self.ranks > 1:
            with self.guard():
                dist.all_reduce(value)
        return value

    def apply(self, rate: float, loss: Tensor | None = None) -> float:
        if loss is not None:
            # a loss that is not finite on one rank alone: all ranks skip the step, or none
            loss = self.sum_over_ranks(loss.detach().cpu().clone())
        return super().apply(rate, loss)

    def gather(self, value: Any) -> list[Any]:
        gathered = [value] * self.ranks
        if self.ranks > 1:
            with self.guard():
                dist.all_gather_object(gathered, value)
        return gathered[:: self.tensor]

    def close(self) -> None:
        self.closed = True
        if self.ranks > 1 and self.rank == 0:
            # after a failure here the other ranks' state is unknown: they would not receive it
            has_failed = sys.exc_info()[0] is not None
            for process in self.others if has_failed else ():
                process.kill()
            with suppress(AsyncrlError):
                if not has_failed and all(process.poll() is None for process in self.others):
                    self.broadcast("end")
            deadline = time.monotonic() + END_S
            for process in self.others:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in self.environment:
            os.environ.pop(name, None)


class ReplicatedBackend(DistributedBackend):
    """The backend torch of several ranks, each of which holds the whole model.

    One message a step holds all gradients. A checkpoint is that of one process.
    """

    def __init__(self, config: Config, model: PolicyModel) -> None:
        super().__init__(config, model)
        TorchBackend.__init__(self, config, model)

    def apply(self, rate: float, loss: Tensor | None = None) -> float:
        self._add_up(self.parameters)
        return super().apply(rate, loss)

    def clip(self, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        # the policy's were added up before their cosine was measured
        if parameters is not self.parameters:
            self._add_up(parameters)
        return super().clip(parameters)

    def _add_up(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace the gradients by their sums over the ranks, added up in float32.

        A parameter that no rank used keeps none, as in one process.
        """
        parts = [
            torch.zeros(p.numel(), device=p.device) if p.grad is None else p.grad.float().flatten()
            for p in parameters
        ]
        used = parts[0].new_tensor([p.grad is not None for p in parameters])
        sums = self.sum_over_ranks(torch.cat([used, *parts]))
        used, *parts = torch.split(sums, [len(part) for part in (used, *parts)])
        for parameter, total, count in zip(parameters, parts, used.tolist(), strict=True):
            if count:
                parameter.grad = total.view_as(parameter).to(parameter.dtype)


def exit_rank() -> NoReturn:
    """End a rank above 0 without the interpreter's own shutdown.

    A gloo thread may still release tensors of the last broadcast, which would abort the process,
    and torchrun would end rank 0 for it.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
