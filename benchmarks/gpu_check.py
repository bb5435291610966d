"""Check on this machine's GPU what the tests check on a CPU (`make gpu-check`).

    python benchmarks/gpu_check.py [--quick] [--json] [--only PART ...] [--size SIZE] [--patience N]

It needs one CUDA GPU, at most 8 minutes, and only torch, transformers, numpy, safetensors, msgspec,
pyzmq, xxhash, click and rich, in whatever versions the machine has; asyncrl itself need not be
installed.  Each part runs in a process of its own with a time limit, so that a failure, a crash or
a hang of one leaves the others.  A part computes on the GPU and compares with the CPU, engines'
log-probabilities in float64 and learners in float32.  Without a GPU all parts run on the CPU.  The
exit code is 1 if a part fails.  Tokens a second are those of a small model and small batches."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from lib import results_file

TOTAL_S = 450.0  # for all parts
DEVICE_S = 25.0  # to find the GPU
ENDING_S = 5.0  # for a part that was stopped
# part -> its time limit in seconds
PARTS = {
    "engine fp32": 30.0,
    "engine bf16": 30.0,
    "packed forward fp32": 30.0,
    "packed forward bf16": 30.0,
    "learner step fp32": 30.0,
    "learner step bf16": 30.0,
    "weights by shared memory": 30.0,
    "weights by pairs": 30.0,
    "LoRA": 35.0,
    "FSDP2": 35.0,
    "speculative decoding": 30.0,
    "routing replay": 30.0,
    "exact mode": 30.0,
    "demo run": 50.0,
}
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "msgspec", "pyzmq", "peft")
LOG_LINES = 30  # of a failed part's stderr, in the result


class Outcome(NamedTuple):
    """How a process ended: its result, or the error in one line."""

    result: dict[str, Any]
    error: str
    seconds: float
    log: str  # the end of its stderr


def run_isolated(command: Sequence[str], limit_s: float) -> Outcome:
    """Run a command that writes a JSON object as the last line of its stdout."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            error = explain_exit(code) if code else ""
        except subprocess.TimeoutExpired:
            error = f"not done after {limit_s:.0f} s"
        finally:
            stop_group(process)
        seconds = time.monotonic() - began
        out.seek(0)
        log.seek(0)
        lines = out.read().strip().splitlines()
        tail = log.read().strip().splitlines()[-LOG_LINES:]
    try:
        result = dict(json.loads(lines[-1]))
    except (IndexError, TypeError, ValueError):
        result = {}
        error = error or "it ended without a result"
    if error and not error.startswith("not done"):
        error = result.get("error") or ": ".join([error, *tail[-1:]])
    return Outcome({} if error else result, error, seconds, "\n".join(tail))


def explain_exit(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a part and the processes that it started: gently, so that a run cleans up, then not."""
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            end = time.monotonic() + ENDING_S
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.02)
    except ProcessLookupError:
        return  # all have ended
    # else one is held up in the kernel, by a driver for example: it is left alone


def part_command(name: str, device: str, size: str, work: Path) -> list[str]:
    arguments = ["--part", name, "--device", device, "--size", size, "--work", str(work)]
    return [sys.executable, str(Path(__file__).resolve()), *arguments]


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that matter; "" for one that is missing."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def print_heading(device: dict[str, Any], error: str, versions: dict[str, str]) -> None:
    from asyncrl.models.installed import list_untested_versions

    print(", ".join(f"{name} {version or '-'}" for name, version in versions.items()))
    if other := list_untested_versions():
        print(f"warning: untested versions: {other}")
    for gpu in device["gpus"]:
        print(f"GPU: {gpu['name']}, {gpu['memory_gib']} GiB, CUDA {device['cuda']}")
    if device["device"] == "cpu":
        reason = f" ({error})" if error else ""
        print(f"no CUDA GPU{reason}: all parts run on the CPU, which is compared with itself")
    print(f"\n{'part':25} {'logprobs':>9} {'gradients':>9} {'tokens/s':>9} {'seconds':>7}  result")


def print_row(row: dict[str, Any]) -> None:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    state = row["error"] or "works" + (f" ({row['note']})" if row["note"] else "")
    print(
        f"{row['part']:25} {number(row['logprobs'], '.1e'):>9} "
        f"{number(row['gradients'], '.1e'):>9} {number(row['tokens_per_s'], ',.0f'):>9} "
        f"{row['seconds']:7.1f}  {state}",
        flush=True,
    )


def run_parts(
    names: Sequence[str], device: str, size: str, work: Path, patience: float
) -> list[dict[str, Any]]:
    """Run the parts one after another, within TOTAL_S; print a row for each as it ends.

    patience: a factor for all limits."""
    empty = {"logprobs": None, "gradients": None, "tokens_per_s": None, "note": ""}
    end = time.monotonic() + patience * TOTAL_S
    rows = []
    for name in names:
        limit = min(patience * PARTS[name], end - time.monotonic())
        outcome = (
            run_isolated(part_command(name, device, size, work), limit)
            if limit > 0
            else Outcome(
                {}, f"not run: the {patience * TOTAL_S:.0f} s of all parts are over", 0.0, ""
            )
        )
        row = {"part": name, "works": not outcome.error, "error": outcome.error[:300]}
        row |= empty | outcome.result | {"seconds": round(outcome.seconds, 1)}
        row |= {"log": outcome.log} if outcome.error else {}
        rows.append(row)
        print_row(row)
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="write nothing to results/")
    parser.add_argument("--json", action="store_true", help="print the result as JSON at the end")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--size", choices=["tiny", "full"], help="default: full on a GPU")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="multiply all time limits, on a busy machine"
    )
    for hidden in ("--part", "--device", "--work", "--receive"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_child(args: argparse.Namespace) -> int:
    """Run one part, or the receiver of one, and print its result or its error as JSON."""
    try:
        from lib import gpu_parts

        result = (
            gpu_parts.receive(json.loads(args.receive))
            if args.receive
            else gpu_parts.run_part(args.part, args.device, args.size, Path(args.work))
        )
    except Exception as error:
        traceback.print_exc()
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        print(json.dumps({"error": f"{type(error).__name__}: {reason}"}))
        return 1
    print(json.dumps(result))
    return 0


def main() -> int:
    args = parse_arguments()
    if args.part or args.receive:
        return run_child(args)
    versions = installed_versions()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        command = part_command("device", "", "tiny", Path(work))
        found = run_isolated(command, args.patience * DEVICE_S)
        device = found.result or {"device": "cpu", "gpus": [], "cuda": None}
        print_heading(device, found.error, versions)
        size = args.size or ("full" if device["device"] == "cuda" else "tiny")
        names = args.only or list(PARTS)
        rows = run_parts(names, device["device"], size, Path(work), args.patience)
    failed = [row["part"] for row in rows if not row["works"]]
    print(f"\n{len(rows) - len(failed)} of {len(rows)} parts work")
    result = {
        "what": "parts of asyncrl on this machine, compared with the CPU",
        "machine": results_file.machine() | device,
        "versions": versions,
        "size": size,
        "met": not failed,
        "parts": rows,
    }
    if not args.quick:
        print(f"result: {results_file.write('gpu_check', result)}")
    if args.json:
        print(json.dumps(result))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
