"""`asyncrl.run` and `asyncrl.load_run`, as a notebook calls them: with real runs."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from process_kit import ENV, SMALL, run_command, until
from warm_python import FORKED

import asyncrl
from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.contract import errors, importing
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.records import jsonl, metrics, process_log, rundir
from asyncrl.supervise import notebook

pytestmark = pytest.mark.slow

# a process may stand still for a minute
PATIENT = ("wires.connect_s=1800.0", "watchdog.floor_s=1800.0", "watchdog.startup_s=3600.0")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> asyncrl.LoadedRun:
    """A run of six steps, started from a table in another working directory."""
    folder = tmp_path_factory.mktemp("notebook")
    table = {
        "runs": "{here}/runs",
        "name": "first",
        "model": {"path": str(small_model)},
        "task": {"name": "sort"},
        "record": {"samples_every": 2},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return asyncrl.run(table, [*SMALL[:-1], *PATIENT, "staleness.max_lag=2"])


def test_what_a_run_left(first: asyncrl.LoadedRun) -> None:
    rows = metrics.read(first.path)
    trained = [r for r in rows if "reward/mean" in r]
    found = first.metrics["reward/mean"]
    assert found.steps.tolist() == [r["step"] for r in trained] and len(trained) == 6
    assert found.values.tolist() == [r["reward/mean"] for r in trained]
    assert found.seconds.tolist() == [r["t"] for r in trained]
    kinds = (found.steps.dtype, found.seconds.dtype, found.values.dtype)
    assert kinds == (np.int64, np.float64, np.float64)
    assert first.metrics["eval/heldout"].steps.tolist() == [0, 3, 6], "as measured, not by batch"
    assert "lag/samples" not in first.metrics and any("lag/samples" in r for r in rows)
    assert first.samples == jsonl.read(first.path / "samples.jsonl") and "text" in first.samples[0]
    assert [row["step"] for row in first.optimizer_steps] == [r["step"] for r in trained]
    norms = [row["optim/grad_norm"] for row in first.optimizer_steps]
    assert norms == first.metrics["optim/grad_norm"].values.tolist()
    assert first.config == load.load(first.path / "config.toml")
    assert first.config.staleness.max_lag == 2 and first.path.is_absolute()
    assert first.summary == json.loads((first.path / "summary.json").read_text())
    assert first.summary["steps"] == 6 and "partial" not in first.summary
    ends = dict(first.ledger)
    assert ends.pop("generated") == sum(ends.values()) > 0


def test_a_run_without_summary_is_read_to_its_end(first: asyncrl.LoadedRun, tmp_path: Path) -> None:
    shutil.copytree(first.path, tmp_path / "cut")
    for name in ("summary.json", "buffer_summary.json"):
        (tmp_path / "cut" / name).unlink()
    cut = asyncrl.load_run(str(tmp_path / "cut"))
    assert cut.summary["partial"] and cut.summary["steps"] == 6
    assert cut.ledger["trained"] == first.ledger["trained"]
    assert cut.metrics.keys() == first.metrics.keys()
    text = repr(first)
    assert len(text) < 500 and "\n" not in text
    end = first.summary["heldout_end"]
    for fact in (str(first.path), "task: sort", "steps: 6 of 6", f"-> {end:.3f}", "mean lag: "):
        assert fact in text
    accuracy = first.metrics["eval/heldout"]
    assert repr(accuracy) == f"MetricSeries(3 values, steps 0 to 6, last {accuracy.values[-1]:.4g})"
    shown = msgspec.structs.replace(first, path=Path("<script>alert(1)</script>&"))._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in shown
    assert f"<td>6 of 6</td></tr><tr><th>held-out</th><td>{first.facts()['held-out']}" in (
        shown.replace("-&gt;", "->")
    )


def test_rows_of_a_run_s_frame(first: asyncrl.LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value of metrics.jsonl once, in its row; without pandas they are there still."""
    table = first.rows()
    for name, one in first.metrics.items():
        named = [row for row in table if name in row]
        assert [row["step"] for row in named] == one.steps.tolist(), name
        assert [row["seconds"] for row in named] == one.seconds.tolist()
        np.testing.assert_array_equal([row[name] for row in named], one.values)
    assert sum(len(row) - 2 for row in table) == sum(len(m.values) for m in first.metrics.values())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"frame\(\) needs pandas: pip install pandas; rows\(\)"):
        first.frame()


