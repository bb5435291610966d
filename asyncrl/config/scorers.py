"""The sections [reward.judge] and [reward.model]: another model scores completions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count, Positive


class JudgeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: Annotated[
        str,
        Meta(
            description="Address of an OpenAI-compatible server, up to /v1, that grades "
            "completions. Empty: no judge."
        ),
    ] = ""
    model: Annotated[str, Meta(description="Name of the judge's model on that server.")] = ""
    key_env: Annotated[
        str,
        Meta(description="Environment variable that holds the server's key. Empty: send no key."),
    ] = ""
    template: Annotated[
        str,
        Meta(
            description="File with the judge's prompt, with {question}, {answer} and "
            "{reference}. Empty: the one in actors/scorers/grading.py."
        ),
    ] = ""
    low: Annotated[float, Meta(description="Lowest grade.")] = 0.0
    high: Annotated[
        float, Meta(description="Highest grade. A grade outside [low, high] is a failed reward.")
    ] = 10.0
    max_tokens: Annotated[
        Positive, Meta(description="Maximum length of the judge's reply, in tokens.")
    ] = 512
    temperature: Annotated[float, Meta(ge=0, description="Sampling temperature of the judge.")] = (
        0.0
    )
    concurrency: Annotated[
        Positive, Meta(description="Most requests at the same time in each reward process.")
    ] = 16
    timeout_s: Annotated[float, Meta(gt=0, description="Seconds that one request may take.")] = 30.0
    attempts: Annotated[
        Positive,
        Meta(
            description="Most requests for one grade. A request is repeated after status 408, "
            "409, 425, 429 or 5xx, or without a reply."
        ),
    ] = 6
    requests_per_minute: Annotated[
        Count,
        Meta(description="Most requests per minute of all processes on this machine. 0: no limit."),
    ] = 0
    tokens_per_minute: Annotated[
        Count,
        Meta(
            description="Most tokens per minute, input and output, of all processes on this "
            "machine. 0: no limit."
        ),
    ] = 0
    budget_requests: Annotated[
        Count,
        Meta(
            description="Most requests of the whole run, including restarts and resumes. The run "
            "ends at this limit. 0: no limit."
        ),
    ] = 0
    budget_tokens: Annotated[
        Count,
        Meta(
            description="Most tokens of the whole run, including restarts and resumes. The run "
            "ends at this limit. 0: no limit."
        ),
    ] = 0


class RewardModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: Annotated[
        str,
        Meta(
            description="Hugging Face directory of a sequence classifier with one label, which "
            "scores completions. Empty: none."
        ),
    ] = ""
    device: Annotated[
        str, Meta(description="Device of the reward model: auto, cpu, cuda or cuda:N.")
    ] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="Data type of the reward model's weights.")
    ] = "float32"
    context: Annotated[
        Count,
        Meta(
            description="Maximum length of prompt and completion, in tokens. Longer ones are "
            "failed rewards. 0: the model's own maximum."
        ),
    ] = 0
    threads: Annotated[
        Positive, Meta(description="OpenMP threads of the reward model's process.")
    ] = 1
