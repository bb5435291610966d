"""Write logs and token files by the code of prime-rl or NeMo-RL, from a checkout of its source.

    python benchmarks/framework_tokens.py prime-rl SOURCE OUT [--top-p 0.8] [--steps 20]
    python benchmarks/framework_tokens.py nemo-rl SOURCE OUT

Both are on no package index and train on GPUs only, but what measures a batch and writes the files
runs on a CPU: of prime-rl the loss, the metrics of episodes, the exporter of `token_exports` and
the monitor of `metrics.jsonl`, of NeMo-RL the loss and the logger, which writes
`train_data_stepN.jsonl` and TensorBoard.  Empty modules stand in for configurations, trackers and
engines.  Batches are of a random policy over 40 symbols, sampled by an engine that is about 0.02
nats off, with top_p if it is given.  Lag, seconds and rewards are made up, in the rows and under
the names of the framework.
tests/data/logs has such files, of prime-rl at 559b447 and NeMo-RL at 7ea279a.  prime-rl needs
`beartype`, `jaxtyping` and `loguru`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SEQUENCES, PROMPT, SYMBOLS = 12, 5, 40


class Batch(NamedTuple):
    """Tokens of `lengths`, prompts included, one after another: of the engine and the trainer."""

    lengths: list[int]
    tokens: Tensor  # [T]
    behavior: Tensor  # [T]; log-probabilities
    trained: Tensor  # [T]
    advantages: Tensor  # [T]
    mask: Tensor  # [T], bool; false on the prompts

    def pad(self, column: str) -> Tensor:
        """Return a column as [SEQUENCES, longest]."""
        parts = getattr(self, column).split(self.lengths)
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


class Stub(types.ModuleType):
    """A module in which each name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def make_batch(rng: torch.Generator, top_p: float) -> Batch:
    """Sample a batch whose completions have 15 to 54 tokens."""
    lengths = torch.randint(20, 60, (SEQUENCES,), generator=rng).tolist()
    logits = 1.5 * torch.randn(sum(lengths), SYMBOLS, generator=rng)
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    inside = ordered.cumsum(-1) - ordered < top_p
    mu = torch.zeros_like(logits).scatter(-1, order, ordered * inside)
    mu /= mu.sum(-1, keepdim=True)
    tokens = torch.multinomial(mu, 1, generator=rng)
    noise = 0.02 * torch.randn(logits.shape, generator=rng)
    mask = [position >= PROMPT for length in lengths for position in range(length)]
    signs = [(-1.0) ** number for number, length in enumerate(lengths) for _ in range(length)]
    return Batch(
        lengths,
        tokens[:, 0],
        mu.gather(-1, tokens)[:, 0].log(),
        (logits + noise).log_softmax(-1).gather(-1, tokens)[:, 0],
        torch.tensor(signs),
        torch.tensor(mask),
    )


def replace_modules(*names: str) -> None:
    sys.modules.update({name: Stub(name) for name in names})


def write_prime_rl(source: Path, out: Path, steps: int, top_p: float) -> None:
    """Write `token_exports` and `metrics.jsonl`, to which trainer and orchestrator append."""
    configs = ("trainer", "monitors")
    replace_modules("prime_rl.configs", *(f"prime_rl.configs.{name}" for name in configs))
    replace_modules("prime_rl.utils.config", "verifiers", "verifiers.v1")
    replace_modules("prime_rl.orchestrator.algo", "prime_rl.orchestrator.algo.routing")
    replace_modules("prime_rl.orchestrator.utils")
    vars(sys.modules["prime_rl.orchestrator.algo.routing"])["is_trainable"] = bool
    vars(sys.modules["prime_rl.orchestrator.utils"])["episode_group_id"] = id
    sys.path.insert(0, str(source / "src"))
    # the package's own __init__ imports the monitors of trackers
    monitors = types.ModuleType("prime_rl.monitors")
    monitors.__path__ = [str(source / "src/prime_rl/monitors")]
    sys.modules["prime_rl.monitors"] = monitors
    from prime_rl.monitors.file import FileMonitor
    from prime_rl.orchestrator.metrics import TraceRecord, TrainMetrics
    from prime_rl.trainer.rl import loss, token_export

    def measure_episodes() -> dict[str, float]:
        seconds = types.SimpleNamespace(duration=0.5)
        phases = types.SimpleNamespace(duration=2.0, model=seconds, harness=seconds)
        timing = {"setup": seconds, "agent": phases, "finalize": seconds, "scoring": seconds}
        facts: dict[str, Any] = {
            "num_turns": 1,
            "num_branches": 1,
            "is_truncated": False,
            "is_completed": True,
        }
        facts |= {"metrics": {}, "rewards": {}, "stop_condition": None, "has_error": False}
        facts |= {"agent": types.SimpleNamespace(name="policy"), "num_input_tokens": 8}
        facts["timing"] = types.SimpleNamespace(**timing)
        traces = []
        for number in range(8):
            tokens = {"num_output_tokens": 20 + 4 * number, "num_total_tokens": 28 + 4 * number}
            traces.append(types.SimpleNamespace(reward=float(number % 4 > 0), **tokens, **facts))
        episodes = [types.SimpleNamespace(ok=True, id="", traces=traces[x : x + 4]) for x in (0, 4)]
        records = [TraceRecord(x, trace, True, True, False) for x in episodes for trace in x.traces]
        made = TrainMetrics(episodes, records)
        rows = [made.to_wandb(prefix="train/agg", subset=x) for x in ("all", "effective")]
        return rows[0] | rows[1]

    async def write() -> None:
        rng, exporter = torch.Generator().manual_seed(0), token_export.TokenExporter(out, 0)
        trainer, orchestrator = (
            FileMonitor(types.SimpleNamespace(path=Path("metrics.jsonl"))) for _ in range(2)
        )
        await trainer.init(out)
        await orchestrator.init(out)
        for step in range(1, steps + 3):
            if step <= steps:  # the orchestrator is two steps ahead
                row = {"time/step": 2.0, "time/pack": 0.1, "time/save_ckpt": 0.0}
                row |= {"time/wait_for_policy": 0.5, "off_policy/mean": 1.5, "off_policy/max": 2.0}
                row |= {"off_policy/dropped": 0.0, **measure_episodes()}
                await orchestrator.log(row | {"step": step}, step)
            if (trained := step - 2) < 1:
                continue
            b = make_batch(rng, top_p)
            batch = {
                "input_ids": b.tokens[None],
                "position_ids": torch.cat([torch.arange(length) for length in b.lengths])[None],
                "loss_mask": b.mask[None],
                "advantages": b.advantages[None],
                "inference_logprobs": b.behavior[None],
                "env_names": ["math"] * len(b.tokens),
            }
            outputs = {"logprobs": b.trained[None], "entropy": torch.zeros(1, len(b.tokens))}
            exporter.export(trained, 0, batch, outputs, b.lengths, None)
            exporter.mark_stable()
            inputs = loss.LossInputs(b.trained, b.behavior, None, b.advantages, b.mask)
            bounds = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}
            made = loss.default_loss_fn(inputs, types.SimpleNamespace(**bounds))
            ratios = loss.compute_importance_ratio_and_mismatch_kl(b.trained, b.behavior)
            stats = {f"{key}/mean": value.item() for key, value in made.metrics.items()}
            stats["mismatch_kl/all/mean"] = ratios[2][b.mask].mean().item()
            times = {"time/step": 3.0, "time/wait_for_batch": 0.2, "time/save_ckpt": 0.0}
            for row in ({"optim/lr": 1e-6, "optim/grad_norm": 0.5}, stats, times):
                await trainer.log(row | {"step": trained}, trained)
        exporter.close()

    asyncio.run(write())


