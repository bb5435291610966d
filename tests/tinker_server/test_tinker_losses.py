"""Losses of `asyncrl tinker` against the learner's own loss, and lags of datums."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker_kit import SYMBOLS

from asyncrl.algorithms import loss as step_loss
from asyncrl.algorithms.batch import LossBatch
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.models.policy import build_model
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.tinker import demo_model, settings
from asyncrl.tinker.messages import (
    CallFailure,
    Datum,
    ForwardBackward,
    LoadModel,
    ScoreResult,
)
from asyncrl.tinker.models import with_lags
from asyncrl.tinker.sequences import (
    ModelAncestry,
    ProvenanceSpan,
    SequenceLedger,
    measure_lags,
)
from asyncrl.tinker.settings import TinkerConfig, TinkerModel
from asyncrl.tinker.workers import losses
from asyncrl.tinker.workers.trainer import Trainer

PROMPT = np.array([5, 13, 5, 16], np.int32)
TOKENS = [[7, 9, 8, 1], [9, 9], [4, 12, 20, 21, 6, 1]]
ADVANTAGES = [1.0, -0.5, 0.25]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    path = tmp_path_factory.mktemp("tinker") / "tiny"
    build_model(path, SYMBOLS, hidden=32, layers=1, heads=2, max_positions=64)
    made = Trainer(TinkerConfig(model=TinkerModel(path=str(path))))
    made.handle(LoadModel("m", rank=0, seed=0))
    return made


def behavior(trainer: Trainer) -> list[np.ndarray]:
    """Log-probabilities of another policy than the current one."""
    now = trainer.base.logprobs(
        [PROMPT] * 3, [np.array(t, np.int32) for t in TOKENS], torch.ones(3)
    ).logprobs.detach()
    noise = torch.linspace(-0.5, 0.5, len(now))
    ends = np.cumsum([len(t) for t in TOKENS])[:-1]
    return np.split((now + noise).float().numpy(), ends)


def datums(trainer: Trainer) -> list[Datum]:
    """The same sequences as datums of a client."""
    rows = []
    for tokens, logprobs, advantage in zip(TOKENS, behavior(trainer), ADVANTAGES, strict=True):
        before = len(PROMPT) - 1
        rows.append(
            Datum(
                np.concatenate([PROMPT, tokens[:-1]]).astype("<i4").tobytes(),
                np.array([0] * before + tokens, "<i4").tobytes(),
                {
                    "logprobs": np.concatenate([np.zeros(before), logprobs])
                    .astype("<f4")
                    .tobytes(),
                    "advantages": np.array(
                        [0.0] * before + [advantage] * len(tokens), "<f4"
                    ).tobytes(),
                },
                np.array([-2] * before + [1] * len(tokens), "<i4").tobytes(),
            )
        )
    return rows


def gradient(trainer: Trainer, loss: str, config: dict[str, float | str]) -> torch.Tensor:
    """The gradient of all weights that a call collects."""
    model = trainer.models["m"]
    model.drop_gradient()
    result = trainer.handle(ForwardBackward("m", datums(trainer), loss, config))
    assert isinstance(result, ScoreResult), result
    return torch.cat([weight.grad.flatten() for weight in model.parameters])


def learner_gradient(trainer: Trainer, **keys: object) -> torch.Tensor:
    """The gradient of the learner's loss of the same sequences, times their tokens."""
    raw = {"model": {"path": "x"}, "task": {"name": "client"}, "advantage": {"name": "rloo"}}
    config = load.build({**raw, "loss": {"reduction": "token-mean"}} | keys)
    lengths = torch.tensor([len(t) for t in TOKENS])
    seq = torch.repeat_interleave(torch.arange(3), lengths)
    policy = trainer.models["m"].policy
    trainer.models["m"].drop_gradient()
    lp = policy.logprobs(
        [PROMPT] * 3, [np.array(t, np.int32) for t in TOKENS], torch.ones(3)
    ).logprobs
    mu = torch.from_numpy(np.concatenate(behavior(trainer)))
    batch = LossBatch(
        seq=seq,
        behavior=mu,
        mask=torch.ones_like(seq, dtype=torch.bool),
        token_lag=torch.ones_like(seq),
        rewards=torch.zeros(3),
        groups=torch.zeros(3, dtype=torch.int64),
        truncated=torch.zeros(3, dtype=torch.bool),
        start=lp.detach().clone(),
        anchor=mu,
    )
    prep = step_loss.prepare(batch, config)
    prep.advantage = torch.tensor(ADVANTAGES)[seq]
    step = step_loss.begin_step(prep, torch.arange(3), lp.detach())
    loss, _ = step_loss.micro_loss(prep, step, torch.arange(len(seq)), lp)
    (loss * len(seq)).backward()
    weights = trainer.models["m"].parameters
    return torch.cat([weight.grad.flatten() for weight in weights])


