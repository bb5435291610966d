"""Check which configs can run in one process (serial.py).

Every cell of a comparison is checked, so this module imports nothing heavy.
"""

from asyncrl.config.engines import list_engines
from asyncrl.config.tree import Config


def needs_own_process(config: Config) -> str:
    """Return the reason why `config` cannot run in a warm process; empty if it can."""
    if config.uses_sessions:
        return "agent: sessions need a gateway, which a warm process lacks; run it as processes"
    if not config.generator.abilities.one_process:
        return (
            f"generator.engine: {config.generator.engine} does not run in a warm process; "
            f"use {list_engines('one_process')}"
        )
    if config.learner.distributed:
        return (
            f"learner.backend: {config.learner.backend} with learner.ranks = "
            f"{config.learner.ranks} does not run in a warm process; use torch and one rank"
        )
    return ""
