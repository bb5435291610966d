#!/usr/bin/env bash
# openai 3.52.0: each new OpenAI or AsyncOpenAI makes a TLS context and reads the certificates, also
# for an http:// address that never needs them: tens of milliseconds of processor time, within the
# constructor. In one event loop that plays many agents' sessions, all of them wait for it. A client
# by `with_options(base_url=..., api_key=...)` of another shares its connections and costs a hundredth.
# Seen: "new client 21.3 ms, with_options 0.09 ms of CPU time".
# Exits non-zero when a new client costs less than 20 times as much.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openai==3.52.0
"$folder/venv/bin/python" - <<'PROGRAM'
import statistics
import sys
import time

import openai
from openai import AsyncOpenAI

print(f"openai {openai.__version__}")
where = {"base_url": "http://127.0.0.1:9/v1", "api_key": "session"}
shared = AsyncOpenAI(**where)


def measure(make):
    """The median CPU milliseconds of 30 calls."""
    times = []
    for _ in range(30):
        began = time.process_time()
        make(**where)
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


new, derived = measure(AsyncOpenAI), measure(shared.with_options)
print(f"new client {new:.1f} ms, with_options {derived:.2f} ms of CPU time")
sys.exit(new < 20 * derived)
PROGRAM
