"""The gateway process."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

from actors.gateway.environment_sessions import EnvironmentSource
from actors.gateway.mixing.mixed_sources import MixedSource
from actors.gateway.service import Gateway
from asyncrl.config.tree import Config


def main(config: Config, run_dir: Path, index: int) -> bool:
    """Run gateway `index`.

    Returns True when the run is finished, False when SIGTERM ended the process.
    """
    agents = config.agents
    make_http = None
    if any(agent.http for agent in agents.values()):
        from actors.gateway import http_gateway, session_api

        make_http = session_api.SessionApi
    mixed = partial(MixedSource, make_http=make_http)
    source = mixed if len(agents) > 1 else make_http or EnvironmentSource
    gateway = Gateway(config, run_dir, index, source=source)

    def stop(_number: int, _frame: object) -> None:
        gateway.ending = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN if os.environ.get("ASYNCRL_SUPERVISED") else stop)
    gateway.warm_up()
    try:
        if make_http is not None:
            asyncio.run(http_gateway.serve(gateway))
        else:
            gateway.loop()
    finally:
        gateway.close()
    return gateway.over
