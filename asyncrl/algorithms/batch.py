"""The packed batch that the loss takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LossBatch:
    """The packed batch that the loss takes: N response tokens of B samples.

    Required:
        seq: int64 [N], the sample of each token. All training sequences of a session have one
            sample number, one after another, so lengths, sequence ratios and weights cover all of
            them.
        behavior: fp32 [N], log mu.
        mask: bool [N], tokens that may be trained.
        token_lag: int64 [N], versions between the sampling policy and the start.
        rewards: fp32 [B].
        groups: int64 [B].
        truncated: bool [B].

    Optional:
        start: [N], the learner's policy at the start of the batch, the origin of all measurements.
        proximal: [N], pi_prox, the denominator of the loss: the start (correction.proximal =
            recompute), mu (behavior), between the two (interpolate) or `version`.
        version: [N], the learner's weights of the version that sampled each token; nan: unknown.
        reference: [N], the reference policy of the loss and the metrics.
        reward_reference: [N], the reference of KL in the reward where it differs.
        token_rewards: [N]; a sample without any has its reward on its last token.
        steps: bool [N], the last token of each step of process supervision; absent: see
            `advantages.RewardedBatch.find_step_ends`.
        values: [N].
        bootstrap: [B], V after the last token of a truncated sample.
        greedy: [B], reward of a greedy completion of the same prompt.
        greedy_truncated: bool [B] of that completion.
        greedy_lengths: int64 [B] of that completion, in tokens.
        age: int64 [N], versions between the weights that sampled a token and the oldest weights
            that computed any key or value it attended to.
        squared_norms: [B], of each sample's gradient.
        energy: [N], squared norm of each token's gradient with respect to the logits.
        baselines: [B], running mean of the prompt's rewards; nan: its first batch.
        parts: [B, P], the named parts of the reward, where all samples have the same ones.
        task: int64 [B], the task of each sample in a mixture, of `task_names`.
        smallest_group: samples of the smallest group; None: not counted yet.

    All log-probabilities are at the sample's own temperature.
    """

    seq: Tensor
    behavior: Tensor
    mask: Tensor
    token_lag: Tensor
    rewards: Tensor
    groups: Tensor
    truncated: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None
    token_rewards: Tensor | None = None
    values: Tensor | None = None
    bootstrap: Tensor | None = None
    greedy: Tensor | None = None
    start: Tensor | None = None
    greedy_truncated: Tensor | None = None
    greedy_lengths: Tensor | None = None
    steps: Tensor | None = None
    reward_reference: Tensor | None = None
    age: Tensor | None = None
    squared_norms: Tensor | None = None
    energy: Tensor | None = None
    version: Tensor | None = None
    baselines: Tensor | None = None
    parts: Tensor | None = None
    part_names: tuple[str, ...] = ()
    task: Tensor | None = None
    task_names: tuple[str, ...] = ()
    smallest_group: int | None = None

    @property
    def count(self) -> int:
        """Number of samples B."""
        return len(self.rewards)
