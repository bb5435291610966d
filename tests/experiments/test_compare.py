"""`asyncrl compare` on real runs: data, bitwise twins, resuming, page, numbers, refusals."""

import errno
import json
import math
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from process_kit import ENV, PATIENT, ROOT, RUN_SEED, Ended, as_options, run_command
from warm_run_kit import make_record

from asyncrl.config import load
from asyncrl.experiments import figures
from asyncrl.experiments.compare import arms as arms_made
from asyncrl.experiments.compare import grid, page
from asyncrl.experiments.compare.analysis import (
    analyze,
    average_reference_kl,
    describe_data_difference,
    summarize,
)
from asyncrl.experiments.compare.grid import CellResult
from buffer import training_log

pytestmark = pytest.mark.slow

SMALL = (
    "learner.steps=5 learner.groups=8 learner.group_size=4 evaluation.every=2 "
    "evaluation.prompts=32 evaluation.final_prompts=32 evaluation.ood_prompts=8 "
    "evaluation.ood_every=3"
)
SETS = (*PATIENT, f"seed={RUN_SEED}", *SMALL.split())
SEEDS = (RUN_SEED, RUN_SEED + 1)


def command(model: Path, out: Path, words: Sequence[str]) -> list[str]:
    sets = as_options((*SETS, f"model.path={str(model)!r}"))
    argv = [sys.executable, "-m", "asyncrl.cli", "compare", "configs/demo.toml", "--out", str(out)]
    return [*argv, *sets, *words]


def compare(model: Path, out: Path, *words: str) -> Ended:
    return run_command(command(model, out, words), timeout=3600)


def on_a_terminal(model: Path, out: Path, *words: str) -> tuple[int, str]:
    """The exit code, and what came to a terminal on stderr."""
    ours, theirs = pty.openpty()
    argv = command(model, out, words)
    env = ENV | {"TERM": "xterm", "COLUMNS": "110", "LINES": "40", "NO_COLOR": "1"}
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError as e:  # Linux says EIO when the other side has gone
        assert e.errno == errno.EIO
    os.close(ours)
    return process.wait(3600), seen.decode()


