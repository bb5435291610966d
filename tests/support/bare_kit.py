import json
from pathlib import Path
from typing import Any


def edit(path: Path, file: str, **keys: Any) -> None:
    """Set keys of a JSON file; None removes."""
    raw = json.loads((path / file).read_text()) | keys
    (path / file).write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
