"""`asyncrl serve`: a model directory behind OpenAI's completions API."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from actors.engine import build_engine
from actors.model_server.completions_app import CompletionsApp
from actors.model_server.engine_thread import EngineThread
from asyncrl.config.tree import Config, GeneratorConfig, ModelConfig, TaskConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.models import model_check
from asyncrl.models.policy import compute_weights_digest, list_named_weights, load_policy
from asyncrl.models.tokenizer import collect_stop_tokens, read_vocabulary_size
from asyncrl.transport.http_server import HttpServer, ListenAddress

MOST_CONTEXT = 4096  # without --context


def build_config(
    path: str, *, context: int, slots: int, dtype: str, device: str, threads: int
) -> Config:
    """Build the config of an engine for a model directory.  Raises ConfigError.

    context: 0 means that of the model, at most MOST_CONTEXT. threads: 0 means all cores.
    """
    raw = model_check.read_settings(Path(path), "MODEL")
    max_positions = model_check.find_max_positions(raw) or max(context, MOST_CONTEXT)
    if context > max_positions:
        raise ConfigError(f"--context {context}: the model in {path} has {max_positions} positions")
    return Config(
        model=ModelConfig(path=path, dtype=dtype, device=device),  # type: ignore[arg-type]
        task=TaskConfig(name="none"),
        generator=GeneratorConfig(
            slots=slots,
            context=context or min(max_positions, MOST_CONTEXT),
            threads=threads or len(os.sched_getaffinity(0)),
        ),
    )


def build_app(config: Config, name: str, key: str) -> CompletionsApp:
    """Load the model and start its engine.

    Raises ConfigError for a directory without a model.
    """
    path = config.model.path
    tokenizer = model_check.check(config)
    engine = build_engine(config)
    dtype = config.model.dtype
    model = load_policy(path, dtype, config.model.device)
    engine.load(dict(list_named_weights(model)), Label(1, 0), compute_weights_digest(model))
    return CompletionsApp(
        EngineThread(engine),
        tokenizer,
        name=name,
        key=key,
        context=config.generator.context,
        vocabulary=read_vocabulary_size(path),
        stops=collect_stop_tokens(tokenizer, config),
    )


def serve(app: CompletionsApp, bind: ListenAddress, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    announce: called with the URL when requests are accepted. Raises ConfigError for an address that
    cannot be used.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        asyncio.run(HttpServer(app.app, bind).serve(announce))
    app.engine.close()
