"""Mutants written by hand, each with the test that must notice it, for continuous integration.

tests/project/test_planted_mutants.py runs them.  Each breaks one promise of the configuration in
one line: `old`, which occurs once in the file, is replaced by `new`."""

from __future__ import annotations

from typing import NamedTuple


class Planted(NamedTuple):
    name: str
    path: str
    old: str
    new: str
    test: str


ALGORITHMS = "asyncrl/algorithms/"
LEARNER = "learner/"
BUFFER = "buffer/"
ADVANTAGES = "tests/algorithms/test_advantages.py::test_"
SETTINGS = "tests/algorithms/test_settings_take_effect.py::test_"
STATE = "tests/learner/test_learner_step.py::test_"
STOPS = "tests/algorithms/test_gradients.py::test_"
LOCAL = "tests/tinker_server/test_tinker_local.py::test_"
PLANTED = [
    Planted(
        "a restarted server writes the rows of its steps again",
        "asyncrl/tinker/models.py",
        "if outcome.row and number > self.recorded:",
        "if outcome.row:",
        LOCAL + "bounded_records_close_the_ledger_after_a_restart",
    ),
    Planted(
        "a later good loss hides a refused one",
        "asyncrl/tinker/models.py",
        "self.refused = self.refused or outcome.error",
        "self.refused = outcome.error",
        LOCAL + "supervised_data_can_be_forbidden",
    ),
    Planted(
        "on_exceed = mask leaves the token in the loss",
        ALGORITHMS + "loss.py",
        "valid &= batch.token_lag <= config.staleness.limit",
        "pass",
        SETTINGS + "masked_tokens_leave_the_loss_and_its_denominator",
    ),
    Planted(
        "truncated = mask leaves the answer in the loss",
        ALGORITHMS + "loss.py",
        "valid &= ~batch.truncated[batch.seq]",
        "pass",
        SETTINGS + "truncated_answers_leave_the_loss_and_its_denominator",
    ),
    Planted(
        "downweight is 1",
        ALGORITHMS + "loss.py",
        "            0.5,\n            (batch.token_lag",
        "            1.0,\n            (batch.token_lag",
        SETTINGS + "downweight_halves_a_token_for_each_half_life_above_the_limit",
    ),
    Planted(
        "downweight does not reach the loss",
        ALGORITHMS + "loss.py",
        "weight * prep.staleness_weight[part], 0.0)",
        "weight, 0.0)",
        SETTINGS + "downweight_halves_a_token_for_each_half_life_above_the_limit",
    ),
    Planted(
        "the entropy bonus has the other sign",
        ALGORITHMS + "loss.py",
        "total = total - c.loss.entropy",
        "total = total + c.loss.entropy",
        SETTINGS + "the_entropy_bonus_lowers_the_loss_by_its_coefficient",
    ),
    Planted(
        "action = slow is off",
        ALGORITHMS + "loss.py",
        'elif stop.action == "slow" and stop.kl_max > 0:',
        "elif False:",
        SETTINGS + "slow_takes_the_share_of_a_step_that_fits_and_stops_at_the_budget",
    ),
    Planted(
        "the KL that a batch arrived with is not subtracted",
        ALGORITHMS + "loss.py",
        "return total - sum_moved_kl(behavior, start, behavior, valid)[0], weight",
        "return total, weight",
        STOPS + "at_learning_rate_zero_nothing_ever_stops[{'epochs': 3}-behavior-behavior]",
    ),
    Planted(
        "ess_min is off",
        ALGORITHMS + "loss.py",
        'if host["ess"] < stop.ess_min:',
        "if False:",
        SETTINGS + "a_small_effective_sample_size_stops_the_batch",
    ),
    Planted(
        "weight_max is off",
        ALGORITHMS + "surrogates.py",
        "w.clamp(max=c.weight_max) if c.weight_max > 0 else w",
        "w",
        SETTINGS + "reshapes_weight_is_bounded_in_value_and_gradient",
    ),
    Planted(
        "group_baseline is off",
        ALGORITHMS + "advantages.py",
        "center_by_group(t.rewards, t.groups) if c.group_baseline else t.rewards",
        "t.rewards",
        ADVANTAGES + "reinforce_pp_takes_the_groups_mean_total_off[True-raw1]",
    ),
    Planted(
        "gae is never whitened",
        ALGORITHMS + "advantages.py",
        "return whiten_masked(adv, mask) if c.whiten else adv",
        "return adv",
        SETTINGS + "gae_can_be_whitened_and_cut_after_k_residuals",
    ),
    Planted(
        "k_step is never taken",
        ALGORITHMS + "advantages.py",
        "if c.k_step > 0:",
        "if False:",
        SETTINGS + "gae_can_be_whitened_and_cut_after_k_residuals",
    ),
    Planted(
        "process_grpo is 0",
        ALGORITHMS + "advantages.py",
        "return _sum_masked_suffix(normalized, t.mask, t.seq, 1.0)",
        "return normalized * 0.0",
        ADVANTAGES + "process_supervision_by_hand",
    ),
    Planted(
        "cispo_absolute is off",
        ALGORITHMS + "surrogates.py",
        "high if c.cispo_absolute else 1 + high",
        "1 + high",
        SETTINGS + "cispos_upper_bound_is_relative_unless_it_is_said_to_be_absolute",
    ),
    Planted(
        "the adaptive coefficient is frozen",
        LEARNER + "step.py",
        "self.state.beta = kl.adapt_beta(",
        "_ = kl.adapt_beta(",
        STOPS + "the_adaptive_coefficient_is_the_controllers",
    ),
    Planted(
        "the running baseline is frozen",
        LEARNER + "step.py",
        "self.state.baseline = mean",
        "_ = mean",
        STOPS + "the_running_mean_follows_rewards_as_they_were_used",
    ),
    Planted(
        "interpolate takes the behaviour policy alone",
        ALGORITHMS + "loss.py",
        "share = 1.0 / (batch.token_lag.float() + 1.0)",
        "share = 1.0 / (batch.token_lag.float() * 0.0 + 1.0)",
        STATE + "the_fresher_a_token_the_nearer_its_anchor_to_the_behaviour",
    ),
    Planted(
        "the buffer grants one group too many",
        "asyncrl/contract/admission.py",
        "(int(max_lag) + 1) * batch",
        "(int(max_lag) + 1) * batch + 1",
        "tests/buffer/test_store.py::test_tickets_go_out_while_the_limit_leaves_room",
    ),
    Planted(
        "the lag of another branch is that of ours",
        "asyncrl/contract/versions.py",
        "self._cached_lags[token] = beyond",
        "self._cached_lags[token] = beyond = -self._depth[self._policies[token]]",
        "tests/project/test_docs.py::test_examples_in_docstrings[asyncrl.contract.versions]",
    ),
]
