"""Config sections that the algorithms read: frozen structs. Imports no torch.

The config is built of them (`asyncrl.config.tree`), and a caller without a config builds them
itself. Each advantage, surrogate and correction has its own struct with the keys that it reads. To
add one, write its struct here and its function, and add a line to the dict that maps its tag to it.
A key that acts only under one value of another key declares that with `read_with`; giving it
elsewhere is an error, which `asyncrl.config.layers` derives from here.

A key that names a function lists its choices here, because a config must not import torch. A test
compares them with the dict that holds the functions.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, dataclass_transform

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NonNegative = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section of a file of settings, or an entry of a table; unknown keys are refused.

    Its subclasses are frozen, too. A required key needs `kw_only` after keys with a default.
    """


# the names of the dicts of functions in the other modules, for the config and its messages
Baseline = Literal["none", "batch", "ema", "prompt"]
Scale = Literal["raw", "unit", "whiten"]
Level = Literal["none", "token", "sequence", "geometric"]
Bound = Literal["none", "truncate", "clip", "mask"]
Reject = Literal["none", "ratio", "k1", "k2", "k3", "chi2", "tv", "kb", "kb_mu"]
Over = Literal["token", "sum", "mean", "max"]
Veto = Literal["none", "probability", "ratio"]
Reduction = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
Mode = Literal["v3.1", "base", "constant"]
Budget = Literal["none", "tokens", "global"]
Form = Literal["power", "box_cox"]
OffPolicy = Literal["none", "ratio", "prefix", "prefix_full"]
Estimator = Literal[
    "k1", "k2", "k3", "abs", "low_var_kl", "k1+", "k2+", "k3+", "abs+", "low_var_kl+"
]
# surrogates whose ratio is pi_theta / mu as published: the proximal policy must be the behavior
# policy
ON_BEHAVIOR = (
    "topr",
    "dro",
    "reshape",
    "vespo",
    "oapl",
    "band",
    "gepo",
    "bapo",
    "minpro",
    "ipo",
    "function",
)
# advantages that compare the samples of one prompt, and need at least two
BY_GROUP = (
    "rloo",
    "grpo",
    "dr_grpo",
    "opo",
    "gpg",
    "oapl",
    "asymre",
    "opob",
    "maxrl",
    "pass_at_k",
    "gdpo",
    "otb",
)


def read_with(key: str, *values: str) -> Meta:
    """Mark a key that is read only while `key` has one of `values`.

    Without values it is read while `key` is on: not absent, 0, empty, false, "none" or "off".

    Args:
        key: of the same section, or with dots from the root of the config.
    """
    return Meta(extra={"read_with": (key, values)})


def list_variants(kind: Any) -> tuple[Any, ...]:
    """Return the tagged structs below `kind`, in the order of their definition."""
    structs = []
    for subclass in kind.__subclasses__():
        if isinstance(subclass.__struct_config__.tag, str) and not subclass.__subclasses__():
            structs.append(subclass)
        structs += list_variants(subclass)
    return tuple(structs)


WITH_COEFFICIENT = read_with("coefficient")
WITH_LEVEL = read_with("level")
WITH_PREFIX = read_with("off_policy", "prefix", "prefix_full")
WITH_REJECT = read_with("reject")
# IS-reshape with gamma of each token
WITH_TOKEN_GAMMA = read_with("budget", "none", "tokens")
Ddof = Annotated[
    Literal[0, 1],
    Meta(description="Degrees of freedom subtracted for the standard deviation. 1: unbiased."),
]
Eps = Annotated[
    NonNegative,
    Meta(
        description="Added to the standard deviation before dividing by it. Groups of "
        "equal rewards get an advantage of 0 with any value."
    ),
]
Pull = Annotated[
    NonNegative,
    Meta(
        description="Coefficient tau of -tau (log ratio)^2, which pulls every token "
        "towards the behavior policy. 0: none."
    ),
]
CovShare = Annotated[Share, Meta(description="Share of the tokens that the surrogate restrains.")]


