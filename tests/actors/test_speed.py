"""What keeps processes small: no heavy import where none is needed, and memory that does not grow
with the answers written."""

import sys
from pathlib import Path

import numpy as np
import psutil
from process_kit import run_command

from actors.engine import CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.versions import Label
from asyncrl.models import policy


def test_the_buffer_with_its_metrics_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import buffer.service; from asyncrl.records.metrics "
        "import "
        "MetricsWriter;"
        "w = MetricsWriter(Path(sys.argv[1])); w.write(1, {'reward/mean': 0.5}, 1.0, "
        "{'lag/samples': [0.0, 1.0]}); w.close();"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = run_command([sys.executable, "-c", code, str(tmp_path)]).check()
    assert done.out.split() == ["False", "False"]
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_engine_stays_flat_over_many_short_answers(tmp_path: Path) -> None:
    model = policy.build_model(tmp_path / "m", "abcdefgh", hidden=32, layers=2)
    engine = EmbeddedEngine(model, slots=32, context=24, max_new_tokens=8)
    weights = dict(policy.list_named_weights(model))
    prompt = np.array([3, 4, 5], np.int32)

    def write(first: int, groups: int) -> None:
        for t in range(first, first + groups, 8):
            engine.load(weights, Label(1, t), f"d{t}")
            engine.add(
                [
                    CompletionRequest((g, s, 1), prompt, g, 1 + (g + s) % 8, 1.0, 1.0, 0, (1,), 0)
                    for g in range(t, t + 8)
                    for s in range(8)
                ]
            )
            while engine.active:
                engine.step()

    write(0, 400)
    before = psutil.Process().memory_info().rss
    write(400, 1600)
    # 12,800 answers: kept, their requests and arrays alone would be 12 MB and more
    assert psutil.Process().memory_info().rss - before < 4 * 2**20