def test_a_comparison_from_start_to_verdict(sort_model: Path, tmp_path: Path) -> None:
    text = (
        "--arm sync:staleness.max_lag=0 --arm twin:same-as=sync --arm "
        "late:staleness.max_lag=2,staleness.inject=2 --seeds 2"
    )
    arms = text.split()
    out = tmp_path / "c"
    done = compare(sort_model, out, *arms, "--jobs", "2", "--json").check()
    found = done.json
    assert list(found["arms"]) == ["sync", "twin", "late"] and found["seeds"] == list(SEEDS)
    words = {(v["arm"], v["metric"]): v for v in found["verdicts"]}
    assert words["twin", "heldout_end"]["verdict"] == "equal"
    assert words["twin", "heldout_end"]["difference"] == 0
    assert found["arms"]["sync"]["weights_digests"] == found["arms"]["twin"]["weights_digests"]
    assert words["late", "heldout_end"]["verdict"] in ("no difference visible", "better", "worse")
    assert found["same_data"] == {"twin": [True, True], "late": [True, True]}
    assert found["data_apart"] == {"twin": ["", ""], "late": ["", ""]}
    curves = [
        json.loads((out / "cells" / f"sync-seed{n}.json").read_text())["accuracy"][1] for n in SEEDS
    ]
    sync = found["arms"]["sync"]
    assert sync["target"] == pytest.approx(0.9 * sync["heldout_end"])
    # the mean of the ends is above nine tenths of itself
    assert sync["reached"] == sum(max(curve) >= sync["target"] for curve in curves) >= 1
    assert all(f"reward {sync['target']:.3f}" in t for t in found["trade"])
    assert sync["lag"] == 0 and found["arms"]["late"]["lag_max"] == 2
    assert ("twin", "ood_end") in words
    assert all(
        0 <= x <= 1
        for a in found["arms"].values()
        for x in (a["ood_start"], a["ood_end"], *a["ood_each"])
    )
    assert words["twin", "area"]["differs"] == {}
    lagged = {"staleness.inject": [None, 2], "staleness.max_lag": [0, 2]}
    assert words["late", "area"]["differs"] == lagged and "found with 80 % power" in done.err
    ended = rf"^(sync|twin|late)-seed({SEEDS[0]}|{SEEDS[1]}): reward [\d.]+ in \d+ s \([1-6] of 6"
    assert len(re.findall(ended, done.err, re.M)) == 6, done.err
    html = (out / "report.html").read_text()
    assert "late against sync" in html or "late is" in html
    assert ">OOD end</th>" in html and ">KL to ref</th>" in html
    assert "Out-of-distribution reward" in html and "KL from target to reference" in html
    settings = html[html.index('<table id="settings">') :].split("</table>")[0]
    assert "staleness.inject = 2 (none), staleness.max_lag = 2 (0)" in settings
    assert "the same as sync" in settings and "compared with sync" in settings
    assert json.loads((out / "comparison.json").read_text()) == found
    assert any((out / "tensorboard").rglob("events*"))

    # Interrupted: what is finished is not made again.
    kept = (out / "cells" / f"sync-seed{RUN_SEED}.json").stat().st_mtime_ns
    (out / "cells" / f"late-seed{SEEDS[1]}.json").unlink()
    code, shown = on_a_terminal(sort_model, out, *arms)
    assert code == 0 and "5 of 6 runs are finished already" in shown
    # as it was redrawn: the second seed comes last
    table = re.findall(r"late[ \u2502]+([\d.]+), \d+ s[ \u2502]+(\S+)", shown)
    ends = [f"{x:.3f}" for x in found["arms"]["late"]["each"]]
    assert (
        {x for x, _ in table} == {ends[0]} and table[0][1] == "-" and table[-1][1] == f"{ends[1]},"
    ), shown[-3000:]
    again = compare(sort_model, out, *arms, "--json")
    assert again.code == 0 and "6 of 6 runs are finished already" in again.err
    assert (out / "cells" / f"sync-seed{RUN_SEED}.json").stat().st_mtime_ns == kept
    assert again.json["arms"]["late"]["weights_digests"] == found["arms"]["late"]["weights_digests"]

    # These arms ran in warm processes.  Processes of their own give the same samples at the same
    # lags; synchronously, the same weights, bitwise.
    assert all(a["warm"] for a in found["arms"].values())
    plain_words = "--seeds 1 --real --jobs 2 --json"
    real = compare(sort_model, tmp_path / "real", *arms[:2], *arms[4:6], *plain_words.split()).json
    assert not any(a["warm"] for a in real["arms"].values())
    for key in ("weights_digests", "ood_each", "each"):
        assert real["arms"]["sync"][key] == sync[key][:1]
    assert real["arms"]["sync"]["ood_start"] == sync["ood_start"]
    assert real["arms"]["late"]["lag_max"] == 2 and real["same_data"]["late"] == [True]
    warm = json.loads((out / "cells" / f"late-seed{RUN_SEED}.json").read_text())["batches"]
    apart = training_log.read(tmp_path / f"real/runs/late-seed{RUN_SEED}/trained.jsonl")
    in_order = [[[8 * n, 8 * n + 7]] for n in range(5)]
    assert [b["tickets"] for b in warm] == [apart[n].tickets for n in range(5)] == in_order

    # A figure's points are the same from either directory; both hold seed 0 of these arms.
    for across in (figures.STEP, figures.LAG):
        warm_points, real_points = (
            figures.read_points([where], "eval/heldout", across)
            for where in (out, tmp_path / "real")
        )
        assert len(real_points) == (8 if across == figures.STEP else 2)
        for arm in ("sync", "late"):
            first = [p for p in warm_points if (p.series, p.seed) == (arm, RUN_SEED)]
            apart_points = [p for p in real_points if p.series == arm]
            assert [p.position for p in apart_points] == pytest.approx([p.position for p in first])
            if arm == "sync":
                assert [p.value for p in apart_points] == [p.value for p in first]

    # Other settings in the same directory.
    other = compare(sort_model, out, *arms, "--set", "learner.lr=1e-3")
    assert other.code == 2 and "learner.lr: 0.0003, now 0.001" in other.err and "--out" in other.err


