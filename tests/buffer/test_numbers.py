"""Numbers of a batch by hand."""

from __future__ import annotations

import pytest
from trajectory_kit import trajectory

from asyncrl.contract.messages import Batch, TrainingSequence, VersionSpan
from asyncrl.contract.versions import Label
from buffer.numbers import compute_batch_metrics

OLD, NEW = Label(1, 4), Label(1, 5)


def test_tokens_on_the_keys_of_older_weights_are_counted() -> None:
    """A completion of one version; one whose last three tokens attend to the version before; a
    session whose second sequence, of six tokens, attends to it with its last two."""
    spans = [
        [VersionSpan(NEW, "b", 0, 5, NEW)],
        [VersionSpan(OLD, "a", 0, 2, OLD), VersionSpan(NEW, "b", 2, 5, OLD)],
        [VersionSpan(NEW, "b", 0, 5, NEW)],
    ]
    samples = [
        trajectory((1, n, 0), [3], [4] * 5, [-1.0] * 5, spans=own) for n, own in enumerate(spans)
    ]
    later = [VersionSpan(OLD, "a", 0, 4, OLD), VersionSpan(NEW, "b", 4, 6, OLD)]
    samples[2].rows = [TrainingSequence(b"", b"\4\0\0\0" * 6, b"\0" * 24, b"\1" * 6, later)]
    batch = Batch(1, 5, samples, [0, 1, 1], [0, 0, 0], [[], [], []], {}, 1, {})
    metrics = compute_batch_metrics(batch, {0: 11, 1: 10})
    assert metrics["lag/old_kv_share"] == pytest.approx((3 + 2) / (5 + 5 + 5 + 6))
