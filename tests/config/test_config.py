"""Configs as a user types them: every mistake is one line, where, what and what to do."""

import json
import math
import re
import sys
import time
from pathlib import Path

import pytest
from process_kit import ROOT, run_command

from asyncrl.algorithms import settings
from asyncrl.config import bundled_configs, explain, load
from asyncrl.contract.errors import ConfigError
from asyncrl.records import metrics

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
BASE = 'model.path = "m"\ntask.name = "sort"\n'


def written(tmp_path: Path, more: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(BASE + more)
    return path


MISTAKES = [
    (
        "[staleness]\nmax_lagg = 4\n",
        "c.toml:4: staleness.max_lagg: unknown key; did you mean staleness.max_lag?",
    ),
    (
        "[generator]\nmax_lag = 4\n",
        "c.toml:4: generator.max_lag: unknown key; did you mean staleness.max_lag?",
    ),
    (
        "[actor.optim]\nfused = true\ngrad_clip = 1.0\n",
        "c.toml:5: actor.optim.grad_clip: is called learner.clip_norm here; write that",
    ),
    (
        "[orchestrator]\nmax_off_policy_steps = 8\n",
        "c.toml:4: orchestrator.max_off_policy_steps: is called staleness.max_lag here; write that",
    ),
    ("[learner]\nlr = -1.0\n", "c.toml:4: learner.lr"),
    ('[learner]\nlr = "fast"\n', "c.toml:4: learner.lr"),
    ('[loss]\nsurrogate = "pppo"\n', "choose one of"),
    ("staleness = 3\n", "c.toml:3: staleness: is a section, not a value"),
    ("[staleness]\nmax_lag = 1.5\n", "staleness.max_lag: 1.5 must be a whole number or inf"),
    (
        "[staleness]\nmax_lag = 2\ninject = 4\n",
        "staleness.inject: injects up to 4 versions, above staleness.max_lag = 2",
    ),
    ("[learner]\ngroups = 2\nminibatches = 3\n", "3 minibatches of 2 groups"),
    ("[learner]\ngroup_size = 1\n", "leaves rloo nothing to compare with"),
    (
        "[staleness]\nmax_lag = 3\n[correction]\nproximal = 'version'\n",
        "weights.slots: 4; correction.proximal = version needs the weights of max_lag + 2 = 5 "
        "versions; raise weights.slots",
    ),
    ("[generator]\nmax_new_tokens = 64\ncontext = 64\n", "leave no room for a prompt"),
    ("[stop]\nkl_max = 0.1\n", "there is nothing to stop"),
    (
        "[stop]\nkl_max = 0.1\nevery = 'epoch'\n[learner]\nminibatches = 2\n",
        "stop.every: epoch checks before the second pass over a batch, and learner.epochs is 1",
    ),
    ("[[[", "not valid TOML"),
]


@pytest.mark.parametrize(("more", "said"), MISTAKES, ids=[m[1][:40] for m in MISTAKES])
def test_mistakes_in_a_file(more: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        load.load(written(tmp_path, more))
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (
            "learner.lrr=1",
            "--set learner.lrr=1: learner.lrr: unknown key; did you mean learner.lr?",
        ),
        ("learner.lr", "write key.path=value"),
        ("learner.steps=-1", "--set learner.steps=-1: learner.steps"),
        ("seed.x=1", "seed: Expected `int`"),
        ("learner.beta2=1", "choose a number of at least 0 and below 1"),
        (f"seed={2**63}", "seed: Expected `int` <= 9223372036854775807"),
        (
            "model.device=tpu",
            "model.device: 'tpu' is not a device; choose one of auto, cpu, cuda, c",
        ),
    ],
)
def test_mistakes_on_the_command_line(item: str, said: str, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "run",
        str(written(tmp_path, "")),
        "--set",
        f"runs={str(tmp_path / 'runs')!r}",
        "--set",
        item,
    ]
    done = run_command(argv)
    assert done.code == 2, done.err
    assert said in done.err and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1 and not (tmp_path / "runs").exists()


