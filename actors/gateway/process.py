"""The gateway process."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from types import ModuleType

from actors.gateway.environment_sessions import EnvironmentSource
from actors.gateway.mixing.mixed_sources import MixedSource
from actors.gateway.service import Gateway
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError


def import_http() -> ModuleType:
    """Import the modules for sessions over HTTP.

    Raises ConfigError when their libraries are not installed.
    """
    try:
        from actors.gateway import http_gateway
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"agent: sessions over HTTP need {error.name}, which is not installed: pip install "
            "'asyncrl[agents]'"
        ) from error
    return http_gateway


def main(config: Config, run_dir: Path, index: int) -> bool:
    """Run gateway `index`.

    Returns True when the run is finished, False when SIGTERM ended the process.
    """
    agents = config.agents
    http = import_http() if any(agent.http for agent in agents.values()) else None
    make_http = http.SessionApi if http is not None else None
    mixed = partial(MixedSource, make_http=make_http)
    source = mixed if len(agents) > 1 else make_http or EnvironmentSource
    gateway = Gateway(config, run_dir, index, source=source)

    def stop(_number: int, _frame: object) -> None:
        gateway.ending = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN if os.environ.get("ASYNCRL_SUPERVISED") else stop)
    gateway.warm_up()
    try:
        if http is not None:
            asyncio.run(http.serve(gateway))
        else:
            gateway.loop()
    finally:
        gateway.close()
    return gateway.over
