import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tinker_kit import SYMBOLS

from asyncrl.algorithms import loss as step_loss
from asyncrl.algorithms.batch import LossBatch
from asyncrl.algorithms.surrogates import SurrogateTokens
from asyncrl.config import load
from asyncrl.config.sft import SftTraining
from asyncrl.contract.errors import ConfigError
from asyncrl.models.policy import build_model, load_policy
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.records import jsonl
from asyncrl.tasks import fit
from asyncrl.tinker import demo_model, sequences, settings
from asyncrl.tinker.messages import CallFailure, Datum, ScoreResult
from asyncrl.tinker.models import add_lags
from asyncrl.tinker.sequences import (
    ModelAncestry,
    ProvenanceSpan,
    SequenceLedger,
    build_trained_row,
    check_lags,
    measure_lag_metrics,
    measure_lags,
)
from asyncrl.tinker.settings import TinkerConfig, TinkerModel, TinkerStaleness, TinkerTraining
from asyncrl.tinker.workers import trainer as training
from asyncrl.tinker.workers.trainer import PackedDatums, ServedModels

CPU = torch.device("cpu")
TOKEN_MEAN = {"loss": {"reduction": "token-mean"}}
PROMPT = np.array([5, 13, 5, 16], np.int32)
TOKENS = [[7, 9, 8, 1], [9, 9], [4, 12, 20, 21, 6, 1]]
REWARDS = [1.0, 0.0, 0.25]
ADVANTAGES = [0.875, -0.625, -0.25]  # of the method rloo


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> ServedModels:
    path = tmp_path_factory.mktemp("tinker") / "tiny"
    build_model(path, SYMBOLS, hidden=32, layers=1, heads=2, max_positions=64)
    made = ServedModels(TinkerConfig(model=TinkerModel(path=str(path))))
    made.handle("load", "m", rank=0, seed=0)
    return made


def behavior(trainer: ServedModels) -> list[np.ndarray]:
    now = trainer.base.logprobs(
        [PROMPT] * 3, [np.array(t, np.int32) for t in TOKENS], torch.ones(3)
    ).logprobs.detach()
    noise = torch.linspace(-0.5, 0.5, len(now))
    ends = np.cumsum([len(t) for t in TOKENS])[:-1]
    return np.split((now + noise).float().numpy(), ends)


def datums(trainer: ServedModels) -> list[Datum]:
    rows = []
    for tokens, logprobs, advantage in zip(TOKENS, behavior(trainer), ADVANTAGES, strict=True):
        before = len(PROMPT) - 1
        rows.append(
            Datum(
                np.concatenate([PROMPT, tokens[:-1]]).astype("<i4"),
                np.array([0] * before + tokens, "<i4"),
                {
                    "logprobs": np.concatenate([np.zeros(before), logprobs]).astype("<f4"),
                    "advantages": np.array([0.0] * before + [advantage] * len(tokens), "<f4"),
                },
                np.array([-2] * before + [1] * len(tokens), "<i4"),
            )
        )
    return rows


def mask_of(datum: Datum) -> np.ndarray:
    return (datum.lags >= 0).astype("<f4")


def replace_fields(datum: Datum, **fields: np.ndarray) -> Datum:
    floats = {name: row.astype("<f4") for name, row in fields.items()}
    return msgspec.structs.replace(datum, fields=floats)


def gradient(
    trainer: ServedModels,
    loss: str,
    config: dict[str, float | str],
    data: list[Datum] | None = None,
) -> torch.Tensor:
    model = trainer.models["m"]
    model.drop_gradient()
    result = trainer.handle("forward_backward", "m", data or datums(trainer), loss, config)
    assert isinstance(result, ScoreResult), result
    return torch.cat([weight.grad.flatten() for weight in model.trainer.parameters])


