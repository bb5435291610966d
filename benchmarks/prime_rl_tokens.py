"""Write token files by prime-rl's own exporter, from a checkout of its source.

    python benchmarks/prime_rl_tokens.py PRIME_RL_DIR OUT_DIR [--top-p 0.8] [--steps 1]

prime-rl is on no package index and trains on GPUs only, but the class that writes `token_exports`
runs on a CPU, with empty classes in place of its configuration.  It gets tokens of a random policy
over 40 symbols, sampled by an engine that is about 0.02 nats off, with top_p if it is given.
tests/data/logs has such a file, of prime-rl at 559b447.  It needs `beartype` and `jaxtyping`."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import torch

SEQUENCES, PROMPT, SYMBOLS = 12, 5, 40
CLASSES = ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig", "TrainerConfig")


def import_exporter(source: Path) -> Any:
    """Import the exporter; the modules of configurations are empty."""
    configs = types.ModuleType("prime_rl.configs.trainer")
    vars(configs).update({name: type(name, (), {}) for name in CLASSES})
    utils = types.ModuleType("prime_rl.utils.utils")
    vars(utils)["import_object"] = None
    for module in (types.ModuleType("prime_rl.configs"), configs, utils):
        sys.modules[module.__name__] = module
    sys.path.insert(0, str(source / "src"))
    from prime_rl.trainer.rl.token_export import TokenExporter

    return TokenExporter


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("source", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--steps", type=int, default=1)
    args = p.parse_args()
    exporter, rng = import_exporter(args.source)(args.out, 0), torch.Generator().manual_seed(0)
    for step in range(1, args.steps + 1):
        lengths = torch.randint(20, 60, (SEQUENCES,), generator=rng).tolist()
        logits = 1.5 * torch.randn(sum(lengths), SYMBOLS, generator=rng)
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        inside = ordered.cumsum(-1) - ordered < args.top_p
        mu = torch.zeros_like(logits).scatter(-1, order, ordered * inside)
        mu /= mu.sum(-1, keepdim=True)
        tokens = torch.multinomial(mu, 1, generator=rng)
        noise = 0.02 * torch.randn(logits.shape, generator=rng)
        trained = (logits + noise).log_softmax(-1).gather(-1, tokens)
        mask = [position >= PROMPT for length in lengths for position in range(length)]
        signs = [(-1.0) ** number for number, length in enumerate(lengths) for _ in range(length)]
        batch = {
            "input_ids": tokens.T,
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "loss_mask": torch.tensor([mask]),
            "advantages": torch.tensor([signs]),
            "inference_logprobs": mu.gather(-1, tokens).log().T,
            "env_names": ["math"] * sum(lengths),
        }
        outputs = {"logprobs": trained.T, "entropy": torch.zeros(1, sum(lengths))}
        exporter.export(step, 0, batch, outputs, lengths, None)
        exporter.mark_stable()
    exporter.close()


if __name__ == "__main__":
    main()
