"""The division of a machine's cores between the learner and its generators (`learner.ranks`).

`auto` begins with `learner.threads`. After the first batches it gives the learner the threads with
the shortest predicted step, and the generators a lower priority. It takes both back as soon as
tokens take longer than before."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch

from asyncrl.config.tree import Config
from asyncrl.records import process_log

SERIAL = 0.2  # of a learner's step; two threads take 0.53 to 0.71 of one thread's time
BATCHES = 6  # of a measurement
IDLE = 0.1  # a learner that waits for more than this share of its time needs no threads
SAVED = 0.8  # of the measured step; a side that shares its core loses more than was predicted
NICE = 5  # of the generators beside several threads: a third of the usual share of a core
# seconds from batch to batch, seconds of them at work, tokens
BatchTimes = tuple[float, float, float]


def scale_step(threads: int) -> float:
    """Return the time of a learner's step over that with one thread (Amdahl 1967).

    >>> [round(scale_step(threads), 2) for threads in (1, 2, 4)]
    [1.0, 0.6, 0.4]
    """
    return SERIAL + (1 - SERIAL) / threads


def choose_threads(
    step: float, busy: float, cpu: float, generators: Sequence[float], cores: int, threads: int
) -> int:
    """Return the number of learner threads with the shortest predicted step.

    step: seconds of some batches with `threads` threads, in which the learner was `busy` and used
        `cpu` seconds of CPU time.
    generators: CPU seconds of each generator on the learner's machine.

    A step takes the learner's time, the time of the busiest generator, or all CPU time divided by
    the cores, whichever is longest."""
    if busy < (1 - IDLE) * step:
        return threads
    least = max([(cpu + sum(generators)) / cores, *generators])
    scale = busy / scale_step(threads)
    steps = {n: max(least, scale * scale_step(n)) for n in range(threads, max(threads, cores) + 1)}
    best = min(steps, key=lambda count: steps[count])
    return best if steps[best] < SAVED * step else threads


def read_generator_times(run_dir: Path) -> dict[int, float]:
    """Return the CPU seconds so far of the run's generators on this machine, by process id."""
    import psutil

    times, here = {}, socket.gethostname()
    for name, row in process_log.read_latest_events(run_dir).items():
        if name.startswith("generator-") and (row["event"], row["host"]) == ("began", here):
            with contextlib.suppress(psutil.Error):
                times[row["pid"]] = sum(psutil.Process(row["pid"]).cpu_times()[:2])
    return times


def use_threads(threads: int, run_dir: Path, nice: int) -> None:
    """Set this process's threads, and the priority of the run's generators on this machine.

    Where the kernel groups processes by session, priorities count within a session alone, and a
    supervisor starts each process in a session of its own: that of the session is set too. Without
    privileges only the session's can be raised again."""
    torch.set_num_threads(threads)
    for pid in read_generator_times(run_dir):
        with contextlib.suppress(OSError):
            if os.getsid(pid) == pid:  # not a user's shell
                Path(f"/proc/{pid}/autogroup").write_text(f"{nice}", encoding="utf-8")
                time.sleep(0.1)  # the kernel takes ten such writes a second
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, nice)


def divide_cores(
    config: Config, run_dir: Path, log: Callable[[str], None]
) -> Generator[int, BatchTimes, None]:
    """Yield the learner's threads, and receive the times of each batch. `log` writes decisions."""
    usual = threads = config.learner.threads
    skip = 3 + int(min(config.staleness.limit, 8))  # until the pipeline is full
    first = ratio = 0.0
    while ratio <= 1:
        for _ in range(skip):
            yield threads
        before, cpu = read_generator_times(run_dir), time.process_time()
        batches: list[BatchTimes] = []
        while len(batches) < BATCHES:
            batches.append((yield threads))
        step, busy, tokens = map(sum, zip(*batches, strict=True))
        if first:
            ratio = step / tokens / first
        else:
            cpu, first = time.process_time() - cpu, step / tokens
            times = read_generator_times(run_dir)
            spent = [times[pid] - before.get(pid, 0.0) for pid in times]
            cores = len(os.sched_getaffinity(0))
            threads = choose_threads(step, busy, cpu, spent, cores, usual)
            log(
                f"learner.ranks = auto: {threads} thread(s), as the learner was idle for "
                f"{1 - busy / step:.0%} of {BATCHES} batches and used "
                f"{cpu / (cpu + sum(spent)):.0%} of the CPU time of learner and generators here"
            )
            if threads == usual:
                break
        use_threads(threads, run_dir, NICE)  # again: generators may have started since
    if ratio:
        use_threads(usual, run_dir, 0)
        log(
            f"learner.ranks = auto: {usual} thread(s) again, as a token took {ratio:.2f} times as "
            f"long with {threads}"
        )
    while True:
        yield usual
