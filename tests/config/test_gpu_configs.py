"""The GPU configs on a machine without one: what they would start, and that nothing starts."""

import json
import os
import re
import socket
from pathlib import Path

import pytest
from process_kit import ENV, ROOT, TEXTS, as_options, run_cli

from actors.generator import WeightsReceiver
from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import WeightsSource
from asyncrl.models import devices, policy
from asyncrl.supervise.hosts import cluster

NO_GPU = ENV | {"CUDA_VISIBLE_DEVICES": ""}


def test_without_cuda_a_dry_run_plans_and_a_run_says_so_before_anything_starts(
    tmp_path: Path,
) -> None:
    many = "rank 0: GPU 0, learner rank 1: GPU 1, generator 0: GPU 2, generator 1: GPU 3"
    for name, said in (("one", "learner rank 0: cuda, generator 0: cuda"), ("many", many)):
        done = run_cli("run", f"configs/gpu_{name}.toml", "--dry-run", env=NO_GPU)
        assert done.code == 0 and said in done.err, done.err
    done = run_cli("run", "configs/gpu_one.toml", sets=[f"runs={str(tmp_path)!r}"], env=NO_GPU)
    assert done.code == 2 and "model.device: needs CUDA, and torch" in done.err
    assert not list(tmp_path.iterdir())


SEVEN_BILLION = (  # the shapes of Qwen2.5-7B
    '{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, '
    '"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, '
    '"vocab_size": 152064, "tie_word_embeddings": false}'
)


def run_cluster(path: Path, *sets: str, words: tuple[str, ...] = ("--dry-run", "--json")) -> None:
    chosen = as_options((f"model.path={str(path)!r}", *sets))
    main.main(["run", "cluster", *chosen, *words], standalone_mode=False)


def test_a_cluster_is_planned_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From config.json alone.  A layer has 2 x 3584 x (3584 + 512) + 3 x 3584 x 18944 weights,
    4,608 biases and two norms of 3584; the tables have 2 x 152064 x 3584.  A server keeps 16,528
    blocks of 32 tokens of 2 x 28 x 4 x 128 numbers of two bytes."""
    (tmp_path / "config.json").write_text(SEVEN_BILLION)
    run_cluster(tmp_path, "learner.steps=8", "learner.groups=8")
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    places = [made[f"place {number}"] for number in range(1, 13)]
    assert places[3:6] == [
        "node 4 GPUs 0-7: learner ranks 24 to 31, tensor groups of 2",
        "node5 GPUs 0-3: server http://node5:8000",
        "node5 GPUs 4-7: server http://node5:8001",
    ]
    assert made["parameters"] == 28 * 233_057_792 + 2 * 544_997_376 + 3584 == 7_615_616_512
    part = 4 * 7_615_616_512 / 8
    assert made["learner_gpu"] == {
        "weights": part,
        "gradients": part,
        "optimizer": 2 * part,
        "gathered layers": 2 * 2 * (2 * 544_997_376 + 3584 + 2 * 233_057_792) / 2,
        "references": 0,
    }
    cache = 16_528 * 32 * 2 * 28 * 4 * 128 * 2 / 4
    assert made["server_gpu"] == {"weights": 2 * 7_615_616_512 / 4, "KV cache": cache}
    assert made["swap"] == {"file": 15_231_233_024, "read by servers": 32 * 15_231_233_024}
    assert 0 <= made["lag"]["mean"] <= made["lag"]["max"] <= 4
    run_cluster(tmp_path, "learner.steps=8", "learner.mesh={replicate=4,shard=8}")
    whole = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert whole["place 1"] == "node 1 GPUs 0-7: learner ranks 0 to 7"
    gathered = made["learner_gpu"]["gathered layers"]
    assert whole["learner_gpu"] == made["learner_gpu"] | {"gathered layers": 2 * gathered}


@pytest.mark.parametrize(("change", "said"), TEXTS["clusters"])
def test_a_cluster_that_cannot_be_is_refused(
    change: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(SEVEN_BILLION)
    for sets, words, wanted in (
        (change.split(), ("--dry-run",), said),
        ((), (), "such a run is only planned"),
    ):
        with pytest.raises(SystemExit):
            run_cluster(tmp_path, *sets, words=words)
        [line] = capsys.readouterr().err.splitlines()
        assert re.search(wanted, line), line


@pytest.mark.parametrize("family", cluster.ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_by_their_shapes(family: str, tied: bool, tmp_path: Path) -> None:
    """And divided among no ranks by the backend torch."""
    model = policy.build_model(tmp_path, "abcdefgh", kv_heads=2, tied=tied, family=family)
    count = sum(parameter.numel() for parameter in model.hf.parameters())
    layer, outside, _ = cluster.count_parameters(policy.load_text_config(tmp_path))
    assert 2 * layer + outside == count
    sets = [f"model.path={str(tmp_path)!r}", "learner.ranks=1", "learner.gpus=[0]"]
    sets += ["learner.mesh={}", "learner.backend=torch"]
    made = cluster.make_plan(load.load("cluster", [*sets, "model.dtype=float32"]))
    assert list(made.learner_gpu.values()) == [4 * count, 4 * count, 8 * count, 0, 0]


def test_each_process_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as a child of one that took its GPU, and among those a scheduler left visible."""
    config = load.load("configs/gpu_many.toml")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for start, wanted in (("", ["0", "1", "2", "3"]), ("4,5,6,7", ["4", "5", "6", "7"])):
        monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": start} if start else {})
        seen = []
        for rank in range(2):  # rank 1 is started by rank 0, with its environment
            os.environ["LOCAL_RANK"] = str(rank)
            devices.bind_learner(config)
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
            assert os.environ["LOCAL_RANK"] == "0"
        for index in range(2):
            devices.bind(config.generator.gpus, index, "generator.gpus")
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        assert seen == wanted
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(ConfigError, match=r"generator\.gpus: GPU 2 of 2"):
        devices.bind(config.generator.gpus, 0, "generator.gpus")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(ConfigError, match=r"generator\.gpus: GPU 2 does not exist"):
        devices.bind(config.generator.gpus, 0, "generator.gpus")
    assert devices.find_missing_gpus(config).startswith("generator.gpus: needs CUDA")