DEMO = load.load("configs/demo.toml")


def cell(
    arm: str,
    *batches: list[list[int]],
    ids: str = "",
    accuracy: tuple[float, ...] = (0.4, 0.6, 0.8),
) -> CellResult:
    """A run of four batches, with times and three evaluations."""
    curve = [{"version": n + 1, "t": 10.0 * n} for n in range(4)]
    record = make_record([[0, 2, 4], [*accuracy]], curve, wall_s=40.0, weights_digest=arm)
    record |= {"trained_ids": ids or str(batches)}
    record |= {"batches": [{"ids": str(b), "tickets": b} for b in batches]}
    return CellResult(arm, 0, record, DEMO, warm=False)


def test_how_far_the_data_of_two_runs_differ() -> None:
    base = cell("a", [[0, 3]], [[4, 7]])
    assert describe_data_difference(cell("b", [[0, 3]], [[4, 7]]), base) == ""
    found = describe_data_difference(cell("b", [[0, 3]], [[4, 5], [8, 9]]), base)
    assert found == "75% of the groups in common, in other batches from number 1 on"
    assert (
        describe_data_difference(cell("b", [[0, 3]]), base)
        == "50% of the groups in common, in other batches from number 1 on"
    )
    assert describe_data_difference(cell("b", ids="of an older version"), base) == "other samples"


def test_the_time_to_an_accuracy() -> None:
    """Base ends at .8, so the target is .72: the base is there at its third evaluation, the other
    at its second, and one never."""
    fast, low = cell("fast", accuracy=(0.4, 0.75, 0.8)), cell("low", accuracy=(0.4, 0.5, 0.6))
    found = analyze([cell("a"), fast, low], dict.fromkeys(("a", "fast", "low"), DEMO))
    assert found["arms"]["fast"]["steps_to_target"] == 2
    assert found["arms"]["fast"]["seconds_to_target"] == 20
    assert found["trade"][0].endswith("reward 0.720 at batch 2 (a 4), after 20 s (30)")
    assert found["trade"][1].endswith("reward 0.720 was never reached")


