#!/usr/bin/env bash
# transformers 5.19.0: a model directory that loads cannot always be saved again. A
# generation_config.json with `"do_sample": false` beside a temperature loads without an error, and
# generate() ignores the temperature. `save_pretrained` of the loaded model raises ValueError
# ("GenerationConfig is invalid"). A program that trains such a model finds out at its first
# checkpoint, not at its start.
# Seen: loaded, generated greedily, refused when saved; saved once the temperature was None.
# Exits non-zero when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.19.0
cd "$folder"
venv/bin/python - <<'PROGRAM'
import json
import pathlib
import sys

import torch
import transformers

config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
)
transformers.LlamaForCausalLM(config).save_pretrained("model")
settings = pathlib.Path("model/generation_config.json")
settings.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
model = transformers.LlamaForCausalLM.from_pretrained("model")
length = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, pad_token_id=0).shape[1]
try:
    model.save_pretrained("copy")
    refusal = ""
except ValueError as error:
    refusal = str(error).splitlines()[0]
model.generation_config.temperature = None
model.save_pretrained("copy")
print(f"transformers {transformers.__version__}: loaded, {length} tokens; saving: {refusal!r}")
sys.exit("invalid" not in refusal)
PROGRAM