def test_the_list_of_runs_and_a_figure_of_one(
    first: asyncrl.LoadedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = first.path.parent
    main.main(["ls", str(runs), "--json"], standalone_mode=False)
    listed = json.loads(capfd.readouterr().out)["runs"]
    whole = {
        "run": "first",
        "state": "finished",
        "steps": 6,
        "of": 6,
        "accuracy": first.metrics["eval/heldout"].values[-1],
        "lag": first.summary["lag"]["mean"],
    }
    assert listed == [whole]
    with closing(rundir.RunLock(first.path)):
        main.main(["ls", str(runs)], standalone_mode=False)
    assert capfd.readouterr().out.split("\n")[1].split()[:3] == ["first", "running", "6/6"]

    table = tmp_path / "points.csv"
    metric = "reward/mean"
    argv = ["figure", str(first.path), "--csv", str(table), "--metric", metric]
    main.main(argv, standalone_mode=False)
    assert "One run each (n = 1 seed), no band." in capfd.readouterr().out
    rows = [line.split(",") for line in table.read_text().splitlines()]
    assert rows[0] == ["series", "seed", "step", metric]
    assert [float(row[3]) for row in rows[1:]] == first.metrics[metric].values.tolist()
    main.main([*argv, "--x", "lag"], standalone_mode=False)
    (row,) = [line.split(",") for line in table.read_text().splitlines()[1:]]
    assert row[0] == "first" and float(row[2]) == pytest.approx(whole["lag"])


def test_where_no_run_is(first: asyncrl.LoadedRun, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.toml").touch()
    for where in (tmp_path, tmp_path / "none", tmp_path / "project", first.path / "logs"):
        with pytest.raises(ConfigError, match=r"is not a run directory .* such as runs/NAME"):
            asyncrl.load_run(where)


def test_a_refusal_is_the_products_own(
    first: asyncrl.LoadedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loaded config whose directory is taken; a name; a wrong key.  Nothing printed unasked."""
    with pytest.raises(ConfigError, match="holds a run already"):
        asyncrl.run(first.config)
    with pytest.raises(
        ConfigError,
        match=r"^demoo: no such config file; did you mean demo\? bundled configs, by name: ",
    ) as e:
        asyncrl.run("demoo")
    assert e.value.exit_code == 2 and capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError, match=r"^--set learner.lrr=1: learner.lrr: unknown key"):
        asyncrl.run(Path("demo"), ["learner.lrr=1"], show=True)
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: --set learner.lrr=1: ")


ENDS = [
    (1, '{"error": "said"}', AsyncrlError, "^said$"),
    (2, '{"error": "said"}', ConfigError, "^said$"),
    (3, '{"error": "said"}', errors.ProcessLost, "^said$"),
    (4, '{"error": "said"}', errors.PeerUnreachable, "^said$"),
    (5, '{"error": "said"}', errors.DamagedDataError, "^said$"),
    (6, '{"error": "said"}', errors.NothingToDo, "^said$"),
    (130, '{"error": "interrupted"}', KeyboardInterrupt, "^$"),
    (130, '{"run_dir": "runs/a"}', KeyboardInterrupt, r"asyncrl.load_run\('runs/a'\)"),
    (1, "", AsyncrlError, "^the last line$"),
]


@pytest.mark.parametrize(("code", "answer", "kind", "said"), ENDS)
def test_how_a_command_may_end(
    code: int, answer: str, kind: type[BaseException], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        f"import sys; print({answer!r}); print('a line\\nthe last line\\n', file=sys.stderr); "
        f"sys.exit({code})"
    )
    monkeypatch.setattr(importing, "make_command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(kind, match=said) as error:
        notebook.run("demo")
    assert type(error.value) is kind and getattr(error.value, "exit_code", code) == code


def going(folder: Path, model: Path, begin: str = "") -> tuple[subprocess.Popen[str], Path]:
    """A program that called asyncrl.run, once its run trains; and the run's directory."""
    sets = [f"model.path={str(model)!r}", *SMALL[:-1], *PATIENT, "learner.steps=100000"]
    sets += ["name='long'"]
    # A program in the background of a shell is born deaf to interrupts; one in a notebook is not.
    code = f"{begin}import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += f"import asyncrl; asyncrl.run('demo', {sets!r}, show=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=ENV, stderr=subprocess.PIPE, text=True
    )
    run_dir = folder / "runs" / "long"
    end = time.monotonic() + 1800
    while not any("reward/mean" in r for r in jsonl.read(run_dir / "metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.05)
    return process, run_dir


def test_an_interrupt_checkpoints_and_is_passed_on(tmp_path: Path, small_model: Path) -> None:
    process, run_dir = going(tmp_path, small_model, FORKED)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=1800)[1]
    assert (
        "KeyboardInterrupt: the run was stopped; read it with asyncrl.load_run('runs/long')" in err
    )
    found = asyncrl.load_run(run_dir)
    assert 0 < found.summary["steps"] < 100000 and list(run_dir.glob("checkpoints/*/*"))


def test_a_run_does_not_outlive_the_notebook(tmp_path: Path, small_model: Path) -> None:
    process, run_dir = going(tmp_path, small_model)
    process.kill()
    process.wait()
    names = ("supervisor", "buffer", "learner", "generator-0")
    until(lambda: not any(process_log.is_alive(run_dir, name) for name in names))
    rundir.RunLock(run_dir).close()
    assert asyncrl.load_run(run_dir).summary["partial"]


def test_importing_asyncrl_stays_cheap() -> None:
    """Every process of a run imports it, and nothing of this with it; reading needs no torch."""
    code = (
        "import sys, asyncrl; few = [m in sys.modules for m in ('numpy', 'msgspec', 'torch')]; "
        "asyncrl.load_run; print(few, 'torch' in sys.modules, hasattr(asyncrl, 'runn'))"
    )
    done = run_command([sys.executable, "-c", code])
    assert done.out.strip() == "[False, False, False] False False", done.err


def test_callbacks_see_the_run_and_one_stops_it(tmp_path: Path, small_model: Path) -> None:
    steps: list[int] = []
    evaluated: list[float] = []
    saved: list[Path] = []
    table = {"runs": str(tmp_path / "runs"), "name": "stopped", "task": {"name": "sort"}}

    def on_checkpoint(checkpoint: dict[str, Any]) -> bool:
        saved.append(Path(checkpoint["path"]))
        return checkpoint["version"] >= 2

    stopped = asyncrl.run(
        table | {"model": {"path": str(small_model)}},
        [
            *SMALL[:-1],
            *PATIENT,
            "learner.steps=1000",
            "learner.checkpoint_every=2",
            "learner.keep_checkpoints=1000",
        ],
        on_step=lambda row: steps.append(row["step"]),
        on_evaluation=lambda row: evaluated.append(row.get("eval/heldout", 0.0)),
        on_checkpoint=on_checkpoint,
    )
    assert steps[:2] == [0, 1] and len(evaluated) >= 1 and saved[-1].is_dir()
    assert 2 <= stopped.summary["steps"] < 1000
    with asyncrl_page(stopped) as url:
        assert httpx2.get(url, follow_redirects=True, timeout=600).status_code == 200
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)

    def fail(row: dict[str, Any]) -> None:
        raise RuntimeError("a callback of one's own")

    with pytest.raises(RuntimeError, match="of one's own"):
        asyncrl.run(stopped.config, ["learner.steps=1000", "name=failed"], on_step=fail)
    assert not process_log.is_alive(tmp_path / "runs" / "failed", "supervisor")


@contextmanager
def asyncrl_page(run: asyncrl.LoadedRun) -> Iterator[str]:
    page = asyncrl.watch(run)
    assert page.url in page._repr_html_() and page.url in repr(page)
    yield page.url
    page.close()


def test_a_page_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        asyncrl.watch(tmp_path)
