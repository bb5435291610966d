"""The ledger's lines sum to what the generators say that they drew, by counts of their own: through
losses, kills and roll-backs."""

import random
from pathlib import Path

import pytest
from journal_kit import PROMPTS, evaluations, open_recorded
from store_kit import hello, sample, total

from actors.delivery import Outbox
from asyncrl.config.tree import WiresConfig
from asyncrl.contract.messages import DISPOSITIONS, LOST, SamplingSettings, Ticket
from asyncrl.contract.versions import Label
from buffer.groups import StoreSettings
from buffer.journal import RecordedStore
from buffer.store import Store


class Generator:
    """Rows of tickets that grow at random; what it says goes to the store at once, or is lost."""

    def __init__(self, store: Store, name: str, session: int, r: random.Random) -> None:
        self.store, self.name, self.session, self.r = store, name, session, r
        self.outbox = Outbox(WiresConfig(), name, session)
        # (ticket, sample, attempt) -> tokens so far
        self.rows: dict[tuple[int, int, int], tuple[Ticket, int]] = {}
        self.done: dict[tuple[int, int], int] = {}
        store.end_sessions(name, session)

    def work(self) -> None:
        for t in self.store.grant(self.name, self.session, self.r.randint(0, 3), 0.0):
            self.rows |= {(t.ticket, s, t.attempt): (t, 0) for s in t.samples}
        for key, (t, n) in list(self.rows.items()):
            self.rows[key] = (t, n := n + self.r.randint(0, 4))
            if n > 3 and self.r.random() < 0.4:
                del self.rows[key]
                self.done[key[0], key[2]] = self.done.get((key[0], key[2]), 0) + n
                failed = "data: no" if self.r.random() < 0.1 else ""
                self.outbox.add(
                    sample(t, key[1], length=n, reward=float(self.r.random() < 0.5), failed=failed)
                )

    def renew(self) -> None:
        tokens = dict.fromkeys({(k[0], k[2]) for k in self.rows}, 0)
        for (t, _, a), (_, n) in self.rows.items():
            tokens[t, a] += n
        progress = [(t, a, n + self.done.get((t, a), 0)) for (t, a), n in tokens.items()]
        self.store.report_tokens(
            self.name, self.session, self.outbox.token_report.on_report(progress)
        )
        self.store.renew(self.name, self.session, progress, 0.0)

    def deliver(self) -> None:
        # those unanswered are sent again, and again
        for frame in self.outbox.take_frames(self.r.random() * 100, flush=True):
            self.store.report_tokens(self.name, self.session, frame.drawn)
            for t in frame.samples:
                self.store.deliver(t, 0.0)


@pytest.mark.parametrize("mode", ["memory", "process"])
def test_the_lines_sum_to_what_the_generators_say(mode: str, tmp_path: Path) -> None:
    lines: set[str] = set()
    for seed in range(60):
        r = random.Random(seed)
        settings = StoreSettings(
            2,
            2,
            500,
            SamplingSettings(max_new_tokens=10_000),
            filter_no_spread=seed % 2 == 0,
            error_budget=99.0,
        )
        directory = tmp_path / str(seed)

        def make(settings: StoreSettings = settings, directory: Path = directory) -> Store:
            if mode == "memory":
                return Store(settings, PROMPTS.__getitem__, evaluations())
            return open_recorded(directory, settings, evaluations=evaluations())

        store = make()
        assert hello(store, 1, 0, k=2)
        generators = [Generator(store, f"g{i}", 1, r) for i in range(2)]
        for step in range(150):
            g = r.choice(generators)
            r.choice([g.work, g.work, g.renew, g.deliver])()
            # killed: what it had not told is drawn for nobody, and known to nobody
            if r.random() < 0.03:
                generators[generators.index(g)] = Generator(store, g.name, g.session + 1, r)
            if r.random() < 0.02 and store.committed:
                assert hello(
                    store,
                    store.epoch + 1,
                    max(store.base, store.committed - 1),
                    k=2,
                    origin=store.epoch,
                    digest="again",
                )
            elif store.ask(store.epoch, store.committed)[0]:
                number = store.committed
                store.commit(number, Label(store.epoch, number + 1), f"d{store.epoch}.{number + 1}")
            if r.random() < 0.05:
                store.retire_batches(max(0, store.committed - 2))
            if mode == "process" and r.random() < 0.02 and isinstance(store, RecordedStore):
                store.flush_journal()
                store.journal.close()
                store = make()
                for x in generators:
                    x.store = store
            assert total(store) == store.count_generated_tokens(), (seed, step)
        lines |= {n for n, x in store.sum_ledger().items() if x["tokens"]}
    assert lines >= {"trained", "failed", "filtered", "lost_with_process", "duplicate", "left_over"}


def test_every_line_is_of_use_lost_or_left_over() -> None:
    """A new line is lost unless somebody says otherwise: the simulator shows it."""
    kept = {"trained", "skipped", "rejected", "left_over", "set_aside"}
    assert set(DISPOSITIONS) - set(LOST) == kept
    assert set(LOST) <= set(DISPOSITIONS) and len(LOST) == len(DISPOSITIONS) - 5
