"""Find the runs that `asyncrl watch` shows."""

from pathlib import Path

from asyncrl.contract.errors import ConfigError
from asyncrl.supervise import tinker_status
from asyncrl.supervise.report.run_view import RunView

DEPTH = 3  # levels of subdirectories that are searched for runs


def find_runs(places: list[Path]) -> list[RunView]:
    """Return the runs at or below `places`: runs, or directories of runs, comparisons, sweeps.

    A model of a Tinker server is a run; its server is the directory of its runs.

    Raises ConfigError for a place without any.
    """
    unique: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(f"{place}: no such directory")
        runs = [place] if _is_run(place) else _find_runs_below(place)
        if not runs and not tinker_status.is_server(place):  # a client may still connect
            raise ConfigError(
                f"{place}: no run directory (with config.toml and run_id) exists there or up to "
                f"{DEPTH} levels below it"
            )
        unique |= dict.fromkeys(path.resolve() for path in runs)
    paths = list(unique)
    return [
        tinker_status.TinkerModelView(name, path)
        if tinker_status.is_model(path)
        else RunView(name, path)
        for name, path in zip(_choose_names(paths), paths, strict=True)
    ]


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() and (
        (path / "run_id").is_file() or (path / "metrics.jsonl").is_file()
    )


def _find_runs_below(place: Path) -> list[Path]:
    runs: list[Path] = []
    level = [place]
    for _ in range(DEPTH):
        level = [
            sub for path in level for sub in sorted(path.iterdir()) if sub.is_dir() and sub != path
        ]
        runs += [path for path in level if _is_run(path)]
        level = [path for path in level if not _is_run(path)]
    return sorted(runs, key=lambda path: (path / "config.toml").stat().st_mtime)


def _choose_names(paths: list[Path]) -> list[str]:
    """Return the shortest names by which the paths differ."""
    for parts in range(1, 6):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
