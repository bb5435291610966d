"""The section [agent]: samples that are sessions of several calls, and what a session may use."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count, Positive


class Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    env: Annotated[
        str,
        Meta(
            description="module:Class or file.py:Class, an environment with gymnasium's reset and "
            "step: every sample is a session in one; empty: none"
        ),
    ] = ""
    tools: Annotated[
        list[str],
        Meta(
            description="module:function or file.py:function of each tool: a session calls them "
            "until an answer calls none, which the reward then judges"
        ),
    ] = []
    sessions: Annotated[Positive, Meta(description="open at once, in the gateway")] = 256
    workers: Annotated[Positive, Meta(description="processes that run environments")] = 1
    step_s: Annotated[float, Meta(gt=0, description="seconds for one reset or step")] = 10.0
    max_calls: Annotated[Count, Meta(description="calls of a session; 0: no limit")] = 32
    max_tokens: Annotated[Positive, Meta(description="tokens that a session may draw")] = 4096
    rows: Annotated[Count, Meta(description="rows of a session; 0: no limit")] = 16
    deadline_s: Annotated[float, Meta(gt=0, description="seconds of a session")] = 600.0
    fork: Annotated[
        Literal["row", "end"],
        Meta(
            description="a call that continues none before it opens another row, or ends the "
            "session; estimators that need the order of all tokens need end"
        ),
    ] = "row"
    at_limit: Annotated[
        Literal["keep", "fail"],
        Meta(
            description="a session that reached a limit: its reward so far, as an answer that was "
            "cut (advantage.truncated); or failed, and written again"
        ),
    ] = "keep"

    @property
    def on(self) -> bool:
        """Are samples sessions?"""
        return bool(self.env or self.tools)
