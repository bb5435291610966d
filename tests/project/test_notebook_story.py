"""docs/notebooks/staleness.py: every cell runs, and the numbers tell the story that it tells."""

from itertools import pairwise

import pytest
from process_kit import ROOT, load_program

pytestmark = pytest.mark.slow


def test_the_notebook_runs_and_its_numbers_tell_its_story() -> None:
    outputs, found = load_program(ROOT / "docs" / "notebooks" / "staleness.py").app.run()
    pages = [output.text for output in outputs if output is not None]
    assert sum("iframe" in page for page in pages) == 3 and len(pages) == 7
    speed, lag = found["speed"], found["lag"]
    assert speed[1] > 1.3 * speed[0], "limit 1 lets both sides work"
    assert lag[0] == 0 and all(low <= high for low, high in pairwise(lag))
    assert all(near < far for near, far in pairwise(found["bias"]["none"]))
    assert max(found["bias"]["sequence none"]) < 1e-9
    assert found["variance"]["sequence none"][-1] > found["variance"]["sequence truncate"][-1]
    last = {name: sorted(found["accuracy"][name])[-1][1] for name in found["shown"]}
    assert last["ppo"] > last["tis"] > last["none"], "what a correction is worth at the largest lag"
