"""The lab's claims on a smaller model (2 symbols, 3 tokens), its gradients, the command line."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from asyncrl.algorithms import correction, loss
from asyncrl.algorithms.settings import RecomputedCorrection
from asyncrl.cli import main
from asyncrl.experiments.lab import bias, corrections, reshape
from asyncrl.experiments.lab.policy import ResponseSpace, differentiate


@pytest.fixture(scope="module")
def space() -> ResponseSpace:
    return ResponseSpace(3, 3)


def run_lab(words: str, out: Path) -> dict:
    """Run an experiment, whose claims hold, and return its numbers."""
    done = CliRunner().invoke(main, ["lab", *words.split(), "--json", "--out", str(out)])
    assert done.exit_code == 0, done.stderr.splitlines()[-1]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(claim["holds"] for claim in found["verdict"])
    assert json.loads((out / f"{words.split()[0]}.json").read_text()) == found
    return found


def test_every_answer_is_there_once_and_probabilities_sum_to_one(space: ResponseSpace) -> None:
    assert len({tuple(a) for a in space.answers.tolist()}) == 27 and space.prefixes == 1 + 3 + 9
    assert float(space.compute_probability(space.draw_table(0)).sum()) == pytest.approx(1)
    rows = {}
    for answer, places in zip(space.answers.tolist(), space.place.reshape(27, 3), strict=True):
        for t, place in enumerate(places.tolist()):
            assert rows.setdefault(place, answer[:t]) == answer[:t], "one row, one prefix"
    assert len(rows) == space.prefixes


def test_rows_are_the_gradients_that_autograd_finds(space: ResponseSpace) -> None:
    """A loss of one answer's tokens with coefficients c and step KLs with coefficients d."""
    theta, ref = space.draw_table(0), space.draw_table(1)
    c, d = torch.randn(2, len(space.seq), dtype=torch.float64)
    own = space.seq == 7
    exact = differentiate(
        lambda t: (c * space.compute_logprobs(t) + d * space.compute_step_kl(t, ref))[own], theta
    )[0]
    one = (torch.arange(space.n) == 7).double()
    found = space.average(space.compute_gradient_rows(theta, c, d, ref=ref), one)
    assert torch.allclose(found, exact, atol=1e-12)
    (none,) = differentiate(lambda lp: lp.detach() * 2, theta)
    assert torch.equal(none, torch.zeros_like(theta))
    # a policy at a given distance
    mu = space.find_policy(theta, 0.03, 5)
    assert float(space.compute_kl(mu, theta)) / 3 == pytest.approx(0.03, abs=1e-9)
    assert torch.equal(space.find_policy(theta, 0.0, 5), theta)


def test_moments_by_hand() -> None:
    """One symbol of two, p = (1/2, 1/2), coefficients 1 and 3: g = (1/2, -1/2) and 3 (-1/2, 1/2);
    mean (-1/2, 1/2), E|g|^2 = (0.5 + 4.5)/2."""
    s = ResponseSpace(2, 1)
    theta = torch.zeros(1, 2, dtype=torch.float64)
    rows = s.compute_gradient_rows(theta, torch.tensor([1.0, 3.0], dtype=torch.float64))
    mean = torch.tensor([[-0.5, 0.5]], dtype=torch.float64)
    found = s.judge(rows, torch.full((2,), 0.5).double(), mean)
    assert found["relative_bias"] == 0 and found["variance"] == pytest.approx(2.5 - 0.5)


def test_bias_truncation_and_discount_trade(tmp_path: Path) -> None:
    """(1, inf) is exact, discount 0 the token level; a lower cut never has more variance."""
    measured = run_lab("bias --vocabulary 2 --length 3 --seeds 2 --draws 60", tmp_path)
    assert max(measured["identities"].values()) < 1e-9
    for which, curve in measured["curve"].items():
        assert curve["1"]["inf"]["relative_bias"] < 1e-9
        assert curve["0"]["inf"]["relative_bias"] == pytest.approx(
            measured["estimators"]["on_policy"]["k2_in_loss"]["relative_bias"], rel=1e-4
        )
        noise = [curve["1"][f"{c:g}"]["variance"] for c in bias.CUTS]
        assert noise == sorted(noise) and noise[0] < noise[-1], which


def test_the_endless_batch_is_the_limit_of_sampled_ones() -> None:
    """Weights of one big sample, by the learner's own path, average to the exact expectation: the
    third decimal at 40,000 answers."""
    s = ResponseSpace(2, 3)
    theta = s.draw_table(0)
    mu = s.find_policy(theta, 0.1, 1)
    case = corrections.StaleSamples(s, theta, mu, corrections.draw_rewards(s, 2))
    c = RecomputedCorrection(level="sequence", bound="mask", self_normalize=True)
    exact = case.compute_weights(c).reshape(s.n, -1)[:, 0]
    drawn = s.sample(mu, 40_000, 3)
    log_rho = case.log_rho.reshape(s.n, -1)[drawn].reshape(-1)
    seq = torch.arange(40_000).repeat_interleave(3)
    got = correction.correct(
        log_rho, log_rho, torch.ones_like(seq, dtype=torch.bool), seq, 40_000, c
    ).weight.reshape(-1, 3)[:, 0]
    assert float((got - exact[drawn]).abs().max()) < 0.02 and float(exact.max()) > 1.05


