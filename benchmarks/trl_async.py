"""Run TRL's asynchronous trainer on a CPU, as far as it goes, and write its log.

    TRL_PYTHON benchmarks/trl_async.py MODEL_DIR OUT_DIR [--steps 30] [--top-p 1.0] [--never-sync]

AsyncGRPOTrainer of TRL 1.16.0 needs a CUDA GPU: it asks for the GPU's name, its attention is a
FlashAttention 3 kernel, and it sends weights to a vLLM server by NCCL.  Here the first is skipped,
a loop over segments stands for the kernel, and by TRL's own protocols a thread with transformers
stands for the server.  Trainer, queue, batches, loss and log are TRL's.  `asyncrl diagnose OUT_DIR`
reads the log."""

from __future__ import annotations

import argparse
import copy
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo import async_grpo_trainer as trl_async
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from asyncrl.config.tree import TaskConfig
from asyncrl.tasks import get_task

GROUPS, SIZE, MOST = 4, 8, 56


class SegmentAttention:
    """Attention of packed segments, each to the end of its own path."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, ends: Any, path_ends: Any, *_: Any, **how: Any
    ) -> Any:
        rows = []
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        edges = zip(*(x.unfold(0, 2, 1).tolist() for x in (ends, path_ends)), strict=True)
        for (start, end), (first, last) in edges:
            mask = torch.ones(end - start, last - first).tril(last - first - end + start).bool()
            query, key, value = (
                x.transpose(0, 1) for x in (q[start:end], k[first:last], v[first:last])
            )
            attended = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=how["softmax_scale"]
            )
            rows.append(attended.transpose(0, 1))
        return torch.cat(rows)


class ThreadEngine:
    """The engine: a rollout worker and the receiver of the weights, in one thread."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.task: Any = get_task(TaskConfig(name="sort"))
        self.args, self.version = args, 0
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=4 * GROUPS * SIZE)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.stopped, self.lock = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        pass

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        self.lock.acquire()

    def resume(self) -> None:
        self.lock.release()

    def destroy(self) -> None:
        pass

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        mine = self.model.state_dict()
        for name, tensor in iterator:
            if not self.args.never_sync:
                mine[name].copy_(tensor)

    def work(self) -> None:
        for group in range(1 << 30):
            with self.lock:
                samples, version = self.sample_group(group), self.version
            for sample in samples:
                sample.model_version, sample.enqueued_at = version, time.time()
                while not self.stopped.is_set():
                    try:
                        self.rollout_buffer.put(sample, timeout=0.2)
                        break
                    except queue.Full:
                        continue
            if self.stopped.is_set():
                return

    @torch.no_grad()
    def sample_group(self, group: int) -> list[RolloutSample]:
        prompt = self.task.prompt("train", group, 0)
        ids = self.tokenizer(prompt.text, return_tensors="pt").input_ids.repeat(SIZE, 1)
        began, end = time.monotonic(), self.tokenizer.eos_token_id
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            top_p=self.args.top_p,
            max_new_tokens=MOST,
            eos_token_id=end,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[:, ids.shape[1] :]
        scores = torch.stack(out.scores, 1).float().log_softmax(-1)
        found = scores.gather(-1, tokens[..., None])[..., 0]
        rows = [row[: row.index(end) + 1] if end in row else row for row in tokens.tolist()]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        rewards = torch.tensor([float(self.task.reward(prompt, text)) for text in texts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        samples = []
        for row, logprobs, advantage, reward in zip(
            rows, found, advantages, rewards.tolist(), strict=True
        ):
            count, before = len(row), ids.shape[1]
            mask = np.r_[np.zeros(before, int), np.ones(count, int)]
            known = np.r_[np.zeros(before), logprobs[:count].numpy()].astype(np.float32)
            samples.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": prompt.text}],
                    completion=[],
                    input_ids=np.r_[ids[0].numpy(), row],
                    completion_mask=mask,
                    old_log_probs=known,
                    advantage=float(advantage),
                    model_version=0,
                    group_id=group,
                    metrics={"reward": reward},
                )
            )
            lengths = {
                "completions/max_length": float(count),
                "completions/mean_length": (count, 1),
            }
            self.metrics_queue.put(lengths | {"rollout/duration_s": time.monotonic() - began})
        return samples


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--never-sync", action="store_true", help="the engine keeps its first weights")
    args = p.parse_args()
    torch.set_num_threads(1)
    trl_async.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = SegmentAttention
    engine = ThreadEngine(args.model, args)
    trainer = AsyncGRPOTrainer(
        model=str(args.model),
        reward_funcs=len,
        args=AsyncGRPOConfig(
            output_dir=str(args.out),
            use_cpu=True,
            bf16=False,
            max_steps=args.steps,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            per_device_train_batch_size=GROUPS * SIZE,
            gradient_accumulation_steps=1,
            num_generations=SIZE,
            token_budget=0,  # otherwise the server is asked for one
            max_completion_length=MOST,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * GROUPS),
        processing_class=copy.deepcopy(engine.tokenizer),
        rollout_worker=engine,
        weight_transfer=engine,
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main()
