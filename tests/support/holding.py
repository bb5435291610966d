"""Runs whose processes stand still where a test wants them to; how is in hold/sitecustomize.py."""

from pathlib import Path

from process_kit import ENV, ROOT


def held(
    *,
    answers: bool = False,
    batches: Path | None = None,
    late: Path | None = None,
    imports: Path | None = None,
    gpu: bool = False,
) -> dict[str, str]:
    """The environment of such a run: its generator waits in mid-answer for the next version; its
    learner trains the batches below the number in a file; the clock of its environments jumps when
    a file is there; late imports are written to a file; it has a pretended GPU."""
    words = {
        "HOLD_ANSWERS": "yes" if answers else "",
        "HOLD_BATCHES": str(batches or ""),
        "HOLD_LATE": str(late or ""),
        "LATE_IMPORTS": str(imports or ""),
        "PRETEND_GPU": "yes" if gpu else "",
    }
    path = f"{ROOT / 'tests' / 'support' / 'hold'}:{ENV['PYTHONPATH']}"
    return ENV | {name: word for name, word in words.items() if word} | {"PYTHONPATH": path}


def allow(allowed: Path, batches: int) -> None:
    """Batches below this number may be trained.  Whole, for whoever reads the file meanwhile."""
    part = allowed.with_suffix(".part")
    part.write_text(str(batches))
    part.rename(allowed)
