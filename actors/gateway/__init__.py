"""Any agent's calls as trajectories: `sessions` (pure: one sample that is written by several calls,
its limits, retries and end), `forest` (pure: which call continues which, and the rows), `chat`
(messages to token ids, once), `web` (the endpoint: the only importer of uvicorn).
"""
