"""`asyncrl diff`: compare two runs.

It reports the settings that differ, the first step at which a metric differs and by how much, and
the curves.
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers
from asyncrl.contract.toml_writer import fill, find_differences, read_table
from asyncrl.experiments.compare.page import CURVES, plot_curves
from asyncrl.records import atomic_write, metrics, page_kit, rundir
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import PlotBlock, TextBlock

MetricsByStep = dict[int, Numbers]
MACHINE, PLACES, TEXTS = read_table(__file__).values()


def read(run_dir: Path) -> tuple[JsonObject, MetricsByStep, str | None]:
    """Return (config, step -> metrics, digest of the final weights) of a run.

    Raises ConfigError if `run_dir` is not a run directory.
    """
    rundir.require_run(run_dir)
    by_step: MetricsByStep = {}
    # rows of training and evaluation may share a step; after a resume the later value wins
    for row in metrics.read(run_dir):
        by_step.setdefault(int(row["step"]), {}).update(metrics.select_numbers(row))
    if not by_step:
        raise ConfigError(f"{run_dir}: it has no metrics yet; wait until the run has made a step")
    digest = run_dir / "weights_digest"
    return (
        tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8")),
        by_step,
        digest.read_text(encoding="utf-8") if digest.exists() else None,
    )


def find_first_difference(rows_a: MetricsByStep, rows_b: MetricsByStep) -> JsonObject | None:
    """Return the first step at which metrics differ, with these metrics.

    The relatively largest difference comes first. Metrics of the machine are ignored.
    """
    for step in sorted(rows_a.keys() & rows_b.keys()):
        differences = []
        for name in sorted(rows_a[step].keys() & rows_b[step].keys()):
            pair = value_a, value_b = rows_a[step][name], rows_b[step][name]
            if name.startswith(tuple(MACHINE)) or value_a == value_b or all(map(math.isnan, pair)):
                continue
            relative = abs(value_a - value_b) / max(*map(abs, pair), 1e-12)
            differences.append({"name": name, "a": value_a, "b": value_b, "relative": relative})
        if differences:
            differences.sort(key=lambda found: (found["relative"], found["name"]), reverse=True)
            return {"step": step, "metrics": differences}
    return None


def list_changes(config_a: JsonObject, config_b: JsonObject) -> list[str]:
    """List the settings that differ, each with its two values."""
    differences = find_differences(config_a, config_b)
    return [f"{key}: {value_a} | {value_b}" for key, (value_a, value_b) in differences.items()]


def diff(run_a: Path, run_b: Path) -> JsonObject:
    """Compare two runs.

    `equal` means bitwise equal final weights, the same steps, and every common metric equal.
    """
    (ca, ra, da), (cb, rb, db) = read(run_a), read(run_b)
    for config in (ca, cb):
        for name in PLACES:
            config.pop(name, None)
    difference = find_first_difference(ra, rb)
    return {
        "a": str(run_a),
        "b": str(run_b),
        "config": list_changes(ca, cb),
        "steps": [max(ra), max(rb)],
        "first_difference": difference,
        "weights_digests": [da, db],
        "equal": difference is None and ra.keys() == rb.keys() and da is not None and da == db,
    }


def format_diff(comparison: JsonObject) -> str:
    """Format the comparison for a reader."""
    difference = format_first_difference(comparison["first_difference"], "step", 6)
    return fill(TEXTS["report"], **comparison, difference=difference).rstrip()


def format_first_difference(first: JsonObject | None, unit: str, shown: int) -> str:
    """Format the result of `find_first_difference`, with `shown` of its metrics."""
    return fill(TEXTS["difference"], first=first, unit=unit, shown=shown).rstrip() if first else ""


def write(comparison: JsonObject, path: Path) -> None:
    """Write a page with the curves of both runs overlaid. comparison: the result of `diff`."""
    runs = {name: read(Path(comparison[name.lower()]))[1] for name in "AB"}
    write_page("Two runs", format_diff(comparison), runs, comparison, path, "diff")


def write_page(
    heading: str,
    text: str,
    runs: Mapping[str, Mapping[int, Mapping[str, float]]],
    result: JsonObject,
    path: Path,
    blob: str,
) -> None:
    """Write an HTML page of a text, overlaid curves and JSON.

    text: the text above the curves.
    runs: name -> step -> metrics.
    result: the JSON, in the element with the id `blob`.
    """
    by_name = {
        metric: {
            run: [[(float(n), row[metric]) for n, row in sorted(rows.items()) if metric in row]]
            for run, rows in runs.items()
        }
        for metric in CURVES
        if metric != "eval/ood"
    }
    plots = [plot_curves(metric, x) for metric, x in by_name.items() if any(map(any, x.values()))]
    blocks = [TextBlock(text, style="pre"), PlotBlock(plots)]
    atomic_write.write(path, page_kit.render(heading, "", blocks, {blob: result}))
