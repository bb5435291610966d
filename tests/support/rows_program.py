"""Program of test_backends.py: `python rows_program.py MODEL` trains two batches of sessions,
split into rows, with FSDP2 and at every ZeRO stage, and the same sessions unsplit with torch;
prints how far the weights are apart and how far they moved, [[stage or fsdp2, variant, apart,
moved]]."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from learner_step_kit import core
from rows_kit import GROUPS, SIZE, sessions

from asyncrl.models.policy import count_flat_bytes

VARIANTS: list[dict[str, Any]] = [
    {},
    {"loss": {"surrogate": "gspo", "reduction": "seq-mean-token-mean"}},
    {"kl": {"loss": {"coefficient": 0.1, "estimator": "k3"}}, "correction": {"preset": "tis"}},
    {"learner": {"minibatches": 2, "epochs": 2, "micro_batch_tokens": 60}},
]


def moved(model: Path, variant: dict[str, Any], ways: tuple[str, str], **learner: Any) -> Any:
    """(weights before, weights after) a batch of sessions cut in each of `ways`."""
    whole = variant | {"learner": variant.get("learner", {}) | learner}
    whole["learner"] |= {"groups": GROUPS, "group_size": SIZE}
    made = core(model, **whole)
    if "zero_stage" in learner:
        assert made.backend.engine.zero_optimization_stage() == learner["zero_stage"]
    before = published(made)
    for number, how in enumerate(ways):
        made.train(msgspec.structs.replace(sessions(how), number=number))
    after = published(made)
    if learner.get("backend") == "fsdp2":
        made.backend.close()
    return before, after


def published(made: Any) -> torch.Tensor:
    buffer = bytearray(count_flat_bytes(made.layout))
    made.backend.write_flat(memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch.float32)


def main() -> None:
    model = Path(sys.argv[1])
    out = []
    plain = [moved(model, variant, ("whole", "whole")) for variant in VARIANTS]
    # DeepSpeed keeps its process group to the end
    backends: dict[Any, dict[str, Any]] = {"fsdp2": {"backend": "fsdp2"}}
    backends |= {stage: {"backend": "deepspeed", "zero_stage": stage} for stage in range(4)}
    for name, learner in backends.items():
        for number, (variant, (before, want)) in enumerate(zip(VARIANTS, plain, strict=True)):
            _, got = moved(model, variant, ("split", "shared"), **learner)
            apart = float((got - want).abs().max())
            out.append([name, number, apart, float((want - before).abs().max())])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
