"""`asyncrl diagnose`: healthy logs and planted faults of each framework, token files, odd inputs.

Real files (tests/data/logs) are of runs of TRL, and by verl_log.py and framework_tokens.py of
benchmarks/; transformers, torch and tinker-cookbook write others; the rest is by schema.
"""

import gzip
import json
import math
import pickle
import random
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from clients_kit import python_of
from simulate_kit import BARE, ROOT, config, run
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerState

from asyncrl.algorithms import correction
from asyncrl.cli import main
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments import diagnose as diagnosis
from asyncrl.experiments.simulate import times
from asyncrl.experiments.simulate.times import change

Values = dict[str, float]
STEPS = 60
LOGS = ROOT / "tests" / "data" / "logs"
# role -> value of a healthy run, relative noise
HEALTHY = {
    "lag": (1.0, 0.3),
    "k3": (2e-4, 0.3),
    "abs": (8e-3, 0.3),
    "chi2": (6e-4, 3.0),
    "ratio": (1.0, 1e-4),
    "ratio_max": (1.3, 0.1),
    "update_kl": (3e-3, 0.5),
    "clip": (4e-3, 0.5),
    "reference_kl": (0.02, 0.3),
    "reward": (0.5, 0.2),
    "equal": (0.1, 0.3),
    "mixed": (0.9, 0.03),
    "mult": (1.01, 2e-3),
    "truncated": (0.02, 0.5),
    "step_s": (30.0, 0.1),
    "wait_s": (2.0, 0.3),
}
# framework, then the metric of each role
TABLE = """
verl lag=training/off_policy/trajectory_staleness_worst/mean k3=rollout_corr/k3_kl
    chi2=rollout_corr/chi2_token update_kl=actor/ppo_kl clip=actor/pg_clipfrac
    reward=critic/score/mean truncated=response_length/clip_ratio step_s=timing_s/step
    wait_s=timing_s/wait_for_enough_samples;
trl abs=sampling/sampling_logp_difference/mean ratio=sampling/importance_sampling_ratio/mean
    ratio_max=sampling/importance_sampling_ratio/max clip=clip_ratio/region_mean
    reference_kl=kl reward=reward equal=frac_reward_zero_std
    truncated=completions/clipped_ratio;
prime-rl lag=off_policy/mean k3=mismatch_kl/all/mean clip=is_masked/all/mean
    reward=train/agg/effective/solver/reward/mean mixed=train/agg/all/solver/solved_some
    truncated=train/agg/all/solver/is_truncated/mean step_s=time/step wait_s=time/wait_for_batch;
nemo-rl lag=train/avg_trajectory_age mult=train/token_mult_prob_error k3=train/gen_kl_error
    reference_kl=train/kl_penalty reward=train/reward truncated=train/truncation_rate;
cookbook lag=async/staleness_mean k3=optim/kl_sample_train_v2 reference_kl=kl_policy_base
    reward=env/all/reward/total mixed=env/all/by_group/frac_mixed;
skyrl lag=async/staleness_mean abs=policy/rollout_train_logprobs_abs_diff_mean
    clip=policy/ppo_clip_ratio reward=reward/avg_raw_reward;
slime abs=train/train_rollout_logprob_abs_diff update_kl=train/ppo_kl clip=train/pg_clipfrac
    reward=rollout/raw_reward truncated=rollout/truncated_ratio;
areal ratio=ppo_actor/update/behave_imp_weight/avg
    ratio_max=ppo_actor/update/behave_imp_weight/max clip=ppo_actor/update/clip_ratio/avg
    reward=ppo_actor/task_reward/avg truncated=ppo_actor/no_eos_ratios/avg;
art ratio=loss/importance_ratio_mean ratio_max=loss/importance_ratio_p99
    reference_kl=loss/kl_div reward=train/reward
"""
NAMES: dict[str, dict[str, str]] = {
    framework: dict(word.split("=") for word in words)
    for framework, *words in map(str.split, TABLE.split(";"))
}


