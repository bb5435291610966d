"""`asyncrl simulate` and `diagnose`; asyncrl/experiments implements them."""

from pathlib import Path
from typing import Any

from asyncrl.cli.base import command, emit, print_progress
from asyncrl.contract.errors import ConfigError


@command
def simulate(
    source: str,
    sets: tuple[str, ...],
    from_run: Path | None,
    file: Path | None,
    single_times: tuple[str, ...],
    no_evaluation: bool,
    **questions: Any,
) -> None:
    """Simulate a run of CONFIG without a model.

    Shows throughput, idle shares and lag, and predicts the effect of another limit, more generators
    or a faster weight sync.
    """
    from asyncrl.config import load

    if from_run is not None and not from_run.exists():
        raise ConfigError(f"--from {from_run}: does not exist; give a run directory or a log")
    log = None
    if from_run is not None and not (from_run / "config.toml").is_file():
        from asyncrl.experiments import diagnose
        from asyncrl.experiments.simulate import times

        log = diagnose.read(from_run)
        sets = (*times.list_settings(log), *sets)
    config = load.load_to_train(source, sets)  # before the imports of torch below
    from asyncrl.experiments.simulate import what_if

    time_models, origin = what_if.collect_times(log or from_run, file, single_times, config)
    outcome = what_if.simulate(
        config,
        time_models,
        origin,
        name=f"simulate {source}",
        evaluate=log is None and not no_evaluation,
        **questions,
    )
    emit(outcome, what_if.format_result(outcome))


@command
def diagnose(path: Path, framework: str, html: Path | None) -> None:
    """Say what another framework's log shows, and what to change.

    PATH is a log file of verl, TRL, prime-rl, NeMo-RL, the Tinker cookbook, SkyRL, slime, AReaL or
    ART, or the directory of a run. It reads numbers and predicts nothing.
    """
    from asyncrl.experiments import diagnose as diagnosis

    log = diagnosis.read(path, framework)
    found = diagnosis.diagnose(log)
    if html is not None:
        diagnosis.write_page(html, log, found)
        print_progress(f"page: {html}")
    emit(found, diagnosis.format_result(found))
