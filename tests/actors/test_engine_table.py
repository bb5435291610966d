"""An engine is a row of a table: what its row says is what config, checks and processes do."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from engine_kit import EOS, request
from process_kit import ROOT

from actors.engine import (
    EngineRow,
    RowEngine,
    build_completion,
    build_engine,
    build_spans,
    load_model,
    require_room,
)
from actors.engine_vllm import ProbedEngine
from asyncrl.cli import main
from asyncrl.config import load, rules, tree
from asyncrl.config.engines import ENGINES, EngineInfo, EngineName
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.experiments.process_run import needs_own_process
from asyncrl.models import installed
from asyncrl.models.policy import compute_weights_digest, list_named_weights, load_policy
from asyncrl.supervise import preflight
from learner.backend import TorchBackend

OTHER = EngineInfo(
    maker="other_engine", title="Other", package="other_engine", distributions=(), trial="pass"
)


EXACT = ("exact=true", "weights.in_flight=recompute_kv")


def config(*sets: str) -> Config:
    return load.load(ROOT / "configs" / "demo.toml", list(sets))


def with_engine(monkeypatch: pytest.MonkeyPatch, row: EngineInfo, *sets: str) -> Config:
    """The demo's config with an engine `other`, as `row` describes it."""
    monkeypatch.setitem(ENGINES, "other", row)
    whole = config(*sets)
    other = msgspec.structs.replace(whole.generator, engine="other")
    return msgspec.structs.replace(whole, generator=other)


def test_choices_are_the_rows_and_a_generator_makes_what_its_row_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert get_args(EngineName) == tuple(ENGINES)
    for name in ENGINES:
        assert config(f"generator.engine={name}").generator.engine == name
    with pytest.raises(ConfigError, match=r"generator\.engine"):
        config("generator.engine=other")
    made = object()
    module = SimpleNamespace(make_engine=lambda config: made)
    monkeypatch.setitem(sys.modules, "other_engine", module)
    assert build_engine(with_engine(monkeypatch, OTHER)) is made


@pytest.mark.parametrize(
    ("change", "sets", "said"),
    [
        ({}, EXACT, "exact: needs generator.engine = embedded, not other"),
        ({"exact": True}, EXACT, ""),
        ({"least_temperature": 0.5}, ("generator.temperature=0.4",), "generator.temperature: 0.4"),
        ({"least_temperature": 0.4}, ("generator.temperature=0.4",), ""),
        ({"numbered_gpu": False}, ("model.device=cuda:1",), "model.device: cuda:1; Other uses"),
        ({}, ("model.device=cuda:1",), ""),
        ({}, ("generator.mantissa_bits=7",), "generator.engine = embedded, not to other"),
        ({"settings": ("mantissa_bits",)}, ("generator.mantissa_bits=7",), ""),
        ({}, ("learner.replay_routing=true",), "generator.engine = embedded; Other does not"),
        ({"records_routing": True}, ("learner.replay_routing=true",), ""),
    ],
)
def test_the_rules_follow_from_the_row(
    change: dict[str, object], sets: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = msgspec.structs.replace(OTHER, **{"least_temperature": 0.0, **change})
    whole = with_engine(monkeypatch, row, "evaluation.temperature=0.6", *sets)
    found = [line for line in rules.check(whole) if "other" in line or "Other" in line]
    assert len(found) == bool(said) and all(said in line for line in found), found


def test_what_a_row_pins_and_brings_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "other", OTHER)
    assert installed.explain_missing("other").startswith("Other is not installed: make env")
    there = msgspec.structs.replace(OTHER, package="msgspec", distributions=("msgspec",))
    monkeypatch.setitem(ENGINES, "other", there)
    assert installed.explain_missing("other") == ""
    monkeypatch.setitem(ENGINES, "other", msgspec.structs.replace(there, pinned="0.0.1"))
    missing = installed.explain_missing("other")
    assert "and its internals differ between versions; asyncrl needs 0.0.1" in missing


