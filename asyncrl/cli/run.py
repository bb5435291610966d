"""`asyncrl run`, and `report`, `export` and `ls` of runs."""

import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from asyncrl import __version__
from asyncrl.cli import result
from asyncrl.cli.base import command, emit, print_progress
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import fill, read_table
from asyncrl.models import devices, fetch
from asyncrl.records import atomic_write, rundir
from asyncrl.records.page_kit import TableBlock, format_number

TEXT: str = read_table(__file__)["summary"]


@command
def run(
    source: str | None,
    sets: tuple[str, ...],
    resume: Path | None,
    dry_run: bool,
    on: str,
    gpus: int | None,
    watch: bool,
) -> None:
    """Run all processes of CONFIG, or continue a run (--resume)."""
    from asyncrl.supervise import run as runner

    if on not in ("local", "ray", "slurm") and not on.startswith("ray://"):
        raise ConfigError(f"--on {on}: choose one of local, ray, ray://HOST:PORT, slurm")
    if on == "slurm" and source is None:
        raise ConfigError("--on slurm: the script of a run resumes it; submit it again with sbatch")
    if (source is None) == (resume is None):
        raise ConfigError("give either a CONFIG or --resume RUN_DIR")
    if on == "slurm" and watch:
        raise ConfigError(
            "--watch: the page is served beside the run, not by the script for Slurm; use `asyncrl "
            "watch RUN_DIR` where the run directory is mounted"
        )
    if gpus is not None and (resume is not None or on != "local"):
        raise ConfigError(
            f"--gpus {gpus}: divides the GPUs of this machine when a run starts; "
            + (
                "a resumed run keeps its own, or takes --set learner.gpus and generator.gpus"
                if resume is not None
                else f"--on {on} places processes by placement.learner and placement.generator"
            )
        )
    if resume is not None:
        config = runner.resolve_resume(resume, sets)
        run_dir = resume
    else:
        if gpus is not None:
            # the rules on devices apply to the config with the split, not to this one
            unchecked = load.load_as(Config, lambda _: [], str(source), sets)
            split = devices.split_gpus(unchecked, gpus, sets)
            print_progress(f"--gpus {gpus}: {', '.join(split.sets)}: {split.reason}")
            sets = (*sets, *split.sets)
        origins: dict[str, str] = {}
        config = load.load(str(source), sets, None, origins)
        if (origin := origins.get("learner.lr", "")).startswith("default"):
            print_progress(f"learner.lr = {config.learner.lr:g}: {origin}")
        run_dir = rundir.choose_directory(config, str(source))
    if config.placement.nodes:
        if not dry_run:
            raise ConfigError(
                "placement.nodes: such a run is only planned, with --dry-run; docs/machines.md has "
                "the commands for each host"
            )
        emit(_plan_cluster(config))
        return
    if dry_run:
        print(load.dump(config))
        placement = ", ".join(devices.describe_placement(config))
        print_progress(f"would start in {run_dir}: buffer, {placement}")
        from asyncrl.supervise import preflight

        for outcome in preflight.run_checks(preflight.localize(config)):
            print_progress(outcome.as_line())
        return
    if on == "slurm":
        from asyncrl.supervise.hosts import cluster

        path = Path(f"{run_dir.name}.sbatch")
        path.write_text(cluster.render_script(config, str(source), sets, run_dir), encoding="utf-8")
        emit({"script": str(path)})
        return
    with ExitStack() as services:
        if resume is None:
            runs = () if Path(config.runs).exists() else (Path(config.runs),)
            run_dir = rundir.choose_directory(config, str(source), create=True)
            # a refused run leaves no empty directory
            services.callback(rundir.remove_empty, run_dir, *runs)
        if watch:
            from asyncrl.viewer import server

            services.enter_context(server.serve_page_beside(run_dir, print_progress))
        code, summary = runner.run(config, run_dir, resume=resume is not None, on=on)
    emit(summary, format_summary(summary) if summary else "")
    sys.exit(code)