def plant_stale(values: Values, step: int) -> None:
    """Weights that are never sent: the difference grows with each update."""
    for role in ("k3", "abs"):
        values[role] *= 1 + step / 5


# a fault, the findings that name it, the roles of which a log needs one, and what it changes
FAULTS: dict[str, tuple[set[str], set[str], Callable[[Values, int], Any]]] = {
    "top_p 0.8": (
        {"truncated_sampler", "mismatch"},  # a log without chi2 and ratio shows the difference
        {"chi2", "ratio", "k3"},
        lambda v, s: v.update(chi2=v["chi2"] - 0.05, ratio=v["ratio"] - 0.03, k3=1.1e-3),
    ),
    "stale weights": ({"stale_weights", "mismatch"}, {"k3", "abs"}, plant_stale),
    "wrong end token": ({"cut_completions"}, {"truncated"}, lambda v, s: v.update(truncated=0.99)),
    "rate too high": (
        {"large_updates", "reference_drift", "reward_fell"},
        {"update_kl", "clip", "reference_kl", "reward"},
        lambda v, s: v.update(
            update_kl=0.2, clip=0.3, reference_kl=0.6, reward=v["reward"] * (1 - s / 61)
        ),
    ),
    "slow generation": ({"trainer_waits"}, {"wait_s"}, lambda v, s: v.update(wait_s=9.0)),
    "constant reward in a third": (
        {"equal_rewards"},
        {"equal", "mixed"},
        lambda v, s: v.update(equal=0.34, mixed=0.66),
    ),
}


def make_rows(
    framework: str, seed: int = 0, fault: Callable[[Values, int], Any] | None = None
) -> list[dict[str, float]]:
    """Make the rows of a run, with `step`."""
    rng = random.Random(seed)
    rows = []
    for step in range(1, STEPS + 1):
        values = {role: x * (1 + noise * rng.gauss(0, 0.5)) for role, (x, noise) in HEALTHY.items()}
        values["lag"] = 0.0 if fault else values["lag"]
        if fault:
            fault(values, step)
        names = NAMES[framework]
        rows.append({"step": step} | {name: values[role] for role, name in names.items()})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, float]], framework: str = "") -> Path:
    if framework == "verl":
        rows = [{"step": row["step"], "data": row} for row in rows]  # type: ignore[dict-item]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def diagnose(path: Path, name: str = "") -> dict[str, Any]:
    return diagnosis.diagnose(diagnosis.read(path, name))


def names_of(result: Mapping[str, Any]) -> set[str]:
    return {finding["name"] for finding in result["findings"]}


@pytest.mark.parametrize("framework", NAMES)
def test_ten_healthy_runs_have_no_finding(framework: str, tmp_path: Path) -> None:
    for seed in range(10):
        rows = make_rows(framework, seed)
        result = diagnose(write_jsonl(tmp_path / f"{seed}.jsonl", rows, framework))
        assert result["framework"] == framework and not result["findings"], seed
        assert {x["name"] for x in result["numbers"]} == {*rows[0]} - {"step"}


@pytest.mark.parametrize("lag", [0.0, 1.5])
def test_the_generation_of_a_synchronous_run_is_no_wait(tmp_path: Path, lag: float) -> None:
    waits, lags = NAMES["verl"]["wait_s"], NAMES["verl"]["lag"]
    rows = make_rows("verl")
    for row in rows:
        row |= {lags: lag, "timing_s/gen": 0.6 * row["timing_s/step"]}
        del row[waits]
    result = diagnose(write_jsonl(tmp_path / "m.jsonl", rows, "verl"))
    assert names_of(result) == ({"trainer_waits"} if lag else set())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("framework", NAMES)
