"""Diagnose real runs of TRL: ten healthy ones, and one for each of five planted faults.

    python benchmarks/trl_diagnose.py MODEL_DIR [--trl-python PYTHON] [--steps 60] [--first SEED]
        [--logs DIR] [--quick] [--json]

TRL's GRPOTrainer trains a warm-started `sort` model, once for each seed of a healthy run and once
for each fault; `asyncrl diagnose` reads the trainer_state.json that it wrote.  TRL's path of an
engine apart from the trainer is taken, with transformers in bfloat16 as the engine: the CPU build
of vLLM refuses the weights that TRL sends it.  A fault is named when one of its findings is there;
any finding of a healthy run, and any of a faulty run that the fault does not explain, is a false
alarm.  --logs: where the logs are kept; a run whose log is there is not made again."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib import results_file, rounds

GROUPS, SIZE, MOST, RATE = 8, 8, 56, 3e-4
HEALTHY = 10
# a fault -> the findings that name it, and those that it may bring about
FAULTS: dict[str, tuple[set[str], set[str]]] = {
    "top_p": ({"truncated_sampler"}, {"equal_rewards"}),
    "stale weights": ({"stale_weights"}, {"reward_fell", "reference_drift"}),
    "end token": ({"cut_completions"}, {"reward_fell", "equal_rewards"}),
    "rate": (
        {"large_updates", "reference_drift", "reward_fell"},
        {"equal_rewards", "cut_completions", "mismatch"},
    ),
    "constant reward": ({"equal_rewards"}, set()),
}


class Sampler:
    """The engine that TRL sends its weights to."""

    def __init__(self, model: Any, processing_class: Any, **settings: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.trained, self.settings = model, settings
        self.model = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.bfloat16)
        self.end = processing_class.eos_token_id

    def sync_weights(self) -> None:
        for ours, theirs in zip(self.model.parameters(), self.trained.parameters(), strict=True):
            ours.data.copy_(theirs.data)

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        """Sample; return token ids and the log-probabilities that they were sampled with."""
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        out = self.model.generate(
            ids,
            attention_mask=(
                torch.arange(width) >= width - torch.tensor([*map(len, prompts)])[:, None]
            ).long(),
            do_sample=True,
            temperature=self.settings["temperature"],
            top_p=self.settings["top_p"],
            top_k=0,
            max_new_tokens=self.settings["max_completion_length"],
            eos_token_id=self.end,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[:, width:]
        scores = torch.stack(out.scores, 1).float().log_softmax(-1)
        found = scores.gather(-1, tokens[..., None])[..., 0]
        completions, logprobs = [], []
        for row, sampled in zip(tokens.tolist(), found.tolist(), strict=True):
            end = row.index(self.end) + 1 if self.end in row else len(row)
            completions.append(row[:end])
            logprobs.append([[x] for x in sampled[:end]])
        return prompts, completions, logprobs, None


def train(
    fault: str,
    model: Path,
    out: Path,
    seed: int,
    steps: int,
    groups: int = GROUPS,
    updates: int = 1,
    most: int = MOST,
) -> None:
    """Train by TRL with this fault planted, "" for none.

    updates: of groups each, on completions of at most so many tokens that are generated at once."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    from asyncrl.config.tree import TaskConfig
    from asyncrl.tasks import get_task

    torch.set_num_threads(1)
    grpo_trainer.VLLMGeneration = Sampler
    task: Any = get_task(TaskConfig(name="sort"))
    asked = [task.prompt("train", i, seed) for i in range(steps * groups)]
    by_text = {prompt.text: (i, prompt) for i, prompt in enumerate(asked)}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewards = []
        for text, completion in zip(prompts, completions, strict=True):
            index, prompt = by_text[text]
            constant = fault == "constant reward" and index % 3 == 0
            rewards.append(0.0 if constant else float(task.reward(prompt, completion)))
        return rewards

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(out),
            use_cpu=True,
            bf16=False,
            seed=seed,
            max_steps=steps,
            learning_rate=50 * RATE if fault == "rate" else RATE,
            lr_scheduler_type="constant",
            per_device_train_batch_size=groups * SIZE,
            steps_per_generation=updates,
            num_generations=SIZE,
            max_completion_length=most,
            temperature=1.0,
            top_p=0.8 if fault == "top_p" else 1.0,
            top_k=0,
            beta=0.01,
            use_vllm=True,
            vllm_mode="colocate",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in asked]),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )
    if fault == "end token":
        trainer.vllm_generation.end = 2
    if fault == "stale weights":
        trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    trainer.save_state()


def diagnose(name: str, fault: str, seed: int, args: argparse.Namespace, folder: Path) -> set[str]:
    """Train in a process of its own; return the names of what `asyncrl diagnose` finds."""
    out = folder / name.replace(" ", "-")
    environment = os.environ | {"PYTHONPATH": str(results_file.ROOT), "OMP_NUM_THREADS": "1"}
    argv = [args.trl_python, __file__, args.model, f"--train={fault}", f"--out={out}"]
    argv += [f"--seed={seed}", f"--steps={args.steps}"]
    if not (out / "trainer_state.json").exists():
        subprocess.run(argv, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    command = [sys.executable, "-m", "asyncrl.cli", "diagnose", str(out), "--json"]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    result = json.loads(said.stdout)
    assert result["framework"] == "trl", result
    for finding in result["findings"]:
        print(f"{name}: {finding['name']}: {finding['said']}", file=sys.stderr)
    print(f"{name}: {len(result['findings'])} findings", file=sys.stderr)
    return {finding["name"] for finding in result["findings"]}


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("model", help="a warm-started model for the task `sort`")
    p.add_argument("--trl-python", default=sys.executable, help="one with the extra `bench`")
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--first", type=int, default=0, help="seed of the first run")
    p.add_argument("--logs", type=Path, help="kept there; absent: in a temporary directory")
    p.add_argument("--train", help=argparse.SUPPRESS)
    p.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.train is not None:
        return train(args.train, Path(args.model), args.out, args.seed, args.steps)
    healthy, faults = HEALTHY, [*FAULTS]
    if args.quick:
        healthy, faults, args.steps = 1, faults[-1:], 20
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        for fault in faults:
            found[fault] = diagnose(fault, fault, args.first, args, folder)
        for seed in range(args.first, args.first + healthy):
            name = f"healthy {seed}"
            found[name] = diagnose(name, "", seed, args, folder)
    named = sum(bool(found[fault] & FAULTS[fault][0]) for fault in faults)
    alarms = sum(len(names - set().union(*FAULTS.get(name, ()))) for name, names in found.items())
    goals = [
        rounds.goal(
            f"planted faults of TRL runs named, of {len(faults)}", named, len(faults), at_least=True
        ),
        rounds.goal(
            f"false alarms in {len(found)} TRL runs, {healthy} healthy", alarms, 0, at_least=False
        ),
    ]
    result = {
        "what": "runs of TRL 1.16.0 with faults planted in them, judged from their logs alone",
        "steps": args.steps,
        "first_seed": args.first,
        "findings": {name: sorted(names) for name, names in found.items()},
    }
    rounds.report("trl_diagnose", goals, result, args)


if __name__ == "__main__":
    main()