class Advantage(Section, tag_field="name"):
    """Keys that every advantage reads.

    Each advantage has its own struct below, tagged by `advantage.name`, with its own keys.
    """

    OWN_KEYS_READ_WITH: ClassVar[str] = "loss.coefficient"

    rewards: Annotated[Scale, read_with("loss.coefficient")] = "raw"
    """Scaling of the rewards before the advantage. raw: as they are; unit: to [0, 1] over the
    batch; whiten: to mean 0 and standard deviation 1 over the batch."""
    truncated: Literal["keep", "penalty", "fixed", "zero", "mask", "soft"] = "keep"
    """Treatment of completions cut at max_new_tokens. keep: as any other; penalty: subtract
    truncation_penalty from their reward; fixed: replace their reward by minus truncation_penalty;
    zero: their reward is 0; mask: exclude them from the loss; soft: a penalty that rises linearly
    before the limit."""
    truncation_penalty: Annotated[
        NonNegative, read_with("truncated", "penalty", "fixed", "soft")
    ] = 0.0
    """Penalty of truncated = penalty, fixed and soft, in units of the reward. It must be above 0
    there."""
    truncation_ramp: Annotated[Positive, read_with("truncated", "soft")] = 16
    """soft: tokens before max_new_tokens at which the penalty begins."""
    no_spread: Literal["keep", "filter"] = "keep"
    """Treatment of groups whose rewards are all equal, which have no gradient. keep: train on them;
    filter: replace them by other prompts (dynamic sampling)."""

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)


class AnswerAdvantage(Advantage):
    """An advantage with one number per sample."""

    whiten: bool = False
    """Scale the advantages to mean 0 and standard deviation 1 over the batch."""


class ReinforceAdvantage(AnswerAdvantage, tag="reinforce"):
    baseline: Baseline = "batch"
    """Baseline, of the rewards after truncation, scaling and KL. batch: their mean; ema: a running
    mean over batches; prompt: a running mean for each prompt; none: 0."""
    ema_decay: Annotated[Share, read_with("baseline", "ema", "prompt")] = 0.9
    """Share of the running mean that each update keeps. Closer to 1: smoother and slower."""


class RlooAdvantage(AnswerAdvantage, tag="rloo"):
    pass


class GrpoAdvantage(AnswerAdvantage, tag="grpo"):
    ddof: Ddof = 1
    std: Literal["group", "batch"] = "group"
    """Rewards whose standard deviation divides: those of the group or of the whole batch, one per
    completion."""
    eps: Eps = 1e-4


class DrGrpoAdvantage(AnswerAdvantage, tag="dr_grpo"):
    pass


class OpoAdvantage(AnswerAdvantage, tag="opo"):
    pass


class GpgAdvantage(AnswerAdvantage, tag="gpg"):
    pass


class RemaxAdvantage(AnswerAdvantage, tag="remax"):
    """Samples the first sample of each group greedily, as a baseline that is not trained on."""


class OaplAdvantage(AnswerAdvantage, tag="oapl"):
    beta: NonNegative = 0.5
    """Temperature of a group's value: 0 gives the largest reward, inf the mean."""


class AsymreAdvantage(AnswerAdvantage, tag="asymre"):
    shift: float = -0.1
    """Added to the group's mean to form the baseline. Below 0 it raises every advantage."""


class OpobAdvantage(AnswerAdvantage, tag="opob"):
    pass


class MaxrlAdvantage(AnswerAdvantage, tag="maxrl"):
    pass


class PassAtKAdvantage(AnswerAdvantage, tag="pass_at_k"):
    k: Count = 0
    """Completions of which the best one counts. 0: the whole group."""


class GdpoAdvantage(AnswerAdvantage, tag="gdpo"):
    part_weights: dict[str, float] = {}
    """Weights of the reward's named parts. A part without a weight counts 1."""
    ddof: Ddof = 1
    eps: Eps = 1e-4


class ReinforcePpAdvantage(Advantage, tag="reinforce_pp"):
    gamma: Share = 1.0
    """Discount per token. 1: none."""
    group_baseline: bool = False
    """Subtract the group's mean reward first."""


