#!/usr/bin/env bash
# torch 2.13.0: parallelize_module unties an embedding and an output layer that share one weight.
# With RowwiseParallel for the embedding and ColwiseParallel for the head, each gets a divided
# weight of its own. Nothing is said, and the first loss is that of the tied model, so it looks
# right. But the two copies have separate gradients: after one step of SGD the loss is another one
# than without tensor parallelism. Most small language models are tied in this way.
# Seen, on two processes with gloo: "one process: shared True, 2 parameters" and "tensor parallel:
# shared False, 3 parameters", the same loss before a step, another one after it.
# Exits non-zero when the weights stay shared, or when the losses agree after the step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
cat > tied.py <<'PROGRAM'
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embedding(ids))))


def train(model):
    """Losses before and after one step of SGD."""
    ids, target = torch.arange(8), torch.arange(8).roll(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), target)
        losses.append(round(loss.item(), 4))
        loss.backward()
        optimizer.step()
    return losses


def describe(name, model):
    shared = model.head.weight is model.embedding.weight
    count = len(list(model.parameters()))
    losses = train(model)
    if dist.get_rank() == 0:
        print(f"{name}: shared {shared}, {count} parameters, losses {losses}", flush=True)
    return shared, losses


dist.init_process_group("gloo")
torch.manual_seed(0)
whole = describe("one process", Tied())
torch.manual_seed(0)
divided = Tied()
plan = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
parallelize_module(divided, init_device_mesh("cpu", (2,)), plan)
parallel = describe("tensor parallel", divided)
same_start, same_end = (a == b for a, b in zip(whole[1], parallel[1]))
dist.destroy_process_group()
sys.exit(not (whole[0] and not parallel[0] and same_start and not same_end))
PROGRAM
venv/bin/python -c "import torch; print('torch', torch.__version__)"
export OMP_NUM_THREADS=1
venv/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 tied.py
