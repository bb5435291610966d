"""Configs as a user types them: every mistake is one line, where, what and what to do."""

import json
import math
import re
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithms_kit import D, batch, config, theta
from click.testing import CliRunner
from process_kit import ROOT, TEXTS, run_cli, run_command

from asyncrl.algorithms import loss as sl
from asyncrl.algorithms import settings
from asyncrl.algorithms.batch import LossBatch
from asyncrl.cli import main
from asyncrl.config import bundled_configs, explain, layers, load, rules
from asyncrl.config.methods import METHODS
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.compare import arms
from asyncrl.records import metrics

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
BASE = 'model.path = "m"\ntask.name = "sort"\n'


def written(tmp_path: Path, more: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(BASE + more)
    return path


@pytest.mark.parametrize(("more", "said"), TEXTS["mistakes"])
def test_mistakes_in_a_file(more: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        load.load(written(tmp_path, more))
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(("item", "said"), TEXTS["items"])
def test_mistakes_on_the_command_line(item: str, said: str, tmp_path: Path) -> None:
    sets = (f"runs={str(tmp_path / 'runs')!r}", item)
    done = run_cli("run", str(written(tmp_path, "")), sets=sets)
    assert done.code == 2, done.err
    assert said in done.err and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("system", TEXTS["others"])
def test_a_config_of_another_system_is_recognized(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text, pairs = TEXTS["others"][system].values()
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


@pytest.mark.parametrize(("more", "keys"), TEXTS["ordered"])
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
    """Of a resolved config, as `asyncrl run --resume --set correction.preset=mis` needs it, all."""
    c = load.load(written(tmp_path, '[correction]\npreset = "tis"\nhi = 3.0\n')).correction
    assert (c.level, c.bound, c.hi) == ("token", "truncate", 3.0)
    resolved = tmp_path / "resolved.toml"
    plain = written(tmp_path, '[correction]\nproximal = "recompute"\nlevel = "none"\n')
    resolved.write_text(load.dump(load.load(plain)))
    c = load.load(resolved, ["correction.preset=mis", "correction.hi=3.0"]).correction
    got = (c.level, c.bound, c.hi, c.reject, c.veto)
    assert got == ("token", "truncate", 3.0, "ratio", "ratio")
    resolved.write_text(load.dump(load.load(resolved, ["correction.preset=mis"])))
    c = load.load(resolved, ["correction.preset=none"]).correction
    assert (c.level, c.bound, c.reject, c.veto) == ("none", "truncate", "none", "none")


def test_the_pages_of_metrics_and_of_keys_name_each_once() -> None:
    first, _, rest = metrics.format_markdown().partition("\n## Rewards and completions\n")
    names = re.findall(r"(?m)^- `(\S+)`[ :]", rest)
    plain = {name for name in metrics.METRICS if not name.startswith(("by_", "ledger/"))}
    assert plain <= set(names) and len(names) == len(set(names))
    listed = metrics.METRICS | metrics.FOR_MANY | metrics.PATTERNS
    families = {family for section in metrics.SECTIONS.values() for family in section}
    assert {name.partition("/")[0] for name in listed} <= families
    looked_at = re.findall(r"(?m)^\| `(\S+)` \|", first)
    assert len(looked_at) > 10 and set(looked_at) <= plain and "below 0.1" in first
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


def test_text_needs_no_quotes_on_the_command_line() -> None:
    for text in ("R", " two words, and {more} ", "2026", "true", "'R'", ""):
        assert load.load("demo", [f"name={text}"]).name == text.strip(" '")
    for key in ("model.path", "correction.function"):
        assert load.apply({}, f"{key}=a b") == key, "text that only some methods take"
    for key in ("learner.lr", "generator.engine", "kl", "no.such.key", "staleness.max_lag"):
        with pytest.raises(ConfigError):
            load.apply({}, f"{key}=a b")


@pytest.mark.parametrize(("item", "said"), TEXTS["what_is_neither_text_nor_toml_is_refused"])
def test_what_is_neither_text_nor_toml_is_refused(item: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load.load("demo", [item])
    assert said in str(error.value)


@pytest.mark.parametrize(("text", "said"), TEXTS["unread"])
def test_an_unread_key_is_refused_at_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        load.load(path)
    line = len(BASE.splitlines()) + len(text.splitlines())
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_the_order_of_items_in_one_command_does_not_matter(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    both = ["loss.surrogate=dppo", "loss.dppo_threshold=0.1"]
    assert load.load(path, both) == load.load(path, both[::-1])
    with pytest.raises(ConfigError, match=r"--set loss\.pull=0\.1: loss\.pull: belongs to"):
        load.load(path, ["loss.surrogate=dppo", "loss.pull=0.1"])
    # an arm drops what an earlier item gave
    assert load.load(path, [*both, "loss.surrogate=vanilla"]).loss == settings.VanillaLoss()


def test_a_later_method_drops_the_keys_of_the_one_before(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[loss]\nsurrogate = "dppo"\ndppo_threshold = 0.1\nentropy = 0.01\n'
        '[correction]\nproximal = "recompute"\nreject = "ratio"\nreject2 = "k2"\n'
        'reject2_hi = 0.1\n[staleness]\non_exceed = "downweight"\nhalf_life = 3.0\n',
    )
    noted: list[str] = []
    sets = ["loss.surrogate=ppo", "correction.reject=none", "staleness.on_exceed=pace"]
    made = load.load(path, sets, noted.append)
    assert made.loss == settings.PpoLoss(entropy=0.01)
    assert made.correction == settings.RecomputedCorrection()
    dropped = {line.split(":")[0] for line in noted}
    assert dropped == {
        f"dropped {key}"
        for key in (
            "loss.dppo_threshold",
            "correction.reject2",
            "correction.reject2_hi",
            "staleness.half_life",
        )
    }
    show = CliRunner().invoke(main, ["config", "show", str(path), "--set", "loss.surrogate=ppo"])
    assert "dropped loss.dppo_threshold: belongs to loss.surrogate = dppo" in show.stderr
    assert "dppo_threshold" not in show.stdout
    assert load.convert(tomllib.loads(show.stdout), "shown") == load.load(
        path, ["loss.surrogate=ppo"]
    )
    # a coefficient of zero drops the keys of the file that it stops
    path = written(tmp_path, "[loss]\neps_high = 0.3\n[advantage]\nwhiten = true\n")
    sets = ["loss.coefficient=0", "kl.preset=distill"]
    made = load.load(path, sets)
    assert made.loss == settings.PpoLoss(coefficient=0.0)
    assert made.advantage == settings.RlooAdvantage()
    for beside, noted in (("advantage.truncated=mask", 0), ("advantage.name=grpo", 1)):
        said = rules.find_warnings(load.load(path, [*sets, beside]))
        assert sum("does not enter the loss" in line for line in said) == noted


@pytest.mark.parametrize("preset", ["tis", "mis_normalized", "none"])
def test_a_preset_may_be_set_on_every_shipped_config(preset: str) -> None:
    """As `asyncrl run --resume RUN --set correction.preset=mis` needs it."""
    for name in bundled_configs.list_names():
        made = load.load(name, [f"correction.preset={preset}"])
        written_by_run = tomllib.loads(load.dump(load.load(name)))
        resumed = load.convert(written_by_run, "run", sets=[f"correction.preset={preset}"])
        assert made.correction.proximal == "recompute" and resumed == made


def with_unread(name: str) -> dict[str, Any]:
    """A run's config.toml as it was when it had every key of every method."""
    raw = tomllib.loads(load.dump(load.load(name)))
    raw["advantage"] |= {"lam": 0.95, "gamma": 1.0, "ema_decay": 0.9, "part_weights": {}}
    raw["correction"] |= {"level": "token", "bound": "truncate", "self_normalize": False}
    raw["loss"] |= {"dppo_threshold": 0.2, "pull": 0.0, "norm_length": 0}
    raw["value"] = {"trunk": "own", "lr": 0.0}
    raw["reshape"] = {"form": "power", "tau": 1.0}
    raw["staleness"] |= {"half_life": 2.0}
    raw["kl"]["reward"] |= {"target": 6.0, "estimator": "k1"}
    return raw


def test_a_config_that_an_older_run_wrote_loads_as_it_trained() -> None:
    """Its unread keys never acted; a key that is given by hand beside them is still an error."""
    for name in ("demo", "decoupled"):
        raw = with_unread(name)
        assert load.convert(raw, "config.toml") == load.load(name)
        with pytest.raises(ConfigError, match=r"--set loss\.pull=0\.2: loss\.pull: belongs to"):
            load.convert(raw, "config.toml", sets=["loss.pull=0.2"])
        made = load.convert(raw, "config.toml", sets=["loss.surrogate=dppo"])
        assert isinstance(made.loss, settings.DppoLoss)


def variants() -> list[Any]:
    return [
        pytest.param(section, tag, id=f"{section}-{tag}")
        for section, kind in (
            ("advantage", settings.Advantage),
            ("loss", settings.Loss),
            ("correction", settings.Correction),
        )
        for tag in (layers.get_tag(struct)[1] for struct in settings.list_variants(kind))
    ]


@pytest.mark.parametrize(("section", "tag"), variants())
def test_what_is_written_loads_back_equal(section: str, tag: str) -> None:
    """Every method with its defaults; nothing that is not read is written."""
    key = layers.get_tag(layers.list_structs(layers.map_fields(Config)[section].type)[0])[0]
    made = load.build({"model": {"path": "m"}, "task": {"name": "sort"}, section: {key: tag}})
    raw = tomllib.loads(load.dump(made))
    assert load.build(raw) == made and layers.find_unread(layers.flatten(raw, Config), Config) == []
    assert raw[section][key] == tag


def test_a_reshape_without_a_repair_is_warned_of() -> None:
    for item in ("", "reshape.budget=global", "reshape.budget=tokens", "reshape.clip=0.2"):
        made = load.load("demo", ["method=reshape", "learner.epochs=2", *item.split()])
        said = [line for line in rules.find_warnings(made) if line.startswith("reshape:")]
        assert bool(said) == (item in ("", "reshape.budget=global")), item
        assert all(x.startswith("reshape: controls variance and not drift") for x in said)
    kinds = {
        "k1": "",
        "k1+": "a + changes nothing",
        **dict.fromkeys(("k2", "k2+", "abs", "abs+"), "has a strongly biased gradient; use k1"),
        **dict.fromkeys(("k3", "k3+", "low_var_kl", "low_var_kl+"), "known to collapse; use k1"),
    }
    for estimator, warned in kinds.items():
        sets = ["kl.reward.coefficient=0.1", f"kl.reward.estimator={estimator!r}"]
        lines = [x for x in rules.find_warnings(load.load("demo", sets)) if x.startswith("kl:")]
        assert len(lines) == bool(warned) and all(warned in line for line in lines), estimator


def test_a_method_sets_all_that_it_is_and_gives_way_to_what_is_given(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    path.write_text('method = "gmpo"\n' + BASE + "[loss]\neps_high = 0.3\n")
    made = load.load(path)
    assert made.loss == settings.GmpoLoss(reduction="seq-mean-token-mean", eps_high=0.3)
    assert made.advantage == settings.GrpoAdvantage()
    assert made.correction == settings.BehaviorCorrection()
    assert load.load(path, ["advantage.name=rloo"]).advantage == settings.RlooAdvantage()
    # a clip range of PPO is none of GMPO's, whose default is another
    made = load.load("demo", ["loss.eps_low=0.1", "loss.entropy=0.01", "method=gmpo"])
    assert made.loss == settings.GmpoLoss(reduction="seq-mean-token-mean", entropy=0.01)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_may_be_set_on_a_config_of_another(name: str) -> None:
    """The result is the method's, whatever was there; a written config needs no method."""
    method = METHODS[name]
    of = {}
    for source in ("demo", "decoupled"):
        items = [f"method={name}"] if source == "demo" else ["learner.minibatches=1"]
        made = load.load(source, [*items, f"method={name}"])
        for key, value in method.keys.items():
            assert layers.get_value(layers.read_keys(made), Config, key) == value, key
        raw = tomllib.loads(load.dump(made))
        assert "method" not in raw and load.convert(raw, "written") == made
        of[source] = (made.loss, made.advantage, made.correction)
    assert of["demo"] == of["decoupled"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gmppo", "gmpo"),
        ("REINFORCE++", "reinforce_pp"),
        ("Dr.GRPO", "dr_grpo"),
        ("reinforc", "reinforce"),
        ("flash_reinforce", "flash-reinforce"),
        # published algorithms whose names differ by a letter from a method's
        *((name, "") for name in ("gppo", "aspo", "luspo", "dpo", "kto", "opo", "prpo", "drpo")),
        *((name, "") for name in ("reinforce-rej", "reinforce-ada", "reinforce-pro", "cppo")),
    ],
)
def test_unknown_methods_get_a_hint_if_misspelled(name: str, hint: str, tmp_path: Path) -> None:
    """In a config and as an arm."""
    path = written(tmp_path, "")
    for call in (lambda: load.load(path, [f"method={name!r}"]), lambda: arms.parse_arm(name)):
        with pytest.raises(ConfigError) as refused:
            call()
        said = re.findall(r"did you mean ([\w-]+)\?", str(refused.value))
        assert said == ([hint] if hint else []), refused.value
    path.write_text("method = ['gmpo']\n" + BASE)
    with pytest.raises(ConfigError, match=f"{path}:1: method: .* is unknown"):
        load.load(path)


def test_a_method_without_kl_drops_that_of_the_method_before_it(tmp_path: Path) -> None:
    """From a resolved config, which has every key."""
    path = written(tmp_path, "")
    path.write_text(load.dump(load.load(path, ["method=grpo"])))
    assert load.load(path).kl.loss.coefficient == 0.04
    for name in ("dapo", "dr_grpo", "gspo", "cispo"):
        assert load.load(path, [f"method={name}"]).kl.loss.coefficient == 0.0


def test_methods_are_listed_with_source_and_evidence() -> None:
    shown = CliRunner().invoke(main, ["methods", "--json"])
    listed = json.loads(shown.stdout.splitlines()[-1])["methods"]
    assert list(listed) == list(METHODS)
    for name, row in listed.items():
        assert row["source"] and row["keys"]["loss.surrogate"], name
        if not row["evidence"]:
            continue
        page, _, anchor = row["evidence"].partition("#")
        text = (bundled_configs.FOLDER.parent / page).read_text()
        titles = {line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")}
        assert not anchor or anchor in {
            title.replace(",", "").replace(" ", "-") for title in titles
        }, anchor
    plain = CliRunner().invoke(main, ["methods"])
    assert "gmpo: GMPO: the geometric mean ratio of a completion" in plain.stdout
    assert "source: arXiv 2507.20673 (code); measured: docs/staleness.md" in plain.stdout
    assert "source: AReaL (code); not measured here" in plain.stdout
    logs = "".join(p.read_text() for p in (bundled_configs.FOLDER.parent / "docs/log").glob("*.md"))
    variants = (*settings.list_variants(settings.Loss), *settings.list_variants(settings.Advantage))
    parts = {variant.__struct_config__.tag for variant in variants}
    for name in (name for name, method in METHODS.items() if not method.evidence):
        if name in parts:  # the logs name the advantage or the surrogate
            continue
        assert f"`{name}`" not in logs, f"{name} was measured"


@pytest.mark.parametrize(("sections", "said"), TEXTS["removed"])
def test_a_removed_method_is_refused_by_name(sections: dict[str, Any], said: str) -> None:
    raw = {"model": {"path": "m"}, "task": {"name": "sort"}, **sections}
    with pytest.raises(ConfigError, match=f"^c.toml.*: {re.escape(said)}"):
        load.convert(raw, "c.toml")


def test_removed_keys_that_change_nothing_are_dropped() -> None:
    """The config of an earlier run gives every key."""
    base = {"model": {"path": "m"}, "task": {"name": "sort"}}
    behavior = {"proximal": "behavior"}
    for earlier, now in (
        ({"correction": behavior | {"m2_over": "all"}}, {"correction": behavior}),
        (
            {"correction": behavior | {"m2": 0.04, "m2_over": "pushing"}},
            {"correction": behavior | {"m2": 0.04}},
        ),
        (
            {"advantage": {"name": "opob", "squared_norm": "gradient"}},
            {"advantage": {"name": "opob"}},
        ),
    ):
        assert load.convert(base | earlier, "c.toml") == load.convert(base | now, "c.toml")


def bare(advantage: dict[str, Any], **more: Any) -> Any:
    keys = {key: value for key, value in advantage.items() if key != "name"}
    kinds = {k.__struct_config__.tag: k for k in settings.list_variants(settings.Advantage)}
    sections = {
        "seed": 0,
        "staleness": SimpleNamespace(on_exceed="pace"),
        "correction": settings.RecomputedCorrection(),
        "advantage": kinds[advantage["name"]](**keys),
        "learner": SimpleNamespace(epochs=1, minibatches=1, distributed=False),
        "loss": settings.PpoLoss(),
        "kl": settings.KL(),
        "reshape": settings.Reshape(),
        "stop": settings.Stop(),
        "value": settings.Value(),
        "generator": SimpleNamespace(max_new_tokens=64),
    }
    return SimpleNamespace(**{**sections, **more})


def with_values(b: LossBatch) -> LossBatch:
    b.values = torch.randn(len(b.seq), generator=torch.Generator().manual_seed(1), dtype=D)
    b.bootstrap = torch.rand(len(b.rewards), generator=torch.Generator().manual_seed(2), dtype=D)
    return b


def prepared(c: Any, per_token: bool) -> sl.PreparedBatch:
    b = with_values(batch(3))
    if per_token:
        b.token_rewards = torch.rand(
            len(b.seq), generator=torch.Generator().manual_seed(3), dtype=D
        )
    return sl.prepare(b, c)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", ["gae", "reinforce_pp", "grpo"])
def test_an_advantage_of_a_name_alone(name: str, per_token: bool) -> None:
    keys: dict[str, Any] = (
        {"name": name}
        if name != "grpo" or per_token
        else {"name": name, "ddof": 1, "eps": 1e-4, "whiten": False}
    )
    got = prepared(bare(keys), per_token)
    want = prepared(config(advantage={"name": name}), per_token)
    assert torch.equal(got.advantage, want.advantage) and float(want.advantage.abs().max()) > 0
    assert (got.returns is None) == (want.returns is None)
    assert got.returns is None or torch.equal(got.returns, want.returns)  # type: ignore[arg-type]
    assert got.metrics == want.metrics


@pytest.mark.parametrize("truncated", ["penalty", "soft", "fixed", "zero"])
def test_a_penalty_nobody_gave_is_none(truncated: str) -> None:
    b, c = batch(3), bare({"name": "rloo", "whiten": False, "truncated": truncated})
    b.truncated = torch.arange(12) % 2 == 0
    want = torch.where(b.truncated, 0.0, b.rewards) if truncated in ("zero", "fixed") else b.rewards
    assert sl.prepare(b, c).metrics["reward/used_mean"] == pytest.approx(float(want.mean()))
    if truncated == "soft":  # a ramp of one token: below the limit nothing, at it the whole
        c.advantage = settings.RlooAdvantage(
            truncated="soft", truncation_penalty=1.0, truncation_ramp=1
        )
        drawn = torch.bincount(b.seq[b.mask], minlength=12)  # what stands between turns is not
        c.generator = SimpleNamespace(max_new_tokens=int(drawn.max()))
        longest = drawn == c.generator.max_new_tokens
        assert sl.prepare(b, c).metrics["reward/used_mean"] == pytest.approx(
            float((b.rewards - longest.to(D)).mean())
        )


def test_a_whole_step_with_bare_sections_is_that_of_the_defaults() -> None:
    lp = theta(batch(3))
    found = []
    for c in (bare({"name": "rloo", "whiten": False}), config()):
        b = batch(3)
        prep = sl.prepare(b, c)
        assert not sl.needs_current(prep) and not sl.needs_proximal_first(c)
        assert not sl.needs_start_first(c)
        step = sl.begin_step(prep, torch.arange(12))
        loss, sums = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp)
        gradient = torch.autograd.grad(loss, lp)[0]
        found.append((gradient, sl.finish(sums), step.metrics, step.lr_scale, step.prepass))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]
    assert found[0][2:] == ({}, 1.0, {})


def test_terms_of_bare_sections_have_the_defaults_of_the_configuration() -> None:
    """KL in the loss: k3, on policy; the value loss: 0.1 of it, not clipped."""
    lp = theta(batch(3))
    now = torch.randn(
        len(batch(3).seq), generator=torch.Generator().manual_seed(9), dtype=D, requires_grad=True
    )
    kl = settings.KL(loss=settings.KLLoss(coefficient=0.3))
    found = []
    for c in (
        bare({"name": "gae"}, kl=kl),
        config(advantage={"name": "gae"}, kl={"loss": {"coefficient": 0.3}}),
    ):
        b = with_values(batch(3))
        prep = sl.prepare(b, c)
        loss, sums = sl.compute_micro_loss(
            prep, sl.begin_step(prep, torch.arange(12)), torch.arange(len(b.seq)), lp, None, now
        )
        found.append((torch.autograd.grad(loss, (lp, now)), sl.finish(sums)))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == found[1][1]
    assert found[0][1]["loss/kl"] > 0 and found[0][1]["loss/value"] > 0
    for stop in (settings.Stop(kl_max=0.5), config(stop={"kl_max": 0.5}).stop):
        prep = sl.prepare(batch(3), bare({"name": "rloo", "whiten": False}, stop=stop))
        assert prep.budget is None and not sl.needs_current(prep)
        a, w = sl.sum_update_kl(prep, torch.arange(len(prep.batch.seq)), theta(batch(3)).detach())
        x = theta(batch(3)).detach() - prep.start
        weight = (prep.start - prep.batch.behavior).exp().clamp(max=2.0)
        assert float(a) == pytest.approx(float((weight * (x.exp() - 1 - x))[prep.valid].sum()))
        assert float(w) == pytest.approx(float(weight[prep.valid].sum()))
    loss = settings.ClipCovLoss(cov_share=0.3, cov_lo=-1.0, cov_hi=1.0)
    whole = config(
        loss={"surrogate": "clip_cov", "cov_share": 0.3, "cov_lo": -1.0, "cov_hi": 1.0}, seed=0
    )
    chosen = []
    for c in (bare({"name": "rloo", "whiten": False}, loss=loss), whole):
        prep = sl.prepare(batch(3), c, number=2)
        chosen.append(
            sl.begin_step(prep, torch.arange(12), theta(batch(3)).detach()).prepass["chosen"]
        )
    assert torch.equal(chosen[0], chosen[1]) and chosen[0].any()
