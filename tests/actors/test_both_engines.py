"""vLLM generates and two DeepSpeed ranks learn, in one run: the main job, and another family."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from holding import held
from process_kit import ROOT, RUN_SEED, run_command

from asyncrl.config import load
from asyncrl.models.policy import build_character_tokenizer
from asyncrl.records import jsonl
from asyncrl.tasks.warm_start import warm_start

pytestmark = pytest.mark.slow

SHORT = (
    "evaluation.final_prompts=256 evaluation.prompts=16 evaluation.ood_prompts=0 "
    "evaluation.every=0 learner.checkpoint_every=1000 record.samples_every=1 record.samples=0 "
    "wires.lease_s=3600.0 wires.connect_s=1800.0 learner.rank_timeout_s=1800.0 "
    "watchdog.startup_s=3600.0 watchdog.floor_s=3600.0 reward.deadline_s=600.0 name='both' "
    f"seed={RUN_SEED}"
).split()
REWARD = '''
def reward(prompt, text):
    """The share of one letter in the answer."""
    return text.count("{letter}") / max(1, len(text))
'''


def both(tmp_path: Path, model: Path, *sets: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`asyncrl run configs/vllm_deepspeed.toml` in short: (its summary, every trained sample).

    Its generator stands still in mid-answer until the next version is there (tests/hold), so that
    versions change there at any speed."""
    words = [f"model.path={str(model)!r}", f"runs={str(tmp_path / 'runs')!r}", *SHORT, *sets]
    argv = [sys.executable, *["-m", "asyncrl.cli", "run", "configs/vllm_deepspeed.toml", "--json"]]
    argv += [x for s in words for x in ("--set", s)]
    env = held(answers=True)
    env["PYTHONPATH"] += f":{tmp_path}"
    summary = run_command(argv, env=env).check().json
    return summary, jsonl.read(Path(summary["run_dir"]) / "samples.jsonl")


def swaps_in_mid_answer(rows: list[dict[str, Any]]) -> set[str]:
    """Versions that took over while some trained answer was being written."""
    return {label for r in rows for label, *_ in r["versions"][1:]}


def task_of_shares(path: Path, first: str, other: str, symbols: str) -> tuple[str, ...]:
    """Settings of a task that ten batches teach: write the first letter of `symbols`."""
    (path / "share_of_a_letter.py").write_text(REWARD.format(letter=symbols[0]))
    for name, begins in (("p", first), ("h", other)):
        rows = [{"prompt": a + b} for a in begins for b in symbols]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        "task.name='file'",
        f"task.prompts={str(path / 'p.jsonl')!r}",
        f"task.heldout={str(path / 'h.jsonl')!r}",
        "reward.function='share_of_a_letter:reward'",
        *["learner.groups=16", "learner.group_size=4", "learner.lr=4e-3", "generator.slots=32"],
    )


def test_the_main_job_in_short(tmp_path: Path) -> None:
    """The shipped config but for task and sizes: its loss, its ways, the model that it builds."""
    model, steps = tmp_path / "m", 10
    config = load.load(ROOT / "configs" / "vllm_deepspeed.toml", [f"model.path={str(model)!r}"])
    warm_start(config, model, steps=1, threads=1)
    task = task_of_shares(tmp_path, "12345", "67890", "1234567890")
    summary, rows = both(tmp_path, model, f"learner.steps={steps}", *task)
    assert summary["steps"] == steps and summary["lag"]["max"] <= 2
    assert len(rows) == 64 * steps == summary["trajectories"]
    assert summary["ledger"]["generated"] == summary["ledger"]["trained"]
    assert summary["mismatch_k3_max"] < 1e-8 and len(swaps_in_mid_answer(rows)) >= steps // 2
    assert summary["heldout_end"] > summary["heldout_start"] + 0.08
    transformers.AutoModelForCausalLM.from_pretrained(Path(summary["run_dir"]) / "model")


def test_a_gemma_through_both(tmp_path: Path) -> None:
    """Neither packed forward nor plain norms: embeddings scaled, norms of 1 + w, always tied.  From
    random weights to mostly a's."""
    tokenizer = build_character_tokenizer("abcdefgh")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 128}
    ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    config = transformers.GemmaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ends)
    transformers.set_seed(0)
    transformers.GemmaForCausalLM(config).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    summary, rows = both(
        tmp_path,
        tmp_path / "m",
        "model.warm_start=false",
        *task_of_shares(tmp_path, "abcd", "efgh", "abcdefgh"),
        *("learner.steps=10", "generator.top_p=0.9", "correction.proximal='recompute'"),
        *("loss.surrogate='decoupled_ppo'", "weights.in_flight='recompute_kv'"),
    )
    # vLLM's logprobs of the learner's version, over the tokens that top-p leaves, are the
    # learner's, after swaps too
    assert summary["steps"] == 10 and summary["mismatch_k3_max"] < 1e-8
    assert len(swaps_in_mid_answer(rows)) >= 5
    assert summary["heldout_end"] > summary["heldout_start"] + 0.08
    trained = transformers.AutoModelForCausalLM.from_pretrained(Path(summary["run_dir"]) / "model")
    assert type(trained).__name__ == "GemmaForCausalLM"
