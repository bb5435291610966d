"""How a vLLM server takes weights: one call of a route of ours, which reads a file.

A server has the route UPDATE by `--middleware actors.vllm_transfer.UpdateRoute`, and what it calls
in every worker by `--worker-extension-cls actors.vllm_transfer.FileExtension`.
"""

from __future__ import annotations

import asyncio
import time

from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.engine_vllm import UPDATE, SwapExtension


class FileExtension(SwapExtension):
    """Methods that vLLM mixes into each worker of a server."""

    def asyncrl_load_file(self, path: str) -> None:
        """Load the weights of a safetensors file, which have transformers' names."""
        self.asyncrl_seed_rows()
        self.asyncrl_load(load_file(path))


class UpdateRoute:
    """POST UPDATE {path, version, clear_cache}: pause, load, name the version and go on.

    vLLM's own routes take five calls for this, between which a server stands still as long as it,
    or its client, waits for a processor. Here its engine gets all that follows the pause at once.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != UPDATE:
            return await self.app(scope, receive, send)
        update = await Request(scope, receive).json()
        engine = scope["app"].state.engine_client
        try:
            await engine.engine_core.pause_scheduler_async("keep", update["clear_cache"])
            began = time.monotonic()
            await asyncio.gather(
                engine.collective_rpc("asyncrl_load_file", args=(update["path"],)),
                engine.update_weight_version(update["version"]),
                engine.resume_generation(),
            )
        except BaseException:
            await engine.resume_generation()
            raise
        await JSONResponse({"paused_s": time.monotonic() - began})(scope, receive, send)