class GaeAdvantage(AnswerAdvantage, tag="gae"):
    """Trains a value head ([value])."""

    gamma: Share = 1.0
    """Discount per token. 1: none."""
    lam: Share = 0.95
    """Lambda of GAE. 1: return minus value, unbiased; 0: the one-step residual, least variance."""
    k_step: Count = 0
    """Cut the sum of residuals after this many tokens. 0: never."""


class OtbAdvantage(Advantage, tag="otb"):
    pass


class FunctionAdvantage(Advantage, tag="function"):
    function: str = ""
    """Your own advantage: module:function or file.py:function with the arguments of
    `asyncrl.losses.advantages` (docs/extending.md). It sets advantage.name = function."""


class Value(Section):
    """The value head, with advantage.name = gae."""

    trunk: Literal["own", "shared"] = "own"
    """own: a second model; shared: a head on the policy's last hidden states, which costs no second
    model."""
    init: Literal["policy", "reward_model", "zeros", "random"] = "policy"
    """policy: the trunk of the policy or of the model at `path`, and a small random head;
    reward_model: trunk and head at `path`; zeros: a head that predicts 0 at first; random: a new
    trunk."""
    path: Annotated[str, read_with("trunk", "own")] = ""
    """Hugging Face directory whose model is the trunk. With init = reward_model it must have a
    sequence-classification head with one label. Empty: the policy."""
    coefficient: NonNegative = 0.1
    """Coefficient c_v of the value loss."""
    clip: NonNegative = 0.0
    """Clipped value loss: a value may leave its value at the start of the batch by at most this. 0:
    off."""
    lr: NonNegative = 0.0
    """Learning rate of the value head and its trunk. 0: learner.lr."""


class Correction(Section, tag_field="proximal"):
    """Keys that every proximal policy reads: the policy that ratios and clips are taken against.

    Each has its own struct below, tagged by `correction.proximal`.
    """

    preset: Literal[
        "", "none", "tis", "seq_tis", "icepop", "mis", "mis_normalized", "geo_mask", "trm"
    ] = ""
    """A published correction: it sets the keys of this section that you do not give."""
    reject: Reject = "none"
    """Exclude what leaves [reject_lo, reject_hi] in this statistic of pi_prox / mu. ratio: the
    ratio; k1, k2, k3: estimates of KL(mu || pi); chi2: rho^2 - 1; tv: |pi - mu|; kb: the larger
    binary KL of the two directions; kb_mu: the one from mu."""
    reject_over: Annotated[Over, WITH_REJECT] = "token"
    """token: exclude tokens by their own value; sum, mean, max: exclude whole completions by that
    of their tokens' values."""
    reject_lo: Annotated[float | None, WITH_REJECT] = None
    """Lower bound of `reject`. Absent: 0.5 for ratio (mean: 0.99), otherwise none."""
    reject_hi: Annotated[float | None, WITH_REJECT] = None
    """Upper bound of `reject`. Absent: 2 for ratio (mean: 1.01); the other statistics need one."""
    reject_when: Annotated[Literal["always", "negative"], WITH_REJECT] = "always"
    """negative: exclude only where the advantage is below 0."""
    reject_at: Annotated[Literal["proximal", "target"], WITH_REJECT] = "proximal"
    """proximal: judge pi_prox / mu once per batch; target: judge pi_theta / mu before each
    optimizer step, whatever the proximal policy."""
    reject2: Annotated[Reject, WITH_REJECT] = "none"
    """A second statistic. What leaves either interval is excluded."""
    reject2_over: Annotated[Over, read_with("reject2")] = "token"
    """As reject_over, for reject2."""
    reject2_lo: Annotated[float | None, read_with("reject2")] = None
    """As reject_lo, for reject2."""
    reject2_hi: Annotated[float | None, read_with("reject2")] = None
    """As reject_hi, for reject2."""
    veto: Veto = "none"
    """Exclude completions with a token whose pi_prox (probability, 1e-6) or pi_prox / mu (ratio,
    1e-4) is below the threshold."""
    veto_below: Annotated[PositiveFloat | None, read_with("veto")] = None
    """Threshold of `veto`. Absent: its default."""
    m2: NonNegative = 0.0
    """M2PO, as published: of the tokens that have moved in the direction of their advantage,
    exclude those with the largest log pi_theta / mu until the mean square of the others is at most
    this, at each optimizer step. 0: off."""
    denominator: Literal["before", "after"] = "before"
    """Count the loss's tokens before or after rejection. after: rejection does not shrink the
    gradient."""

    @property
    def proximal(self) -> str:
        return str(self.__struct_config__.tag)

    # pi_prox / mu is 1 on the behavior policy: weights do not apply

    @property
    def level(self) -> str:
        return "none"

    @property
    def bound(self) -> str:
        return "none"

    @property
    def lo(self) -> float | None:
        return None

    @property
    def hi(self) -> float | None:
        return None

    @property
    def self_normalize(self) -> bool:
        return False

    @property
    def function(self) -> str:
        return ""


