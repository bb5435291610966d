"""`asyncrl replay` of real runs: the same bits, differences, cuts, damage, refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from click.testing import CliRunner
from process_kit import Ended, as_options

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.contract.versions import Label
from asyncrl.experiments.replay import replay as replaying
from asyncrl.models.policy import compute_weights_digest, count_flat_bytes, load_policy
from asyncrl.records import metrics, stream
from asyncrl.records.stream import RecordedStep, RecordingHeader, RecordingWriter

Run = Callable[..., dict[str, Any]]
OWN = {"loss": "own_methods:ppo", "advantage": "own_methods:rloo"}
STREAM = ("record.stream=true", "record.weights_every=2", "staleness.max_lag=2", "generators=2")


def typed(*words: object) -> Ended:
    """`asyncrl replay ...` as typed, in this process."""
    done = CliRunner().invoke(main, ["replay", *map(str, words)])
    return Ended(CompletedProcess(words, done.exit_code, done.stdout, done.stderr))


@pytest.fixture(scope="module")
def recorded(forked: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An asynchronous run whose learner was killed in its fourth batch: two lives recorded."""
    return forked(tmp_path_factory.mktemp("replay") / "run", *STREAM, die={"learner": 4})


@pytest.fixture(scope="module")
def cut(forked: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run all of whose processes were killed when three batches were recorded."""
    return Path(forked(tmp_path_factory.mktemp("replay") / "cut", *STREAM, stop=3)["run_dir"])


def train_rows(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {r["step"]: r for r in rows if "loss/policy" in r}


def test_by_sampling_version_a_replay_knows_the_weights_that_it_computed_itself(
    recorded: dict[str, Any],
) -> None:
    sets = ["correction.proximal=version", "loss.surrogate=decoupled_ppo", "weights.slots=4"]
    done = typed(recorded["run_dir"], "--json", *as_options(sets))
    rows = train_rows(metrics.read(Path(done.json["replay_dir"])))
    # a token of the second batch was sampled by version 0 or by the weights that train it
    assert [rows[n]["is/fallback_share"] for n in (0, 1)] == [0, 0]
    replayed = replaying.Replay(Path(recorded["run_dir"]), sets)
    core = replayed.make_core(replayed.config)
    digests = []
    for _ in range(5):
        digests.append(replayed.keep_weights(core))
        next(core.model.hf.parameters()).data.add_(1.0)
    held = [len(core.measure.read_weights(Label(1, 0), digest)) for digest in digests]
    assert held == [0, *[count_flat_bytes(core.layout)] * 4]


def test_an_average_of_versions_needs_all_of_them(recorded: dict[str, Any]) -> None:
    sets = ("--set", "correction.proximal=ema", "--set", "loss.surrogate=decoupled_ppo")
    done = typed(recorded["run_dir"], "--until", 2, "--json", *sets)
    assert not done.json["reproduced"] and done.json["to"] == 2
    refused = typed(recorded["run_dir"], "--from", 2, *sets)
    assert refused.code and "or replay from version 0" in refused.err


def test_nothing_changed_gives_the_same_bits(recorded: dict[str, Any]) -> None:
    done = typed(recorded["run_dir"], "--json")
    found = done.json
    assert done.code == 0 and found["reproduced"] and found["equal"]
    assert found["cut"] == found["warning"] == ""
    assert recorded["deaths"] == ["learner"] and len(stream.read(recorded["run_dir"]).lives) == 2
    assert found["weights_digest"] == recorded["digest"] and found["to"] == 6
    was, now = train_rows(recorded["rows"]), train_rows(metrics.read(Path(found["replay_dir"])))
    assert was.keys() == now.keys() == set(range(6))
    for n, row in now.items():
        assert {k: row[k] for k in row if k != "t"} == {k: was[n][k] for k in row if k != "t"}
    rows = metrics.read(Path(found["replay_dir"]))
    assert [row["step"] for row in rows if "eval/heldout" in row] == [0, 3, 6]
    # five answers each; the batches differ
    replayed, expected = (found[side]["heldout_end"] for side in ("replayed", "recorded"))
    assert 0 < replayed == pytest.approx(expected, abs=0.2)


def test_a_function_of_the_method_gives_the_same_bits(recorded: dict[str, Any]) -> None:
    words = [w for key in ("loss", "advantage") for w in ("--set", f"{key}.function={OWN[key]}")]
    found = typed(recorded["run_dir"], "--json", *words).json
    assert found["weights_digest"] == recorded["digest"]
    rows = train_rows(metrics.read(Path(found["replay_dir"])))
    assert [rows[n]["loss/function/version"] for n in range(6)] == [*range(6)]


def test_a_shorter_replay_compares_the_same_version_on_the_same_prompts(
    recorded: dict[str, Any],
) -> None:
    """The run evaluated the versions 0, 3 and 6; the reward at 6 is of more prompts."""
    heldout = {r["step"]: r["eval/heldout"] for r in recorded["rows"] if "eval/heldout" in r}
    for until in (3, 4, 5):
        found = typed(recorded["run_dir"], "--json", "--until", until).json
        assert found["reproduced"] and found["heldout_version"] == 3
        for side in ("recorded", "replayed"):
            ends = found[side]["heldout_start"], found[side]["heldout_end"]
            assert ends == (heldout[0], heldout[3])
        text = replaying.format_replay(found)
        assert "heldout_end (version 3)" in text and ("no version from 4 to" in text) == (until > 3)
    early = typed(recorded["run_dir"], "--json", "--no-eval", "--until", 2).json
    assert early["reproduced"] and early["heldout_version"] is None
    assert early["recorded"]["heldout_end"] is None is early["replayed"]["heldout_end"]


def test_a_change_is_shown_on_the_same_data(recorded: dict[str, Any]) -> None:
    sets = "loss.surrogate=vanilla learner.minibatches=2 stop.kl_max=1e-9 learner.lr=1e-2"
    sets += " kl.preset=grpo kl.loss.coefficient=0.5"
    done = typed(recorded["run_dir"], "--no-eval", *as_options(sets.split()))
    assert done.code == 0 and "loss.surrogate: ppo | vanilla" in done.out
    assert "data would have changed too" in done.out
    where = Path(done.err.split("report: ")[1].strip()).parent
    found = json.loads((where / "replay.json").read_text())
    assert found["reproduced"] is None and not found["equal"]
    assert found["first_difference"]["step"] == 0 and found["first_other_weights"] == 1
    was, now = train_rows(recorded["rows"]), train_rows(metrics.read(where))
    # not the recorded data
    assert [now[n]["reward/mean"] for n in range(6)] == [was[n]["reward/mean"] for n in range(6)]
    # one step of two, then over the budget, in every batch
    assert now[5]["optim/early_stops"] == 6 and was[5]["optim/early_stops"] == 0
    assert now[0]["kl/loss_beta"] == 0.5 and now[5]["loss/kl"] > 0 and was[0]["kl/loss_beta"] == 0
    page = (where / "report.html").read_text()
    titles = ("Gradient norm", "Effective sample size", "KL from behavior to target")
    assert all(title in page for title in (*titles, 'id="replay"'))


def test_a_rate_of_zero_moves_nothing(
    recorded: dict[str, Any], small_model: Path, tmp_path: Path
) -> None:
    words = ["--json", "--no-eval", "--set", "learner.lr=0.0", "--until", 4]
    found = typed(recorded["run_dir"], *words, "--out", tmp_path / "still").json
    assert found["weights_digest"] == compute_weights_digest(load_policy(small_model, device="cpu"))
    assert found["to"] == 4
    was, now = train_rows(recorded["rows"]), train_rows(metrics.read(tmp_path / "still"))
    assert now[0]["kl/behavior_target_k3"] == was[0]["kl/behavior_target_k3"]
    assert now[3]["kl/behavior_target_k3"] > 10 * now[0]["kl/behavior_target_k3"]


def test_from_middle_weights(recorded: dict[str, Any]) -> None:
    found = typed(recorded["run_dir"], "--json", "--no-eval", "--from", 4).json
    assert found["reproduced"] and (found["from"], found["to"]) == (4, 6)
    assert found["weights_digest"] == recorded["digest"]
    wrong = typed(recorded["run_dir"], "--from", 3)
    assert wrong.code == 2
    assert "no weights of version 3 were recorded; recorded versions: 0, 2, 4, 6" in wrong.err


def test_a_recording_cut_short_replays_up_to_the_cut(cut: Path, tmp_path: Path) -> None:
    end = stream.read(cut).end
    assert 3 <= end < 6
    whole = typed(cut, "--no-eval", "--json")
    assert whole.json["reproduced"] and whole.json["to"] == end
    assert f"has {end} of 6 batches: the run ended there" in whole.json["cut"]
    assert whole.json["cut"] in whole.err
    shutil.copytree(cut, tmp_path / "torn")
    log = stream.list_logs(tmp_path / "torn")[1]
    data = log.read_bytes()
    log.write_bytes(data[:-7])
    torn = typed(tmp_path / "torn", "--no-eval", "--json").json
    assert torn["reproduced"] and torn["to"] == end - 1
    assert "ended while it wrote the next record" in torn["cut"]
    log.write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
    damaged = typed(tmp_path / "torn")
    assert damaged.code == 5 and f"damaged at byte 0 of {len(data)}" in damaged.err


def test_a_run_that_went_on_with_other_settings(cut: Path, forked: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "on"
    shutil.copytree(cut, run_dir)
    (run_dir / "run_id").write_text("0123456789ab")
    config = run_dir / "config.toml"
    sets = ["learner.lr=1e-2", "kl.loss.coefficient=0.05", "kl.preset=grpo"]
    config.write_text(load.dump(load.load(config, sets)))
    done = forked(run_dir, *STREAM)
    found = typed(run_dir, "--json", "--no-eval").json
    first, second = (life for _, life in stream.read(run_dir).lives)
    assert "lr = 0.003" in first.config and "lr = 0.01" in second.config
    assert found["reproduced"] and found["to"] == 6 and found["weights_digest"] == done["digest"]
    assert train_rows(done["rows"])[5]["kl/loss_beta"] == 0.05
    assert train_rows(done["rows"])[0]["kl/loss_beta"] == 0
    # a value head from nothing, over both lives
    other = typed(run_dir, "--json", "--no-eval", "--set", "advantage.name=gae").json
    assert not other["equal"] and other["to"] == 6 and not other["failed"]


REFUSED = [
    (("--set", "generator.temperature=0.5"), "generator.temperature changes what is sampled"),
    (("--set", "learner.steps=3"), "cannot change learner.steps"),
    (("--set", "staleness.max_lag=1"), "a replay can mask or downweight"),
    (("--set", "advantage.name=remax"), "only remax has a greedy completion"),
    (("--set", "loss.surogate=ppo"), "did you mean loss.surrogate?"),
    (("--until", "0"), "0 is not in the range"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[r[1][:30] for r in REFUSED])
def test_what_a_replay_cannot_change(
    words: tuple[str, ...], says: str, recorded: dict[str, Any]
) -> None:
    done = typed(recorded["run_dir"], *words)
    assert done.code == 2 and says in done.err and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_no_recording_names_the_option(tmp_path: Path) -> None:
    assert "no run directory" in typed(tmp_path).err
    (tmp_path / "config.toml").write_text("")
    done = typed(tmp_path)
    assert done.code == 2 and "--set record.stream=true" in done.err


def test_a_preset_replaces_what_the_resolved_config_had_filled_in(recorded: dict[str, Any]) -> None:
    text = (recorded["run_dir"] / "config.toml").read_text()
    first = replaying.resolve(text, ["correction.preset=tis", "correction.proximal=recompute"], "c")
    assert (first.correction.bound, first.correction.hi) == ("truncate", 2.0)
    after = replaying.resolve(load.dump(first), ["correction.preset=icepop"], "c").correction
    assert (after.bound, after.lo, after.hi) == ("mask", 0.5, 5.0)


def test_the_bound_on_the_size_holds(recorded: dict[str, Any], tmp_path: Path) -> None:
    steps = list(stream.read(recorded["run_dir"]).read_steps(0, 6))
    (tmp_path / "config.toml").write_text("")
    log = RecordingWriter(tmp_path, RecordingHeader(stream.FORMAT, 1, 0, "", ""), 0, 8000)
    kept = [log.add(step.batch, step.metrics, step.digest) for step in steps]
    log.close()
    assert kept[0] and not kept[-1] and sorted(kept, reverse=True) == kept
    assert stream.measure_size(tmp_path) <= 8000
    read = stream.read(tmp_path)
    assert read.full and read.end == sum(kept)
    assert "record.stream_mib" in read.explain_missing_part(6)
    # a resumed run with a larger bound: its batches cannot be reached
    later = RecordingWriter(tmp_path, RecordingHeader(stream.FORMAT, 2, 5, "", ""), 0, 10**9)
    assert later.add(steps[5].batch, steps[5].metrics, steps[5].digest)
    later.close()
    read = stream.read(tmp_path)
    assert read.end == sum(kept) and len(read.lives) == 1
    assert f"batch {read.end} was not recorded" in read.explain_missing_part(6)
    again = read.read_step(0)
    assert isinstance(again, RecordedStep) and again == steps[0]
    assert all(s.text == "" for s in again.batch.samples)
