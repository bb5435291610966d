import json
import os
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
import tomli_w
from click.testing import CliRunner
from process_kit import ENV, ROOT, TEXTS, run_command

from asyncrl.algorithms import settings
from asyncrl.cli import main
from asyncrl.config import bundled_configs, explain, layers, load, presets, rules
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError

BARE = '[model]\npath = "m"\n\n[task]\nname = "sort"\n'
NO_DIMENSION = """
seed agent.port reward.weights generator.gpus learner.gpus learner.zero_stage learner.lr
learner.beta1 learner.beta2 learner.weight_decay learner.clip_norm learner.cosine_max lora.rank
lora.alpha generator.temperature generator.top_p generator.top_k evaluation.temperature
reward.judge.temperature watchdog.multiple placement.learner.cpus placement.learner.gpus
placement.generator.cpus placement.generator.gpus
"""
KEYS = load.list_keys()
# of the mathematics, a number without an entry is a coefficient, an exponent or a bound of a ratio
MATHEMATICS = ("advantage.", "value.", "correction.", "loss.", "reshape.", "kl.", "stop.")


def typed(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
        sys.exit(0)
    shown = capfd.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_every_key_has_a_meaning_values_a_default_a_unit_and_a_page() -> None:
    for key in KEYS:
        (shown,) = explain.explain(key)
        assert len(shown.meaning) > 10 and shown.meaning[-1] in ".)", key
        assert shown.values and shown.default, key
        assert (ROOT / shown.page).is_file(), f"{key}: {shown.page}"
    for key in KEYS:
        places = layers.map_places(Config)[key]
        (shown,) = explain.explain(key)
        if any(explain.is_number(x.field.type) for x in places) and not shown.unit:
            assert key in NO_DIMENSION.split() or key.startswith(MATHEMATICS), key
    known = set(KEYS)
    named = {key for keys in explain.KEYS_BY_UNIT.values() for key in keys.split()}
    assert named <= known, named - known
    assert set(explain.REASONS) <= known, set(explain.REASONS) - known
    assert set(explain.TAGS) == {key for key in known if not layers.map_places(Config)[key]}


def test_a_key_and_a_section_are_explained_on_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = typed(capfd, "config", "explain", "correction.hi")
    assert code == 0
    assert "only if correction.proximal = recompute or interpolate" in " ".join(out.split())
    assert "correction.bound = truncate or clip or mask" in " ".join(out.split())
    assert "tis: 2.0" in out and "docs/algorithms.md" in out
    code, out, _ = typed(capfd, "config", "explain", "staleness.max_lag", "--json")
    (shown,) = json.loads(out)["keys"]
    assert shown["unit"] == "versions" and shown["default"] == "2.0" and shown["reason"]
    assert shown["values"] == "a number of at least 0, or a table of auto, floor, most"
    assert shown["read"] == []
    code, out, _ = typed(capfd, "config", "explain", "loss.pull")
    assert "loss.surrogate = ipo or band" in out
    code, out, _ = typed(capfd, "config", "explain", "durability")
    assert code == 0 and 'durability.mode = "memory"' in out
    code, out, _ = typed(capfd, "config", "explain", "kl.reward", "--json")
    keys = {row["key"] for row in json.loads(out)["keys"]}
    assert keys == {key for key in KEYS if key.startswith("kl.reward.")}
    (shown,) = explain.explain("agent.args")
    assert "keyword arguments" in str(shown) and "[env] block" in str(shown)


@pytest.mark.parametrize(("key", "said"), TEXTS["an_unknown_key_gets_the_nearest"])
def test_an_unknown_key_gets_the_nearest(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .*") as error:
        explain.explain(key)
    assert said in str(error.value)


def test_show_names_each_values_source(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(BARE + '\n[correction]\npreset = "tis"\n\n[reward]\ndeadline_s = 3\n')
    words = ("--set", "learner.steps=7", "--set", "task.columns={answer='a'}")
    code, out, _ = typed(capfd, "config", "show", str(path), *words, "--set", "task.name=file")
    assert code == 0
    lines = out.splitlines()
    for line in TEXTS["show_names_each_values_source"]:
        assert line in lines, out
    shown = tomllib.loads(out)
    keys = layers.read_keys(load.load(path, [words[1], words[3], "task.name=file"]))
    assert shown == layers.nest(keys)
    path = tmp_path / "c.toml"
    path.write_text('method = "gmpo"\n' + BARE + '\n[loss]\nreduction = "token-mean"\n')
    origins: dict[str, str] = {}
    load.load(path, ["loss.eps_low=0.3"], None, origins)
    assert origins["loss.surrogate"] == 'method = "gmpo"'
    assert origins["loss.reduction"] == "c.toml:9"
    assert origins["loss.eps_low"] == "--set loss.eps_low=0.3" and "loss.eps_high" not in origins


def test_diff_of_configs_and_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(
        load.dump(load.load("demo", ["staleness.max_lag=5", "kl.loss.coefficient=0.1"]))
    )
    assert typed(capfd, "config", "diff", "demo", "demo") == (0, "the two configs are equal\n", "")
    code, out, _ = typed(capfd, "config", "diff", "demo", str(tmp_path / "run"))
    assert code == 1 and "staleness.max_lag: 2.0 -> 5.0\n" in out
    assert 'kl.loss.estimator: (not read) -> "k3"\n' in out and "learner.lr" not in out
    code, out, _ = typed(capfd, "config", "diff", "demo", str(tmp_path / "run"), "--json")
    found = json.loads(out)
    assert code == 1 and not found["equal"] and found["differs"]["staleness.max_lag"] == [2.0, 5.0]
    code, _, err = typed(capfd, "config", "diff", "demo", "nowhere")
    assert code == 2 and "nowhere: no such config file" in err


def complete(*words: str) -> list[str]:
    done = run_command(
        [sys.executable, "-c", "from asyncrl.cli import main; main(prog_name='asyncrl')"],
        env=ENV
        | {
            "_ASYNCRL_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("asyncrl", *words)),
            "COMP_CWORD": str(len(words)),
        },
    )
    assert not done.err, done.err
    return [line.partition(",")[2] for line in done.out.splitlines()]


@pytest.mark.parametrize(("words", "expected"), TEXTS["the_shell_completes_any_kind_of_word"])
def test_the_shell_completes_any_kind_of_word(words: tuple[str, ...], expected: list[str]) -> None:
    found = complete(*words)
    assert set(expected) <= set(found), found
    if not words[-1].startswith("staleness.on"):
        assert len(found) == len(expected), found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_of_three_shells(shell: str) -> None:
    done = run_command(
        [sys.executable, "-c", "from asyncrl.cli import main; main(prog_name='asyncrl')"],
        env=ENV | {"_ASYNCRL_COMPLETE": f"{shell}_source", "PATH": os.environ["PATH"]},
    )
    assert f"_ASYNCRL_COMPLETE={shell}_complete" in done.out, done.err


DEFAULTS = Path(__file__).parents[1] / "data" / "defaults.toml"
METHODS = DEFAULTS.with_name("method_defaults.toml")


def test_every_default_is_the_one_that_is_written_down() -> None:
    least = {"model": {"path": "m"}, "task": {"name": "sort"}}
    assert load.dump(load.build(least)) == DEFAULTS.read_text()
    found = {
        kind.__name__.lower(): {
            struct.__struct_config__.tag: {
                name: value
                for name, value in msgspec.to_builtins(struct()).items()
                if value is not None
            }
            for struct in settings.list_variants(kind)
        }
        for kind in (settings.Advantage, settings.Loss, settings.Correction)
    }
    sections = (settings.Reshape, settings.Value, settings.KLReward, settings.KLLoss, settings.Stop)
    found |= {kind.__name__.lower(): msgspec.to_builtins(kind()) for kind in sections}
    assert tomli_w.dumps(found) == METHODS.read_text()
    bare = load.convert({"model": {"path": "m"}, "task": {"name": "sort"}}, "bare.toml")
    demo = load.load("demo")
    for section in ("advantage", "correction", "loss", "kl", "stop", "staleness"):
        assert getattr(bare, section) == getattr(demo, section), section
    assert bare.staleness.max_lag == 2 and bare.correction.proximal == "behavior"


def write_header(path: Path, *sizes: int) -> Path:
    """Write the headers of weight files with `sizes` parameters each, without data."""
    path.mkdir(parents=True)
    for number, size in enumerate(sizes):
        entry = {"dtype": "BF16", "shape": [size // 10, 10], "data_offsets": [0, 2 * size]}
        header = json.dumps({"w": entry, "__metadata__": {"format": "pt"}}).encode()
        file = path / f"model-{number}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@pytest.mark.parametrize(
    ("sizes", "sets", "rate", "reason"), TEXTS["the_learning_rate_is_that_of_the_models_size"]
)
def test_the_learning_rate_is_that_of_the_models_size(
    sizes: tuple[int, ...], sets: tuple[str, ...], rate: float, reason: str, tmp_path: Path
) -> None:
    """With its reason in `config show`; a written config keeps it."""
    model = write_header(tmp_path / "model", *sizes)
    path = tmp_path / "c.toml"
    path.write_text(f"model.path = '{model}'\ntask.name = 'sort'\n")
    origins: dict[str, str] = {}
    made = load.load(path, sets, None, origins)
    assert made.learner.lr == pytest.approx(rate) and origins.get("learner.lr", "") == reason
    (tmp_path / "written.toml").write_text(load.dump(made))
    assert load.load(tmp_path / "written.toml") == made
    shown = CliRunner().invoke(main, ["config", "show", str(path), *(f"--set={x}" for x in sets)])
    assert f"lr = {made.learner.lr!r}  # {reason or 'default'}" in shown.stdout


def test_a_tiny_models_rate_on_a_large_one_is_warned_of(tmp_path: Path) -> None:
    model = write_header(tmp_path / "model", 134_515_000)
    path = tmp_path / "c.toml"
    path.write_text(f"model.path = '{model}'\ntask.name = 'sort'\n")
    assert not rules.find_warnings(load.load(path))
    (warning,) = rules.find_warnings(load.load(path, ["learner.lr=2e-4"]))
    usual = "1e-05 is the default for 134,515,000 parameters"
    assert warning == f"learner.lr: 0.0002 is that of a tiny model; {usual}"
    of_hub = load.build({"model": {"path": "hf://org/name"}, "task": {"name": "sort"}})
    assert of_hub.learner.lr == 1e-6
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert presets.count_parameters(tmp_path) == 0


@pytest.mark.parametrize("name", bundled_configs.list_names())
def test_every_bundled_config_gives_its_rate(name: str) -> None:
    origins: dict[str, str] = {}
    load.load(name, [], None, origins)
    assert not origins["learner.lr"].startswith("default")