def _plan_cluster(config: Any) -> dict[str, Any]:
    """Plan a run on a cluster, and simulate its lag at the speeds that the plan assumes."""
    from asyncrl.experiments.simulate import times, what_if
    from asyncrl.supervise.hosts import cluster

    plan = cluster.make_plan(config)
    time_model = times.merge_times(times.TimeModel(), plan.times, "placement")
    [outcome] = what_if.simulate_seeds(config, time_model, 1, evaluate=False)
    sizes = {name: getattr(plan, name) for name in ("learner_gpu", "server_gpu", "swap")}
    lag = {key: outcome[f"lag_{key}"] for key in ("mean", "p95", "max")}
    simulated = "mean {mean:.1f}, p95 {p95:.0f}, max {max:.0f} versions, simulated"
    return {
        **{f"place {index}": place for index, place in enumerate(plan.placement, 1)},
        **{
            name: used if result.as_json else cluster.describe_bytes(used)
            for name, used in sizes.items()
        },
        "parameters": plan.parameters,
        "lag": lag if result.as_json else simulated.format(**lag),
        "tokens_per_s": round(outcome["tokens_per_s"]),
        "limited_by": what_if.describe_limiting_side(outcome),
    }


def format_summary(summary: dict[str, Any]) -> str:
    """Format a run's summary for a reader; summary.json is complete."""
    from asyncrl.supervise.run import format_interval

    interval = format_interval(summary)
    return fill(TEXT, **summary, interval=interval, number=format_number).strip()


@command
def report(run_dir: Path) -> None:
    """Write RUN_DIR/report.html from the files of the run.

    If one side waits for the other, the first lines have the prediction of `asyncrl simulate` for
    a higher limit or one more generator.
    """
    rundir.require_run(run_dir)  # before the imports of torch below
    from asyncrl.experiments.simulate import what_if
    from asyncrl.supervise.report import advice, run_view

    atomic_write.write(run_dir / advice.PREDICTION, json.dumps(what_if.predict(run_dir)))
    emit({"report": str(run_view.write_report(run_dir))})


@command
def export(run_dir: Path, path: Path, push_to_hub: str, private: bool) -> None:
    """Copy the newest trained model of RUN_DIR to PATH.

    PATH becomes a Hugging Face directory. Its README.md is a model card: base model, data,
    settings, results, lag and ledger.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another path")
    source, root = run_dir / "model", run_dir / "checkpoints"
    missing = ConfigError(f"{run_dir}: has no model and no checkpoint; is it a run directory?")
    if not source.is_dir() and not root.is_dir():
        raise missing
    from asyncrl.supervise import summary
    from learner import checkpoint

    if not source.is_dir():
        claimed = checkpoint.list_epochs(root, claimed=True)
        newest = (
            checkpoint.find_newest_checkpoint(root / f"epoch_{claimed[-1]}") if claimed else None
        )
        if newest is None:
            raise missing
        source = newest / "model"
        if newest.name == "number_0":
            print_progress(f"note: {run_dir} has made no step; this is its initial model")
    has_adapter = (source / "adapter_config.json").is_file()
    if has_adapter and (config := load.load(run_dir / "config.toml")).export.lora == "merged":
        from asyncrl.models import adapters, policy

        base = policy.load_policy(config.model.path, config.model.dtype, "cpu")
        policy.export(adapters.merge_directory(base, source), path)
    else:
        shutil.copytree(source, path)
    summary.write_model_card(run_dir, path, __version__)
    exported = {"model": str(path), "from": str(source)}
    if push_to_hub:
        exported["pushed"] = fetch.push_to_hub(path, push_to_hub, private=private)
    emit(exported)


@command
def ls(directory: Path) -> None:
    """List the runs in DIR (default: runs), oldest first.

    Shows state, steps, newest mean reward on held-out prompts and mean lag.
    """
    from asyncrl.supervise.report import run_view

    runs = run_view.list_runs(directory)
    rows = [
        [
            run["run"],
            run["state"],
            f"{format_number(run['steps'], 'd')}/{format_number(run['of'], 'd')}",
            format_number(run["accuracy"], ".3f"),
            format_number(run["lag"], ".2f"),
        ]
        for run in runs
    ]
    head = ("run", "state", "steps", "held-out", "lag")
    emit({"runs": runs}, TableBlock(head, rows, text_columns=2).as_text())