def test_each_fault_that_a_log_shows_is_named(framework: str, fault: str, tmp_path: Path) -> None:
    expected, roles, plant = FAULTS[fault]
    result = diagnose(write_jsonl(tmp_path / "m.jsonl", make_rows(framework, 1, plant), framework))
    found = names_of(result)
    assert found <= expected
    if roles & {*NAMES[framework]}:
        assert found
    if fault == "stale weights":
        assert ("stale_weights" in found) == bool(roles & {*NAMES[framework]})
    if fault == "rate too high":
        assert "reward_fell" in found
    if fault == "top_p 0.8" and {"chi2", "ratio"} & {*NAMES[framework]}:
        assert found == {"truncated_sampler"}
    for finding in result["findings"]:  # numbers with their metric and rows, and a key
        assert "60 rows" in finding["said"] or "mean" in finding["said"]
        assert finding["try_this"] and "{" not in finding["said"] + finding["try_this"]


def test_a_difference_at_lag_is_growth_or_nothing_but_no_mismatch(tmp_path: Path) -> None:
    rows = [row | {"off_policy/mean": 3.0} for row in make_rows("prime-rl", 1)]
    for row in rows:
        row["mismatch_kl/all/mean"] = 5e-3
    result = diagnose(write_jsonl(tmp_path / "m.jsonl", rows))
    assert not result["findings"]
    assert any("lag and mismatch come mixed" in note for note in result["notes"])


def test_what_real_runs_of_trl_taught(tmp_path: Path) -> None:
    """Weights never sent: the difference leaps and stays.  A wrong end token: TRL calls those
    completions cut whose last token is not the trainer's, and at the limit it may be."""

    def find(later: float, length: int, since: int = 3) -> set[str]:
        rows = make_rows("trl", 1)
        for row in rows:
            row |= {"completions/mean_length": length - 0.1, "completions/max_length": length}
            row[NAMES["trl"]["abs"]] = later if row["step"] > since else 0.0027
        return names_of(diagnose(write_jsonl(tmp_path / "m.jsonl", rows)))

    assert find(0.13, 56) == {"stale_weights", "cut_completions"}
    assert find(0.13, 15) == {"stale_weights"}  # of a task whose answers all have one length
    assert not find(0.006, 15, 30)  # a sharper policy rounds otherwise, by far less

    def find_async(kl: Callable[[int], float], ratio: float) -> set[str]:
        """Of the asynchronous trainer; the first step has no lag, and no difference by it."""
        rows = [{"step": x, "kl": kl(x), "ratio": ratio} for x in range(1, 41)]
        rows = [row | {"sample/staleness_mean": min(row["step"] - 1, 0.25)} for row in rows]
        log = diagnosis.read(write_jsonl(tmp_path / "a.jsonl", rows))
        assert log.find("k3")[0] == "kl" and not log.find("reference_kl")[1]
        return names_of(diagnosis.diagnose(log))

    assert not find_async(lambda step: 6e-5 if step == 1 else 0.002, 1.0)
    assert find_async(lambda step: 0.0023, 0.974) == {"truncated_sampler"}
    assert find_async(lambda step: 0.001 * step, 0.996) == {"stale_weights"}


# ---- files of the packages' own writers ----------------------------------------------------------


def test_transformers_writes_the_state_that_is_read(tmp_path: Path) -> None:
    rows = make_rows("trl", 1, FAULTS["constant reward in a third"][2])
    for count in (20, 60):  # each checkpoint has the whole history so far
        (tmp_path / f"checkpoint-{count}").mkdir()
        path = tmp_path / f"checkpoint-{count}" / "trainer_state.json"
        TrainerState(log_history=rows[:count]).save_to_json(str(path))
    result = diagnose(tmp_path)
    assert result["framework"] == "trl" and names_of(result) == {"equal_rewards"}
    assert {x["rows"] for x in result["numbers"]} == {60} and not result["notes"]


def test_torch_writes_the_events_that_are_read(tmp_path: Path) -> None:
    rows = make_rows("slime", 1)
    for part in (rows[:40], rows[30:]):  # the second after a resume
        with SummaryWriter(str(tmp_path), filename_suffix=f".{len(part)}") as writer:
            for row in part:
                for name in {*row} - {"step"}:
                    writer.add_scalar(name, row[name], int(row["step"]))
    log = diagnosis.read(tmp_path)
    assert log.framework == "slime" and [*log.find("update_kl")[1]] == [*range(1, 61)]


