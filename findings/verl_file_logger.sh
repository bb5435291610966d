#!/usr/bin/env bash
# verl 0.9.1: its file logger (trainer.logger = file) opens PROJECT/EXPERIMENT.jsonl for writing, not
# for appending. A run that is resumed under its own name, as after a crash, erases the metrics of
# all steps before; only those from the resume on remain. Console, TensorBoard and wandb keep them.
# Seen: "steps in the file: 1 2 3" before the resume, "steps in the file: 4 5" after it.
# Exits non-zero when the earlier steps remain.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orjson==3.11.4 packaging==25.0
"$folder/venv/bin/pip" install --quiet --no-deps verl==0.9.1
cd "$folder"
venv/bin/python - <<'PROGRAM'
import importlib.metadata
import importlib.util
import json
import sys
import sysconfig
from pathlib import Path

print(f"verl {importlib.metadata.version('verl')}")
# the module alone: the package imports ray and torch
source = Path(sysconfig.get_path("purelib"), "verl", "utils", "tracking.py")
spec = importlib.util.spec_from_file_location("tracking", source)
tracking = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tracking)
found = []
for steps in (range(1, 4), range(4, 6)):
    logger = tracking.FileLogger("project", "experiment")
    for step in steps:
        logger.log({"actor/lr": 1e-6}, step)
    logger.finish()
    lines = Path("project", "experiment.jsonl").read_text().splitlines()
    found.append([json.loads(line)["step"] for line in lines])
    print("steps in the file:", *found[-1])
sys.exit(found != [[1, 2, 3], [4, 5]])
PROGRAM
