"""Versions per token are exact, and the logged lag is the lag: both reckoned again from what a real
run wrote, by other code; and over random schedules."""

import collections
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from holding import held
from process_kit import ENV, Ended
from schedules import Broken, World

from asyncrl.contract.errors import ProtocolError
from asyncrl.models import policy

pytestmark = pytest.mark.slow

Call = Callable[..., Ended]


def recorded(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (run_dir / "samples.jsonl").read_text().splitlines()]


def number(label: str) -> int:
    epoch, _, n = label.partition(".")
    assert epoch == "1"
    return int(n)


@pytest.fixture
def written(asyncrl: Call, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any]]:
    """A run that swaps weights in mid-answer, where its generator waits for them (tests/hold), and
    keeps every version and every sample."""
    for name, word in held(answers=True).items():
        monkeypatch.setitem(ENV, name, word)
    text = (
        "run learner.steps=14 learner.groups=8 learner.group_size=8 staleness.max_lag=4 "
        "weights.in_flight='recompute_kv' learner.checkpoint_every=1 learner.keep_checkpoints=100 "
        "record.samples_every=1 record.samples=0 generator.slots=48 generator.temperature=0.9 "
        "learner.lr=1e-3 evaluation.every=0 name='v'"
    )
    done = asyncrl(*text.split()).check()
    return Path(done.json["run_dir"]), done.json


def test_every_token_was_drawn_by_the_version_it_names_and_the_lag_is_its_age(
    written: tuple[Path, dict[str, Any]],
) -> None:
    run_dir, summary = written
    rows = recorded(run_dir)
    assert len(rows) == 14 * 64

    # Log-probabilities again, by plain transformers on the checkpoint that the label names: the
    # whole prefix under that version.
    policies: dict[int, Any] = {}
    swapped = [r for r in rows if len(r["versions"]) >= 2]
    assert len(swapped) >= 10, f"only {len(swapped)} answers saw a swap"
    wrong_version = 0.0
    for r in swapped[:60]:
        ids = torch.tensor([r["prompt_tokens"] + r["tokens"]])
        assert [v[1] for v in r["versions"]] == [0] + [v[2] for v in r["versions"][:-1]]
        assert r["versions"][-1][2] == len(r["tokens"])
        for (label, start, end), digest in zip(r["versions"], r["digests"], strict=True):
            n = number(label)
            if n not in policies:
                path = run_dir / "checkpoints" / "epoch_1" / f"number_{n}" / "model"
                policies[n] = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32
                )
                got = policy.compute_weights_digest(policy.load_policy(path, "float32", "cpu"))
                assert got == digest
            for named, kept in ((n, True), (number(r["versions"][0][0]), False)):
                if named not in policies:
                    continue
                with torch.no_grad():
                    logits = policies[named](input_ids=ids).logits[0]
                logits = logits[len(r["prompt_tokens"]) - 1 : -1] / 0.9
                again = torch.log_softmax(logits.float(), -1).gather(
                    1, ids[0, len(r["prompt_tokens"]) :, None]
                )[:, 0][start:end]
                off = float((again - torch.tensor(r["logprobs"][start:end])).abs().max())
                if kept:
                    assert off < 1e-4, (r["ticket"], label, start, end, off)
                elif named != n:
                    wrong_version = max(wrong_version, off)
    assert wrong_version > 1e-3, "versions are too alike for this test to mean anything"

    # Lags again, from the spans: a batch n starts from version n.
    logged = {
        r["batch"]: {int(k): v for k, v in r["lags"].items()}
        for r in map(json.loads, (run_dir / "trained.jsonl").read_text().splitlines())
    }
    for n in range(14):
        counted: collections.Counter[int] = collections.Counter()
        for r in rows:
            if r["batch"] == n:
                for label, start, end in r["versions"]:
                    counted[n - number(label)] += end - start
                assert r["lag"] == n - number(r["versions"][0][0])
        assert dict(counted) == logged[n] and max(counted) <= 4
    whole = sum(lag * c for lags in logged.values() for lag, c in lags.items()) / sum(
        c for lags in logged.values() for c in lags.values()
    )
    assert summary["lag"]["mean"] == pytest.approx(whole) and whole > 0
    means = {
        r["step"]: r["lag/mean"]
        for r in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if "lag/mean" in r
    }
    for n, lags in logged.items():
        key = n if n in means and len(means) == 14 and min(means) == 0 else n + 1
        assert means[key] == pytest.approx(
            sum(a * c for a, c in lags.items()) / sum(lags.values()), abs=1e-6
        )


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        ("a slow generator", ("generator.slots=8",)),
        ("a slow learner", ("learner.micro_batch_tokens=64",)),
    ],
)
def test_injected_lag_is_exact(speed: str, words: tuple[str, ...], asyncrl: Call) -> None:
    text = (
        "run learner.steps=10 learner.groups=4 learner.group_size=4 staleness.max_lag=3 "
        "staleness.inject=3 evaluation.every=0 record.samples_every=1 record.samples=0 "
        "name='inject'"
    )
    done = asyncrl(*text.split(), *words)
    assert done.code == 0, (speed, done.err[-3000:])
    for r in recorded(Path(done.json["run_dir"])):
        assert [number(v[0]) for v in r["versions"]] == [max(0, r["batch"] - 3)]
        assert r["lag"] == min(3, r["batch"])