@pytest.mark.parametrize(
    ("loss", "config", "surrogate"),
    [
        ("importance_sampling", {}, {"surrogate": "vanilla"}),
        ("ppo", {}, {"surrogate": "ppo", "eps_low": 0.2, "eps_high": 0.2}),
        (
            "ppo",
            {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
            {"surrogate": "ppo", "eps_low": 0.3, "eps_high": 0.1},
        ),
        ("cispo", {}, {"surrogate": "cispo", "eps_low": 0.2, "eps_high": 0.2}),
        ("dro", {"beta": 0.3}, {"surrogate": "dro", "dro_beta": 0.3}),
        (
            "gspo",
            {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
            {"surrogate": "gspo", "eps_low": 0.5, "eps_high": 0.5},
        ),
    ],
)
def test_gradients_equal_the_learners(
    trainer: Trainer, loss: str, config: dict[str, float | str], surrogate: dict[str, object]
) -> None:
    ours = gradient(trainer, loss, config)
    theirs = learner_gradient(trainer, loss={"reduction": "token-mean", **surrogate})
    assert theirs.abs().max() > 1e-2
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize("method", ["vespo", "gmpo", "icepop", "ppo"])
def test_a_method_by_name_is_the_learners(trainer: Trainer, method: str) -> None:
    ours = gradient(trainer, "importance_sampling", {"method": method})
    config = losses.method_settings({"method": method})
    if config.correction.proximal != "behavior" or config.loss.reduction != "token-mean":
        assert float(ours.abs().max()) > 0
        return
    theirs = learner_gradient(trainer, method=method)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("stable_reinforce", {}, "not published"),
        ("ppo", {"beta": 1.0}, "loss_fn_config.beta: ppo has no such option"),
        ("ppo", {"method": "vcpo"}, "it sets stop.lr_by_ess"),
        ("ppo", {"method": "vespo", "beta": 1.0}, "keys of"),
        ("ppo", {"method": "nonsense"}, "nonsense"),
    ],
)
def test_other_losses_are_refused(
    trainer: Trainer, loss: str, config: dict[str, float | str], message: str
) -> None:
    result = trainer.handle(ForwardBackward("m", datums(trainer), loss, config))
    assert isinstance(result, CallFailure)
    assert message in result.error


def test_masked_tokens_have_no_gradient(trainer: Trainer) -> None:
    """`on_exceed = "mask"`: tokens above the limit are left out."""
    whole, rest = datums(trainer), []
    for place, datum in enumerate(whole):
        lags = np.frombuffer(datum.lags, "<i4").copy()
        lags[lags >= 0] = 3 if place == 1 else 1
        masked, kept = with_lags(datum, lags, 2.0)
        rest.append(masked)
        assert (kept >= 0).sum() == (0 if place == 1 else len(TOKENS[place]))
    model = trainer.models["m"]
    gradients = []
    for data in (rest, [whole[0], whole[2]]):
        model.drop_gradient()
        assert isinstance(trainer.handle(ForwardBackward("m", data, "ppo", {})), ScoreResult)
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters]))
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-6)


def test_the_demo_model_reads_the_recipes_prompts(tmp_path: Path) -> None:
    config = settings.read(str(Path(__file__).parents[2] / "configs/examples/tinker_demo.toml"))
    assert config.model.warm_start and config.staleness.max_lag == 2
    path = tmp_path / "models" / "demo"
    demo_model.build(path, seed=0, steps=1)
    tokenizer = load_tokenizer(path)
    asked, answered = demo_model.demonstrations(1, seed=0)[0]
    assert asked.endswith("?\n\nAssistant:") and answered.endswith("\n\nUser:")
    ids = tokenizer.encode(asked + answered, add_special_tokens=False)
    assert tokenizer.decode(ids) == asked + answered


# ---- sequences -----------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> SequenceLedger:
    return SequenceLedger(tmp_path / "sequences.jsonl")


