"""README, CONTRIBUTING and docs: what they name is there, links lead somewhere, the site builds."""

import doctest
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import figures
import pytest
import table
import yaml

import actors
import asyncrl
import buffer
import learner
from asyncrl.config import load

ROOT = Path(__file__).resolve().parents[2]


LOOP = "2026-11-27_e4736b19_2core_loop_speed.json"
LOG = sorted((ROOT / "docs" / "log").glob("[!i]*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "configs" / "README.md",
    ROOT / "benchmarks" / "results" / "README.md",
    *sorted(
        page
        for page in (ROOT / "docs").rglob("*.md")
        if not page.name.startswith("extending-notes-")
    ),
]
TYPESET = ("algorithms", "methods", "staleness")
RESULT = re.compile(r"benchmarks/results/[\w.-]+")
RESULT_NAME = re.compile(r"\d{4}-\d\d-\d\d_([0-9a-f]+)_\d+core_[\w-]+\.(?:json|html)")
NAMED = re.compile(
    r"`((?:asyncrl|actors|buffer|learner|configs|tests|benchmarks|docs|requirements)/(?:[\w./-]*(?:/|\.\w+))?)`"
)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text())


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, as GitHub and the site do it."""
    found: set[str] = set()
    for heading in re.findall(r"(?m)^#+ (.+)$", prose(page)):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", words).strip()))
    return found


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page)))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: {name(target)} has no #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_table_row_has_the_cells_of_its_head(page: Path) -> None:
    """A missing or an unescaped `|` cuts or shifts a row when it is rendered."""
    width = 0
    for line in prose(page).splitlines():
        pipes = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (width and pipes) or pipes == width, f"{name(page)}: {line}"
        width = pipes


def test_there_are_links_to_check() -> None:
    assert len(links(ROOT / "README.md")) > 10


@pytest.mark.parametrize("page", [p for p in PAGES if p not in LOG], ids=name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    """The log speaks of its day; every other page of today."""
    for named in NAMED.findall(prose(page)):
        assert "NAME" in named or (ROOT / named).exists(), (
            f"{name(page)} names {named}, which is not there"
        )


def test_every_page_that_the_code_names_is_there() -> None:
    folders = ("asyncrl", "actors", "buffer", "learner", "benchmarks", "tests", "configs")
    sources = [p for f in folders for kind in ("*.py", "*.toml") for p in (ROOT / f).rglob(kind)]
    found = {
        (path, page)
        for path in [*sources, ROOT / "Makefile", ROOT / "pyproject.toml"]
        for page in re.findall(r"\b(docs/[\w/-]+\.md|CONTRIBUTING\.md)", path.read_text())
        if path.name != "coming_from.toml"  # which names pages of others
    }
    assert len(found) > 5
    for path, page in sorted(found):
        assert (ROOT / page).is_file(), f"{name(path)} names {page}, which is not there"


def test_every_key_that_a_page_names_exists() -> None:
    keys = load.list_keys()
    sections = {k.split(".")[0] for k in keys if "." in k}
    ends = ("py", "md", "toml", "json", "jsonl", "html", "log", "txt", "key", "key_secret")
    named = 0
    for page in PAGES:
        if page in LOG or page.name == "coming-from.md":  # which names the keys of others, too
            continue
        for key in re.findall(r"`(\w+(?:\.\w+)+)(?: = [^`]*)?`", page.read_text()):
            section, *_, last = key.split(".")
            if section not in sections or last in ends:
                continue
            named += 1
            known = key in keys or key in load.REMOVED
            assert known or any(k.startswith(key + ".") for k in keys), f"{name(page)}: {key}"
    assert named > 100


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


def results_named() -> dict[str, str]:
    pages = sorted(PAGES, key=lambda page: page not in LOG)  # a page of today counts more
    return {found: name(page) for page in pages for found in RESULT.findall(page.read_text())}


def test_every_result_that_a_page_names_is_there() -> None:
    """The log may name a superseded result, which is in the history."""
    named = results_named()
    assert len(named) > 30
    words = ("log", "--diff-filter=D", "--name-only", "--format=", "--", "benchmarks/results")
    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip() != "false"
    removed = set(named) if shallow else set(git(*words).stdout.split())  # or no history at all
    logs = {name(page) for page in LOG}
    for path, page in named.items():
        superseded = page in logs and path in removed
        assert superseded or (ROOT / path).is_file(), f"{page} names {path}, which is not there"


def test_every_result_was_measured_at_a_commit_of_this_history() -> None:
    if git("rev-parse", "--git-dir").returncode:
        pytest.skip("no git history here (an unpacked archive): commits of results not checked")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        pytest.skip("a shallow clone: commits of results not checked; `git fetch --unshallow`")
    files = sorted(p.name for p in (ROOT / "benchmarks" / "results").glob("20*"))
    commits = git("rev-list", "HEAD").stdout.split()
    assert files
    for file in files:
        found = RESULT_NAME.fullmatch(file)
        assert found, f"{file} is not called DATE_COMMIT_MACHINE_NAME"
        assert any(commit.startswith(found[1]) for commit in commits), (
            f"{file}: commit {found[1]} is not in this history: measure it again, or leave it out"
        )


def test_the_readme_fits_on_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@cache
def drawn_images() -> dict[str, str]:
    return figures.drawn()


SHOWN = sorted(path.name for path in figures.IMAGES.glob("*.svg"))


def test_every_drawn_figure_is_there() -> None:
    assert sorted(drawn_images()) == SHOWN


@pytest.mark.parametrize("image", SHOWN)
def test_every_figure_is_what_its_result_draws(image: str) -> None:
    drawn = drawn_images()[image]
    assert drawn == (ROOT / "docs" / "img" / image).read_text(), "run benchmarks/figures.py"


def test_the_demo_s_figure_shows_its_run() -> None:
    """Of another run, another picture: the end of the curve is in the title and in the line."""
    result = json.loads(json.dumps(figures.demo_result()))
    before = figures.demo(result)
    result["heldout"][-1][1] = 0.123
    after = figures.demo(result)
    assert "to 0.88" in before and "to 0.12" in after
    line = re.compile(r'<path d="([^"]+)"[^>]*stroke: #2563eb')
    old, new = (line.search(drawn) for drawn in (before, after))
    assert old and new and old[1].split()[-1] != new[1].split()[-1]
    assert old[1].split()[:-1] == new[1].split()[:-1]


@pytest.mark.parametrize("page", LOG, ids=name)
def test_a_page_of_the_log_has_dated_sections_newest_first_and_is_in_the_index(page: Path) -> None:
    title, *sections = re.split(r"(?m)^## ", prose(page))
    dates = []
    for section in sections:
        heading, blank, verdict = section.splitlines()[:3]
        dated = re.fullmatch(r"(2\d{3}-\d\d-\d\d)\. \*\*.+\*\*", verdict)
        assert dated and not blank, f"{page.name}, {heading}: date and verdict in bold come first"
        dates.append(dated[1])
    assert dates and dates == sorted(dates, reverse=True)
    index = (page.parent / "index.md").read_text()
    line = re.compile(
        rf"(?m)^\| \[{title.strip()[2:]}\]\({page.name}\) \| .{{1,90}} \| {dates[0]} \|$"
    )
    assert line.search(index), f"{page.name}: the index has a short line with its newest date"


def site_pages() -> dict[str, list[Path]]:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    def below(entry: Any) -> list[Path]:
        if isinstance(entry, str):
            return [ROOT / "docs" / entry]
        return [p for e in (entry.values() if isinstance(entry, dict) else entry) for p in below(e)]

    return {name: below(entries) for section in menu for name, entries in section.items()}


def density(page: Path) -> tuple[int, float]:
    """Words of a page's prose, numbers per hundred words; no tables, code and formulas."""
    words = re.sub(r"(?m)^\|.*$|^\s*\d+\. ", "", prose(page))
    words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", words))
    words = re.sub(r"\$\$[^$]+\$\$|\$[^$]+\$", "X", words)  # a formula
    count = len(words.split())
    return count, 100 * len(re.findall(r"(?<![\w.])\d[\d.,]*", words)) / max(count, 1)


