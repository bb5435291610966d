from pathlib import Path
from typing import Any

import msgspec
from schedules import PROMPTS

from asyncrl.contract.messages import Prompt, SamplingSettings
from buffer.evaluation import EvaluationPlan, Evaluations
from buffer.groups import StoreSettings
from buffer.journal import RecordedStore
from buffer.state import StoreSnapshot
from buffer.store import Store


def evaluations() -> Evaluations:
    return Evaluations(
        EvaluationPlan(2, 2, 3, 1, 0.7, ood_every=5), lambda split, i: Prompt(i, split)
    )


def state(store: Store) -> StoreSnapshot:
    """Everything the store knows, without the clocks of leases."""
    x = msgspec.msgpack.decode(msgspec.msgpack.encode(store.snapshot()), type=StoreSnapshot)
    for g in x.alive:
        if g.lease:
            g.lease.expires = 0.0
    x.window = repr(msgspec.structs.replace(x.window, opens=0.0))  # nan is not equal to nan
    for _, leased in x.evaluations.leased_jobs:
        leased.expires = 0.0
    return x


def open_recorded(directory: Path, settings: StoreSettings, **more: Any) -> RecordedStore:
    parts = {name: more.pop(name) for name in ("evaluations", "mixer") if name in more}
    store = RecordedStore(settings, more.pop("prompt", PROMPTS.__getitem__), **parts)
    return store.open(directory, **{"sync": False, "now": 0.0} | more)


def recorded(directory: Path, steps: int = 3) -> RecordedStore:
    settings = StoreSettings(1, 1, steps, SamplingSettings())
    return open_recorded(directory, settings, evaluations=evaluations())