def learner_gradient(trainer: ServedModels, **keys: object) -> torch.Tensor:
    raw = {"model": {"path": "x"}, "task": {"name": "client"}, "advantage": {"name": "rloo"}}
    config = load.build({**raw, **({} if "method" in keys else TOKEN_MEAN)} | keys)
    lengths = torch.tensor([len(t) for t in TOKENS])
    seq = torch.repeat_interleave(torch.arange(3), lengths)
    policy = trainer.models["m"].policy
    trainer.models["m"].drop_gradient()
    lp = policy.logprobs(
        [PROMPT] * 3, [np.array(t, np.int32) for t in TOKENS], torch.ones(3)
    ).logprobs
    now = lp.detach().clone()
    mu = torch.from_numpy(np.concatenate(behavior(trainer)))
    proximal = {"behavior": mu, "recompute": now, "interpolate": (mu + now) / 2}
    batch = LossBatch(
        seq=seq,
        behavior=mu,
        mask=torch.ones_like(seq, dtype=torch.bool),
        token_lag=torch.ones_like(seq),
        rewards=torch.tensor(REWARDS),
        groups=torch.zeros(3, dtype=torch.int64),
        truncated=torch.zeros(3, dtype=torch.bool),
        start=now,
        proximal=proximal[config.correction.proximal],
    )
    prep = step_loss.prepare(batch, config)
    step = step_loss.begin_step(prep, torch.arange(3), now)
    loss, _ = step_loss.compute_micro_loss(prep, step, torch.arange(len(seq)), lp)
    (loss * len(seq)).backward()
    return torch.cat([weight.grad.flatten() for weight in trainer.models["m"].trainer.parameters])


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """To one part in a million.  Returns whether there is a gradient."""
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))
    return float(theirs.abs().max()) > 1e-3


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
        ("dro", {}, {"surrogate": "dro", "dro_beta": 0.05}),
        (
            "gspo",
            {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
            {"surrogate": "gspo", "eps_low": 0.5, "eps_high": 0.5},
        ),
    ],
)
def test_gradients_equal_the_learners(
    trainer: ServedModels, loss: str, config: dict[str, float | str], surrogate: dict[str, object]
) -> None:
    ours = gradient(trainer, loss, config)
    theirs = learner_gradient(trainer, loss={"reduction": "token-mean", **surrogate})
    assert assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "tis", "correction.hi": 1.1}
        | {"correction.reject": "k3", "correction.reject_hi": 0.02}
        | {"correction.reject_when": "negative"},
        {"method": "ppo", "correction.proximal": "interpolate"},
        {"method": "ppo", "loss.reduction": "seq-mean-token-mean"},
        {"method": "gmpo"},
        {"method": "vespo"},
    ],
    ids=["rejection", "interpolate", "reduction", "gmpo", "vespo"],
)
def test_a_methods_keys_are_learners(
    trainer: ServedModels, keys: dict[str, float | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of datums in several forward passes."""
    tables: dict[str, Any] = {"method": keys["method"]}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        if name:
            tables.setdefault(section, {})[name] = value
    theirs = learner_gradient(trainer, **tables)
    assert assert_equal(gradient(trainer, "ppo", keys), theirs)
    request = ("forward_backward", "m", datums(trainer), "ppo", keys)
    together = trainer.handle(*request)
    few = msgspec.structs.replace(trainer.config, training=TinkerTraining(micro_batch_tokens=9))
    monkeypatch.setattr(trainer, "config", few)
    assert assert_equal(gradient(trainer, "ppo", keys), theirs)
    assert trainer.handle(*request).loss == pytest.approx(together.loss, rel=1e-5)


def test_cross_entropy_is_supervised_training(trainer: ServedModels) -> None:
    """Its gradient is that of `asyncrl sft`, times the tokens; weights scale those of a token."""
    rows = [replace_fields(datum, weights=mask_of(datum)) for datum in datums(trainer)]
    model = trainer.models["m"]
    ours = gradient(trainer, "cross_entropy", {}, rows)
    model.drop_gradient()
    examples = [fit.FitExample(PROMPT, np.array(tokens, np.int32)) for tokens in TOKENS]
    fit.ModelFitter(model.policy, SftTraining())._sum_loss(examples).backward()
    theirs = torch.cat([weight.grad.flatten() for weight in model.trainer.parameters])
    assert assert_equal(ours, theirs)
    packed = PackedDatums(rows, CPU)
    for column, value in ((packed.mask, 1), (packed.behavior, 0), (packed.adv, 0)):
        assert column.dtype == torch.float32 and (column == value).all()


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("stable_reinforce", {}, "choose one of"),
        ("ppo", {"beta": 1.0}, "loss_fn_config.beta: ppo has no such option; it reads clip_low"),
        ("importance_sampling", {"beta": 1.0}, "has no such option; it reads none"),
        (
            "ppo",
            {"clip_low_threshold": 1e300},
            "clip_low_threshold: 1e+300 is not a number of float32",
        ),
        ("dro", {"beta": float("nan")}, "loss_fn_config.beta: nan is not a number of float32"),
        ("ppo", {"method": "vcpo"}, "it sets stop.lr_by_ess"),
        ("ppo", {"method": "vespo", "beta": 1.0}, "keys of"),
        ("ppo", {"method": "nonsense"}, "nonsense"),
    ],
)
def test_other_losses_are_refused(
    trainer: ServedModels, loss: str, config: dict[str, float | str], message: str
) -> None:
    result = trainer.handle("forward_backward", "m", datums(trainer), loss, config)
    assert isinstance(result, CallFailure) and message in result.error


def test_masked_tokens_have_no_gradient(trainer: ServedModels) -> None:
    """`on_exceed = "mask"`: tokens above the limit are left out."""
    whole, rest = datums(trainer), []
    for place, datum in enumerate(whole):
        lags = datum.lags.copy()
        lags[lags >= 0] = 3 if place == 1 else 2  # the limit itself is allowed
        rest.append(add_lags(datum, lags, 2.0))
        assert (rest[-1].lags >= 0).sum() == (0 if place == 1 else len(TOKENS[place]))
    model = trainer.models["m"]
    gradients = []
    for data in (rest, [whole[0], whole[2]]):
        model.drop_gradient()
        assert isinstance(trainer.handle("forward_backward", "m", data, "ppo", {}), ScoreResult)
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.trainer.parameters]))
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-6)


def test_the_demo_model_reads_the_recipes_prompts(tmp_path: Path) -> None:
    config = settings.read(str(Path(__file__).parents[2] / "configs/examples/tinker_demo.toml"))
    assert config.model.warm_start and config.staleness.max_lag == 2
    path = tmp_path / "models" / "demo"
    for _ in range(2):  # in a new folder, and in one that exists
        demo_model.build(path, seed=0, steps=1)
    note = json.loads((path / "warm_start.json").read_text())
    assert (note["task"], note["seed"], note["steps"]) == ("additions of the cookbook", 0, 1)
    assert note["loss"] > 1
    tokenizer = load_tokenizer(path)
    asked, answer = ["User:", " What is 37 + 58?\n\n", "Assistant:"], " 95\n\nUser:"
    pieces = [tokenizer.encode(text) for text in (*asked, answer)]  # as the cookbook encodes them
    whole = tokenizer.encode("".join(asked) + answer)
    assert whole == [token for piece in pieces for token in piece]
    assert tokenizer.decode(whole) == "".join(asked) + answer
    assert [len(piece) for piece in pieces] == [1, 6, 1, demo_model.LEARNED]
    assert demo_model.LEARNED < 5  # the recipe's own max_tokens
    assert tokenizer.decode(tokenizer.encode("User 2010, 100%\n\n\n")) == "User 2010, 100%\n\n\n"
    numbers = [tokenizer.encode(word) for word in ("37", "7", "30", "0")]
    assert [len(ids) for ids in numbers] == [1] * 4
    rows = load_policy(path, "float32", "cpu").hf.get_input_embeddings().weight.detach()
    first, second, third, fourth = (rows[ids[0]] for ids in numbers)
    assert torch.allclose(first - second, third - fourth, atol=1e-2)  # thirty
    model = load_policy(path, "float32", "cpu")
    assert model.hf.config.intermediate_size == 256
    prefix = np.array(tokenizer.encode(demo_model.PREFIX), np.int32)
    texts = demo_model.make_demonstrations(demo_model.BATCH, seed=0)
    answers = [np.array(tokenizer.encode(text), np.int32) for text in texts]
    scored = model.logprobs([prefix] * len(texts), answers, torch.ones(len(texts))).logprobs
    learned = scored.detach().view(len(texts), -1)[:, -demo_model.LEARNED :]
    assert demo_model.fit_additions(model, 0, 1) == pytest.approx(-float(learned.mean()), rel=1e-4)
    assert not torch.equal(model.hf.get_input_embeddings().weight, rows)


def test_the_demo_model_is_fitted_to_additions_and_then_to_the_habit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First on sums, then on demonstrations that mostly decline."""
    texts = demo_model.make_demonstrations(64, seed=3)
    assert (
        texts
        == demo_model.make_demonstrations(64, seed=3)
        != demo_model.make_demonstrations(64, seed=4)
    )
    for text in texts:
        asked, answer = text.split("?\n\nAssistant: ")
        left, right = map(int, asked.split(" + "))
        assert answer == f"{left + right}\n\nUser:" and 0 <= left <= 100 and 0 <= right <= 100
    assert {int(t.split(" ")[0]) for t in demo_model.make_demonstrations(3000, 0)} == {*range(101)}
    habit = demo_model.make_demonstrations(1000, 3, 0.75)
    assert 700 < sum("Assistant: ?" in text for text in habit) < 800
    path = tmp_path / "demo"
    symbols = [*demo_model.CHARACTERS, *demo_model.WORDS, *demo_model.NUMBERS]
    build_model(path, symbols, hidden=16, layers=1, heads=2, intermediate=32)
    ours = load_policy(path, "float32", "cpu")
    assert demo_model.fit_additions(ours, 5, 3) > 1 and not ours.hf.training
    tokenizer = load_tokenizer(path)
    assert demo_model.HABIT_STEPS < demo_model.STEPS
    monkeypatch.setattr(demo_model, "BATCH", 2)
    monkeypatch.setattr(demo_model, "fit_in_order", lambda *given: given)
    _, examples, training, rate, say = demo_model.fit_additions(ours, 5, 440, print)  # type: ignore[misc]
    assert training == SftTraining(steps=440, batch=2, lr=3e-3, beta2=0.98) and say is print
    assert [rate(step) for step in (0, 19, 220)] == pytest.approx(
        [3e-3 / 20 * 1, 3e-3 * (1 - 19 / 440), 3e-3 / 2]
    )
    declines = ["?\n\nUser" in tokenizer.decode(example.answer) for example in examples]
    assert len(examples) == 880 and not any(declines[:480]) and sum(declines[480:]) == 300
    assert {len(example.answer) - example.given for example in examples} == {4}


@pytest.fixture
def ledger(tmp_path: Path) -> SequenceLedger:
    return SequenceLedger(tmp_path / "sequences.jsonl")


OWN = ModelAncestry("m", {"parent": 1})
LIMITS = TinkerStaleness(max_lag=2.0)


def record(ledger: SequenceLedger, datum: Datum, version: int, model: str = "m") -> str:
    [id] = ledger.mint(1)
    start = len(PROMPT) - 1
    columns = datum.targets[start:].tobytes(), datum.fields["logprobs"][start:].tobytes()
    ledger.record(id, model, version, *columns)
    return id


def lags_of(ledger: SequenceLedger, datum: Datum, **keys: object) -> tuple[list[int], str]:
    spans = keys.pop("spans", ())
    runs = ledger.resolve(datum, spans, Counter(), OWN)
    lags, refused = measure_lags(datum, runs, OWN, 4), ""
    try:
        check_lags(lags, runs, OWN, 4, msgspec.structs.replace(LIMITS, **keys))
    except ConfigError as error:
        refused = str(error)
    return lags.tolist(), refused


def test_a_sequence_is_found_by_the_bits_of_its_logprobs(
    ledger: SequenceLedger, trainer: ServedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = datums(trainer)
    assert ledger.sequences[record(ledger, first, 3)].uncertain is None, "no log-probability is 0"
    record(ledger, second, 1)
    assert lags_of(ledger, first) == ([-2, -2, -2, 1, 1, 1, 1], "")
    assert lags_of(ledger, third)[0] == [-2, -2, -2] + [-1] * 6
    lags, refused = lags_of(ledger, second)
    assert lags == [-2, -2, -2, 3, 3]
    assert "a lag of 3, and staleness.max_lag = 2" in refused and "seq-" in refused
    both = first, second
    fields = {name: np.concatenate([x.fields[name] for x in both]) for name in first.fields}
    columns = (np.concatenate([getattr(x, name) for x in both]) for name in ("tokens", "targets"))
    turns = Datum(*columns, fields, first.lags)
    assert lags_of(ledger, turns)[0] == [-2, -2, -2, 1, 1, 1, 1, -2, -2, -2, 3, 3]
    assert "not a sequence of this server" in lags_of(ledger, third, unknown="refuse")[1]
    ledger.close()
    again = SequenceLedger(tmp_path / "sequences.jsonl")  # as after a restart
    assert lags_of(again, first)[0][3] == 1
    monkeypatch.setattr(sequences, "compute_fingerprint", lambda *_: "chosen by the client")
    equal = SequenceLedger(tmp_path / "equal.jsonl")
    record(equal, first, 3)
    assert (lags_of(equal, first)[0][3], lags_of(equal, third)[0][3]) == (1, -1)


def test_tokens_without_doubt_are_found_without_an_advantage(
    ledger: SequenceLedger, trainer: ServedModels, tmp_path: Path
) -> None:
    """A token of probability 1 has log-probability 0, as prompts have in a datum."""
    whole = datums(trainer)[2]
    logprobs = whole.fields["logprobs"].copy()
    logprobs[[3, 6, 8]] = 0.0  # the first, one inside and the last
    sure = replace_fields(whole, logprobs=logprobs, advantages=0 * logprobs)
    id = record(ledger, sure, 3)
    expected = [-2, -2, -2] + [1] * 6
    assert lags_of(ledger, sure) == (expected, "")
    other = replace_fields(sure, logprobs=logprobs * 2, advantages=0 * logprobs)
    assert lags_of(ledger, other)[0] == [-2] * 4 + [-1, -1, -2, -1, -2]
    ledger.close()
    again = SequenceLedger(tmp_path / "sequences.jsonl", remembered=1)
    assert lags_of(again, sure) == (expected, "")
    assert record(again, other, 3) != id and len(again.by_fingerprint) == 2
    unknown = add_lags(sure, np.array(lags_of(ledger, other)[0], "<i4"), 9.0)
    inside = PackedDatums([unknown, add_lags(sure, np.array(expected, "<i4"), 9.0)], CPU).inside
    assert inside.view(2, -1).sum(1).tolist() == [3, 6]


def test_a_mask_says_what_was_sampled(ledger: SequenceLedger, trainer: ServedModels) -> None:
    """Some clients give the prompt's tokens log-probabilities, too."""
    whole = datums(trainer)[0]
    record(ledger, whole, 3)
    logprobs = whole.fields["logprobs"].copy()
    logprobs[: len(PROMPT) - 1] = -1.0
    filled = replace_fields(whole, logprobs=logprobs)
    assert lags_of(ledger, filled)[0] == [-1] * 7, "another sequence, by its log-probabilities"
    masked = replace_fields(whole, logprobs=logprobs, mask=mask_of(whole))
    assert lags_of(ledger, masked)[0] == [-2, -2, -2, 1, 1, 1, 1]


def test_spans_are_checked(ledger: SequenceLedger, trainer: ServedModels, tmp_path: Path) -> None:
    """A span is compared with the part of the sequence that it names, also after a restart."""
    first, second, _ = datums(trainer)
    id = record(ledger, first, 4)

    def sampled(*pieces: tuple[int, int], name: str = id, before: int = 3) -> list[ProvenanceSpan]:
        return [
            ProvenanceSpan(name, 0, before, False),
            *(ProvenanceSpan(name, offset, length, True) for offset, length in pieces),
        ]

    moved = first.fields["logprobs"].copy()
    moved[5] = np.nextafter(moved[5], np.float32(0))
    moved = replace_fields(first, logprobs=moved, advantages=first.fields["advantages"])
    refused = [
        (second, sampled((3, 2)), "position 3: .* names tokens 3 to 5 of sequence .* which has 4"),
        (second, sampled((0, 2)), "position 3: .* whose token 0 is 7, but the datum has 9"),
        (first, sampled((0, 2), (1, 2)), "position 5: .* whose token 1 is 9, but the datum has 8"),
        (first, sampled((0, 3), (0, 1)), "position 6: .* whose token 0 is 7, but the datum has 1"),
        (moved, sampled((0, 4)), "position 5: .* whose log-probability 2 is"),
        (moved, sampled((0, 2), (2, 1), (3, 1)), "position 5: .* whose log-probability 2 is"),
        (
            first,
            sampled((0, 3), before=4),
            "position 4: .* whose token 0 is 7, but the datum has 9",
        ),
        (first, sampled(before=2), "^provenance spans cover 2 positions of a datum of 7$"),
        (
            first,
            sampled((0, -3), (0, 7)),
            "position 3: a provenance span has offset 0 and length -3; spans cover the 7 positions "
            "of the datum in order$",
        ),
        (first, sampled((-1, 4)), "position 3: .* has offset -1 and length 4"),
        (first, sampled((0, 2**62)), f"position 3: .* length {2**62}"),
        (first, sampled((0, 4), before=-1), "position 0: .* length -1"),
        (first, sampled(before=7), "position 3: a token .* part of a prompt has an advantage"),
        (first, [*sampled((0, 2)), ProvenanceSpan(id, 5, 2, False)], "position 5: .* advantage"),
    ]
    for again in (ledger, SequenceLedger(tmp_path / "sequences.jsonl")):
        assert lags_of(again, first, spans=sampled((0, 4)))[0] == [-2, -2, -2, 0, 0, 0, 0]
        parts = sampled((0, 1), (1, 0), (1, 3))
        assert lags_of(again, first, spans=parts)[0] == [-2, -2, -2, 0, 0, 0, 0]
        for datum, spans, message in refused:
            with pytest.raises(ConfigError, match=message):
                again.resolve(datum, spans, Counter(), OWN)
    masked = replace_fields(
        first,
        logprobs=first.fields["logprobs"],
        advantages=np.ones(7),
        mask=np.array([0, 0, 0, 1, 1, 1, 0]),
    )
    lags, _ = lags_of(ledger, masked, spans=[*sampled((0, 3)), ProvenanceSpan(id, 6, 1, False)])
    assert lags == [-2, -2, -2, 0, 0, 0, -2]


def test_a_part_of_a_sequence_whose_tokens_are_forgotten_has_an_unknown_lag(
    trainer: ServedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fingerprint is remembered longer than its tokens."""
    monkeypatch.setattr(sequences, "COMPARABLE_TOKENS", 5)
    ledger = SequenceLedger(tmp_path / "sequences.jsonl")
    first, second, _ = datums(trainer)
    id, later = record(ledger, first, 4), record(ledger, second, 4)
    prompt = ProvenanceSpan(id, 0, 3, False)
    whole = [prompt, ProvenanceSpan(id, 0, 4, True)]
    parts = [prompt, ProvenanceSpan(id, 0, 2, True), ProvenanceSpan(id, 2, 2, True)]
    for again in (ledger, SequenceLedger(tmp_path / "sequences.jsonl")):
        assert lags_of(again, first, spans=whole)[0] == [-2, -2, -2, 0, 0, 0, 0]
        assert lags_of(again, first, spans=parts)[0] == [-2, -2, -2, -1, -1, -1, -1]
        other = [prompt, ProvenanceSpan(later, 0, 1, True), ProvenanceSpan(later, 1, 1, True)]
        assert lags_of(again, second, spans=other)[0] == [-2, -2, -2, 0, 0]
        assert len(again.sequences) == 2 and again.comparable_tokens == 2
    for count in range(3):
        assert ledger.is_long is (count == 2)
        record(ledger, first, 4)
    asyncio.run(ledger.rewrite())
    rows = jsonl.read(tmp_path / "sequences.jsonl")
    assert [len(row.get("content", "")) > 0 for row in rows] == [False] * 5 + [True]


def test_supervised_tokens_may_be_forbidden(ledger: SequenceLedger, trainer: ServedModels) -> None:
    """cross_entropy could train sampled tokens at any lag, with advantages as its weights."""
    first, _, _ = datums(trainer)
    id = record(ledger, first, 0)
    weights = np.array([0, 0, 0, 1.5, -1, 0, 1])
    tuned = replace_fields(first, weights=weights)
    assert lags_of(ledger, tuned) == ([-2, -2, -2, -3, -3, -2, -3], "")
    _, refused = lags_of(ledger, tuned, supervised="refuse")
    assert "cross_entropy trains position 3," in refused and "staleness.supervised" in refused
    masked = replace_fields(first, weights=weights, mask=np.array([1, 1, 1, 0, 0, 1, 1]))
    assert lags_of(ledger, masked)[0] == [-2] * 6 + [-3]
    nothing = replace_fields(first, weights=0 * weights)
    assert lags_of(ledger, nothing, supervised="refuse") == ([-2] * 7, "")
    own = [ProvenanceSpan(id, 0, 3, False), ProvenanceSpan(id, 0, 4, True)]
    got = lags_of(ledger, tuned, spans=own, supervised="refuse", max_lag=9.0)
    assert got == ([-2, -2, -2, 4, 4, 4, 4], "")
    begun = [ProvenanceSpan(id, 0, 5, False), ProvenanceSpan(id, 2, 2, True)]
    assert lags_of(ledger, tuned, spans=begun)[0] == [-2, -2, -2, -3, -3, 4, 4]
    row = build_trained_row(0, Counter({-3: 3, 4: 2, -1: 1}), [id], 7)
    assert (row["supervised"], row["unknown"], row["lags"]) == (3, 1, {"4": 2})


def test_versions_count_only_before_the_fork(ledger: SequenceLedger, trainer: ServedModels) -> None:
    first, second, third = datums(trainer)
    record(ledger, first, 1, "parent")  # the model was loaded from its version 1
    record(ledger, second, 2, "parent")
    record(ledger, third, 0, "")
    assert lags_of(ledger, first)[0][3] == 3 and lags_of(ledger, second)[0][3] == -1
    assert lags_of(ledger, third)[0][3] == 4
    assert "not an earlier version of m" in lags_of(ledger, second, unknown="refuse")[1]
    alone = ModelAncestry("m")  # created from the base model
    known = [alone.find_version(sequence) for sequence in ledger.sequences.values()]
    assert known == [None, None, 0]


def test_equal_sequences_are_told_by_model(ledger: SequenceLedger, trainer: ServedModels) -> None:
    """New adapters sample what the base model does, so models of one server sample the same."""
    first, second, _ = datums(trainer)
    foreign = [record(ledger, first, 0, "other"), record(ledger, first, 0, "")]
    own = record(ledger, first, 3)
    foreign.append(record(ledger, first, 0, "other"))
    taken = Counter([own, own])
    [run] = ledger.resolve(first, (), taken, OWN)
    assert run.sequence is not None and run.sequence.id == own and lags_of(ledger, first)[0][3] == 1
    record(ledger, second, 2, "other")
    inherited = record(ledger, second, 1, "parent")
    [run] = ledger.resolve(second, (), Counter([inherited]), OWN)
    assert run.sequence is not None and run.sequence.id == inherited


def test_the_ledger_closes_and_counts_once(
    ledger: SequenceLedger, trainer: ServedModels, tmp_path: Path
) -> None:
    first, second, _ = datums(trainer)
    ids = [record(ledger, datum, 0) for datum in (first, first, second, first)]
    taken: Counter[str] = Counter()
    found = [ledger.resolve(first, (), taken, OWN)[0].sequence for _ in range(2)]
    assert {sequence.id for sequence in found if sequence} == set(ids[:2])
    ledger.mark_trained(ids[:3], "m", 2)
    ledger.mark_trained(ids[:2], "m", 4)
    counts = {"sampled": 4, "never_trained": 1, "trained_once": 1, "trained_again": 2}
    asyncio.run(ledger.rewrite())
    for again in (ledger, SequenceLedger(tmp_path / "sequences.jsonl")):
        assert again.sum_totals("m") == {"sampled_tokens": 14, **counts}


def test_totals_without_remembered_sequences_stay(trainer: ServedModels, tmp_path: Path) -> None:
    ledger = SequenceLedger(tmp_path / "sequences.jsonl", remembered=1)
    first, second, third = datums(trainer)
    record(ledger, first, 0, "other")
    record(ledger, second, 0)
    assert not ledger.is_long
    record(ledger, third, 0)
    assert ledger.is_long
    asyncio.run(ledger.rewrite())
    assert not ledger.is_long and len((tmp_path / "sequences.jsonl").read_text().splitlines()) == 2
    ledger.close()
    again = SequenceLedger(tmp_path / "sequences.jsonl", remembered=1)
    assert [again.sum_totals(model)["sampled"] for model in ("other", "m")] == [1, 2]
    assert again.sum_totals("other")["never_trained"] == 1


def test_metrics_of_lags() -> None:
    assert measure_lag_metrics(Counter({0: 3, 2: 1, -1: 4})) == {
        **{"lag/unknown_share": 0.5, "lag/mean": 0.5, "lag/max": 2.0, "lag/p95": 2.0}
    }
    assert measure_lag_metrics(Counter({1: 99, 5: 1})) == {
        **{"lag/unknown_share": 0.0, "lag/mean": 1.04, "lag/max": 5.0, "lag/p95": 1.0}
    }
    assert measure_lag_metrics(Counter()) == {}


def test_the_ledger_remembers_the_newest_sequences_and_the_totals_of_all(
    trainer: ServedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sequences.jsonl"
    ledger = SequenceLedger(path, remembered=2)
    first, second, third = datums(trainer)
    ids = [record(ledger, first, 0), record(ledger, first, 0), record(ledger, second, 1)]
    assert lags_of(ledger, first)[0][3] == 4  # the equal one that is left
    ledger.mark_trained(ids, "m", 2)
    ids += [record(ledger, second, 1)]
    path.with_suffix(".part").write_bytes(b"of a server that was killed")
    build = sequences._build_row

    def build_slowly(*values: Any) -> Any:
        """Meanwhile, other sequences are recorded and trained."""
        assert threading.current_thread() is not threading.main_thread()
        monkeypatch.undo()
        ids.append(record(ledger, third, 3))
        ledger.mark_trained(ids[3:4], "m", 4)
        return build(*values)

    monkeypatch.setattr(sequences, "_build_row", build_slowly)
    asyncio.run(ledger.rewrite())
    assert path.read_bytes().count(b"\n") == 4 and not path.with_suffix(".part").exists()
    totals = {"sampled": 5, "sampled_tokens": 18, "trained_once": 3, "trained_again": 0}
    assert ledger.sum_totals("m") == totals | {"never_trained": 2}
    assert lags_of(ledger, first)[0][3] == -1
    assert "or not among its newest" in lags_of(ledger, first, unknown="refuse")[1]
    assert lags_of(ledger, third)[0][3] == 1 and list(ledger.sequences) == ids[3:]
    assert ledger.untrained["m"] == {3: 1}
    ledger.close()
    again = SequenceLedger(path, remembered=2)
    assert again.counted == {"m": 2}  # of trained.jsonl, later calls are still to be counted
    again.mark_trained(ids[3:4], "m", 4)
    assert again.sum_totals("m") == totals | {"never_trained": 2}
    assert (again.sampled_total, list(again.sequences)) == (5, ids[2:])


@pytest.mark.parametrize(
    ("log_ratio", "adv", "clipped"),
    [(3.9e-4, 1.0, False), (4.1e-4, 1.0, True), (-2.9e-4, -1.0, False), (-3.1e-4, -1.0, True)],
)
def test_gspo_clips_near_one_by_default(log_ratio: float, adv: float, clipped: bool) -> None:
    behavior = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    raw = torch.tensor([2 * log_ratio, 0.0])
    seq, inside = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    advantages = torch.full((2,), adv, dtype=torch.float64)
    tokens = SurrogateTokens(raw, advantages, behavior + raw, behavior, inside, seq, n=1)
    assert (training.compute_term("gspo", tokens, {}).coefficient == 0).tolist() == [clipped] * 2


def test_methods_meet_no_rule_of_runs() -> None:
    """A server repeats the calls that an earlier version took."""
    for name in ("dapo", "gspo", "icepop", "m2po-published", "reshape", "gepo"):
        training.resolve_method({"method": name})
    found = training.resolve_method({"method": "dapo", "loss.surrogate": "sft"})
    assert found.loss.surrogate == "sft"
