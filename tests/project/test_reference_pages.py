"""The pages that come from tables: coming-from, papers, exit codes, names; and the glossary."""

import re
import shlex
from pathlib import Path

import click
import pytest
import reference_pages

import asyncrl
from asyncrl.cli import main
from asyncrl.config import bundled_configs, explain, load, methods
from asyncrl.contract.errors import EXIT_CODES
from asyncrl.records import health_checks, metrics

ROOT = Path(__file__).resolve().parents[2]


SYSTEMS = bundled_configs.load_systems()
PAPERS = reference_pages.papers()
DEMO = ROOT / "configs" / "demo.toml"


def load_settings(settings: str) -> int:
    """Load each alternative of a row on top of the demo's config; return how many have values."""
    loaded = 0
    for option in reference_pages.alternatives(settings):
        parts = [setting.partition(" = ") for setting in option]
        unknown = {key for key, _, _ in parts} - {"method", *load.list_keys()}
        assert not unknown, f"{settings}: {unknown}"
        if sets := [f"{key}={value}" for key, equals, value in parts if equals]:
            load.load(DEMO, sets)
            loaded += 1
    return loaded


@pytest.mark.parametrize("path", reference_pages.pages(), ids=lambda path: path.name)
def test_every_page_is_what_its_table_says(path: Path) -> None:
    assert path.read_text() == reference_pages.pages()[path], "run benchmarks/reference_pages.py"


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_key_of_ours_exists_and_every_setting_loads(name: str) -> None:
    theirs = [row[0] for row in SYSTEMS[name]["keys"]]
    assert len(theirs) == len(set(theirs)) > 35, "a setting of theirs stands in one row"
    assert sum(load_settings(row[2]) for row in SYSTEMS[name]["keys"]) > 10


@pytest.mark.parametrize("row", PAPERS, ids=lambda row: f"{row[0]} {row[1]}")
def test_the_settings_of_a_paper_load(row: list[str]) -> None:
    assert load_settings(row[2]) > 0


def test_every_paper_that_the_algorithms_name_is_in_the_index() -> None:
    number = re.compile(r"\b\d{4}\.\d{5}\b")
    sources = [*(ROOT / "asyncrl" / "algorithms").rglob("*.py"), Path(methods.__file__)]
    named = {found for path in sources for found in number.findall(path.read_text())}
    assert len(named) > 30
    assert named <= {row[0] for row in PAPERS}, named - {row[0] for row in PAPERS}


def test_every_method_is_in_the_index_of_papers() -> None:
    """Except plain combinations: `none` and `k3` have no paper of their own."""
    options = [option for row in PAPERS for option in reference_pages.alternatives(row[2])]
    named = {setting for option in options for setting in option}
    missing = {name for name in methods.METHODS if f"method = {name}" not in named}
    assert missing <= {"none", "k3"}, missing


def test_every_exit_code_says_what_to_do() -> None:
    assert set(reference_pages.ACTIONS) == set(EXIT_CODES)


def test_the_glossary_is_sorted_and_has_the_terms_of_the_package() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"(?m)^- \*\*(.+?)\*\*", page)
    assert terms == sorted(terms, key=str.lower) and len(terms) > 25
    listed = (asyncrl.__doc__ or "").partition("Glossary:")[2].partition("`actors` turns")[0]
    names = re.findall(r"(?m)(?:^- |\. )([A-Z]?[\w ,-]+?)(?: \([\w, ]+\))?: ", listed)
    words = {word.strip().lower() for name in names for word in name.split(",")}
    known = {word.strip() for term in terms for word in term.lower().split(",")}
    assert len(words) > 15 and words <= known, words - known


TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_every_command_in_a_sentence_is_understood() -> None:
    """Commands, options and settings of inline code, without running anything."""
    found = re.findall(r"`asyncrl ([^`]+)`", " ".join(TROUBLESHOOTING.split()))
    assert found
    for line in found:
        words = shlex.split(line)
        command: click.Command = main
        context = click.Context(main)
        path = []
        while isinstance(command, click.Group):
            path.append(words.pop(0))
            known = command.get_command(context, path[-1])
            assert known is not None, f"asyncrl {line}"
            command = known
        if not words:  # only its name
            continue
        context = command.make_context(path[-1], words)  # raises for an unknown option
        if sets := list(context.params.get("sets") or ()):
            load.load(DEMO, sets)
        if key := context.params.get("key"):
            assert key == "KEY" or explain.explain(key)


def test_every_finding_and_metric_in_a_sentence_exists() -> None:
    for metric in re.findall(r"`([a-z_]+/[a-z0-9_]+)`", TROUBLESHOOTING):
        known = metrics.is_known_metric(metric) or metric.endswith("_B")
        assert known or (ROOT / metric).exists(), metric
    rules = Path(health_checks.__file__).read_text()
    rules += Path(health_checks.__file__).with_suffix(".toml").read_text()
    text = " ".join(TROUBLESHOOTING.split())
    for finding in re.findall(r"findings? ((?:`[a-z_]+`(?:, | or )?)+)", text):
        for word in re.findall(r"`([a-z_]+)`", finding):
            assert f'"{word}"' in rules or f"\n{word} = " in rules, word


ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()
NAMES = ALGORITHMS.split("## By the names you may know")[1].split("\n## ")[0]
TABLES = ("latest", "recent", "kl")
RULES = (*health_checks.RULES, *health_checks.END_RULES, *health_checks.KNOWN_RULES)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dynamic sampling", ["advantage.no_spread='filter'"]),
        ("partial rollouts", ["weights.in_flight='keep_kv'", "weights.in_flight='recompute_kv'"]),
        (
            "adaptive KL controller",
            ["kl.reward.controller='adaptive'", "kl.reward.target=3.0", "kl.reward.horizon=100"],
        ),
    ],
)
def test_a_name_leads_to_its_keys(name: str, keys: list[str]) -> None:
    """In docs/algorithms.md and in the settings' own descriptions."""
    (line,) = [x for x in NAMES.splitlines() if x.startswith(f"| {name}")]
    before = ["kl.reward.coefficient=0.1"]
    for key in keys:
        path, value = key.split("=")
        load.load("configs/demo.toml", [*before, key])
        if key.endswith("'adaptive'"):  # the keys after it are the controller's own
            before.append(key)
        assert path in line and (value[0] != "'" or value.replace("'", '"') in line), key
    assert name in (ROOT / "configs" / "schema.json").read_text()


def test_every_key_of_the_table_exists() -> None:
    named = re.findall(r"`(\w+(?:\.\w+)+)", NAMES)
    assert len(named) > 10 and set(named) <= set(load.list_keys())


def test_every_sign_is_named_with_what_it_is() -> None:
    table = TROUBLESHOOTING.split("## When a run goes wrong")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table))
    code = (ROOT / "asyncrl" / "records" / "health_checks.py").read_text()
    said = {
        name
        for named_here in re.findall(r'inding\(\s*("\w+"(?: if \w+ else "\w+")?),', code)
        for name in re.findall(r'"(\w+)"', named_here)
    } | {
        "answers_missing",
        *(rule.name for table in TABLES for rule in health_checks.BOUND_RULES[table]),
    }
    # answers_missing and the rules of the tables are in none of the lists
    assert len(said) == len(RULES) + 10 and said <= named, said - named
    read = set(re.findall(r'"((?:kl|split|mismatch|reward|answer|eval)/\w+)"', code))
    assert len(read) > 8 and all(metrics.is_known_metric(x) for x in read), "no run writes it"