def test_out_of_distribution_accuracy_and_kl_to_the_reference_of_every_arm() -> None:
    """Means over the runs that have them; KL over the last 20 batches; a verdict at every end."""
    config = load.load("configs/demo.toml", ["evaluation.ood_prompts=50"])
    base, arm, gone = cell("base"), cell("arm"), cell("arm")
    base.ood, arm.ood = {0.0: 0.2, 2.0: 0.3, 4.0: 0.1}, {0.0: 0.2, 4.0: 0.4}
    # 28 is the last
    base.rows = [
        {"step": n, "t": 0.0} | ({"kl/target_ref_k3": float(n)} if n % 2 else {}) for n in range(29)
    ]
    found = analyze([base, arm], {"base": config, "arm": config})
    a, b = found["arms"]["arm"], found["arms"]["base"]
    assert (b["ood_start"], b["ood_end"], a["ood_end"], b["ood_each"]) == (0.2, 0.1, 0.4, [0.1])
    assert b["kl_ref"] == (9 + 27) / 2 and math.isnan(a["kl_ref"])
    assert average_reference_kl(base.rows[:8]) == (1 + 3 + 5 + 7) / 4
    assert average_reference_kl([*base.rows[:4], *[{"step": 5}] * 20]) == 3
    # the first batch is not the end
    assert math.isnan(average_reference_kl([base.rows[1], {"step": 5}]))
    (far,) = [v for v in found["verdicts"] if v["metric"] == "ood_end"]
    assert far["difference"] == pytest.approx(0.3)
    assert "out-of-distribution reward +0.300" in far["text"]
    assert math.isfinite(far["interval_other_prompts"][0])
    row = dict(zip(page.HEAD, page.format_arms(found)[1], strict=True))
    assert (row["OOD start"], row["OOD end"], row["KL to ref"]) == ("0.200", "0.400", "-")
    assert dict(zip(page.HEAD, page.format_arms(found)[0], strict=True))["KL to ref"] == "18"
    other = cell("base")
    # the last has no end
    other.seed, other.ood, gone.seed, gone.ood = 1, {0.0: 0.2, 4.0: 0.3}, 1, {0.0: 0.4, 2.0: 0.9}
    short = analyze([base, other, arm, gone], {"base": config, "arm": config})
    assert short["arms"]["arm"]["ood_end"] == 0.4
    assert short["arms"]["arm"]["ood_start"] == pytest.approx(0.3)
    assert not [v for v in short["verdicts"] if v["metric"] == "ood_end"]


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ("a:staleness.lag=0|b:", "--arm a: --set staleness.lag=0: staleness.lag: unknown key"),
        ("a:|b:", "--arm b: resolves to the same config as a; leave one out, or write b:same-as=a"),
        ("a:", "a comparison needs two arms or more"),
        ("a:|a:staleness.max_lag=0", "the name a is given twice"),
        ("nonsense|b:", "write NAME:key=value"),
        ("x y:|b:", "a name may have letters, digits and . + - _"),
        ("tiis|b:", "--arm tiis: no such method (did you mean tis?); choose from none, ppo"),
        ("TIS:learner.lr=1|b:", "the name TIS reads like the method tis; write tis:..."),
        ("a:method=tiis|b:", "method=tiis: no such method (did you mean tis?)"),
        ("a:method=tis,method=ppo|b:", "method is given twice"),
        ("tis:method=ppo|b:", "tis is a method; give an arm with method=ppo another name"),
        ("b:|tis:same-as=b", "tis is a method; give an arm that repeats another a name"),
        ("tis:correction.preset=mis|b:", "so correction.preset has no effect"),
        ("tis|tis:learner.lr=1", "given twice; write the second as NAME:method=tis,..."),
        ("a:|b:seed=4", "seed must be the same in all arms"),
        ("a:|b:same-as=z", "no earlier arm has that name"),
    ],
)
def test_what_it_refuses(arms: str, said: str, tmp_path: Path) -> None:
    given = [word for arm in arms.split("|") for word in ("--arm", arm)]
    done = compare(tmp_path / "m", tmp_path / "c", *given)
    assert done.code == 2 and said in done.err and len(done.err.strip().splitlines()) == 1, done.err
    assert not (tmp_path / "c").exists()


def test_a_method_before_the_colon_is_that_method() -> None:
    """Its own keys come first, those beside it refine them, wherever `method=` stands."""
    texts = ("tis:staleness.max_lag=8", "tis16:staleness.max_lag=16,method='tis'", "tis:", "free:")
    refined, named, bare, free = map(arms_made.parse_arm, texts)
    whole = arms_made.CORRECTIONS["tis"][1]
    assert refined.sets == [*whole, "staleness.max_lag=8"] and bare.sets == whole
    assert named.sets == [*whole, "staleness.max_lag=16"] and free.sets == []
    assert refined.title == f"{arms_made.CORRECTIONS['tis'][0]}; with staleness.max_lag=8"
    assert (bare.title, free.title) == (arms_made.CORRECTIONS["tis"][0], "as configured")
    assert arms_made.parse_arm("mine:learner.lr=1").title == "learner.lr=1"
    configs = grid.resolve("demo", (), [arms_made.parse_arm("sync:staleness.max_lag=0"), named])
    assert configs["tis16"].correction.level == "token" and configs["tis16"].staleness.limit == 16
    differs = arms_made.find_changes(*configs.values())
    assert differs["staleness.max_lag"] == (0, 16)
    assert differs["loss.surrogate"] == ("ppo", "decoupled_ppo") and "learner.lr" not in differs
    assert "staleness.max_lag = 16 (0)" in arms_made.format_differences(differs)


