#!/usr/bin/env bash
# safetensors 0.8.0: the bytes of a file are not a function of its tensors and metadata. With two or
# more metadata keys, `save_file` writes the keys in an order that changes from call to call, also
# within one process. Two files of equal weights therefore have different checksums about half the
# time, and a comparison of checkpoints by the digest of their files reports a difference that is
# not one. Compare the tensors. With a single metadata key the bytes repeat.
# Seen: two digests of 40 files with two keys, one digest of 40 files with one key.
# Exits non-zero when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.3.5
cd "$folder"
venv/bin/python - <<'PROGRAM'
import hashlib
import pathlib
import sys

import numpy
import safetensors
from safetensors.numpy import load_file, save_file

weights = {"weight": numpy.arange(6, dtype=numpy.float32).reshape(2, 3)}


def count_digests(metadata: dict[str, str]) -> int:
    """Save the same weights 40 times and return how many different files that makes."""
    digests = set()
    for number in range(40):
        path = pathlib.Path(f"{number}.safetensors")
        save_file(weights, path, metadata=metadata)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
        assert numpy.array_equal(load_file(path)["weight"], weights["weight"])
    return len(digests)


one = count_digests({"format": "np"})
two = count_digests({"format": "np", "rank": "8"})
print(f"safetensors {safetensors.__version__}: {one} digest with one key, {two} with two keys")
sys.exit(not (one == 1 and two == 2))
PROGRAM
