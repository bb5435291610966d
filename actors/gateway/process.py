"""The gateway process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from actors.gateway.environment_sessions import EnvironmentSource, SingleCompletions
from actors.gateway.service import Gateway
from actors.gateway.session_source import SessionSource
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
    gateway = Gateway(config, run_dir, index, source=make_source)
    gateway.warm_up()
    if not any(agent.http for agent in config.agents.values()):
        return gateway.run_until_signal(gateway.loop)
    from actors.gateway import http_gateway

    return gateway.run_until_signal(lambda: asyncio.run(http_gateway.serve(gateway)))