def test_one_seed_runs_and_allows_no_verdict(sort_model: Path, tmp_path: Path) -> None:
    text = "--arm sync:staleness.max_lag=0 --arm async: --seeds 1 --set learner.steps=3"
    done = compare(sort_model, tmp_path / "c", *text.split()).check()
    # its speed is compared with a real run's
    assert (tmp_path / "c" / "runs" / f"sync-seed{RUN_SEED}" / "summary.json").exists()
    # of three batches only the first measures the KL, before any update
    assert re.search(r"unstable +OOD start +OOD end *\n", done.out)
    assert "sync: staleness.max_lag=0" in done.out
    assert re.search(r"async, compared with sync: staleness.max_lag = \d+ \(0\)", done.out)
    assert "no verdict is possible" in done.err
    assert "with one seed: no verdict is possible" in done.out


def test_signs_of_warm_runs(tmp_path: Path) -> None:
    """By the rules of a run: the size of each evaluation comes from the settings, and only what
    came to its end is judged by it."""
    lost = [
        {"version": n + 1, "t": 1.0, "reward/mean": 0.5, "kl/target_ref_k3": 0.008 * n}
        for n in range(50)
    ]
    record = make_record([[0.0, 20.0, 50.0], [0.4, 0.6, 0.9]], lost)
    record["ood"] = [[0.0, 20.0, 50.0], [0.4, 0.2, 0.1]]
    sets = "learner.steps=50 evaluation.final_prompts=512 evaluation.prompts=10 "
    sets += "evaluation.ood_prompts=256 kl.loss.coefficient=0.3 kl.loss.estimator="
    k1, k3 = (load.load("configs/demo.toml", f"{sets}{x}".split()) for x in ("k1", "k3"))
    both = CellResult("a", 0, record, k1)
    assert [s.name for s in both.signs] == ["out_of_distribution", "kl_drift"]
    assert [s.name for s in CellResult("a", 0, record, k3).signs] == ["out_of_distribution"]
    early = record | {
        "accuracy": [[0.0, 20.0], [0.4, 0.9]],
        "ood": [[0.0, 20.0], [0.4, 0.1]],
        "curve": lost[:20],
    }
    # given up: its last evaluation is its end
    assert [s.name for s in CellResult("a", 0, early, k3).signs] == ["out_of_distribution"]
    middle = record | {"ood": [[0.0, 20.0], [0.4, 0.2]]}
    assert CellResult("a", 0, middle, k3).signs == [], "ten prompts say little"
    still = record | {"accuracy": [[0.0, 50.0], [0.4, 0.41]], "ood": [[], []]}
    assert [s.name for s in CellResult("a", 0, still, k3).signs] == ["unmoved_accuracy"]
    assert CellResult("a", 0, still | {"accuracy": [[0.0, 20.0], [0.4, 0.41]]}, k3).signs == []
    late = [both, CellResult("a", 1, record, k1), CellResult("a", 2, middle, k3)]
    found = summarize(late, k1)["signs"]
    assert list(found) == ["out_of_distribution", "kl_drift"]
    assert [len(x) for x in found.values()] == [2, 2]
    first, second = page.list_signs([("late", {"signs": found, "seeds": 3})]).items
    assert first.text.startswith(
        "late: out_of_distribution in 2 of 3 runs: held-out reward rose from 0.400 to 0.900"
    )
    assert "kl_drift" in second.text
    cells = [both, CellResult("b", 0, middle, k3)]
    arms = analyze(cells, {"a": k1, "b": k3})
    assert arms["arms"]["a"]["signs"] == {k: x[:1] for k, x in found.items()}
    assert arms["arms"]["b"]["signs"] == {}
    html = page.write(
        tmp_path, "n", cells, arms, [("a", "k1", ""), ("b", "k3", "kl")], k1
    ).read_text()
    listed = html[html.index('<ul id="signs">') :].split("</ul>")[0]
    assert listed.count("<li>") == 2 and "a: kl_drift in 1 of 1 runs: KL to the reference" in listed
