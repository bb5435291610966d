"""The story of staleness in four steps, as a marimo notebook.

marimo edit docs/notebooks/staleness.py
python docs/notebooks/staleness.py
"""

import marimo

app = marimo.App(app_title="Staleness")


@app.cell
def _():
    import json
    from pathlib import Path

    import marimo as mo

    from asyncrl.config import load
    from asyncrl.experiments.lab import corrections
    from asyncrl.experiments.simulate import what_if
    from asyncrl.experiments.simulate.times import TimeModel
    from asyncrl.records.page_kit import PagePlot, PlotBlock, PlotLine, render

    def show(*plots):
        return mo.iframe(render("", "", [PlotBlock(plots)], {}), height="420px")

    return (
        Path,
        PagePlot,
        PlotLine,
        TimeModel,
        corrections,
        json,
        load,
        mo,
        show,
        what_if,
    )


@app.cell
def _(mo):
    mo.md(
        """
        # Staleness

        An asynchronous run samples and trains at the same time. A sample was drawn by the policy of
        some version, and it is trained when the learner has made more updates. The number of
        updates in between is its **lag**. `staleness.max_lag` bounds it.

        ## 1. What a limit buys: speed

        A simulated run with one generator, whose completions take as long as an update. With limit
        0 both sides wait for each other in turn. With limit 1 both work. A higher limit only makes
        samples older.
        """
    )
    return


@app.cell
def _(PagePlot, PlotLine, TimeModel, load, show, what_if):
    limits = [0, 1, 2, 4]
    config = load.load("demo", ["learner.steps=30", "evaluation.every=0", "staleness.wait=0"])
    outcomes = [
        what_if.simulate_seeds(
            what_if.change_limit(config, limit), TimeModel(), seeds=1, evaluate=False
        )[0]
        for limit in limits
    ]
    speed = [outcome["tokens_per_s"] for outcome in outcomes]
    lag = [outcome["lag_mean"] for outcome in outcomes]
    show(
        PagePlot("Speed", "trained tokens a second", [PlotLine("", limits, speed)], "max_lag"),
        PagePlot("Lag", "versions, mean", [PlotLine("", limits, lag)], "max_lag"),
    )
    return lag, limits, speed


@app.cell
def _(mo):
    mo.md(
        """
        ## 2. What lag costs: bias

        Every response of a tiny policy, summed exactly. The samples come from a policy at some
        distance, as if it were older. Without a correction the gradient is wrong, and the further
        the policies are apart, the more. Weights of whole responses remove the bias and pay with
        variance. A bound on the weights trades one for the other.
        """
    )
    return


@app.cell
def _(PagePlot, PlotLine, corrections, show):
    estimators = corrections.measure(2, 4, 2, lambda _: None)["estimators"]
    by_distance = estimators[max(estimators, key=int)]
    distances = [float(distance) for distance in by_distance]
    bias, variance = (
        {
            name: [by_distance[distance][name][kind] for distance in by_distance]
            for name in ("none", "token truncate", "sequence none", "sequence truncate")
        }
        for kind in ("relative_bias", "relative_variance")
    )
    show(
        *(
            PagePlot(
                title,
                "of the exact gradient",
                [PlotLine(name, distances, values) for name, values in found.items()],
                "KL of the two policies, nats a token",
            )
            for title, found in (("Bias", bias), ("Variance", variance))
        )
    )
    return bias, distances, variance


@app.cell
def _(mo):
    mo.md(
        """
        ## 3. What it does to a run

        The task `rle` with five seeds at each lag, from a result file of the repository: accuracy
        on held-out prompts at the end of training.
        """
    )
    return


@app.cell
def _(PagePlot, Path, PlotLine, json, show):
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    grid = json.loads((results / "2026-11-21_3ff3b71_4core_lag_grid.json").read_text())
    accuracy = {}
    for cell in grid["tasks"]["rle-5e-4"]["cells"]:
        accuracy.setdefault(cell["correction"], []).append((float(cell["limit"]), cell["final"]))
    shown = [name for name in ("none", "tis", "ppo") if name in accuracy]
    lines = [
        PlotLine(name, *(list(column) for column in zip(*sorted(accuracy[name]), strict=True)))
        for name in shown
    ]
    show(PagePlot("Held-out accuracy", "at the end", lines, "injected lag, versions"))
    return accuracy, shown


@app.cell
def _(mo):
    mo.md(
        """
        ## 4. What to do

        - Take the smallest limit at which neither side waits: 1 or 2 in most runs.
        - Look at the effective sample size (`is/ess`). Near 1, the ratios leave all of the batch.
        - If it falls, choose a method made for lag: `asyncrl methods` lists them.
        - `asyncrl watch RUN` shows all of this for a run of your own, and what to try.
        """
    )
    return


if __name__ == "__main__":
    app.run()