def test_a_page_is_short_and_its_numbers_earn_their_place() -> None:
    """Reference and Evidence are looked up, not read: they may be longer and denser.

    The home page is the README."""
    sections = site_pages()
    assert {"Home", "Start", "Learn", "How to", "Agents", "Internals"} <= set(sections)
    for section, pages in sections.items():
        if section in ("Home", "Reference", "Evidence", "Log"):
            continue
        for page in pages:
            words, numbers = density(page)
            assert not re.search(r"(?m)^ {1,3}[-*+] ", prose(page)), "the site nests by 4 spaces"
            assert words <= 1200, f"{name(page)}: {words} words; split it by topic"
            assert numbers <= 6, f"{name(page)}: {numbers:.1f} numbers a hundred words"


@pytest.mark.parametrize("section", ["Start", "How to"])
def test_a_page_shows_what_its_commands_print(section: str) -> None:
    """In a block of text. A page without one says in its source why."""
    shown = re.compile(r"(?m)^ *```text$|^<!-- no output: \w.+ -->$")
    for page in site_pages()[section]:
        assert shown.search(page.read_text()), (
            f"{name(page)} shows no output: add a ```text block, or <!-- no output: why -->"
        )


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """A link that the site cannot follow, or a page that its menu lacks, is an error."""
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "s")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = {p.parent.name for p in (tmp_path / "s").rglob("index.html")}
    assert {"staleness", "algorithms", "performance", "log"} <= made
    reference = (tmp_path / "s" / "python-api" / "index.html").read_text()
    assert "load_run(" in re.sub(r"<[^>]+>", "", reference), "no docstring came into the page"
    check_formulas(tmp_path / "s")


