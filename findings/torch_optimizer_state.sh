#!/usr/bin/env bash
# torch 2.13.0: an optimizer takes the state_dict of another kind of optimizer without a word, when
# both have the same parameters. AdamW gets SGD's groups, which have no betas, and SGD gets AdamW's,
# which have no momentum: load_state_dict succeeds, and the first step after it is a KeyError that
# names neither optimizer. A trainer whose resume changes the optimizer fails one batch later, in
# other code than the one that read the checkpoint.
# Seen: "AdamW from SGD: loaded, then KeyError 'betas'" and "SGD from AdamW: loaded, then KeyError
# 'momentum'".
# Exits non-zero when loading refuses the state, or when the step no longer fails.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PROGRAM'
import sys

import torch

print(f"torch {torch.__version__}")
missing = []
for kind, other in ((torch.optim.AdamW, torch.optim.SGD), (torch.optim.SGD, torch.optim.AdamW)):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    writer, reader = other([weight], lr=0.1), kind([weight], lr=0.1)
    writer.step()
    reader.load_state_dict(writer.state_dict())
    try:
        reader.step()
    except KeyError as error:
        missing.append(error.args[0])
        print(f"{kind.__name__} from {other.__name__}: loaded, then KeyError {error}")
sys.exit(missing != ["betas", "momentum"])
PROGRAM
