"""The sections [reward.judge] and [reward.model]: another model says what an answer is worth."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count, Positive


class JudgeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: Annotated[
        str,
        Meta(description="of an OpenAI-compatible server, up to /v1; empty: no judge"),
    ] = ""
    model: Annotated[str, Meta(description="the name that the server knows it by")] = ""
    key_env: Annotated[
        str,
        Meta(description="environment variable that holds the server's key; empty: none is sent"),
    ] = ""
    template: Annotated[
        str,
        Meta(
            description="file of the text that the judge is given, with {question}, {answer}, "
            "{reference}; empty: the one in actors/scorers/grading.py"
        ),
    ] = ""
    low: Annotated[float, Meta(description="lowest grade")] = 0.0
    high: Annotated[float, Meta(description="highest grade; beyond: a failed reward")] = 10.0
    max_tokens: Annotated[Positive, Meta(description="tokens of the judge's reply")] = 512
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    concurrency: Annotated[
        Positive, Meta(description="requests under way at once, in each reward process")
    ] = 16
    timeout_s: Annotated[float, Meta(gt=0, description="seconds of one request")] = 30.0
    attempts: Annotated[
        Positive,
        Meta(description="requests for one grade: after 408, 409, 425, 429, 5xx or none at all"),
    ] = 6
    requests_per_minute: Annotated[
        Count, Meta(description="of all processes of this machine; 0: no limit")
    ] = 0
    tokens_per_minute: Annotated[Count, Meta(description="the same for tokens, in and out")] = 0
    budget_requests: Annotated[
        Count,
        Meta(description="requests of the whole run, its later lives too; the run ends; 0: none"),
    ] = 0
    budget_tokens: Annotated[Count, Meta(description="the same for tokens")] = 0


class RewardModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: Annotated[
        str,
        Meta(
            description="Hugging Face directory of a sequence classifier with one label; empty: "
            "none"
        ),
    ] = ""
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N")] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    context: Annotated[
        Count,
        Meta(description="tokens of question and answer, more: a failed reward; 0: its positions"),
    ] = 0
    threads: Annotated[Positive, Meta(description="OMP threads of its process")] = 1