@pytest.mark.parametrize(("sets", "said"), TEXTS["what_cannot_work_is_refused"])
def test_what_cannot_work_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load.load("configs/gpu_many.toml", sets)


def test_on_one_gpu_weights_go_through_the_hosts_memory(tmp_path: Path) -> None:
    """NCCL makes no group of two ranks on one GPU: the config's own way is the ring."""
    config = load.load(ROOT / "configs" / "gpu_one.toml")
    assert config.weights.transport == "auto" and not config.learner.gpus
    receiver = WeightsReceiver(config, "generator-0")
    assert receiver.is_local(WeightsSource(1, socket.gethostname(), str(tmp_path), ""))
    for gpus in ((), ("learner.gpus=[0]", "generator.gpus=[0]")):
        with pytest.raises(ConfigError, match=r"weights.transport: nccl .*use auto"):
            load.load(ROOT / "configs" / "gpu_one.toml", ("weights.transport='nccl'", *gpus))


@pytest.mark.parametrize(
    ("ranks", "count", "sets", "reason"), TEXTS["gpus_are_divided_among_ranks_and_generators"]
)
def test_gpus_are_divided_among_ranks_and_generators(
    ranks: int, count: int, sets: list[object], reason: str
) -> None:
    """A config with lists of its own too: the command line wins."""
    more = [f"learner.ranks={ranks}", "weights.transport='auto'"]
    before = load.load("gpu_many", [*more, f"learner.gpus={list(range(ranks))}"])
    split = devices.split_gpus(before, count)
    assert reason in split.reason
    config = load.load("gpu_many", [*more, *split.sets])  # the rules take it
    assert [config.learner.gpus, config.generator.gpus, config.generators] == sets
    one = load.load("gpu_one")
    assert "(more with learner.ranks)" in devices.split_gpus(one, 8).reason
    assert "fsdp2" not in devices.split_gpus(one, 2).reason


@pytest.mark.parametrize(("count", "more", "said"), TEXTS["gpus_that_cannot_be_divided"])
def test_gpus_that_cannot_be_divided(
    count: int, more: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = more if more[:1] and more[0].startswith("--") else as_options(more)
    source = () if "--resume" in more else ("gpu_many",)
    with pytest.raises(SystemExit) as ended:
        main(["run", *source, "--gpus", str(count), *words, "--dry-run"])
    error = capfd.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and re.search(said, error), error


def test_what_gpus_writes_is_said_and_in_the_config(capfd: pytest.CaptureFixture[str]) -> None:
    """Also where the config without it would be refused: two ranks and no list."""
    lists = ("--set", "learner.ranks=3")
    main.main(["run", "gpu_many", "--gpus", "8", *lists, "--dry-run"], standalone_mode=False)
    out, err = capfd.readouterr()
    assert "--gpus 8: learner.gpus=[0, 1, 2], generator.gpus=[3, 4, 5, 6, 7], generators=5: " in err
    assert "learner rank 2: GPU 2, generator 0: GPU 3" in err and "generators = 5" in out
