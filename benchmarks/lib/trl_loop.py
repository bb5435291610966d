"""TRL's GRPO on the `sort` task, set for speed: what a run's step is measured against, beside the
strong loop.  Needs the extra `bench` (pip install 'asyncrl[bench]').

    OMP_NUM_THREADS=2 python benchmarks/lib/trl_loop.py MODEL_DIR [--steps 40] [--rows 256]

A batch is that of the other contenders: 32 prompts (--groups) with 8 completions of at most 56
tokens (--most), temperature 1, one clipped update a batch, leave-one-out in all but the scale (GRPO
without division by the standard deviation), no KL.  For speed: no checkpoints of activations, no
logging, no saving, fp32 (bf16 is slower on these cores), fused AdamW, no memory pinned, generation
without compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from itertools import pairwise
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from asyncrl.config.tree import TaskConfig
from asyncrl.tasks import get_task

SIZE = 8


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model")
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lr", type=float, default=0.0)
    p.add_argument("--rows", type=int, default=256, help="answers a micro-batch")
    p.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    p.add_argument("--cache", default="dynamic", choices=["dynamic", "static"])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--groups", type=int, default=32)
    p.add_argument("--most", type=int, default=56, help="tokens of an answer")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    task: Any = get_task(TaskConfig(name="sort"))
    asked = [task.prompt("train", i, args.seed) for i in range(args.steps * args.groups)]
    by_text = {prompt.text: prompt for prompt in asked}
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation=args.attention
    )
    tokens: list[int] = []

    def reward(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
        tokens.append(sum(map(len, more["completion_ids"])))
        return [
            float(task.reward(by_text[prompt], text))
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            seed=args.seed,
            max_steps=args.steps,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            adam_beta2=0.99,
            max_grad_norm=1.0,
            per_device_train_batch_size=args.rows,
            gradient_accumulation_steps=args.groups * SIZE // args.rows,
            num_generations=SIZE,
            max_completion_length=args.most,
            temperature=1.0,
            top_k=0,
            cache_implementation=args.cache,
            beta=0.0,
            scale_rewards="none",
            loss_type="dapo",  # the mean over the batch's tokens
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in asked]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    seconds = [b - a for a, b in pairwise(clock.ends)]
    print(json.dumps({"step_seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