SCHEDULES = 400
CHUNK = 100


def chunk(first: int) -> Counter[str]:
    """Runs CHUNK schedules; tokens by ledger line, summed, and how often the limit was reached."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        world = World(seed)
        try:
            world.run()
        except Exception as e:
            raise AssertionError(f"seed {seed}: {e}") from e
        seen.update({line: int(x["tokens"]) for line, x in world.store.sum_ledger().items()})
        seen["at the limit"] += world.at_limit
    return seen


def test_no_token_past_the_limit_no_deadlock_and_a_ledger_that_sums() -> None:
    with multiprocessing.get_context("fork").Pool(min(2, os.cpu_count() or 1)) as pool:
        seen = sum(pool.imap_unordered(chunk, range(0, SCHEDULES, CHUNK)), Counter())
    # the schedules do what they are for: each fault leaves its line, and the bound is tight
    for line in (
        "trained",
        "filtered",
        "duplicate",
        "orphaned",
        "lost_with_process",
        "at the limit",
    ):
        assert seen[line] > 100, seen


@pytest.mark.parametrize("on_exceed", ["drop", "mask", "downweight"])
def test_completion_order_keeps_its_own_promise_and_the_ledger(on_exceed: str) -> None:
    for seed in range(80):
        World(seed, on_exceed=on_exceed).run()


@pytest.mark.parametrize("on_exceed", ["drop", "mask", "downweight"])
def test_freshest_first_keeps_the_same_promise(on_exceed: str) -> None:
    for seed in range(60):
        World(seed, on_exceed=on_exceed, order="freshest").run()


def test_free_running_ends_and_sums() -> None:
    for seed in range(60):
        World(seed, limits=(float("inf"),), order="freshest" if seed % 3 == 0 else "auto").run()


ORDERS = [
    {"on_exceed": "pace", "order": "auto"},
    {"on_exceed": "drop"},
    {"on_exceed": "mask"},
    {"on_exceed": "mask", "order": "freshest"},
]


def test_a_run_resumed_at_another_limit_or_order_keeps_the_bound_and_never_stands_still() -> None:
    """What another order, or no limit, composed stays so, and comes first: places count it."""
    for seed in range(100):
        try:
            World(
                seed, limits=(float("inf"), 2, 1, 0), variants=ORDERS[:1] if seed % 2 else ORDERS
            ).run()
        except Exception as e:
            raise AssertionError(f"seed {seed}: {e}") from e


AUTO = {"limits": (1, 2, 3, 4), "ess_floor": 0.5, "steps": 14}


def test_a_limit_that_sets_itself_keeps_what_each_ticket_announced() -> None:
    """Up, down, over lives of the learner with other bounds: no token past the limit of its ticket
    (schedules.World reckons it), none past the bound, no standing still."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        world = World(seed, **AUTO)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update({str(limit) for limit in world.announced.values()})
        seen["moves"] += world.moves
        seen["at the limit"] += world.at_limit
    assert all(seen[f"{limit}"] > 30 for limit in (1, 2, 3)), seen
    assert seen["moves"] > 200 and seen["at the limit"] > 1000, seen


def test_room_by_the_bound_breaks_what_a_ticket_announced() -> None:
    for seed in range(400):
        try:
            World(seed, frozenset(["announced_room"]), **AUTO).run()
        except (Broken, ProtocolError) as error:
            assert "versions late" in str(error), f"seed {seed}: {error}"
            return
    raise AssertionError("tickets go out by the bound, and nothing breaks")


@pytest.mark.parametrize(
    ("off", "what"),
    [
        ("ticket_order", "versions late"),  # completion order overtakes
        # a ticket goes out during a lease, and trains a version too late
        ("count_leased", "versions late"),
        ("min_version", "versions late"),  # a new ticket is written by old weights
        ("reissue_paced", "versions late"),  # after a roll-back, a group far back starts too early
        ("filter_leaves", "nothing moves"),  # a filtered group keeps its place for good
    ],
)
def test_each_condition_is_needed(off: str, what: str) -> None:
    """With one condition off, the same schedules break the bound (or the run stands still)."""
    for seed in range(3000):
        try:
            World(seed, frozenset([off])).run()
        except (Broken, ProtocolError) as e:
            assert what in str(e), f"seed {seed}: {e}"
            return
    raise AssertionError(f"{off} switched off, and nothing breaks")