def check_formulas(site: Path) -> None:
    """Each formula is one `<math>` that a browser draws, and no page loads from elsewhere."""
    for page in TYPESET:
        made = (site / page / "index.html").read_text()
        source = re.sub(r"`[^`]*`", "", prose(ROOT / "docs" / f"{page}.md"))
        formulas = len(re.findall(r"\$\$[^$]+\$\$|\$[^$]+\$", source))
        assert formulas > 0 and made.count("<math ") == made.count("</math>") == formulas, page
        assert "arithmatex" not in made and "$" not in made.split("<article")[1], page
        assert "\\" not in "".join(re.findall(r"(?s)<math .*?</math>", made)), page
    for path in site.rglob("*.html"):
        loaded = r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)"
        linked = r"<link\b[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon)[^>]*>"
        text = path.read_text()
        for target in re.findall(loaded, text) + re.findall(linked, text):
            assert "//" not in target, f"{path.relative_to(site)} loads {target}"
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text()), path


def result(file: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / file).read_text()))


def rows_of(file: str, arm: str, key: str) -> list[float]:
    return [row[key] for row in result(file)[arm]]


def mean_accuracy(curve: list[list[float]]) -> float:
    values = [accuracy for _, accuracy in curve]
    return sum(map(fmean, pairwise(values))) / (len(values) - 1)