def test_corrections_as_json(tmp_path: Path) -> None:
    found = run_lab("corrections --vocabulary 2 --length 4 --seeds 2", tmp_path)
    assert list(found["estimators"]) == ["2", "4"]
    far = found["estimators"]["4"]["0.1"]
    assert "preset mis" in far
    for name in ("token truncate", "sequence mask", "sequence clip"):
        assert far[name]["mean_weight"] != pytest.approx(1, abs=1e-3)
        assert far[f"{name} normalised"]["mean_weight"] == pytest.approx(1, abs=1e-5)
    by_lag = found["proximal"]
    assert list(by_lag) == ["0", "1", "2", "3", "4"]
    assert by_lag["0"]["version"] == by_lag["0"]["recompute"], "there it is the learner's start"
    for lag, policies in by_lag.items():
        # the mismatch alone is in the weights: of behavior nothing, of version the same at all lags
        assert policies["behavior"]["ess"] == 1 > policies["version"]["ess"] > 0.98
        assert lag == "0" or policies["recompute"]["ess"] < policies["version"]["ess"]


def trainer(arm: str, optimizer: str, rate: float) -> reshape.TabularTrainer:
    s = ResponseSpace(3, 3)
    right, config = corrections.draw_rewards(s, 1), reshape.make_config(arm, 16, 1)
    return reshape.TabularTrainer(s, s.draw_table(0), right, config, optimizer, rate)


def test_reshape_its_first_step_is_the_policy_gradient_of_the_batch() -> None:
    """SGD at rate 2: theta moves by 2/N sum_i A_i grad lp_i, with grpo's advantages by hand."""
    t = trainer("vanilla", "sgd", 2.0)
    drawn, b = t.sample_batch(32, 5)
    r = b.rewards.reshape(4, 8)
    adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).reshape(-1)
    each = torch.zeros(t.space.n, dtype=torch.float64).index_add_(0, drawn, adv)
    rows = t.space.compute_gradient_rows(t.start, torch.ones(len(t.space.seq)).double())
    g = t.space.average(rows, each) / len(b.seq)
    t.c = reshape.make_config("vanilla", 2, 1)
    t._make_step(loss.prepare(b, t.c), drawn, torch.arange(32))
    assert torch.allclose(t.theta.detach(), t.start + 2 * g, atol=1e-12) and float(g.norm()) > 0.01


@pytest.mark.parametrize("optimizer, rate", [("sgd", 5.0), ("adam", 0.1)])
def test_reshape_v31_drifts_past_clip_and_a_budget_holds_it(optimizer: str, rate: float) -> None:
    arms = ("clip", "v3.1", "A", "D learning rate")
    rows = {arm: trainer(arm, optimizer, rate).train(128, 7) for arm in arms}
    top = {arm: max(r["kl"] for r in x) for arm, x in rows.items()}
    assert top["v3.1"] > 2 * top["clip"]
    assert min(r["cosine"] for r in rows["v3.1"][1:]) > 0.9, "small steps in one direction add up"
    held = max(r["kl_batch"] for r in rows["D learning rate"])
    assert held <= 1.05 * reshape.BUDGET < top["v3.1"]
    skipped = ["grad_norm" not in r for r in rows["A"]]
    # once past the budget the rest of the batch is skipped
    assert any(skipped) and skipped == sorted(skipped)
    assert rows["A"][skipped.index(True)]["kl_batch"] > reshape.BUDGET


def test_reshape_a_claim_that_does_not_hold_is_said_and_ends_with_1(tmp_path: Path) -> None:
    """Two epochs are too few for any drift."""
    text = "lab reshape --vocabulary 2 --length 2 --seeds 1 --epochs 2 --samples 64 --lr-adam 0.001"
    done = CliRunner().invoke(main, [*text.split(), "--json", "--out", str(tmp_path)])
    assert done.exit_code == 1 and "do not hold: " in done.stderr.splitlines()[-1]
    # what was measured; what is wrong with it is on stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert any(c["holds"] is False for c in found["verdict"])
    assert len(found["runs"]["adam"]["v3.1"]["kl"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("reshape --samples 20", "groups of 8 completions"),
        ("bias --vocabulary 50 --length 9", "--vocabulary 50 --length 9: at least 2 and 1, and at"),
    ],
)
def test_sizes_must_fit(words: str, said: str) -> None:
    done = CliRunner().invoke(main, ["lab", *words.split()])
    assert done.exit_code == 2 and said in done.stderr