def test_untested_versions_are_warned_about_and_not_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = preflight.Subject(config())
    versions = {"torch": "2.11.0+cu128", "transformers": installed.TESTED["transformers"]}
    usual = installed.find_version
    monkeypatch.setattr(installed, "find_version", lambda *n: versions.get(n[0]) or usual(*n))
    other = f"torch 2.11.0 (tested: {installed.TESTED['torch']})"
    assert installed.list_untested_versions() == other
    assert installed.find_missing_package(subject.config) == ""
    with pytest.raises(preflight.DoubtfulCheck, match=r"untested versions: torch 2\.11\.0"):
        preflight.check_versions(subject)
    for check in ("check_packages", "check_devices", "check_task", "build_model"):
        monkeypatch.setattr(preflight, check, lambda subject: "")
    for check in ("check_template", "check_images", "check_prompts", "check_characters"):
        monkeypatch.setattr(preflight, check, lambda subject: "")
    monkeypatch.setattr(preflight, "call_reward", lambda subject: "")
    preflight.preflight(subject.config)
    assert f"warning: untested versions: {other}; the run starts" in capsys.readouterr().err
    monkeypatch.setattr(installed, "check_installed", list)
    main(["engines"])
    assert f"\nwarning: untested versions: {other}\n" in capsys.readouterr().out
    versions["torch"] = installed.TESTED["torch"] + "+cpu"
    assert installed.list_untested_versions() == ""
    assert preflight.check_versions(subject).startswith("torch ")


def test_one_process_and_the_probe_follow_from_the_row(
    monkeypatch: pytest.MonkeyPatch, small_model: Path
) -> None:
    assert "does not run in a warm process; use embedded" in needs_own_process(
        with_engine(monkeypatch, OTHER)
    )
    able = msgspec.structs.replace(OTHER, one_process=True, probed=True)
    whole = with_engine(monkeypatch, able)
    assert needs_own_process(whole) == ""
    backend = TorchBackend(whole, load_policy(small_model))
    assert backend.probe()
    backend.config = config()
    assert backend.probe() == b""


def test_every_setting_of_a_row_is_one_of_the_section() -> None:
    known = set(tree.GeneratorConfig.__struct_fields__)
    assert all(set(row.settings) <= known for row in ENGINES.values())


def test_of_two_versions_at_one_position_the_later_one_counts() -> None:
    labels = [Label(1, number) for number in range(4)]
    engine = RowEngine(1, 64, "keep_kv", None, None)
    row = engine.rows[0] = EngineRow(request(0, 0, [3], 12), [(0, labels[0], "d0")])
    for row.sampled, label in zip((0, 3, 5), labels[1:], strict=True):
        engine.load({}, label, f"d{label.number}")
    marks = row.marks
    assert [(position, label.number) for position, label, _ in marks] == [(0, 1), (3, 2), (5, 3)]
    _, one, two, three = labels
    first = VersionSpan(one, "d1", 0, 3, one)
    assert build_spans(marks, 5, "keep_kv") == [first, VersionSpan(two, "d2", 3, 5, one)]
    own = [VersionSpan(two, "d2", 3, 5, two), VersionSpan(three, "d3", 5, 6, three)]
    assert build_spans(marks, 6, "recompute_kv") == [first, *own]
    # of vLLM: the keys of a prompt that was sent before the version of its first token
    named = [SimpleNamespace(version=f"1.{n}.d{n}", start=n - 1, end=n) for n in (1, 2)]
    for in_flight, keys in (("keep_kv", [labels[0]] * 2), ("recompute_kv", labels[1:3])):
        probed: Any = SimpleNamespace(in_flight=in_flight)
        made = ProbedEngine.build_spans(probed, named, labels[0])
        assert [(s.label, s.start, s.kv) for s in made] == [(one, 0, keys[0]), (two, 1, keys[1])]


def test_a_completion_has_its_dtypes_its_end_and_room() -> None:
    asked = request(0, 0, [3, 4, 5], 12)
    experts: Any = object()
    for tokens, finish in (([4, EOS], "stop"), ([EOS, 4], "length")):
        made = build_completion(asked, tokens, [-1, -2], [], routed=experts)
        assert (made.finish, made.routed, made.support, made.spans) == (finish, experts, None, [])
        assert (made.tokens.dtype, made.logprobs.dtype) == (np.int32, np.float32)
    require_room(asked, 15)
    with pytest.raises(ConfigError, match=r"prompt of 3 and 12 new tokens do not fit gen.* = 14$"):
        require_room(asked, 14)
    engine = RowEngine(1, 2, "keep_kv", None, None)
    assert engine.score([]) == []
    with pytest.raises(ConfigError, match=r"a prompt of 3 tokens does not fit generator.*t = 2$"):
        engine.score([asked.prompt, asked.prompt[:1]])


def test_a_model_is_loaded_as_a_version(small_model: Path) -> None:
    loaded: list[Any] = []
    model = load_policy(small_model)
    load_model(SimpleNamespace(load=lambda *given: loaded.extend(given)), model, Label(1, 2))  # type: ignore[arg-type]
    weights = dict(list_named_weights(model))
    assert loaded[0].keys() == weights.keys()
    assert all((loaded[0][name] == weights[name]).all() for name in weights)
    assert loaded[1:] == [Label(1, 2), compute_weights_digest(model)]
