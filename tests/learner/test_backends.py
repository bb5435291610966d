"""Backends of the learner: DeepSpeed and FSDP2, in processes of their own."""

import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers
import warm_python
from lib import memory_arithmetic as sums
from models_kit import model_fixture
from process_kit import ENV, ROOT, Ended, run_command, until
from ranks_kit import FORKED, LEARNER, PATHS, PATIENT_S, TORCHRUN, forked, start, trained
from run_kit import FEW, check_summary, children, finish, let_go, steps_done, wait_until
from run_kit import start as start_run

from asyncrl.config import load, rules
from asyncrl.contract.errors import ConfigError
from asyncrl.models.policy import build_character_tokenizer, build_model
from learner import checkpoint
from learner.distributed.fsdp_backend import FsdpBackend
from learner.distributed.ranks import reserve_port

pytestmark = pytest.mark.slow

STEPS = 5  # batches; of them, one without a finite loss, one whose loss is NaN on one rank alone
BAD, LOST = 2, 4


def zero(stage: int, **learner: Any) -> dict[str, Any]:
    return {"backend": "deepspeed", "zero_stage": stage, "ranks": 2} | learner


# every rank holds all, as at stage 0
TORCH = {"backend": "torch", "ranks": 2, "zero_stage": 0}
FSDP2 = {"backend": "fsdp2", "ranks": 2}
COPIES = FSDP2 | {"ranks": 4, "mesh": {"shard": 2, "replicate": 2}}
TENSOR = FSDP2 | {"mesh": {"tensor": 2}}


def shards(learner: dict[str, Any]) -> int:
    """Ranks that divide one copy of the model."""
    copies: int = learner.get("mesh", {}).get("replicate", 1)
    return 1 if learner["backend"] == "torch" else learner["ranks"] // copies


model_dir = model_fixture("abcdefgh", layers=2)


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> dict[str, Any]:
    whole = {"sessions": ["whole"] * 3}
    made, _ = trained(model_dir, {"backend": "torch"}, STEPS, **TRAINED | whole)
    assert [numbers[0] for numbers in made["numbers"]] == [1, 1, 0, 1, 0, 1, 1, 1]
    return made


Whole = Callable[..., tuple[dict[str, Any], dict[int, dict[str, Any]], Path]]