def test_the_cookbook_writes_the_metrics_that_are_read(tmp_path: Path) -> None:
    rows = make_rows("cookbook", 1)
    program = (
        "import json, sys\nfrom tinker_cookbook.utils.ml_log import JsonLogger\n"
        "log = JsonLogger(sys.argv[1])\n"
        "for row in json.load(sys.stdin): log.log_metrics(row, row.pop('step'))\n"
        "log.log_summary({'env/all/reward/total': 0.5})\n"
    )
    command = [python_of("cookbook-0.6"), "-c", program, str(tmp_path)]
    subprocess.run(command, input=json.dumps(rows), text=True, check=True, timeout=300)
    log = diagnosis.read(tmp_path)
    assert log.framework == "cookbook" and len(log.find("reward")[1]) == STEPS


def test_a_tracker_exports_a_csv_with_the_names_of_runs(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    lines = ["Step,a - async/staleness_mean,b - async/staleness_mean,a - async/staleness_mean__MIN"]
    lines += [f"{step},{step / 100},7,0" for step in range(30)]
    path.write_text("\n".join(lines))
    log = diagnosis.read(path, "skyrl")
    assert log.find("lag")[1][20] == 0.2 and any("has 2 runs (a, b)" in note for note in log.notes)


# ---- odd inputs ----------------------------------------------------------------------------------


def write_verl(path: Path, steps: Any, value: Callable[[int], Any] = float) -> Path:
    return write_jsonl(path, [{"step": x, "rollout_corr/k3_kl": value(x)} for x in steps], "verl")


def not_in_three(step: int) -> float:
    return math.nan if step % 3 else step


@pytest.mark.parametrize(
    ("steps", "value", "cut", "expected", "note"),
    [
        (range(9), float, 12, range(8), "m.jsonl: 1 damaged or torn lines, the first is 9"),
        ([*range(9), 5, 6], float, 0, range(7), "m.jsonl: steps go back from 8 to 5"),
        ([*range(1, 9), 1, 2, 3], float, 0, [1, 2, 3], "m.jsonl: steps begin again at 1"),
        (range(9), not_in_three, 0, [0, 3, 6], "rollout_corr/k3_kl: 6 values are not finite"),
    ],
)
def test_rows_that_are_torn_repeated_or_not_finite_are_left_out_and_said(
    tmp_path: Path, steps: Any, value: Any, cut: int, expected: Any, note: str
) -> None:
    path = write_verl(tmp_path / "m.jsonl", steps, value)
    path.write_text(path.read_text()[: -cut or None])
    log = diagnosis.read(path)
    assert [*log.find("k3")[1]] == [*expected] and log.notes[0].startswith(note)


def test_metrics_of_another_framework_or_of_a_file_before_are_left_out(tmp_path: Path) -> None:
    for name in "ab":
        write_verl(tmp_path / f"{name}.jsonl", range(9), lambda x, name=name: float(name == "a"))
    log = diagnosis.read(tmp_path)
    assert {*log.find("k3")[1].values()} == {1.0} and "b.jsonl" in log.notes[0]
    rows = [row | {"reward": 1.0} for row in make_rows("verl", 1)]
    log = diagnosis.read(write_jsonl(tmp_path / "a.jsonl", rows))
    assert log.framework == "verl" and "reward" not in log.columns
    assert "reward is refused: of another framework" in log.notes[0]


def test_a_long_log_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "MOST", 100)
    log = diagnosis.read(write_verl(tmp_path / "m.jsonl", range(5000)))
    column = log.find("k3")[1]
    assert 30 < len(column) <= 100 and all(step == value for step, value in column.items())
    assert any(note.startswith("m.jsonl: one step of") for note in log.notes)