class BehaviorCorrection(Correction, tag="behavior"):
    """The policy that sampled the tokens: the surrogate's own clip bounds the update."""


class WeightedCorrection(Correction):
    """Weights of pi_prox / mu, never differentiated."""

    level: Level = "token"
    """Importance weights pi_prox / mu per token, per completion (sequence: product; geometric:
    geometric mean), or none."""
    bound: Annotated[Bound, WITH_LEVEL] = "truncate"
    """Bound on the weights. truncate: at most hi; clip: into [lo, hi]; mask: 0 outside [lo, hi]."""
    lo: Annotated[NonNegative | None, WITH_LEVEL, read_with("bound", "clip", "mask")] = None
    """Lower bound of a weight. Absent: 0.5 (geometric: 0.99)."""
    hi: Annotated[
        PositiveFloat | None, WITH_LEVEL, read_with("bound", "truncate", "clip", "mask")
    ] = None
    """Upper bound of a weight. Absent: 2 (geometric: 1.01)."""
    self_normalize: Annotated[bool, WITH_LEVEL] = False
    """Divide the weights by their mean over the batch, after the bound. It keeps the effective
    learning rate constant."""
    function: str = ""
    """Your own weights: module:function or file.py:function of (log_rho, mask, seq, n, correction),
    which returns [N]."""


class RecomputedCorrection(WeightedCorrection, tag="recompute"):
    """The learner's policy at the start of the batch (decoupled PPO)."""


class InterpolatedCorrection(WeightedCorrection, tag="interpolate"):
    """Between the two, nearer to the learner's policy the older a token is."""


class VersionCorrection(WeightedCorrection, tag="version"):
    """The weights that sampled the token, in the learner: weights correct the engine's mismatch
    alone."""


class AveragedCorrection(WeightedCorrection, tag="ema"):
    """An exponential average of the learner's weights over its versions (PPO-EWMA)."""

    ema_half_life: Annotated[float, Meta(gt=0, le=1e6)] = 2.0
    """Number of versions after which a version counts half in the average."""


