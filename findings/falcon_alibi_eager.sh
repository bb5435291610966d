#!/usr/bin/env bash
# transformers 5.19.0: a Falcon model with ALiBi (config alibi=True, as Falcon-RW) computes different
# logits under attn_implementation="eager" and "sdpa" from the same weights. The model adds the bias
# to the causal mask, and the eager branch of its attention adds it to the scores once more. Halving
# the bias therefore makes the eager logits equal to the sdpa logits, which have it once. Anybody who
# takes eager attention as the reference for a fused kernel gets the wrong one for this model.
# Seen (a random model, weights of std 0.3): 0.53 nats largest difference; 3e-06 with half the bias.
# Exits non-zero when the two no longer differ in this way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.19.0 numpy
cd "$folder"
venv/bin/python - <<'PROGRAM'
import sys

import torch
import transformers
from transformers.models.falcon import modeling_falcon

config = transformers.FalconConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config)
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.3)
model.eval().save_pretrained("falcon")
build_bias = modeling_falcon.build_alibi_tensor


def compute(attention: str, share: float = 1.0) -> torch.Tensor:
    modeling_falcon.build_alibi_tensor = lambda *a, **k: share * build_bias(*a, **k)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        "falcon", attn_implementation=attention
    ).eval()
    with torch.no_grad():
        logits = loaded(input_ids=torch.arange(3, 43)[None], use_cache=False).logits
    return logits.log_softmax(-1)


sdpa = compute("sdpa")
full = float((compute("eager") - sdpa).abs().max())
half = float((compute("eager", 0.5) - sdpa).abs().max())
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
print(f"eager and sdpa differ by {full:.2g} nats; with half the bias in eager, by {half:.0e}")
sys.exit(not (full > 0.01 and half < 1e-4))
PROGRAM