def test_torn_files_keep_what_is_before(tmp_path: Path) -> None:
    text = write_verl(tmp_path / "m.jsonl", range(500)).read_bytes()
    packed = gzip.compress(text)
    for name, data in (("a.jsonl.gz", packed), ("b.jsonl.gz", packed[:-600])):
        (tmp_path / name).write_bytes(data)
    assert len(diagnosis.read(tmp_path / "a.jsonl.gz").find("k3")[1]) == 500
    torn = diagnosis.read(tmp_path / "b.jsonl.gz")
    assert 0 < len(torn.find("k3")[1]) < 500 and "torn at its end" in torn.notes[0]
    path = tmp_path / "trainer_state.json"
    TrainerState(log_history=make_rows("trl")).save_to_json(str(path))
    path.write_text(path.read_text()[:-3000])
    log = diagnosis.read(path)
    assert 20 < len(log.find("reward")[1]) < STEPS and "torn at its end" in log.notes[0]
    with SummaryWriter(str(tmp_path / "events")) as writer:
        for step in range(20):
            writer.add_scalar("train/ppo_kl", 0.1, step)
    (events,) = (tmp_path / "events").iterdir()
    events.write_bytes(events.read_bytes()[:-9] + b"\xff" * 200)
    log = diagnosis.read(events)
    assert len(log.find("update_kl")[1]) >= 18 and "torn at its end" in log.notes[0]


class NotLoaded:
    def __reduce__(self) -> Any:
        return pytest.fail, ("it was loaded",)


