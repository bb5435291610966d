"""A server of a model directory by OpenAI's completions API, without a run."""