def record(ledger: SequenceLedger, datum: Datum, version: int, model: str = "m") -> str:
    [id] = ledger.mint(1)
    start = 4 * (len(PROMPT) - 1)
    ledger.record(id, model, version, datum.targets[start:], datum.fields["logprobs"][start:])
    return id


def lags_of(ledger: SequenceLedger, datum: Datum, **keys: object) -> tuple[list[int], str]:
    spans = keys.pop("spans", None)
    runs = ledger.resolve(datum, spans, Counter())  # type: ignore[arg-type]
    options = {"limit": 2.0, "unknown": "train"} | keys
    checked = measure_lags(datum, runs, ModelAncestry("m", {"parent": 1}), 4, **options)  # type: ignore[arg-type]
    return checked.lags.tolist(), checked.refused


def test_a_sequence_is_found_by_the_bits_of_its_logprobs(
    ledger: SequenceLedger, trainer: Trainer, tmp_path: Path
) -> None:
    first, second, third = datums(trainer)
    record(ledger, first, 3)
    record(ledger, second, 1)
    assert lags_of(ledger, first) == ([-2, -2, -2, 1, 1, 1, 1], "")
    assert lags_of(ledger, third)[0] == [-2, -2, -2] + [-1] * 6
    lags, refused = lags_of(ledger, second)
    assert lags == [-2, -2, -2, 3, 3]
    assert "a lag of 3, and staleness.max_lag = 2" in refused and "seq-" in refused
    assert "no sequence of this server" in lags_of(ledger, third, unknown="refuse")[1]
    ledger.close()
    again = SequenceLedger(tmp_path / "sequences.jsonl")  # as after a restart
    assert lags_of(again, first)[0][3] == 1


def test_spans_name_sequences_and_are_checked(ledger: SequenceLedger, trainer: Trainer) -> None:
    first, second, _ = datums(trainer)
    id = record(ledger, first, 4)
    spans = [ProvenanceSpan(id, 0, 3, False), ProvenanceSpan(id, 0, 4, True)]
    assert lags_of(ledger, first, spans=spans)[0] == [-2, -2, -2, 0, 0, 0, 0]
    short = [ProvenanceSpan(id, 0, 3, False), ProvenanceSpan(id, 0, 2, True)]
    assert lags_of(ledger, second, spans=short)[0] == [-2, -2, -2, 0, 0]  # the first two tokens
    beyond = [ProvenanceSpan(id, 0, 3, False), ProvenanceSpan(id, 3, 2, True)]
    with pytest.raises(ConfigError, match="names tokens 3 to 5 of sequence"):
        ledger.resolve(second, beyond, Counter())
    with pytest.raises(ConfigError, match="spans cover 2 positions of a datum of 7"):
        ledger.resolve(first, spans[:0] + [ProvenanceSpan(id, 0, 2, True)], Counter())
    other = record(ledger, first, 4)
    ledger.sequences[other].fingerprint = "0"
    wrong = [ProvenanceSpan(other, 0, 3, False), ProvenanceSpan(other, 0, 4, True)]
    with pytest.raises(ConfigError, match="has other tokens or log-probabilities"):
        ledger.resolve(first, wrong, Counter())


def test_versions_of_other_models_count_only_before_the_fork(
    ledger: SequenceLedger, trainer: Trainer
) -> None:
    first, second, third = datums(trainer)
    record(ledger, first, 1, "parent")  # the model was loaded from its version 1
    record(ledger, second, 2, "parent")
    record(ledger, third, 0, "")
    assert lags_of(ledger, first)[0][3] == 3
    assert lags_of(ledger, second)[0][3] == -1
    assert lags_of(ledger, third)[0][3] == 4
    assert "no earlier version of m" in lags_of(ledger, second, unknown="refuse")[1]


def test_the_ledger_closes_and_equal_sequences_are_trained_once_each(
    ledger: SequenceLedger, trainer: Trainer
) -> None:
    first, second, _ = datums(trainer)
    ids = [record(ledger, first, 0), record(ledger, first, 0), record(ledger, second, 0)]
    taken: Counter[str] = Counter()
    found = [ledger.resolve(first, None, taken)[0].sequence for _ in range(2)]
    assert {sequence.id for sequence in found if sequence} == set(ids[:2])
    ledger.mark_trained(ids[:2])
    ledger.mark_trained(ids[:1])
    assert ledger.of_model("m").as_dict() == {
        "sampled": 3,
        "sampled_tokens": 10,
        "never_trained": 1,
        "trained_once": 1,
        "trained_again": 1,
    }