class Loss(Section, tag_field="surrogate"):
    """Keys that every surrogate reads.

    Each surrogate has its own struct below, tagged by `loss.surrogate`, with its own keys.
    """

    OWN_KEYS_READ_WITH: ClassVar[str] = "loss.coefficient"

    coefficient: NonNegative = 1.0
    """Coefficient of the surrogate, which carries the reward. 0: only kl.loss and entropy are left,
    as in distillation, and the keys of one advantage or surrogate have no effect."""
    reduction: Reduction = "token-mean"
    """Mean over the batch. token-mean: over all tokens; seq-mean-token-mean: each completion's
    mean; seq-mean-token-sum: each completion's sum; seq-mean-token-sum-norm: that sum divided by
    norm_length."""
    norm_length: Annotated[Count, read_with("reduction", "seq-mean-token-sum-norm")] = 0
    """Constant length of seq-mean-token-sum-norm, in tokens. 0: max_new_tokens."""
    entropy: float = 0.0
    """Coefficient c_h of the entropy bonus. Above 0 it keeps the policy from collapsing."""

    @property
    def surrogate(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def center(self) -> str:
        return "off"


class ClippedLoss(Loss):
    eps_low: NonNegative | None = None
    """Clip below 1 - eps_low. Absent: the surrogate's default (0.2; gspo 3e-4; gmpo 0.4 nats)."""
    eps_high: NonNegative | None = None
    """Clip above 1 + eps_high. Absent: the surrogate's default (0.2; gspo 4e-4; gmpo 0.4 nats;
    minpro 0.28)."""
    DEFAULT_CLIP: ClassVar[tuple[float, float]] = (0.2, 0.2)

    @property
    def clip(self) -> dict[str, float]:
        """`low` and `high`, as given or by default."""
        low, high = self.DEFAULT_CLIP
        return {
            "low": low if self.eps_low is None else self.eps_low,
            "high": high if self.eps_high is None else self.eps_high,
        }


Ratio = Annotated[
    Literal["token", "sequence", "geometric"],
    Meta(
        description="Ratio of each token, or of its whole completion (sequence: product; "
        "geometric: geometric mean)."
    ),
]


class PpoFamilyLoss(ClippedLoss):
    dual_clip: NonNegative = 0.0
    """Dual clip: the bound c above 1 on the ratio where the advantage is negative. 0: off."""
    ratio: Ratio = "token"


class PpoLoss(PpoFamilyLoss, tag="ppo"):
    pass


class DecoupledPpoLoss(PpoFamilyLoss, tag="decoupled_ppo"):
    pass


class VanillaLoss(Loss, tag="vanilla"):
    pass


class ReinforceLoss(Loss, tag="reinforce"):
    center: Literal["off", "exact", "top"] = "off"
    """Subtract what the score of a token is expected to be under the weights that sampled it, so
    that a constant in the advantage does not move the policy. exact: over the vocabulary; top:
    over its center_top likeliest tokens, the others being as likely as in the policy."""
    center_top: Annotated[int, Meta(ge=1, le=100_000), read_with("center", "top")] = 20
    """top: number of tokens."""


class GspoLoss(ClippedLoss, tag="gspo"):
    # its ratio is a mean
    DEFAULT_CLIP = (3e-4, 4e-4)


class CispoLoss(ClippedLoss, tag="cispo"):
    DEFAULT_CLIP = (1.0, 0.2)  # no lower bound, as published
    cispo_absolute: bool = False
    """Use eps_high itself, which must be given, as the upper bound, not 1 + eps_high."""


class MovedLoss(Loss):
    dppo_threshold: NonNegative = 0.2
    """Largest distance that a token's probability may move. With divergence kl, 0.05 is common."""
    dppo_high: NonNegative | None = None
    """Largest upward distance. dppo_threshold is then for downward moves only. Absent:
    dppo_threshold."""


class DppoLoss(MovedLoss, tag="dppo"):
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """Distance of a token: tv, |pi - pi_prox|, or kl, the binary KL(pi_prox || pi)."""


class IpoLoss(MovedLoss, tag="ipo"):
    pull: Pull = 0.0


class SapoLoss(Loss, tag="sapo"):
    sapo_tau_pos: PositiveFloat = 1.0
    """Temperature of the gate where the advantage is positive. Larger closes it faster."""
    sapo_tau_neg: PositiveFloat = 1.05
    """Temperature of the gate elsewhere. Larger closes it faster."""
    ratio: Ratio = "token"


class ToprLoss(Loss, tag="topr"):
    pass


class DroLoss(Loss, tag="dro"):
    dro_beta: NonNegative = 0.05
    """Coefficient beta of the log ratio in A - beta log r. Larger keeps the policy closer."""


class KlCovLoss(Loss, tag="kl_cov"):
    cov_share: CovShare = 2e-4
    cov_coefficient: NonNegative = 1.0
    """Weight of |log ratio| on the chosen tokens."""


class ClipCovLoss(ClippedLoss, tag="clip_cov"):
    cov_share: CovShare = 2e-4
    cov_lo: float = 1.0
    """Smallest covariance of tokens to choose from."""
    cov_hi: float = 5.0
    """Largest covariance of tokens to choose from."""


class GpgLoss(Loss, tag="gpg"):
    pass


class SftLoss(Loss, tag="sft"):
    pass


class ReshapeLoss(Loss, tag="reshape"):
    """IS-reshape, whose keys are those of [reshape]."""


class VespoLoss(Loss, tag="vespo"):
    vespo_k_pos: Annotated[float, Meta(ge=1)] = 2.0
    """Exponent k of the weight W^k e^(l (1 - W)) where the advantage is at least 0."""
    vespo_l_pos: NonNegative = 3.0
    """Rate l of that weight where the advantage is at least 0."""
    vespo_k_neg: Annotated[float, Meta(ge=1)] = 3.0
    """Exponent k of that weight where the advantage is negative."""
    vespo_l_neg: NonNegative = 2.0
    """Rate l of that weight where the advantage is negative."""


class OaplLoss(Loss, tag="oapl"):
    oapl_beta: PositiveFloat = 1e-3
    """Coefficient beta of the log ratio: a completion is pulled to a log ratio of A / beta. Larger
    moves the policy less."""


class BandLoss(Loss, tag="band"):
    band_lo: NonNegative = 0.7
    """Smallest ratio to mu that counts. Tokens outside [band_lo, band_hi] get 0."""
    band_hi: PositiveFloat = 6.0
    """Largest ratio to mu that counts."""
    pull: Pull = 0.0


class GepoLoss(Loss, tag="gepo"):
    pass


class BapoLoss(Loss, tag="bapo"):
    bapo_share: Share = 0.4
    """Share of the loss that tokens of positive advantage must have. The clip bounds move until
    they have it."""


class MinproLoss(ClippedLoss, tag="minpro"):
    DEFAULT_CLIP = (0.2, 0.28)


class GmpoLoss(ClippedLoss, tag="gmpo"):
    # in nats of a token's log-ratio
    DEFAULT_CLIP = (0.4, 0.4)


class FunctionLoss(Loss, tag="function"):
    function: str = ""
    """Your own loss: module:function or file.py:function with the arguments of
    `asyncrl.losses.loss` (docs/extending.md). It sets loss.surrogate = function."""


class Reshape(Section):
    """IS-reshape, with loss.surrogate = reshape and correction.proximal = behavior."""

    form: Form = "power"
    """Objective. power: w^gamma A, without a gradient at gamma = 0; box_cox: A (w^gamma - 1) /
    gamma, weighted log-likelihood at gamma = 0."""
    mode: Annotated[Mode, WITH_TOKEN_GAMMA] = "v3.1"
    """Source of gamma. v3.1: per token, as in the report; base: gamma_base for the whole batch;
    constant: `gamma`."""
    gamma: Annotated[Share, read_with("mode", "constant"), WITH_TOKEN_GAMMA] = 1.0
    """Constant gamma. 1: plain ratios."""
    rho_min: Annotated[float, Meta(gt=0, lt=1), read_with("mode", "v3.1", "base")] = 0.3
    """Smallest effective sample size that gamma_base aims at. Higher: lower gamma, less
    variance."""
    tau: Annotated[float, Meta(gt=0), read_with("mode", "v3.1"), WITH_TOKEN_GAMMA] = 1.0
    """Scale of A log w in the gate between gamma_base and gamma_target."""
    temperature: Annotated[NonNegative, read_with("mode", "v3.1"), WITH_TOKEN_GAMMA] = 5.0
    """Temperature T of gamma_target = sigmoid(-T log w)."""
    gamma_min: Annotated[Share, read_with("mode", "v3.1", "base"), WITH_TOKEN_GAMMA] = 0.05
    """Lower bound of gamma, before repair D."""
    weight_max: NonNegative = 0.0
    """Upper bound of w^gamma (the report's clip_threshold: 10). 0: off."""
    clip: NonNegative = 0.0
    """Repair B: no gradient where the ratio of clip_on has left 1 +- clip in the direction of A. 0:
    off."""
    clip_on: Annotated[Literal["w", "w_gamma"], read_with("clip")] = "w"
    """The ratio that `clip` bounds. w_gamma: w^gamma, as the report words it; w itself may then
    leave the interval by 1 / gamma of it."""
    kl_penalty: NonNegative = 0.0
    """Repair C: coefficient of KL(theta, mu) in the loss. 0: off."""
    kl_estimator: Annotated[Estimator, read_with("kl_penalty")] = "k2"
    """Estimator of kl_penalty. With +: the estimator's value and the gradient of k2."""
    budget: Budget = "none"
    """Repair D: lower gamma so that the KL to mu stays in kl_budget. tokens: for tokens that push
    away; global: for the whole batch, whatever the mode, as the report words it, which does not
    bound the KL."""
    kl_budget: Annotated[PositiveFloat, read_with("budget")] = 0.05
    """Budget of repair D, in nats per token."""


class KLReward(Section):
    """KL to the reference subtracted from the reward, before the advantage."""

    coefficient: NonNegative = 0.0
    """Coefficient beta of the KL penalty in the reward. 0: none."""
    estimator: Annotated[Estimator, WITH_COEFFICIENT] = "k1"
    """Estimator of the KL. Use k1: the others are biased, and k3 in the reward is known to
    collapse. A + changes nothing here: the reward has no gradient."""
    reference: Annotated[str, WITH_COEFFICIENT] = ""
    """Directory of the reference policy of this term. Empty: model.reference."""
    at: Annotated[Literal["start", "behavior"], WITH_COEFFICIENT] = "start"
    """Policy whose KL is penalized. start: the learner as the batch begins (one more forward pass
    where the loss needs none); behavior: the recorded policy, whose gradient is biased by staleness
    and mismatch."""
    controller: Annotated[Literal["fixed", "adaptive"], WITH_COEFFICIENT] = "fixed"
    """fixed: a constant coefficient; adaptive: the adaptive KL controller steers the coefficient to
    kl.reward.target."""
    target: Annotated[NonNegative, WITH_COEFFICIENT, read_with("controller", "adaptive")] = 6.0
    """adaptive: KL to hold, in nats per completion (kl/answer)."""
    horizon: Annotated[Positive, WITH_COEFFICIENT, read_with("controller", "adaptive")] = 10000
    """adaptive: samples over which the coefficient adapts. Larger is slower."""


class KLLoss(Section):
    """KL to the reference as a term of the loss."""

    coefficient: NonNegative = 0.0
    """Coefficient beta of the KL penalty in the loss. 0: none."""
    estimator: Annotated[
        Estimator, WITH_COEFFICIENT, read_with("off_policy", "none", "ratio", "prefix")
    ] = "k3"
    """Estimator of the KL. Use k3 or k2; k1 has no expected gradient on policy. With +: the
    estimator's value and the gradient of k2."""
    reference: Annotated[str, WITH_COEFFICIENT] = ""
    """Directory of the reference policy of this term. Empty: model.reference."""
    off_policy: Annotated[OffPolicy, WITH_COEFFICIENT] = "none"
    """Correction of the term on stale samples. none: no correction; ratio: a ratio per token;
    prefix: the exact sequence-level gradient; prefix_full: the same with less variance, by the KL
    over the whole vocabulary."""
    discount: Annotated[Share, WITH_COEFFICIENT, WITH_PREFIX] = 1.0
    """prefix, prefix_full: discount of later terms. 1: exact; 0: token level, with less
    variance."""
    truncate: Annotated[
        float,
        Meta(gt=0),
        WITH_COEFFICIENT,
        WITH_PREFIX,
    ] = float("inf")
    """prefix, prefix_full: upper bound of the prefix weights. inf: exact."""


class KL(Section):
    """Towards a reference policy: in the reward, in the loss, or both at once."""

    preset: Literal["", "grpo", "dr_grpo", "rloo", "distill"] = ""
    """A published setting of the keys that you do not give. grpo: k3 in the loss with 0.04;
    dr_grpo: no KL in the loss; rloo: k1 in the reward with 0.05; distill: the full KL to the
    teacher in model.reference, token by token."""
    reward: KLReward = KLReward()
    loss: KLLoss = KLLoss()


class Stop(Section):
    kl_max: NonNegative = 0.0
    """KL early stopping: how far the updates of one batch may move the policy, in nats per token.
    0: off."""
    against: Annotated[Literal["start", "behavior"], read_with("kl_max")] = "start"
    """start: KL(start || policy), where start is the learner as the batch begins; behavior: KL(mu
    || policy) less what the batch arrived with."""
    action: Annotated[Literal["skip", "slow"], read_with("kl_max")] = "skip"
    """Past kl_max, skip the rest of the batch, or slow: scale each step's learning rate so that it
    fits into kl_max."""
    every: Annotated[Literal["step", "epoch"], read_with("kl_max"), read_with("action", "skip")] = (
        "step"
    )
    """When kl_max is checked. step: before each optimizer step, on its own samples; epoch: before
    each pass over the batch but the first, on the whole batch, at one forward pass over it."""
    ess_min: Share = 0.0
    """Skip the rest of the batch once the effective sample size of pi_theta / mu falls below this;
    the whole batch if it arrives below it. 0: off."""
    lr_by_ess: Literal["off", "sqrt", "linear"] = "off"
    """Multiply each step's learning rate by the effective sample size of its completions' whole
    ratios pi_theta / mu (linear) or its square root (sqrt) (VCPO)."""
    ess_on_policy: Annotated[PositiveShare, read_with("lr_by_ess")] = 1.0
    """lr_by_ess: effective sample size from which the learning rate is not reduced."""


if TYPE_CHECKING:
    AnyAdvantage = Advantage
    AnyCorrection = Correction
    AnyLoss = Loss
else:
    AnyAdvantage = functools.reduce(operator.or_, list_variants(Advantage))
    AnyCorrection = functools.reduce(operator.or_, list_variants(Correction))
    AnyLoss = functools.reduce(operator.or_, list_variants(Loss))


class Settings(Protocol):
    """All sections that the algorithms read: `asyncrl.config.tree.Config` or an equivalent.

    They read on_exceed, limit and half_life of [staleness], max_new_tokens of [generator], and
    epochs, minibatches and distributed of [learner].
    """

    @property
    def seed(self) -> int: ...
    @property
    def staleness(self) -> Any: ...
    @property
    def generator(self) -> Any: ...
    @property
    def learner(self) -> Any: ...
    @property
    def advantage(self) -> Advantage: ...
    @property
    def value(self) -> Value: ...
    @property
    def correction(self) -> Correction: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def reshape(self) -> Reshape: ...
    @property
    def kl(self) -> KL: ...
    @property
    def stop(self) -> Stop: ...


def list_ordered_settings(config: Settings) -> list[str]:
    """Return `key = value` of each setting that needs the token order of a whole sample.

    The training sequences of a session that forked have no such order.
    """
    advantage, kl = config.advantage, config.kl
    gamma = advantage.gamma if isinstance(advantage, ReinforcePpAdvantage) else 1.0
    penalizes = kl.reward.coefficient > 0 and advantage.name == "reinforce_pp"
    has_prefix = kl.loss.coefficient > 0 and kl.loss.off_policy in ("prefix", "prefix_full")
    settings = {
        "advantage.name = gae": advantage.name == "gae",
        f"advantage.gamma = {gamma:g}": gamma < 1,
        f"kl.reward.coefficient = {kl.reward.coefficient:g} with reinforce_pp": penalizes,
        "advantage.name = otb": advantage.name == "otb",
        "loss.surrogate = minpro": config.loss.surrogate == "minpro",
        f"kl.loss.off_policy = {kl.loss.off_policy}": has_prefix,
    }
    return [setting for setting, needs_order in settings.items() if needs_order]