OTHERS = {  # as their own examples are written: name of the file, its text, key -> ours
    "prime-rl": (
        "rl.toml",
        """max_steps = 20\n[model]\nname = "m"\n[orchestrator]\ngroup_size = 16\n
        [[orchestrator.train.env]]\nname = "e"\n[trainer.optim]\nlr = 3e-6\n[ckpt]\n""",
        (
            "model.name is model.path",
            "max_steps is learner.steps",
            "trainer.optim.lr is learner.lr",
        ),
    ),
    "trl": (
        "grpo.yaml",
        """model_name_or_path: m\ndataset_configs:\n- all\nlearning_rate: 2.0e-05
num_generations: 7\nadam_beta2: 0.9\nloss_type: cispo\nseed: 42\n""",
        (
            "num_generations is learner.group_size",
            "adam_beta2 is learner.beta2",
            "loss_type is loss.surrogate = cispo and",
        ),
    ),
    "verl": (
        "run.sh",
        """set -x\npython3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo \\\n    actor_rollout_ref.model.path=$MODEL \\
    +actor_rollout_ref.rollout.n=5 $@\n""",
        ("actor_rollout_ref.rollout.n is learner.group_size", "advantage.name = rloo;"),
    ),
    "areal": (
        "gsm8k.yaml",
        """rollout:\n  experiment_name: ${name}\n  max_head_offpolicyness: 2
gconfig: {n_samples: 4}\nactor:\n  eps_clip: 0.4\n""",
        ("rollout.max_head_offpolicyness is staleness.max_lag", "actor.eps_clip is loss.eps_low"),
    ),
    "slime": (
        "run.sh",
        """ROLLOUT_ARGS=(\n   --rollout-batch-size 32\n   --n-samples-per-prompt 8\n)\n""",
        ("--rollout-batch-size is learner.groups",),
    ),
    "openrlhf": (
        "run.sh",
        "python3 -m x --actor.adam.lr 5e-7 \\\n --rollout.batch_size 128\n",
        ("--actor.adam.lr is learner.lr",),
    ),
    "nemo-rl": (
        "grpo.yaml",
        "grpo:\n  num_prompts_per_step: 32\npolicy:\n  model_name: m\n",
        ("policy.model_name is model.path", "grpo.num_prompts_per_step is learner.groups"),
    ),
    "skyrl": (
        "ppo.yaml",
        """trainer:\n  train_batch_size: 8\n  policy: {model: {path: m}}
  algorithm: {policy_loss_type: gspo}\n""",
        ("trainer.policy.model.path is model.path", "loss.surrogate = gspo;"),
    ),
}


