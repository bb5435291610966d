"""The sections [reward.judge] and [reward.model]: another model scores completions."""

from __future__ import annotations

from typing import Literal

from asyncrl.algorithms.settings import Count, NonNegative, Positive, PositiveFloat, Section


class JudgeConfig(Section):
    url: str = ""
    """Address of an OpenAI-compatible server, up to /v1, that grades completions. Empty: no
    judge."""
    model: str = ""
    """Name of the judge's model on that server."""
    key_env: str = ""
    """Environment variable that holds the server's key. Empty: send no key."""
    template: str = ""
    """File with the judge's prompt, with {question}, {answer} and {reference}. Empty: the one in
    actors/scorers/judge.py."""
    low: float = 0.0
    """Lowest grade."""
    high: float = 10.0
    """Highest grade. A grade outside [low, high] is a failed reward."""
    max_tokens: Positive = 512
    """Maximum length of the judge's reply, in tokens."""
    temperature: NonNegative = 0.0
    """Sampling temperature of the judge."""
    concurrency: Positive = 16
    """Most requests at the same time in each reward process."""
    timeout_s: PositiveFloat = 30.0
    """Seconds that one request may take."""
    attempts: Positive = 6
    """Most requests for one grade. A request is repeated after status 408, 409, 425, 429 or 5xx, or
    without a reply."""
    requests_per_minute: Count = 0
    """Most requests per minute of all processes on this machine. 0: no limit."""
    tokens_per_minute: Count = 0
    """Most tokens per minute, input and output, of all processes on this machine. 0: no limit."""
    budget_requests: Count = 0
    """Most requests of the whole run, including restarts and resumes. The run ends at this limit.
    0: no limit."""
    budget_tokens: Count = 0
    """Most tokens of the whole run, including restarts and resumes. The run ends at this limit. 0:
    no limit."""


class RewardModelConfig(Section):
    path: str = ""
    """Hugging Face directory of a sequence classifier with one label, which scores completions.
    Empty: none."""
    device: str = "cpu"
    """Device of the reward model: auto, cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the reward model's weights."""
    context: Count = 0
    """Maximum length of prompt and completion, in tokens. Longer ones are failed rewards. 0: the
    model's own maximum."""
    threads: Positive = 1
    """OpenMP threads of the reward model's process."""