@pytest.fixture(scope="module")
def whole(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """(what rank 0 printed, what the others did, its checkpoint) of the batches of `plain`, made
    once for each learner."""
    made: dict[str, Any] = {}

    def make(learner: dict[str, Any], launcher: tuple[str, ...] = FORKED) -> Any:
        name = json.dumps(learner)
        if name not in made:
            saved = tmp_path_factory.mktemp("whole")
            is_resumed = learner in (zero(3), TORCH, FSDP2, COPIES, TENSOR)
            save = {"save": [STEPS, str(saved)]} if is_resumed else {}
            done = trained(model_dir, learner, STEPS, **TRAINED, **save, launcher=launcher)
            made[name] = *done, saved / f"number_{STEPS}"
        return made[name]

    return make


TRAINED: dict[str, Any] = {"bad": BAD, "lost": LOST, "sessions": ["split", "shared", "split"]}


@pytest.mark.parametrize(
    ("learner", "launcher"),
    [
        (zero(0), FORKED),
        (zero(1), TORCHRUN),
        (zero(2, ranks=1), FORKED),
        (zero(2, offload=True, gradient_checkpointing=True), ()),
        (zero(3), FORKED),
        (TORCH, FORKED),
        (TORCH | {"ranks": 3, "gradient_checkpointing": True}, ()),
        (FSDP2 | {"ranks": 1}, FORKED),
        (FSDP2, FORKED),
        (FSDP2 | {"ranks": 4, "offload": True}, FORKED),
        (FSDP2 | {"mesh": {"replicate": 2}}, TORCHRUN),
        (COPIES, FORKED),
        (TENSOR, FORKED),
        (TENSOR | {"ranks": 4, "gradient_checkpointing": True}, FORKED),
    ],
)
def test_every_backend_is_the_torch_learner(
    learner: dict[str, Any], launcher: tuple[str, ...], whole: Whole, plain: dict[str, Any]
) -> None:
    """Answers of 1 to 12 tokens, 18 a batch: uneven over ranks and micro-batches; then sessions
    split into rows, which torch trains unsplit.  Every rank skips a batch in which one group, or
    one rank, has no finite loss.  A tensor group has equal norms, and 6 and 5 of 11 tokens."""
    mine, others, _ = whole(learner, launcher)
    ranks, stage = learner["ranks"], learner.get("zero_stage", 3)
    assert len(mine["losses"]) == STEPS + 3
    assert mine["losses"] == pytest.approx(plain["losses"], abs=1e-5, nan_ok=True)
    assert mine["norms"] == pytest.approx(plain["norms"], rel=1e-4, nan_ok=True)
    assert mine["weights"] == pytest.approx(plain["weights"], abs=1e-5)
    for a, b in zip(mine["numbers"], plain["numbers"], strict=True):
        assert a == pytest.approx(b, abs=1e-5, nan_ok=True)
    parameters = plain["parameters"]
    part = parameters if stage == 0 or ranks == 1 else parameters / shards(learner)
    # the stage is really on: what each rank holds of Adam's moments, and of the parameters, of
    # which ZeRO-3 holds none between passes
    kept = parameters / shards(learner) if learner["backend"] == "fsdp2" else 0
    more = 112 if "tensor" in learner.get("mesh", {}) else 64
    for r in (mine, *others.values()):
        assert abs(r["held"] - part) <= more
        assert abs(r["parameters"] - (kept if stage == 3 else parameters)) <= more
    assert len(others) == ranks - 1
    if learner == TENSOR:
        assert others[1]["norms"] == mine["own_norms"]
    # what it publishes for a generator to check itself by is a plain forward of the published
    # weights
    assert max(mine["probe_off"], plain["probe_off"]) < 1e-5 and plain["again"] == 0
    # layers are computed again, here by the packed forward
    assert (mine["again"] >= 4) == ("gradient_checkpointing" in learner)


def test_a_sample_split_into_rows_has_torchs_unsplit_gradient(model_dir: Path) -> None:
    """By plain gradient steps at every stage and with FSDP2, for losses by token, by sequence,
    towards a reference, and over mini-batches and epochs."""
    argv = [sys.executable, "tests/support/rows_program.py", str(model_dir)]
    done = run_command(argv, env=PATHS, timeout=7200).check()
    rows = json.loads(done.out.strip().splitlines()[-1])
    assert {(backend, variant) for backend, variant, *_ in rows} == {
        (backend, variant) for backend in (*range(4), "fsdp2") for variant in range(4)
    }
    assert all(moved > 1e-3 and apart <= 1e-6 for *_, apart, moved in rows), rows


ADAPTERS = {"lora": {"rank": 4}, "kl": {"loss": {"coefficient": 0.1, "estimator": "k3"}}}


@pytest.fixture(scope="module")
def plain_adapters(model_dir: Path) -> dict[str, Any]:
    return trained(model_dir, {"backend": "torch"}, batches=4, sections=ADAPTERS)[0]


# stage 1 differs from 2 in the gradients' place alone
@pytest.mark.parametrize("two", [zero(0), zero(2), TORCH, FSDP2])
def test_adapters_are_trained_published_and_kept_alone(
    two: dict[str, Any], model_dir: Path, plain_adapters: dict[str, Any], tmp_path: Path
) -> None:
    """As by torch, at two ranks and, of one stage and FSDP2, then at one, with the base as
    reference: ZeRO divides the adapters' state, FSDP2 the base too, and a checkpoint holds the
    adapters alone."""
    plain, stage = plain_adapters, two.get("zero_stage")
    mine, others = trained(model_dir, two, batches=4, save=[2, str(tmp_path)], sections=ADAPTERS)
    runs = [(mine, 0)]
    if stage != 0:
        how = {"restore": str(tmp_path / "number_2"), "sections": ADAPTERS}
        again, _ = trained(model_dir, two | {"ranks": 1}, batches=4, **how)
        assert again["held"] == plain["held"]
        runs.append((again, 2))
    adapters = sum(file.stat().st_size for file in tmp_path.rglob("adapter_model.safetensors"))
    assert 0 < adapters < 4 * plain["parameters"] and not list(tmp_path.rglob("model.safetensors"))
    for found, since in runs:
        assert found["names"] == plain["names"] and all("lora" in name for name in found["names"])
        assert found["losses"] == pytest.approx(plain["losses"][since:], abs=1e-5)
        assert found["norms"] == pytest.approx(plain["norms"][since:], rel=1e-4)
        assert found["weights"] == pytest.approx(plain["weights"], abs=1e-5)
        assert found["probe_off"] == 0
    assert len(others) == 1
    part = plain["held"] / (1 if stage == 0 else 2)  # at stage 0 every rank has all of it
    kept = plain["parameters"] / (2 if stage is None else 1)
    for rank in (mine, *others.values()):
        assert abs(rank["held"] - part) <= 64 and abs(rank["parameters"] - kept) <= 64
    assert plain["held"] < plain["parameters"] / 2


@pytest.mark.parametrize("two", [zero(2), TORCH, FSDP2])
def test_early_stops_leave_weights_and_moments_alone(two: dict[str, Any], model_dir: Path) -> None:
    """With a bound that any step passes, four epochs end as one does: in this batch and, by the
    moments, in the next ones."""
    one, _ = trained(model_dir, two, batches=2)
    stop = {"stop": {"kl_max": 1e-12}}
    four, _ = trained(model_dir, two | {"epochs": 4}, batches=2, sections=stop)
    assert [n[0] for n in four["numbers"]] == [1, 1]
    assert four["weights"] == pytest.approx(one["weights"], abs=1e-7)


@pytest.mark.parametrize(
    ("two", "elsewhere", "other", "said"),
    [
        (zero(3), [zero(3, ranks=1)], zero(1), "is of 2 ranks at ZeRO stage 3"),
        (FSDP2, [FSDP2 | {"ranks": 3}, COPIES, TENSOR], {"backend": "torch"}, "backend = fsdp2"),
        (TENSOR, [FSDP2], {"backend": "torch"}, "the optimizer of learner.backend = fsdp2"),
        (COPIES, [FSDP2], {"backend": "torch"}, "the optimizer of learner.backend = fsdp2"),
        (TORCH, [TORCH | {"ranks": 1}], FSDP2, "the optimizer of learner.backend = torch"),
    ],
)
def test_a_resumed_learner_goes_on_as_if_nothing_had_happened(
    two: dict[str, Any],
    elsewhere: list[dict[str, Any]],
    other: dict[str, Any],
    said: str,
    whole: Whole,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    """At stage 3, with torch's ranks and with FSDP2; at stage 2 a whole run below is resumed."""
    made, _, saved = whole(two)
    restore: dict[str, Any] = TRAINED | {"restore": str(saved)}
    # by transformers' own modules (ZeRO-3) and the packed forward, each layer computed again
    again, _ = trained(model_dir, two | {"gradient_checkpointing": True}, STEPS, **restore)
    assert again["losses"] == pytest.approx(made["losses"][STEPS:], abs=1e-7)
    assert len(again["losses"]) == 3 and again["again"] >= 4 and again["digest"] == made["digest"]
    # at another number of ranks or in another mesh, with the same moments
    for learner in elsewhere:
        found, _ = trained(model_dir, learner, STEPS, **restore)
        assert found["losses"] == pytest.approx(made["losses"][STEPS:], abs=1e-5)
        assert found["weights"] == pytest.approx(made["weights"], abs=1e-5)
        held = made["held"] * shards(two)
        assert found["held"] * shards(learner) == pytest.approx(held, rel=0.05)
    assert [x.name for x in saved.parent.iterdir()] == [saved.name]
    # DeepSpeed loads nothing from a path that is not there, and says nothing
    assert checkpoint.verify(saved) == ""
    if two is not TORCH:
        folders = shutil.ignore_patterns("deepspeed", "fsdp2")
        shutil.copytree(saved, tmp_path / "torn", ignore=folders)
        assert "has no bytes" in checkpoint.verify(tmp_path / "torn")
    job = {"model": str(model_dir), "batches": STEPS, "restore": str(saved)}
    code, _, err = forked(job | {"config": {"learner": LEARNER | other}})
    assert code != 0 and said in err


def test_bfloat16_stages_agree_despite_an_old_lock(model_dir: Path, tmp_path: Path) -> None:
    """A process killed while DeepSpeed compiled an operator leaves a lock file, for which later
    ones wait without end."""
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm" / "lock").touch()
    ENV["TORCH_EXTENSIONS_DIR"] = str(tmp_path)
    try:
        one, *others = [
            trained(model_dir, learner, batches=3, dtype="bfloat16")[0]
            for learner in (zero(1, ranks=1), zero(2), FSDP2)
        ]
    finally:
        del ENV["TORCH_EXTENSIONS_DIR"]
    for two in others:
        assert two["losses"] == pytest.approx(one["losses"], abs=2e-3)
        assert two["norms"] == pytest.approx(one["norms"], rel=0.03)
        assert max(abs(a - b) for a, b in zip(two["weights"], one["weights"], strict=True)) < 0.02


def test_the_ports_at_which_ranks_meet_are_nobody_elses() -> None:
    with reserve_port() as meet:
        port = meet.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False
        )
        store.set("key", "value")
        assert store.get("key") == b"value"


def ranks_of(pid: int, word: str = "ranks_program") -> list[int]:
    """Processes that rank 0 started."""
    found = {p.pid: p.as_dict(["cmdline"])["cmdline"] for p in psutil.Process(pid).children()}
    return [number for number, words in found.items() if word in " ".join(words or [])]


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("two", [zero(3), TORCH, FSDP2])
def test_a_rank_that_hangs_is_said(two: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    """At stage 3 and with FSDP2 the forward pass waits for the others too; a killed rank is the
    subject of the whole run below.  Until it is stopped nobody is impatient."""
    learner = LEARNER | two | {"steps": 10**6}
    stopped = tmp_path / "stopped"
    job = {"model": str(model_dir), "batches": 10**6, "save": [3, str(tmp_path)]}
    p = start(job | {"stand": [str(stopped), 5.0], "config": {"learner": learner}})
    try:
        wait_until(stopped.with_suffix(".there").exists, p)
        (other,) = ranks_of(p.pid)
        os.kill(other, signal.SIGSTOP)
        stopped.touch()
        _, err = p.communicate(timeout=7200)
    finally:
        if p.poll() is None:
            p.kill()
    assert p.returncode != 0 and "RankLost" in err, err[-3000:]
    assert "learner.rank_timeout_s = 5)" in err, err[-3000:]
    # it is killed with the first rank's end, and takes a moment to be gone
    until(lambda: not alive(other))


@pytest.mark.parametrize(
    ("config", "sets"),
    [
        ("demo", ("learner.backend='deepspeed'", "learner.ranks=2", "learner.zero_stage=2")),
        ("demo", ("learner.ranks=2",)),
        ("fsdp2", ()),
    ],
)
def test_a_killed_rank_costs_the_run_only_its_time_and_the_run_resumes_and_exports(
    config: str,
    sets: tuple[str, ...],
    asyncrl: Callable[..., Ended],
    tmp_path: Path,
    sort_model: Path,
) -> None:
    patience = f"learner.rank_timeout_s={PATIENT_S}"
    words = (*sets, *FEW, patience, "learner.checkpoint_every=3", "learner.steps=6", "name='two'")
    run_dir = tmp_path / "runs" / "two"
    process = start_run(tmp_path, sort_model, *words, hold=5, config=config)
    wait_until(lambda: steps_done(run_dir) >= 4, process)
    (other,) = ranks_of(children(process.pid)["learner"], "asyncrl.cli")
    os.kill(other, signal.SIGKILL)
    let_go(tmp_path)
    summary = finish(process, tmp_path)
    check_summary(summary, summary["lag"]["limit"])
    assert summary["steps"] == 6 and summary["mismatch_k3_max"] < 1e-9
    assert "of the learner has ended" in (tmp_path / "stderr").read_text()
    more = asyncrl("run", "--resume", str(run_dir), "learner.steps=8", "learner.ranks=1")
    assert more.code == 0 and more.json["steps"] == 8, more.err[-3000:]
    transformers.AutoModelForCausalLM.from_pretrained(run_dir / "model")


OTHER_RANK = """
import atexit, os, sys
from learner import loop

atexit.register(os.abort)  # what threads of the transport do to an interpreter that ends
loop.LearnerCore = lambda *words: words
loop.follow = lambda core: print("followed", end="")
from asyncrl.config import load

words = {"model": {"path": "m"}, "task": {"name": "sort"}, "learner": {"backend": "deepspeed"}}
loop.main(load.convert(words, "c.toml"), None)
print("and went on")
"""


def test_a_rank_that_has_followed_to_the_end_leaves_without_the_interpreters_own() -> None:
    argv = [sys.executable, "-c", warm_python.FORKED + OTHER_RANK]
    done = run_command(argv, env=ENV | {"RANK": "1"})
    assert (done.code, done.out) == (0, "followed"), done.err[-3000:]


@pytest.mark.parametrize(
    ("learner", "model", "said"),
    [
        ({"ranks": 2, "gpus": [0]}, {}, "each needs its own GPU"),
        ({"backend": "fsdp2", "zero_stage": 3}, {}, "3 is a stage of DeepSpeed"),
        (zero(2, mesh={"replicate": 2}), {}, r"mesh\.replicate: needs learner\.backend = fsdp2"),
        (COPIES | {"ranks": 3}, {}, "= 2 x 2 x 1 is not learner.ranks = 3"),
        ({"backend": "fsdp2", "mesh": {"shard": 2}}, {}, "= 1 x 2 x 1 is not learner.ranks = 1"),
        (FSDP2 | {"mesh": {"tensor": 4}}, {}, "= 1 x 1 x 4 is not learner.ranks = 2"),
        (TENSOR | {"gradient_cosine": "log"}, {}, r"mesh\.tensor: divides the vocabulary"),
        ({"backend": "deepspeed", "zero_stage": 0}, {"dtype": "bfloat16"}, "use 1 or higher"),
        (zero(0, ranks=1, offload=True), {}, r"learner\.offload: needs"),
        ({"offload": True}, {}, r"learner\.offload: needs"),
    ],
)
def test_what_cannot_work_is_refused(
    learner: dict[str, Any], model: dict[str, Any], said: str
) -> None:
    raw = {"model": {"path": "m", **model}, "task": {"name": "sort"}, "learner": learner}
    with pytest.raises(ConfigError, match=said):
        load.convert(raw, "c.toml")


WHOLE = {"backend": "torch", "ranks": 2}
FULL_KL = {"coefficient": 0.1, "off_policy": "prefix_full"}
METHODS: dict[str, dict[str, Any]] = {
    "gae, a trunk of its own": {"advantage": {"name": "gae"}},
    "gae, the policy's trunk": {"advantage": {"name": "gae"}, "value": {"trunk": "shared"}},
    "prefix_full, its base as reference": {"kl": {"loss": FULL_KL}, "lora": {"rank": 4}},
    "distillation": {"kl": {"preset": "distill"}},
    "functions": {
        "loss": {"surrogate": "function", "function": "own_methods:ppo"},
        "advantage": {"name": "function", "function": "own_methods:to_go"},
    },
    "opob": {"advantage": {"name": "opob"}},
    "otb": {"advantage": {"name": "otb"}},
    "projected gradients": {"learner": {"gradient_cosine": "project", "cosine_max": 0.1}},
}


def compare(
    model: Path,
    sections: dict[str, Any],
    save: Path | None = None,
    backend: dict[str, Any] = FSDP2,
    **more: Any,
) -> tuple[Any, Any]:
    """(what torch printed, what two ranks printed) of two batches; the latter save."""
    learner = sections.get("learner", {})
    rest = {name: section for name, section in sections.items() if name != "learner"}
    how = {"batches": 2, "sections": rest, **more}
    saves = {"save": [1, str(save)]} if save else {}
    plain, _ = trained(model, learner | {"backend": "torch"}, **how)
    two, _ = trained(model, learner | backend, **how, **saves)
    assert two["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    assert two["weights"] == pytest.approx(plain["weights"], abs=1e-5)
    assert two["metrics"].keys() == plain["metrics"].keys()
    assert two["metrics"] == pytest.approx(plain["metrics"], rel=1e-3, abs=1e-5, nan_ok=True)
    return plain, two


@pytest.mark.parametrize("backend", [FSDP2, WHOLE], ids=["fsdp2", "torch"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_that_deepspeed_refuses_are_those_of_torch(
    method: str, backend: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    """Also resumed by one rank: a value head and the last gradient are in the checkpoint."""
    sections = METHODS[method]
    resumes = method.startswith("gae") or "learner" in sections
    plain, _ = compare(model_dir, sections, tmp_path if resumes else None, backend)
    if resumes:
        rest = {name: section for name, section in sections.items() if name != "learner"}
        learner = sections.get("learner", {}) | backend | {"ranks": 1}
        how = {"restore": str(tmp_path / "number_1"), "sections": rest}
        one, _ = trained(model_dir, learner, batches=2, **how)
        assert one["weights"] == pytest.approx(plain["weights"], abs=1e-5)


NARROW = {"loss": {"surrogate": "decoupled_ppo", "eps_low": 0.01, "eps_high": 0.01}}


@pytest.mark.parametrize(
    ("family", "tied", "method"),
    [
        ("llama", False, "gae, the policy's trunk"),
        ("qwen2", True, "opob"),
        ("qwen3", False, "otb"),
        ("mistral", True, "gae, a trunk of its own"),
    ],
)
def test_a_tensor_group_divides_every_family(
    family: str, tied: bool, method: str, tmp_path: Path
) -> None:
    """A tied head stays tied: in training, in what is published, in the model of a checkpoint."""
    model, saved = tmp_path / "m", tmp_path / "saved"
    build_model(model, "abcdefgh", hidden=32, family=family, tied=tied, kv_heads=2)
    plain, two = compare(model, METHODS[method], saved, TENSOR)
    assert two["names"] == plain["names"] and ("lm_head.weight" in two["names"]) != tied
    assert two["probe_off"] < 1e-5 and two["tied"] == plain["tied"] == tied
    made = transformers.AutoModelForCausalLM.from_pretrained(saved / "number_1" / "model")
    assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    ("tensor", "how"),
    [(3, {}), (4, {"kv_heads": 2}), (4, {"intermediate": 66}), (2, {"family": "mixtral"})],
)
def test_what_a_tensor_group_cannot_divide(tensor: int, how: Any, tmp_path: Path) -> None:
    model = build_model(tmp_path, "abcdefgh", **how)
    with pytest.raises(
        ConfigError, match=rf"mesh\.tensor: {tensor} ranks cannot divide {tmp_path};"
    ):
        FsdpBackend._divide(SimpleNamespace(tensor=tensor), model)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 4], ids=["whole", "adapters"])
def test_rank_0_runs_the_versions_of_tokens_without_the_others(rank: int, model_dir: Path) -> None:
    """As proximal policies: pi_v / mu is 1, and the clip sees the lag; split and KL to the base."""
    sections = NARROW | {"correction": {"proximal": "version"}, "weights": {"slots": 8}}
    sections |= {"lora": {"rank": rank}, "record": {"split_every": 1, "reference_kl_every": 1}}
    plain, *others = (
        trained(model_dir, backend, batches=2, held=True, sections=sections)[0]
        for backend in ({"backend": "torch"}, FSDP2, WHOLE, zero(2))
    )
    assert plain["metrics"]["clip/share"] > 0.05
    for made in (plain, *others):
        metrics = made["metrics"]
        assert metrics["is/mean_weight"] == pytest.approx(1, abs=1e-6)
        assert metrics["is/fallback_share"] == 0 and metrics["split/coverage"] == 1
        assert abs(metrics["split/mismatch"]) < 1e-6 < abs(metrics["split/staleness"])
        assert {"kl/target_ref_k3", "split/update_k3"} <= metrics.keys()
        assert made["norms"] == pytest.approx(plain["norms"], rel=1e-4)
        assert made["weights"] == pytest.approx(plain["weights"], abs=1e-5)


@pytest.mark.parametrize("two", [FSDP2, WHOLE, zero(3)])
def test_each_rank_averages_its_part(two: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    """As torch does; a resumed learner of the same ranks has the same bits."""
    sections = NARROW | {"correction": {"proximal": "ema"}}
    plain = trained(model_dir, {"backend": "torch"}, batches=3, sections=sections)[0]
    made = trained(model_dir, two, batches=3, sections=sections, save=[2, str(tmp_path)])[0]
    assert made["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert made["weights"] == pytest.approx(plain["weights"], abs=1e-5)
    assert plain["metrics"]["clip/share"] > 0.05
    saved = str(tmp_path / "number_2")
    again = trained(model_dir, two, batches=3, sections=sections, restore=saved)[0]
    assert again["digest"] == made["digest"]
    job = {"batches": 3, "config": {"learner": LEARNER | two | {"ranks": 1}, **sections}}
    code, _, err = forked(job | {"model": str(model_dir), "restore": saved})
    # whole copies are the same at any number of ranks
    assert (code == 0) == (two is WHOLE) != ("has no average of these weights" in err), err


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen2Moe"])
def test_experts_that_no_token_of_a_rank_chose(family: str, tmp_path: Path) -> None:
    """Through the packed forward and through transformers' modules, whose layers are computed
    again; a checkpoint holds a model directory."""
    tokenizer = build_character_tokenizer("abcdefgh")
    more = {"Qwen3Moe": {"head_dim": 8}, "Qwen2Moe": {"shared_expert_intermediate_size": 16}}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 8}
    sizes |= {"num_experts_per_tok": 1, "max_position_embeddings": 64, **more[family]}
    config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **sizes)
    torch.manual_seed(0)
    model = tmp_path / "moe"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    sections = {"learner": {"gradient_checkpointing": family == "Qwen2Moe"}}
    _, two = compare(model, sections, tmp_path / "saved")
    directory = tmp_path / "saved" / "number_1" / "model"
    saved = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert type(saved).__name__ == f"{family}ForCausalLM"
    numbers = torch.cat([p.detach().flatten() for p in saved.parameters()])
    assert numbers.abs().sum() > 0
    assert len(numbers) == pytest.approx(2 * two["parameters"], rel=0.02)


def test_a_weight_without_gradients_is_resumed_by_another_number_of_ranks(
    model_dir: Path, tmp_path: Path
) -> None:
    """Its moments are not in the checkpoint, which torch's own loading refuses."""
    how: dict[str, Any] = {"batches": 2, "frozen": "model.layers.0.mlp.up_proj.weight"}
    two, _ = trained(model_dir, FSDP2, **how, save=[1, str(tmp_path)])
    saved = str(tmp_path / "number_1")
    three, others = trained(model_dir, FSDP2 | {"ranks": 3}, **how, restore=saved)
    assert three["losses"] == pytest.approx(two["losses"][1:], abs=1e-5)
    assert three["weights"] == pytest.approx(two["weights"], abs=1e-5)
    held = three["held"] + sum(other["held"] for other in others.values())
    assert held == three["parameters"] + sum(o["parameters"] for o in others.values()) - 64 * 32


def test_a_rank_holds_what_the_arithmetic_says(model_dir: Path) -> None:
    """Of weights, gradient and moments; and, while a layer runs, that layer and the embeddings."""
    shape = sums.Shape(32, 2, 4, 4, 8, 64, 11, norms=True)
    one, _ = trained(model_dir, FSDP2 | {"ranks": 1}, batches=1)
    assert one["parameters"] == shape.parameters
    for ranks in (2, 4):
        mine, others = trained(model_dir, FSDP2 | {"ranks": ranks}, batches=1)
        bytes_held = sums.learner(shape, "float32", stage="fsdp2", ranks=ranks)
        padding = 4 * 32 * ranks
        assert len(others) == ranks - 1
        assert abs(4 * mine["parameters"] - bytes_held["weights"]) <= padding
        assert abs(4 * mine["gradient"] - bytes_held["gradient"]) <= padding
        assert abs(8 * mine["held"] - bytes_held["moments"]) <= 2 * padding
        assert mine["gathered"] == shape.root + shape.layer < one["parameters"]
        assert bytes_held["gathered"] >= 4 * mine["gathered"]


def test_the_table_of_backends_is_what_the_rules_refuse() -> None:
    """Every row of docs/engines.md: "yes" is accepted, "no" is refused in a line that says why."""
    page = (ROOT / "docs" / "engines.md").read_text()
    backends = ("torch", "deepspeed", "fsdp2")
    for ability in rules.TABLES["backends"]:
        (cells,) = re.findall(rf"^\| {re.escape(ability.title)} \|(.*)\|$", page, re.MULTILINE)
        documented = dict(zip(backends, [cell.strip() for cell in cells.split("|")], strict=True))
        for backend, cell in documented.items():
            sets = [*ability.sets, f"learner.backend={backend}"]
            if cell == "yes":
                load.load(ROOT / "configs" / "demo.toml", sets)
                continue
            assert cell == "no"
            with pytest.raises(ConfigError) as refused:
                load.load(ROOT / "configs" / "demo.toml", sets)
            needed = " or ".join(ability.unless["learner.backend"])
            assert f"learner.backend = {needed}, not {backend}" in str(refused.value)
    assert page.count("| yes |") > len(rules.TABLES["backends"])