@pytest.mark.parametrize("name", ["dump.pkl", "metrics.jsonl", "dump.pt", "m.jsonl.gz"])
def test_a_pickle_is_refused_unread(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    data = pickle.dumps(NotLoaded())
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    if name == "dump.pt":
        torch.save({"a": 1}, path)
    with pytest.raises(ConfigError, match="a pickle or an archive, which is not read"):
        diagnosis.read(path)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("", "", "no metric of verl, TRL, prime-rl"),
        ('{"step": 1, "loss": 2}\n[1]\n', "", "1 damaged or torn lines"),
        ('{"step": 1, "reward": 2}\n', "rllib", "--as rllib: choose one of verl"),
        ('{"step": 1, "reward": 2}\n', "verl", "m.jsonl has metrics of"),
        ('{"step": 1, "version_stats/sample_staleness_theta_avg": 2}\n', "", "can be judged"),
    ],
)
def test_an_empty_file_is_one_error(text: str, name: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    done = CliRunner().invoke(main, ["diagnose", str(path), "--as", name])
    assert done.exit_code == 2 and expected in done.stderr and done.stderr.count("\n") == 1


def test_a_run_of_our_own_is_not_taken_for_another_framework_s(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 2.0, "optim/lr": 0.1}\n')
    assert diagnosis.read(tmp_path).framework == "prime-rl"
    (tmp_path / "run_id").touch()
    with pytest.raises(ConfigError, match="is a run of asyncrl; type: asyncrl doctor"):
        diagnosis.read(tmp_path)


# ---- logs that are known to be wrong -------------------------------------------------------------


def test_wrong_logs_are_refused_or_explained_by_name(tmp_path: Path) -> None:
    rows = [row | {"a/sample_staleness_theta_avg": 2.0} for row in make_rows("areal")]
    result = diagnose(write_jsonl(tmp_path / "areal.jsonl", rows))
    assert any("pull request 1736" in note for note in result["notes"])
    assert all("staleness" not in x["name"] for x in result["numbers"])
    rows = [row | {"policy/is_ratio_min": 0.0} for row in make_rows("skyrl")]
    result = diagnose(write_jsonl(tmp_path / "skyrl.jsonl", rows))
    assert any("policy/is_ratio_min is refused" in note for note in result["notes"])
    lost = ("rollout_corr/k3_kl", "rollout_corr/chi2_token")
    rows = [{x: y for x, y in row.items() if x not in lost} for row in make_rows("verl")]
    result = diagnose(write_jsonl(tmp_path / "verl.jsonl", rows, "verl"))
    assert any("bypass mode" in note for note in result["notes"])


# ---- exact token data ----------------------------------------------------------------------------


def sample_tokens(
    seed: int, top_p: float = 1.0, shift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample [64, 24] tokens of 40 symbols; return log mu of the engine and log pi of the trainer.

    shift: nats by which the trainer's logits differ."""
    rng = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(64, 24, 40, generator=rng, dtype=torch.float64)
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    inside = ordered.cumsum(-1) - ordered < top_p
    mu = torch.zeros_like(logits).scatter(-1, order, ordered * inside)
    mu /= mu.sum(-1, keepdim=True)
    tokens = torch.multinomial(mu.view(-1, 40), 1, generator=rng).view(64, 24, 1)
    noise = torch.randn(logits.shape, generator=rng, dtype=torch.float64)
    log_pi = (logits + shift * noise).log_softmax(-1)
    return mu.gather(-1, tokens)[..., 0].log(), log_pi.gather(-1, tokens)[..., 0]


def write_tokens(folder: Path, framework: str, step: int, **settings: float) -> None:
    """Write a step as the framework does; completions have 5 to 24 tokens behind a prompt of 3."""
    mu, pi = sample_tokens(step, **settings)
    rows = []
    for number in range(64):
        length = 5 + number % 20
        mask = [False] * 3 + [True] * length
        sides = [[0.0] * 3 + side[number, :length].tolist() for side in (mu, pi)]
        advantages = [(-1.0) ** number] * len(mask)
        row: dict[str, Any] = {"token_loss_mask": [[*map(float, mask)]], "sample_loss_mask": [1.0]}
        row |= {"generation_logprobs": [sides[0]], "prev_logprobs": [sides[1]]}
        row |= {"advantages": [advantages], "rewards": [1.0], "idx": number}
        if framework == "prime-rl":
            row = {"step": step, "schema_version": 1, "loss_mask": mask, "advantages": advantages}
            row |= {"inference_logprobs": sides[0], "trainer_logprobs": sides[1]}
            row["inference_logprobs"][0] = None  # not finite, outside the mask
        rows.append(row)
    path = folder / f"train_data_step{step}.jsonl"
    if framework == "prime-rl":
        path = folder / "token_exports" / f"step_{step}" / "rank_0.jsonl"
        path.parent.mkdir(parents=True)
    write_jsonl(path, rows)


@pytest.mark.parametrize("folder", ["nemo_rl_7ea279a", "prime_rl_559b447"])
def test_token_files_show_truncation_mismatch_or_nothing(folder: str, tmp_path: Path) -> None:
    framework = folder[:-8].replace("_", "-")
    exported = diagnose(LOGS / folder)  # by the framework's own code
    assert names_of(exported) == {"truncated_sampler"}
    assert "over 375 tokens" in exported["findings"][0]["said"]
    # prime-rl's trainer and orchestrator append to one file, each with steps and seconds of its own
    assert not [note for note in exported["notes"] if "steps" in note]
    known = {row["role"]: row["median"] for row in exported["numbers"] if row["rows"] == 12}
    assert {"lag", "k3", "reward", "length", "gradient", "lr", "wait_s"} < known.keys()
    assert known["step_s"] == 3
    cases: dict[str, tuple[dict[str, float], set[str]]] = {
        "healthy": ({"shift": 0.02}, set()),
        "exact": ({}, set()),
        "top_p": ({"top_p": 0.8}, {"truncated_sampler"}),
        "stale": ({"shift": 0.4}, {"mismatch"}),
    }
    for name, (settings, expected) in cases.items():
        (tmp_path / name).mkdir()
        for step in range(1, 4):
            write_tokens(tmp_path / name, framework, step, **settings)
        result = diagnose(tmp_path / name)
        assert result["framework"] == framework and names_of(result) == expected, name
        assert result["measured"]["token_ratio"] < 1.3 or name == "stale"


def test_the_corrections_table_counts_what_the_learner_excludes(tmp_path: Path) -> None:
    write_tokens(tmp_path, "nemo-rl", 1, shift=0.4)
    log = diagnosis.read(tmp_path)
    samples = diagnosis.read_samples(log, 1)
    behavior, target = (torch.cat([x[side] for x in samples]) for side in (0, 1))
    seq = torch.repeat_interleave(torch.tensor([len(x[0]) for x in samples]))
    weight = (target - behavior).exp()
    mask = torch.ones_like(seq, dtype=torch.bool)
    rejected = ~correction.build_rejection_mask(
        "ratio", "mean", None, None, target - behavior, mask, seq=seq, n=64
    )
    vetoed = correction.find_vetoed("ratio", None, target - behavior, target, mask, seq=seq, n=64)
    expected = {
        "masked IS": (weight < 0.5) | (weight > 5),
        "geometric mask": rejected,
        "veto": vetoed,
        "TIS": torch.zeros_like(mask),
    }
    rows = {row[0]: row for row in diagnose(tmp_path)["tokens"][1]["rows"]}
    for name, cut in expected.items():
        row = next(row for key, row in rows.items() if key.startswith(name))
        assert row[1] == f"{float(cut.double().mean()):.2%}", name
    tis = next(row for key, row in rows.items() if key.startswith("TIS"))
    assert tis[3] == f"{float(weight.clamp(max=2).mean()):.3f}"


def test_tokens_are_grouped_by_the_lag_of_their_version_or_of_their_step(tmp_path: Path) -> None:
    for step in (1, 2):
        write_tokens(tmp_path, "prime-rl", step, shift=0.05 * step)
    write_jsonl(
        tmp_path / "metrics.jsonl", [{"step": x, "off_policy/mean": 3.0 * x} for x in (1, 2)]
    )
    (table, _) = diagnose(tmp_path)["tokens"]
    assert [row[0] for row in table["rows"]][-2:] == ["lag 3", "lag 6"]
    assert sum(float(x[1].rstrip("%")) for x in table["rows"][-2:]) == pytest.approx(100, abs=0.2)
    path = tmp_path / "token_exports" / "step_2" / "rank_0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_jsonl(path, [row | {"versions": [7 - number % 2]} for number, row in enumerate(rows)])
    (table, _) = diagnose(path)["tokens"]
    assert [row[0] for row in table["rows"]][-2:] == ["lag 0", "lag 1"]
    shares = [float(row[1].rstrip("%")) for row in table["rows"]]
    for part in (shares[1:5], shares[5:9], shares[9:]):
        assert sum(part) == pytest.approx(100, abs=0.3)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_text_json_and_a_page(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", make_rows("trl", 1, FAULTS["rate too high"][2]))
    text = CliRunner().invoke(main, ["diagnose", str(path), "--html", str(tmp_path / "page.html")])
    assert text.exit_code == 0 and "Change: lower learning_rate" in text.stdout
    page = (tmp_path / "page.html").read_text()
    assert "lower learning_rate" in page and "clip_ratio/region_mean" in page
    done = CliRunner().invoke(main, ["diagnose", str(path), "--json"])
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["framework"] == "trl" and result["numbers"][0]["steps"] == [1, 60]
    assert "predict" not in done.stdout


# ---- `asyncrl simulate --from` -------------------------------------------------------------------


def write_outcome(path: Path, outcome: Any) -> Path:
    row = {
        "timing_s/step": outcome.step_s,
        "timing_s/gen": outcome.step_s * outcome.idle_learner,
        "timing_s/agent_loop/generate_sequences/max": outcome.sample_p90_s,
        "training/off_policy/trajectory_staleness_worst/mean": outcome.lag_mean,
        "response_length/mean": 45,
        "response_length/max": 60,
    }
    return write_jsonl(path, [{"step": step} | row for step in range(20)], "verl")


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("train", [0.2, 0.6, 1.2])
def test_the_effect_of_a_change_is_predicted_from_a_log_alone(
    train: float, limit: int, tmp_path: Path
) -> None:
    """The log has a step's seconds, waits and lengths; the run that wrote it is simulated too."""
    sets = (f"staleness.max_lag={limit}", "generator.slots=16")
    known = change(BARE, row=0.01 / 16, train=train, lengths="uniform(30, 60)", batch=0.01)
    base = run(known, *sets)
    log = diagnosis.read(write_outcome(tmp_path / "m.jsonl", base))
    fitted = times.fit_log(log, config(*sets))[0][0]
    again = run(fitted, *sets)
    assert again.step_s == pytest.approx(base.step_s, rel=0.05 if limit == 0 else 0.2)
    for changed in ("staleness.max_lag=4", "generators=2"):
        expected = run(known, *sets, changed).step_s / base.step_s
        assert run(fitted, *sets, changed).step_s / again.step_s == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("name", "groups", "finding", "takes", "seconds"),
    [
        ("trl_1.16_8_groups.json.gz", 32, "equal_rewards", "of 4 updates take", (2.42, 1.33, 1.06)),
        ("verl_0.9.1.jsonl.gz", 8, "truncated_sampler", "take", (32.4, 20.4, 11.1)),
    ],
)
def test_real_logs(
    name: str, groups: int, finding: str, takes: str, seconds: tuple[float, float, float]
) -> None:
    step_s, generation_s, update_s = seconds
    log = diagnosis.read(LOGS / name)
    assert names_of(diagnosis.diagnose(log)) <= {finding}
    sets = [*times.list_settings(log), f"learner.groups={groups}", "generator.slots=512"]
    fitted, said = times.fit_log(log, config(*sets, "learner.group_size=8"))
    parts = f"generation {generation_s} s, updates {update_s} s"
    assert f"steps {takes} {step_s} s, {parts}; assumed" in said
    for model in fitted:
        again = run(model, *sets, "learner.group_size=8")
        assert again.step_s == pytest.approx(step_s, rel=0.1) and again.lag_max == 0


def test_a_real_run_of_trl_is_predicted_from_the_log_of_another() -> None:
    """Updates of 16 groups in place of 8; both ran on a busy machine.

    A tiny model on a CPU takes twice the time for twice the completions, the last assumption."""
    other = diagnosis.read(LOGS / "trl_1.16_16_groups.json.gz")
    real = 4 * sum(other.find("step_s")[1].values()) / len(other.find("step_s")[1])
    log = diagnosis.read(LOGS / "trl_1.16_8_groups.json.gz")
    sets = [*times.list_settings(log), "learner.group_size=8", "generator.slots=512"]
    fitted, _ = times.fit_log(log, config(*sets, "learner.groups=32"))
    steps = [run(model, *sets, "learner.groups=64").step_s for model in fitted]
    assert [step / real for step in steps] == pytest.approx([0.81, 0.71, 0.94], abs=0.02)


def test_a_log_gives_times_or_one_error_with_the_metric_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"

    def simulate(more: Values, *words: str, framework: str = "verl") -> Any:
        write_jsonl(path, [row | more for row in make_rows(framework)], framework)
        arguments = ["simulate", str(ROOT / "configs" / "demo.toml"), "--from", str(path)]
        arguments += ["--more", "1", "--steps", "6", "--seeds", "2", *words]
        return CliRunner().invoke(main, arguments)

    assert "also needs tokens of a completion, mean: response_length/mean" in simulate({}).stderr
    long, waits = {"response_length/mean": 900.0}, {"timing_s/wait_for_enough_samples": 9.0}
    assert "agent_loop/generate_sequences/max" in simulate(long).stderr
    done = simulate(long | waits)  # the longest is taken for 1,350 tokens
    assert done.exit_code == 0 and f"times: {path}, by verl: steps take 30 s" in done.stdout
    assert "limit 1: " in done.stdout and "2 generators instead of 1" in done.stdout
    assert "(seeds" in done.stdout and "devices of their own" in done.stdout
    known = {"step_time": 3.0, "completions/mean_length": 20.0}
    done = simulate(known, framework="trl")
    assert done.exit_code == 2 and "or give --time train=SECONDS" in done.stderr
    done = simulate(known, "--time", "train=1", framework="trl")
    assert "generation 2 s, updates 1 s" in done.stdout and "limit 0" in done.stdout
