"""Find the runs that `asyncrl watch` shows."""

from __future__ import annotations

from pathlib import Path

from asyncrl.contract.errors import ConfigError
from asyncrl.supervise import tinker_status
from asyncrl.viewer.findings import WatchedRun
from asyncrl.viewer.tinker_models import WatchedTinkerModel

DEPTH = 3  # levels below a directory in which runs are looked for


def find_runs(places: list[Path]) -> list[WatchedRun]:
    """Return the runs at or below `places`: runs, or directories of runs, comparisons, sweeps.

    A model of a Tinker server is a run; its server is the directory of its runs.

    Raises ConfigError for a place without any.
    """
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(f"{place}: no such directory")
        here = [place] if _is_run(place) else _runs_below(place)
        if not here and not tinker_status.is_server(place):  # its first client may still come
            raise ConfigError(
                f"{place}: no run directory (with config.toml and run_id) is there or up to "
                f"{DEPTH} levels below it"
            )
        found |= dict.fromkeys(path.resolve() for path in here)
    paths = list(found)
    return [
        WatchedTinkerModel(name, path) if tinker_status.is_model(path) else WatchedRun(name, path)
        for name, path in zip(_names(paths), paths, strict=True)
    ]


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() and (
        (path / "run_id").is_file() or (path / "metrics.jsonl").is_file()
    )


def _runs_below(place: Path) -> list[Path]:
    found: list[Path] = []
    level = [place]
    for _ in range(DEPTH):
        level = [
            sub for path in level for sub in sorted(path.iterdir()) if sub.is_dir() and sub != path
        ]
        found += [path for path in level if _is_run(path)]
        level = [path for path in level if not _is_run(path)]
    return sorted(found, key=lambda path: (path / "config.toml").stat().st_mtime)


def _names(paths: list[Path]) -> list[str]:
    """Return the shortest names that tell the paths apart."""
    for parts in range(1, 6):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