@pytest.mark.parametrize("system", OTHERS)
def test_a_config_of_another_system_is_recognized(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text, pairs = OTHERS[system]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load.load(path)
    said = str(error.value)
    title = bundled_configs.load_systems()[system]["title"]
    assert said.startswith(f"{path}: is a config of {title}, not of asyncrl; here ")
    assert all(pair in said for pair in pairs) and "\n" not in said
    assert said.endswith(f"docs/coming-from.md#{system} maps the other keys")
    headings = re.findall(r"(?m)^## (.+)$", (ROOT / "docs" / "coming-from.md").read_text())
    assert system in {heading.lower() for heading in headings}
    assert said.count(" is ") <= bundled_configs.MOST_MAPPED + 1
    monkeypatch.setitem(sys.modules, "yaml", None)  # not installed
    with pytest.raises(ConfigError, match="is not valid TOML" if "yaml" in name else "is a config"):
        load.load(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_of_ours_with_a_misspelled_key_is_ours(path: Path, tmp_path: Path) -> None:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if match := re.match(r"(\w+)( = .*[^\[{,])$", line):
            text = "\n".join([*lines[:number], f"{match[1]}_typo{match[2]}", *lines[number + 1 :]])
            (tmp_path / "c.toml").write_text(text)
            with pytest.raises(ConfigError) as error:
                load.load(tmp_path / "c.toml")
            assert "is a config of" not in str(error.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_resolved_config_repeats_itself(path: Path, tmp_path: Path) -> None:
    config = load.load(path)
    again = tmp_path / "resolved.toml"
    again.write_text(load.dump(config))
    assert load.load(again) == config


ORDERED = [  # settings that need a sample's tokens in order, and how they are told
    ({"advantage": {"name": "gae"}}, ["advantage.name = gae"]),
    ({"advantage": {"name": "reinforce_pp", "gamma": 0.5}}, ["advantage.gamma = 0.5"]),
    (
        {"advantage": {"name": "reinforce_pp"}, "kl": {"reward": {"coefficient": 0.25}}},
        ["kl.reward.coefficient = 0.25 with reinforce_pp"],
    ),
    ({"advantage": {"name": "otb"}}, ["advantage.name = otb"]),
    ({"loss": {"surrogate": "minpro"}}, ["loss.surrogate = minpro"]),
    (
        {"kl": {"loss": {"coefficient": 0.25, "off_policy": "prefix"}}},
        ["kl.loss.off_policy = prefix"],
    ),
    (
        {"kl": {"loss": {"coefficient": 0.25, "off_policy": "prefix_full"}}},
        ["kl.loss.off_policy = prefix_full"],
    ),
    ({"advantage": {"name": "reinforce_pp"}}, []),
    ({"kl": {"reward": {"coefficient": 0.25}}}, []),
    ({"kl": {"loss": {"coefficient": 0.25, "off_policy": "ratio"}}}, []),
]


@pytest.mark.parametrize(("more", "keys"), ORDERED)
def test_sessions_that_fork_have_no_order_for_some_methods(
    more: dict[str, dict[str, object]], keys: list[str]
) -> None:
    raw = {"model": {"path": "m"}, "task": {"name": "sort"}, **more}
    assert settings.list_ordered_settings(load.build(raw)) == keys


def test_every_key_says_what_it_means() -> None:
    """The schema that editors show: every key is in it, with its default."""
    schema = json.loads((ROOT / "configs" / "schema.json").read_text())
    # stale: asyncrl config schema > configs/schema.json
    assert schema == json.loads(json.dumps(load.build_schema()))
    config_keys = load.list_keys()
    named = {p for d in schema["$defs"].values() for p in d["properties"]}
    assert "method" in schema["$defs"]["Config"]["properties"]
    assert {k.rsplit(".", 1)[-1] for k in config_keys} <= named


def test_presets_fill_only_what_is_not_given(tmp_path: Path) -> None:
    c = load.load(written(tmp_path, '[correction]\npreset = "tis"\nhi = 3.0\n')).correction
    assert (c.level, c.bound, c.hi) == ("token", "truncate", 3.0)


def test_a_preset_on_the_command_line_acts_on_a_resolved_config(tmp_path: Path) -> None:
    """As `asyncrl run --resume --set correction.preset=mis` needs it: the file gives every key."""
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(
        load.dump(
            load.load(written(tmp_path, '[correction]\nproximal = "recompute"\nlevel = "none"\n'))
        )
    )
    c = load.load(resolved, ["correction.preset=mis", "correction.hi=3.0"]).correction
    got = (c.level, c.bound, c.hi, c.reject, c.veto)
    assert got == ("token", "truncate", 3.0, "ratio", "ratio")
    resolved.write_text(load.dump(load.load(resolved, ["correction.preset=mis"])))
    c = load.load(resolved, ["correction.preset=none"]).correction
    assert (c.level, c.bound, c.reject, c.veto) == ("none", "truncate", "none", "none")


def test_the_page_of_metrics_names_each_once_and_first_those_that_exist() -> None:
    first, _, rest = metrics.format_markdown().partition("\n## Rewards and completions\n")
    names = re.findall(r"(?m)^- `(\S+)`[ :]", rest)
    plain = {name for name in metrics.METRICS if not name.startswith(("by_", "ledger/"))}
    assert plain <= set(names) and len(names) == len(set(names))
    looked_at = re.findall(r"(?m)^\| `(\S+)` \|", first)
    assert len(looked_at) > 10 and set(looked_at) <= plain and "below 0.1" in first


def test_the_configuration_reference_is_whole() -> None:
    """Every key is there once, in a row of five cells, with its meaning and its default."""
    page = explain.render_reference()
    rows = [re.split(r"(?<!\\)\|", line) for line in page.splitlines() if line.startswith("| `")]
    assert [cells[1].strip(" `") for cells in rows] == ["method", *load.list_keys()]
    assert all(len(cells) == 7 and cells[2].strip() and cells[4].strip() for cells in rows)
    lengths = {cells[1].strip(" `"): cells for cells in rows}
    assert "(tokens)" in lengths["generator.max_new_tokens"][3]
    assert "truncated = soft" in lengths["advantage.truncation_ramp"][5]


def test_an_unknown_metric_is_refused(tmp_path: Path) -> None:
    writer = metrics.MetricsWriter(tmp_path)
    with pytest.raises(Exception, match="no/such"):
        writer.write(0, {"reward/mean": 1.0, "no/such": 2.0})
    writer.write(1, {"reward/mean": 0.5, "lag/mean": 1.0}, histograms={"lag/samples": [0, 0, 2]})
    writer.close()
    (row,) = metrics.read(tmp_path)
    assert row["reward/mean"] == 0.5 and row["lag/samples"] == {"0": 2, "2": 1}


def test_metrics_are_written_without_tensorboardx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    writer = metrics.MetricsWriter(tmp_path)
    writer.write(1, {"reward/mean": 0.5}, histograms={"lag/samples": [0, 2]})
    writer.close()
    (row,) = metrics.read(tmp_path)
    assert row["reward/mean"] == 0.5 and not (tmp_path / "tensorboard").exists()
    (note,) = capsys.readouterr().err.splitlines()
    assert "tensorboard can no longer be written" in note and "tensorboardX" in note


def test_tensorboard_reads_what_is_written_at_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    began = time.time()
    writer = metrics.MetricsWriter(tmp_path)
    writer.write(1, {"reward/mean": 0.5, "lag/mean": 1.0}, histograms={"lag/samples": [0, 0, 2]})
    writer.write(3, {"lag/mean": 2.0}, 9.0, {"lag/samples": []})
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    writer.close()
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(1, 0.5)]
    assert [(e.step, e.value) for e in board.Scalars("lag/mean")] == [(1, 1.0), (3, 2.0)]
    assert all(began <= e.wall_time <= time.time() for e in board.Scalars("lag/mean"))
    (event,) = board.Histograms("lag/samples")
    found = event.histogram_value
    assert (event.step, found.min, found.max, found.num) == (1, 0.0, 2.0, 3.0)
    assert (found.sum, found.sum_squares) == (2.0, 4.0)
    # up to each limit, from the one before; TensorBoard draws none without an empty first
    got = list(zip(found.bucket_limit, found.bucket, strict=True))
    assert got == [(-0.5, 0.0), (0.5, 2.0), (1.5, 0.0), (2.5, 1.0)]
    # a step's numbers travel together: one event each was most of what they cost the buffer
    (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    assert [len(e.summary.value) for e in EventFileLoader(str(path)).Load()] == [0, 3, 1]
    again = metrics.MetricsWriter(tmp_path)  # another life: what was written stays
    again.close()
    assert path.stat().st_size > 100


def test_tensorboard_shows_the_steps_that_a_crash_repeats_once(tmp_path: Path) -> None:
    """A learner of the same buffer goes back to step 2, then everything does to step 3.

    The evaluation of version 2 is not made again, and version 4 of the second branch replaces the
    one of the first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def write(writer: metrics.MetricsWriter, steps: range, branch: float) -> None:
        for step in steps:
            if step in (2, 4):
                writer.write(step, {"eval/heldout": branch, "eval/heldout_n": 8.0})
            writer.write(step, {"reward/mean": branch + step}, 0.0, {"lag/samples": [0, step]})

    first = metrics.MetricsWriter(tmp_path)
    write(first, range(6), 10.0)
    first.write(2, {"reward/mean": 22.0}, 0.0, {"lag/samples": [1.0]})
    write(first, range(3, 6), 20.0)
    first.close()
    second = metrics.MetricsWriter(tmp_path)
    write(second, range(3, 7), 30.0)
    second.close()
    rows = metrics.read(tmp_path)
    # by default it keeps one histogram of a name
    everything = {"scalars": 0, "histograms": 0}
    board = EventAccumulator(str(tmp_path / "tensorboard"), everything).Reload()
    for name in ("reward/mean", "eval/heldout"):
        shown = [(event.step, event.value) for event in board.Scalars(name)]
        assert shown == [(row["step"], row[name]) for row in rows if name in row], name
    assert [e.value for e in board.Scalars("reward/mean")] == [10, 11, 22, 33, 34, 35, 36]
    assert [e.value for e in board.Scalars("eval/heldout")] == [10, 30]
    assert [e.step for e in board.Histograms("lag/samples")] == [*range(7)]
    assert board.Histograms("lag/samples")[2].histogram_value.num == 1


def test_what_is_not_finite_has_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = metrics.MetricsWriter(tmp_path)
    writer.write(1, {"reward/mean": 0.5, "kl/moved": math.inf, "loss/policy": math.nan})
    writer.write(2, {"reward/mean": 0.5, "kl/moved": -math.inf})
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "Infinity" not in text and "NaN" not in text
    assert [r["reward/mean"] for r in metrics.read(tmp_path)] == [0.5, 0.5]
    assert capsys.readouterr().err.splitlines() == [
        "step 1: not finite, left out of the metrics: kl/moved, loss/policy"
    ], "once a name"


def test_the_layers_hold() -> None:
    """The import contracts of pyproject.toml: mathematics, wire, buffer and parts are apart."""
    done = run_command(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    )
    assert done.code == 0, done.out[-2000:] + done.err[-2000:]
    assert "0 broken" in done.out


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("name=R", "R"),
        ("name= two words, and {more} ", "two words, and {more}"),
        ("name=2026", "2026"),
        ("name=true", "true"),
        ("name='R'", "R"),
        ("name=", ""),
    ],
)
def test_text_needs_no_quotes_on_the_command_line(item: str, value: str) -> None:
    assert load.load("demo", [item]).name == value


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ('name="R', "is not a TOML value"),
        ("learner.lr=1 2", "is not a TOML value"),
        ("generator.engine=v llm", "is not a TOML value"),
        ("name=['R']", "name: Expected `str`, got `array`"),
        ("lerner.lr=1", "--set lerner.lr=1: lerner: unknown key; did you mean learner?"),
    ],
)
def test_what_is_neither_text_nor_toml_is_refused(item: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load.load("demo", [item])
    assert said in str(error.value)


def test_text_that_only_some_methods_take_is_found() -> None:
    for key in ("model.path", "correction.function"):
        assert load.apply({}, f"{key}=a b") == key
    for key in ("learner.lr", "generator.engine", "kl", "no.such.key", "staleness.max_lag"):
        with pytest.raises(ConfigError):
            load.apply({}, f"{key}=a b")
