"""The gateway process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from actors.gateway.environment_sessions import EnvironmentSource, SingleCompletions
from actors.gateway.service import Gateway, SessionSource
from asyncrl.config.tree import Config


def make_source(gateway: Gateway, part: str) -> SessionSource:
    """Make the source of a part's sessions; all parts with agents over HTTP share one."""
    agent = gateway.agents[part]
    if not agent.http:
        return (EnvironmentSource if agent.uses_sessions else SingleCompletions)(gateway, part)
    from actors.gateway.session_api import SessionApi

    shared = (source for source in gateway.sources.values() if isinstance(source, SessionApi))
    return next(shared, None) or SessionApi(gateway)


def main(config: Config, run_dir: Path, index: int) -> bool:
    """Run gateway `index`.

    Returns True when the run is finished, False when SIGTERM ended the process.
    """
    over_http = any(agent.http for agent in config.agents.values())
    if over_http:  # before `warm_up` freezes the heap
        from actors.gateway import http_gateway
    gateway = Gateway(config, run_dir, index, source=make_source)

    def play() -> None:
        gateway.warm_up()
        if over_http:
            asyncio.run(http_gateway.serve(gateway))
        else:
            gateway.loop()

    return gateway.run_until_signal(play)