def difference(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    each = [a - b for a, b in zip(ours, theirs, strict=True)]
    half = figures.half_interval(each)
    return fmean(each), fmean(each) - half, fmean(each) + half


def shown(what: str) -> list[str]:
    """The cells of the README's row about `what`: figure, goal, whether it is met."""
    text = (ROOT / "README.md").read_text()
    (row,) = re.findall(rf"(?m)^\| {re.escape(what)}.*?\| (.*) \|$", text)
    return [cell.strip() for cell in row.split("|")]


def faster(found: dict[str, Any], seconds: str = "wall_s") -> str:
    return f"{found['arms']['sync'][seconds] / found['arms']['async'][seconds]:.2f}"


def test_the_goal_of_the_step_stands_beside_the_fastest_rival() -> None:
    """The two ranks are the faster loop in every file, and the page's figures are of its rounds."""
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    files = sorted((ROOT / "benchmarks" / "results").glob("*_loop_speed*.json"))
    ratios: dict[str, list[float]] = {}
    for path in files:
        rounds = json.loads(path.read_text())["speed"]["rounds"]
        over = {
            rival: [r["async"]["step"] / r[rival]["step"] for r in rounds]
            for rival in ("two ranks", "strong")
        }
        least, most = (median(over[rival]) for rival in ("strong", "two ranks"))
        assert most > 0.6 and least < most, path
        ratios[path.name] = over["two ranks"]
    medians = [median(each) for each in ratios.values()]
    assert f"{min(medians):.2f} to {max(medians):.2f} in {len(files)} of {len(files)}" in page
    now = ratios[LOOP]
    said = f"{median(now):.2f} ({min(now):.2f} to {max(now):.2f})"
    cells = page.partition("as two ranks, the fastest rival |")[2].split(" | ")
    assert cells[0].strip().startswith(said) and cells[1].startswith("0.60, not met")
    rounds = result(LOOP)["speed"]["rounds"]
    tokens = [256 * r["async"]["answer/length"] / r["two ranks"]["step"] for r in rounds]
    share = median(r["bare"]["Tl"] * t for r, t in zip(rounds, tokens, strict=True))
    assert f"the learner alone takes {share:.2f} of the rival's step" in page
    figure = f"{median(now):.2f} of its time"
    assert shown("a step, over the strongest synchronous") == [figure, "0.60", "not met"]
    (trl,) = [g for g in result(LOOP)["goals"] if g["figure"].endswith("/ TRL's GRPO")]
    figure = f"{trl['value']:.2f} of its time"
    assert shown("a step, over that of TRL") == [figure, "0.30", "not met"] and not trl["met"]


def test_the_readme_s_figures_are_those_of_their_files() -> None:
    seeds = "2026-11-27_313bddc5_2core_demo_seeds.json"
    rows = result(seeds)["seeds"]
    low, start = min(r["heldout_end"] for r in rows), min(r["heldout_start"] for r in rows)
    slowest = max(r["wall_s"] for r in rows)
    figure = f"{start:.2f} to {low:.2f} and more, in {slowest:.0f} s"
    assert shown("the demo's held-out") == [figure, "0.80 in 120 s", "met"] and len(rows) == 10

    equal, low, high = result(seeds)["equal_accuracy"]["ratio"]
    ended = [rows_of(seeds, arm, "heldout_end") for arm in ("seeds", "synchronous")]
    end, least, most = difference(*ended)
    figure = f"{equal:.2f} times as fast ({low:.2f} to {high:.2f})"
    assert shown("the same runs to 0.80") == [figure, "1.5", "not met"]

    compared = "2026-11-26_6dfbc087_2core_comparisons_default.json"
    found = result(compared)["parts"]["default"]["found"]
    worse = next(
        v for v in found["verdicts"] if (v["arm"], v["metric"]) == ("async", "heldout_end")
    )
    study = (ROOT / "docs" / "findings.md").read_text()
    areas = [map(mean_accuracy, rows_of(seeds, arm, "curve")) for arm in ("seeds", "synchronous")]
    walls = [sum(rows_of(seeds, arm, "wall_s")) for arm in ("synchronous", "seeds")]
    cells = [
        f"{equal:.2f} [{low:.2f}, {high:.2f}]",
        f"{walls[0] / walls[1]:.2f}",
        f"{end:+.3f} [{least:+.3f}, {most:+.3f}]",
        "{:+.3f} [{:+.3f}, {:+.3f}]".format(*difference(*map(list, areas))),
    ]
    assert f"| plain, ten seeds, a warm start each | 2 | {' | '.join(cells)} |" in study
    area = next(v for v in found["verdicts"] if (v["arm"], v["metric"]) == ("async", "area"))
    cells = [f"{faster(found, 'seconds_to_target')}", faster(found)]
    cells += [
        "{:+.3f} [{:+.3f}, {:+.3f}]".format(v["difference"], *v["interval"]) for v in (worse, area)
    ]
    assert f"| plain, three seeds, one warm start | 2 | {' | '.join(cells)} |" in study

    slow = "2026-11-27_7053e374_2core_slow_seeds.json"
    ratio, low, high = result(slow)["equal_accuracy"]["ratio"]
    speed = result(slow)["speed"][0]
    figure = f"{ratio:.2f} times as fast ({low:.2f} to {high:.2f})"
    assert shown("rewards of 0.2 s") == [figure, "2.5", "met"] and ratio >= 2.5
    curves = [rows_of(slow, arm, "curve") for arm in ("seeds", "synchronous")]
    areas = [map(mean_accuracy, each) for each in curves]
    cells = [
        f"{ratio:.2f} [{low:.2f}, {high:.2f}]",
        f"{speed:.2f}",
        "{:+.3f} [{:+.3f}, {:+.3f}]".format(*result(slow)["final_accuracy"]),
        "{:+.3f} [{:+.3f}, {:+.3f}]".format(*difference(*map(list, areas))),
    ]
    row = "rewards of 0.2 s and more, five seeds, a warm start each"
    assert f"| {row} | 4 | {' | '.join(cells)} |" in study


def recipe(title: str, *files: str) -> tuple[str, list[dict[str, Any]]]:
    page = (ROOT / "docs" / "recipes.md").read_text()
    text = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert all(f"benchmarks/results/{file}" in text for file in files)
    results = ROOT / "benchmarks" / "results"
    return text, [json.loads((results / file).read_text()) for file in files]


def shares(accuracy: dict[str, Any], when: str) -> list[str]:
    """Accuracy with its interval, held out and out of distribution, as a table has it."""
    cells = [accuracy[split][when] for split in ("heldout", "ood")]
    return [f"{c['share']:.3f} ({c['interval'][0]:.3f} to {c['interval'][1]:.3f})" for c in cells]


def test_the_tables_of_the_recipes_are_those_of_their_files() -> None:
    page, (found,) = recipe("Sort, the demo", "2026-11-27_313bddc5_2core_demo_seeds.json")
    words = " ".join(page.split())
    for before, key, digits in (
        ("begin at a held-out accuracy of", "heldout_start", 2),
        ("end at", "heldout_end", 2),
        ("Out of distribution they end at", "ood_end", 2),
        ("RL takes", "wall_s", 0),
        ("with the warm start", "whole_s", 0),
    ):
        # the first run of a seed builds its model
        first = slice(0, None, 2 if key == "whole_s" else 1)
        values = [row[key] for row in found["seeds"][first]]
        assert f"{before} {min(values):.{digits}f} to {max(values):.{digits}f}" in words
    lags = [row["lag"]["mean"] for row in found["seeds"]]
    assert f"The mean lag is {min(lags):.2f} to {max(lags):.2f} versions" in words

    page, both = recipe(
        "SmolLM2 on a CPU",
        "2026-11-22_239afbe_2core_smollm2_sort.json",
        "2026-11-22_239afbe_2core_smollm2_first_lora.json",
    )
    for words, found in zip(("all weights", "adapters"), both, strict=True):
        starts, ends = (shares(found["accuracy"], when) for when in ("start", "end"))
        assert f"| {words}, held out | {starts[0]} | {ends[0]} |" in page
        assert f"| {words}, names never shown | {starts[1]} | {ends[1]} |" in page

    page, (found, late) = recipe(
        "Reward hacking and KL",
        figures.HACK,
        "2026-11-24_a9f4abf_2core_kl_placement_rlehack_lag4.json",
    )
    arms = found["arms"]
    for words in ("none", *(f"k{k} in the {p}" for k in (1, 2, 3) for p in ("loss", "reward"))):
        if words == "k2 in the reward":
            continue
        arm = arms["no KL" if words == "none" else f"{words.replace(' the', '')}, 0.1"]
        ends = [run["end"] for run in arm["each"]]
        spread = f"{arm['end']:.2f} ({min(ends):.2f}, {max(ends):.2f})"
        assert f"| {words} | {arm['reward_end']:.2f} | {spread} | {arm['ood']:.2f} |" in page
    p_value = arms["k1 in reward, 0.1"]["against_base"]["end"]["p_holm"]
    assert f"has p = {p_value:.2f}" in " ".join(page.split())
    assert f"{late['arms']['no KL']['end']:.2f} (`benchmarks" in " ".join(page.split())


def test_speed_is_claimed_from_results_against_present_rivals_only() -> None:
    """A result against a weaker rival is no figure any more, on any page but the log."""
    for page in PAGES:
        for file in () if page in LOG else RESULT.findall(page.read_text()):
            day, _, _, name = Path(file).stem.split("_", 3)
            assert day >= table.SINCE.get(name, ""), f"{page}: {file} had a weaker rival"
            assert not name.startswith(table.OUTDATED), f"{page}: {file} had a weaker rival"


# imported in the Python of an environment alone (agent.python), where its package is
FOREIGN = {
    "actors.gateway.hubs.verifiers_chat",
    "actors.gateway.hubs.verifiers_v0",
    "actors.gateway.hubs.verifiers_v1",
}
MODULES = sorted(
    m.name
    for package in (actors, asyncrl, buffer, learner)
    for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if m.name not in FOREIGN
)
FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples(name: str) -> list[doctest.DocTest]:
    return [t for t in FINDER.find(importlib.import_module(name)) if t.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    for test in examples(name):
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0, test.name


def test_there_are_examples() -> None:
    assert sum(len(examples(name)) for name in MODULES) >= 5