def write_nemo_rl(source: Path, out: Path, steps: int, top_p: float) -> None:
    """Write `train_data_stepN.jsonl`, and `tensorboard` with rows of its asynchronous trainer."""
    import accelerate  # noqa: F401  (it looks for packages that get stubs)
    import ray  # noqa: F401
    import wandb  # noqa: F401

    replace_modules("mlflow", "swanlab", "pynvml", "nemo_rl.models.policy")
    replace_modules("nemo_rl.models.dtensor.parallelize", "nemo_rl.distributed.model_utils")
    replace_modules("nemo_rl.algorithms.x_token.loss_utils")
    sys.path.insert(0, str(source))
    from nemo_rl.algorithms.loss import loss_functions
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.utils.logger import Logger

    names = ("wandb", "swanlab", "tensorboard", "mlflow")
    enabled = {f"{name}_enabled": name == "tensorboard" for name in names}
    logger = Logger({"log_dir": str(out), "tensorboard": {}, "monitor_gpus": False, **enabled})
    settings = loss_functions.ClippedPGLossConfig(
        reference_policy_kl_penalty=0.0, use_importance_sampling_correction=True
    )
    loss, rng = loss_functions.ClippedPGLossFn(settings), torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        b = make_batch(rng, top_p)
        data = {
            "input_ids": b.pad("tokens"),
            "token_mask": b.pad("mask").float(),
            "sample_mask": torch.ones(SEQUENCES),
            "advantages": b.pad("advantages"),
            "generation_logprobs": b.pad("behavior"),
            "prev_logprobs": b.pad("trained"),
        }
        used = BatchedDataDict(data)
        made = loss(data["prev_logprobs"][:, 1:], used, torch.tensor(SEQUENCES), b.mask.sum())
        rewards = [number % 2 for number in range(SEQUENCES)]
        columns = {"token_ids": "input_ids", "token_loss_mask": "token_mask"}
        columns |= {"sample_loss_mask": "sample_mask"}
        columns |= {x: x for x in ("advantages", "generation_logprobs", "prev_logprobs")}
        lists = {name: data[key].tolist() for name, key in columns.items()}
        known = {"content": [""] * SEQUENCES, "rewards": rewards, "input_lengths": b.lengths}
        logger.log_batched_dict_as_jsonl(known | lists, f"train_data_step{step}.jsonl")
        row = {"reward": 0.5, "grad_norm": 0.3, "lr": 1e-6, "mean_gen_tokens_per_sample": 32.0}
        row |= {"avg_trajectory_age": 1.0, **made[1]}
        logger.log_metrics(row, step, prefix="train")
        times = {"total_step_time": 3.0, "exposed_generation": 0.4, "weight_sync": 0.1}
        logger.log_metrics(times, step, prefix="timing/train", step_finished=True)
    logger.loggers[0].writer.close()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("framework", choices=["prime-rl", "nemo-rl"])
    p.add_argument("source", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--steps", type=int, default=1)
    args = p.parse_args()
    write = write_prime_rl if args.framework == "prime-rl" else write_nemo_rl
    write(args.source, args.out, args.steps, args.top_p)


if __name__ == "__main__":
    main()
