"""Config sections that the algorithms read: frozen structs. Imports no torch.

The config is built of them (`asyncrl.config.tree`), and a caller without a config builds them
itself. Each advantage, surrogate and correction has its own struct with the keys that it reads. To
add one, write its struct here and its function, and add a line to the dict that maps its tag to it.
A key that acts only under one value of another key declares that with `read_with`; giving it
elsewhere is an error, which `asyncrl.config.layers` derives from here.

A key that names a function takes its choices from the dict that holds the functions, so the config,
its schema and its error messages need no second list.
"""

from __future__ import annotations

import ast
import functools
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


@functools.cache
def _read_tables(module: str) -> dict[str, tuple[str, ...]]:
    """Return every dict with text keys and every tuple of texts at the module's top level."""
    tables = {}
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        name = node.targets[0] if isinstance(node, ast.Assign) else node.target
        words: list[ast.expr | None] = []
        if isinstance(node.value, ast.Dict):
            words = [*node.value.keys]
        elif isinstance(node.value, ast.Tuple):
            words = [*node.value.elts]
        constants = [word.value for word in words if isinstance(word, ast.Constant)]
        texts = tuple(text for text in constants if isinstance(text, str))
        if isinstance(name, ast.Name) and words and len(texts) == len(words):
            tables[name.id] = texts
    return tables


def read_names(module: str, table: str) -> tuple[str, ...]:
    """Return the keys of the dict `table` (or the words of a tuple) in MODULE.py of this folder.

    They are read from its source: importing it would import torch, which a config must not. Raises
    KeyError for an unknown table.
    """
    return _read_tables(module)[table]


if TYPE_CHECKING:  # a type checker has no names to read
    Baseline = str
    Scale = str
    Level = str
    Bound = str
    Reject = str
    Over = str
    Veto = str
    Reduction = str
    Mode = str
    Form = str
    Budget = str
    Estimator = str
    OffPolicy = str
else:
    Baseline = Literal[read_names("advantages", "BASELINES")]
    Scale = Literal[read_names("batch", "SCALES")]
    Level = Literal[read_names("correction", "LEVELS")]
    Bound = Literal[read_names("correction", "BOUNDS")]
    Reject = Literal[read_names("correction", "STATISTICS")]
    Over = Literal[read_names("correction", "OVER")]
    Veto = Literal[read_names("correction", "VETO")]
    Reduction = Literal[read_names("reductions", "REDUCTIONS")]
    Mode = Literal[read_names("reshape", "MODES")]
    Budget = Literal[read_names("reshape", "BUDGETS")]
    Form = Literal[read_names("surrogates", "FORMS")]
    _KL = read_names("kl", "ESTIMATORS")
    Estimator = Literal[_KL + tuple(f"{name}+" for name in _KL)]
    OffPolicy = Literal[read_names("kl", "OFF_POLICY")]
# surrogates whose ratio is pi_theta / mu as published
ON_BEHAVIOR = read_names("surrogates", "ON_BEHAVIOR")
# statistics of rejection that are never negative
NOT_NEGATIVE = read_names("correction", "NOT_NEGATIVE")
# advantages that compare the samples of one prompt
BY_GROUP = read_names("advantages", "BY_GROUP")


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


def build_variant(kind: Any, tag: str, **keys: Any) -> Any:
    """Build the struct below `kind` with this tag.

    For example `build_variant(Loss, "dppo", dppo_threshold=0.1)`. Raises KeyError for an unknown
    tag.
    """
    return {subclass.__struct_config__.tag: subclass for subclass in list_variants(kind)}[tag](
        **keys
    )


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


class Advantage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name"
):
    """Keys that every advantage reads.

    Each advantage has its own struct below, tagged by `advantage.name`, with its own keys.
    """

    rewards: Annotated[
        Scale,
        Meta(
            description="Scaling of the rewards before the advantage. raw: as they are; unit: "
            "to [0, 1] over the batch; whiten: to mean 0 and standard deviation 1 over the batch."
        ),
    ] = "raw"
    truncated: Annotated[
        Literal["keep", "penalty", "fixed", "zero", "mask", "soft"],
        Meta(
            description="Treatment of completions cut at max_new_tokens. keep: as any other; "
            "penalty: subtract truncation_penalty from their reward; fixed: replace their reward "
            "by minus truncation_penalty; zero: their reward is 0; mask: exclude them from the "
            "loss; soft: a penalty that rises linearly before the limit."
        ),
    ] = "keep"
    truncation_penalty: Annotated[
        NonNegative,
        Meta(
            description="Penalty of truncated = penalty, fixed and soft, in units of the "
            "reward. It must be above 0 there."
        ),
        read_with("truncated", "penalty", "fixed", "soft"),
    ] = 0.0
    truncation_ramp: Annotated[
        Positive,
        Meta(description="soft: tokens before max_new_tokens at which the penalty begins."),
        read_with("truncated", "soft"),
    ] = 16
    no_spread: Annotated[
        Literal["keep", "filter"],
        Meta(
            description="Treatment of groups whose rewards are all equal, which have no "
            "gradient. keep: train on them; filter: replace them by other prompts (dynamic "
            "sampling)."
        ),
    ] = "keep"

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)


class AnswerAdvantage(Advantage, frozen=True, kw_only=True):
    """An advantage with one number per sample."""

    whiten: Annotated[
        bool,
        Meta(description="Scale the advantages to mean 0 and standard deviation 1 over the batch."),
    ] = False


class ReinforceAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="reinforce"):
    baseline: Annotated[
        Baseline,
        Meta(
            description="Baseline, of the rewards after truncation, scaling and KL. batch: "
            "their mean; ema: a running mean over batches; prompt: a running mean for each "
            "prompt; none: 0."
        ),
    ] = "batch"
    ema_decay: Annotated[
        Share,
        Meta(
            description="Share of the running mean that each update keeps. Closer to 1: "
            "smoother and slower."
        ),
        read_with("baseline", "ema", "prompt"),
    ] = 0.9


class RlooAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="rloo"):
    pass


class GrpoAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="grpo"):
    ddof: Ddof = 1
    std: Annotated[
        Literal["group", "batch"],
        Meta(
            description="Rewards whose standard deviation divides: those of the group or of "
            "the whole batch, one per completion."
        ),
    ] = "group"
    eps: Eps = 1e-4


class DrGrpoAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="dr_grpo"):
    pass


class OpoAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="opo"):
    pass


class GpgAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="gpg"):
    pass


class RemaxAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="remax"):
    """Samples the first sample of each group greedily, as a baseline that is not trained on."""


class OaplAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="oapl"):
    beta: Annotated[
        NonNegative,
        Meta(
            description="Temperature of a group's value: 0 gives the largest reward, inf the mean."
        ),
    ] = 0.5


class AsymreAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="asymre"):
    shift: Annotated[
        float,
        Meta(
            description="Added to the group's mean to form the baseline. Below 0 it raises "
            "every advantage."
        ),
    ] = -0.1


class OpobAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="opob"):
    pass


class MaxrlAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="maxrl"):
    pass


class PassAtKAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="pass_at_k"):
    k: Annotated[
        Count, Meta(description="Completions of which the best one counts. 0: the whole group.")
    ] = 0


class GdpoAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="gdpo"):
    part_weights: Annotated[
        dict[str, float],
        Meta(description="Weights of the reward's named parts. A part without a weight counts 1."),
    ] = {}
    ddof: Ddof = 1
    eps: Eps = 1e-4


class ReinforcePpAdvantage(Advantage, frozen=True, kw_only=True, tag="reinforce_pp"):
    gamma: Annotated[Share, Meta(description="Discount per token. 1: none.")] = 1.0
    group_baseline: Annotated[bool, Meta(description="Subtract the group's mean reward first.")] = (
        False
    )


class GaeAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="gae"):
    """Trains a value head ([value])."""

    gamma: Annotated[Share, Meta(description="Discount per token. 1: none.")] = 1.0
    lam: Annotated[
        Share,
        Meta(
            description="Lambda of GAE. 1: return minus value, unbiased; 0: the one-step "
            "residual, least variance."
        ),
    ] = 0.95
    k_step: Annotated[
        Count, Meta(description="Cut the sum of residuals after this many tokens. 0: never.")
    ] = 0


class OtbAdvantage(Advantage, frozen=True, kw_only=True, tag="otb"):
    pass


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The value head, with advantage.name = gae."""

    trunk: Annotated[
        Literal["own", "shared"],
        Meta(
            description="own: a second model; shared: a head on the policy's last hidden "
            "states, which costs no second model."
        ),
    ] = "own"
    init: Annotated[
        Literal["policy", "reward_model", "zeros", "random"],
        Meta(
            description="policy: the trunk of the policy or of the model at `path`, and a "
            "small random head; reward_model: trunk and head at `path`; zeros: a head that "
            "predicts 0 at first; random: a new trunk."
        ),
    ] = "policy"
    path: Annotated[
        str,
        Meta(
            description="Hugging Face directory whose model is the trunk. With init = "
            "reward_model it must have a sequence-classification head with one label. Empty: the "
            "policy."
        ),
        read_with("trunk", "own"),
    ] = ""
    coefficient: Annotated[NonNegative, Meta(description="Coefficient c_v of the value loss.")] = (
        0.1
    )
    clip: Annotated[
        NonNegative,
        Meta(
            description="Clipped value loss: a value may leave its value at the start of the "
            "batch by at most this. 0: off."
        ),
    ] = 0.0
    lr: Annotated[
        NonNegative,
        Meta(description="Learning rate of the value head and its trunk. 0: learner.lr."),
    ] = 0.0


class Correction(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="proximal"
):
    """Keys that every proximal policy reads: the policy that ratios and clips are taken against.

    Each has its own struct below, tagged by `correction.proximal`.
    """

    preset: Annotated[
        Literal["", "none", "tis", "seq_tis", "icepop", "mis", "mis_normalized"],
        Meta(
            description="A published correction: it sets the keys of this section that you do "
            "not give."
        ),
    ] = ""
    reject: Annotated[
        Reject,
        Meta(
            description="Exclude what leaves [reject_lo, reject_hi] in this statistic of "
            "pi_prox / mu. ratio: the ratio; k1, k2, k3: estimates of KL(mu || pi); chi2: rho^2 "
            "- 1; tv: |pi - mu|; kb: the larger binary KL of the two directions; kb_mu: the one "
            "from mu."
        ),
    ] = "none"
    reject_over: Annotated[
        Over,
        Meta(
            description="token: exclude tokens by their own value; sum, mean, max: exclude "
            "whole completions by that of their tokens' values."
        ),
        read_with("reject"),
    ] = "token"
    reject_lo: Annotated[
        float | None,
        Meta(
            description="Lower bound of `reject`. Absent: 0.5 for ratio (mean: 0.99), "
            "otherwise none."
        ),
        read_with("reject"),
    ] = None
    reject_hi: Annotated[
        float | None,
        Meta(
            description="Upper bound of `reject`. Absent: 2 for ratio (mean: 1.01); the other "
            "statistics need one."
        ),
        read_with("reject"),
    ] = None
    reject_when: Annotated[
        Literal["always", "negative"],
        Meta(description="negative: exclude only where the advantage is below 0."),
        read_with("reject"),
    ] = "always"
    reject_at: Annotated[
        Literal["proximal", "target"],
        Meta(
            description="proximal: judge pi_prox / mu once per batch; target: judge pi_theta / "
            "mu before each optimizer step, whatever the proximal policy."
        ),
        read_with("reject"),
    ] = "proximal"
    reject2: Annotated[
        Reject,
        Meta(description="A second statistic. What leaves either interval is excluded."),
        read_with("reject"),
    ] = "none"
    reject2_over: Annotated[
        Over, Meta(description="As reject_over, for reject2."), read_with("reject2")
    ] = "token"
    reject2_lo: Annotated[
        float | None, Meta(description="As reject_lo, for reject2."), read_with("reject2")
    ] = None
    reject2_hi: Annotated[
        float | None, Meta(description="As reject_hi, for reject2."), read_with("reject2")
    ] = None
    veto: Annotated[
        Veto,
        Meta(
            description="Exclude completions with a token whose pi_prox (probability, 1e-6) or "
            "pi_prox / mu (ratio, 1e-4) is below the threshold."
        ),
    ] = "none"
    veto_below: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Threshold of `veto`. Absent: its default."),
        read_with("veto"),
    ] = None
    m2: Annotated[
        NonNegative,
        Meta(
            description="M2PO, as published: of the tokens that have moved in the direction of "
            "their advantage, exclude those with the largest log pi_theta / mu until the mean "
            "square of the others is at most this, at each optimizer step. 0: off."
        ),
    ] = 0.0
    denominator: Annotated[
        Literal["before", "after"],
        Meta(
            description="Count the loss's tokens before or after rejection. after: rejection "
            "does not shrink the gradient."
        ),
    ] = "before"

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


class BehaviorCorrection(Correction, frozen=True, kw_only=True, tag="behavior"):
    """The policy that sampled the tokens: the surrogate's own clip bounds the update."""


class WeightedCorrection(Correction, frozen=True, kw_only=True):
    """Weights of pi_prox / mu, never differentiated."""

    level: Annotated[
        Level,
        Meta(
            description="Importance weights pi_prox / mu per token, per completion (sequence: "
            "product; geometric: geometric mean), or none."
        ),
    ] = "token"
    bound: Annotated[
        Bound,
        Meta(
            description="Bound on the weights. truncate: at most hi; clip: into [lo, hi]; "
            "mask: 0 outside [lo, hi]."
        ),
        read_with("level"),
    ] = "truncate"
    lo: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Lower bound of a weight. Absent: 0.5 (geometric: 0.99)."),
        read_with("level"),
        read_with("bound", "clip", "mask"),
    ] = None
    hi: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Upper bound of a weight. Absent: 2 (geometric: 1.01)."),
        read_with("level"),
        read_with("bound", "truncate", "clip", "mask"),
    ] = None
    self_normalize: Annotated[
        bool,
        Meta(
            description="Divide the weights by their mean over the batch, after the bound. It "
            "keeps the effective learning rate constant."
        ),
        read_with("level"),
    ] = False
    function: Annotated[
        str,
        Meta(
            description="Your own weights: module:function of (log_rho, mask, seq, n, "
            "correction), which returns [N]."
        ),
    ] = ""


class RecomputedCorrection(WeightedCorrection, frozen=True, kw_only=True, tag="recompute"):
    """The learner's policy at the start of the batch (decoupled PPO)."""


class InterpolatedCorrection(WeightedCorrection, frozen=True, kw_only=True, tag="interpolate"):
    """Between the two, nearer to the learner's policy the older a token is."""


class Loss(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="surrogate"
):
    """Keys that every surrogate reads.

    Each surrogate has its own struct below, tagged by `loss.surrogate`, with its own keys.
    """

    coefficient: Annotated[
        NonNegative,
        Meta(
            description="Coefficient of the surrogate, which carries the reward. 0: only "
            "kl.loss and entropy are left, as in distillation."
        ),
    ] = 1.0
    reduction: Annotated[
        Reduction,
        Meta(
            description="Mean over the batch. token-mean: over all tokens; "
            "seq-mean-token-mean: each completion's mean; seq-mean-token-sum: each completion's "
            "sum; seq-mean-token-sum-norm: that sum divided by norm_length."
        ),
    ] = "token-mean"
    norm_length: Annotated[
        Count,
        Meta(
            description="Constant length of seq-mean-token-sum-norm, in tokens. 0: max_new_tokens."
        ),
        read_with("reduction", "seq-mean-token-sum-norm"),
    ] = 0
    entropy: Annotated[
        float,
        Meta(
            description="Coefficient c_h of the entropy bonus. Above 0 it keeps the policy "
            "from collapsing."
        ),
    ] = 0.0

    @property
    def surrogate(self) -> str:
        return str(self.__struct_config__.tag)


class ClippedLoss(Loss, frozen=True, kw_only=True):
    eps_low: Annotated[
        NonNegative | None,
        Meta(
            description="Clip below 1 - eps_low. Absent: the surrogate's default (0.2; gspo "
            "3e-4; gmpo 0.4 nats)."
        ),
    ] = None
    eps_high: Annotated[
        NonNegative | None,
        Meta(
            description="Clip above 1 + eps_high. Absent: the surrogate's default (0.2; gspo "
            "4e-4; gmpo 0.4 nats; minpro 0.28)."
        ),
    ] = None


Ratio = Annotated[
    Literal["token", "sequence", "geometric"],
    Meta(
        description="Ratio of each token, or of its whole completion (sequence: product; "
        "geometric: geometric mean)."
    ),
]


class PpoFamilyLoss(ClippedLoss, frozen=True, kw_only=True):
    dual_clip: Annotated[
        float,
        Meta(
            ge=0,
            description="Dual clip: the bound c above 1 on the ratio where the advantage is "
            "negative. 0: off.",
        ),
    ] = 0.0
    ratio: Ratio = "token"


class PpoLoss(PpoFamilyLoss, frozen=True, kw_only=True, tag="ppo"):
    pass


class DecoupledPpoLoss(PpoFamilyLoss, frozen=True, kw_only=True, tag="decoupled_ppo"):
    pass


class VanillaLoss(Loss, frozen=True, kw_only=True, tag="vanilla"):
    pass


class ReinforceLoss(Loss, frozen=True, kw_only=True, tag="reinforce"):
    pass


class GspoLoss(ClippedLoss, frozen=True, kw_only=True, tag="gspo"):
    pass


class CispoLoss(ClippedLoss, frozen=True, kw_only=True, tag="cispo"):
    cispo_absolute: Annotated[
        bool,
        Meta(
            description="Use eps_high itself, which must be given, as the upper bound, not 1 + "
            "eps_high."
        ),
    ] = False


class MovedLoss(Loss, frozen=True, kw_only=True):
    dppo_threshold: Annotated[
        NonNegative,
        Meta(
            description="Largest distance that a token's probability may move. With divergence "
            "kl, 0.05 is common."
        ),
    ] = 0.2
    dppo_high: Annotated[
        NonNegative | None,
        Meta(
            description="Largest upward distance. dppo_threshold is then for downward moves "
            "only. Absent: dppo_threshold."
        ),
    ] = None


class DppoLoss(MovedLoss, frozen=True, kw_only=True, tag="dppo"):
    dppo_divergence: Annotated[
        Literal["tv", "kl"],
        Meta(
            description="Distance of a token: tv, |pi - pi_prox|, or kl, the binary KL(pi_prox "
            "|| pi)."
        ),
    ] = "tv"


class IpoLoss(MovedLoss, frozen=True, kw_only=True, tag="ipo"):
    pull: Pull = 0.0


class SapoLoss(Loss, frozen=True, kw_only=True, tag="sapo"):
    sapo_tau_pos: Annotated[
        float,
        Meta(
            gt=0,
            description="Temperature of the gate where the advantage is positive. Larger "
            "closes it faster.",
        ),
    ] = 1.0
    sapo_tau_neg: Annotated[
        float, Meta(gt=0, description="Temperature of the gate elsewhere. Larger closes it faster.")
    ] = 1.05
    ratio: Ratio = "token"


class ToprLoss(Loss, frozen=True, kw_only=True, tag="topr"):
    pass


class DroLoss(Loss, frozen=True, kw_only=True, tag="dro"):
    dro_beta: Annotated[
        NonNegative,
        Meta(
            description="Coefficient beta of the log ratio in A - beta log r. Larger keeps the "
            "policy closer."
        ),
    ] = 0.05


class KlCovLoss(Loss, frozen=True, kw_only=True, tag="kl_cov"):
    cov_share: CovShare = 2e-4
    cov_coefficient: Annotated[
        NonNegative, Meta(description="Weight of |log ratio| on the chosen tokens.")
    ] = 1.0


class ClipCovLoss(ClippedLoss, frozen=True, kw_only=True, tag="clip_cov"):
    cov_share: CovShare = 2e-4
    cov_lo: Annotated[float, Meta(description="Smallest covariance of tokens to choose from.")] = (
        1.0
    )
    cov_hi: Annotated[float, Meta(description="Largest covariance of tokens to choose from.")] = 5.0


class GpgLoss(Loss, frozen=True, kw_only=True, tag="gpg"):
    pass


class SftLoss(Loss, frozen=True, kw_only=True, tag="sft"):
    pass


class ReshapeLoss(Loss, frozen=True, kw_only=True, tag="reshape"):
    """IS-reshape, whose keys are those of [reshape]."""


class VespoLoss(Loss, frozen=True, kw_only=True, tag="vespo"):
    vespo_k_pos: Annotated[
        float,
        Meta(
            ge=1,
            description="Exponent k of the weight W^k e^(l (1 - W)) where the advantage is at "
            "least 0.",
        ),
    ] = 2.0
    vespo_l_pos: Annotated[
        NonNegative, Meta(description="Rate l of that weight where the advantage is at least 0.")
    ] = 3.0
    vespo_k_neg: Annotated[
        float, Meta(ge=1, description="Exponent k of that weight where the advantage is negative.")
    ] = 3.0
    vespo_l_neg: Annotated[
        NonNegative, Meta(description="Rate l of that weight where the advantage is negative.")
    ] = 2.0


class OaplLoss(Loss, frozen=True, kw_only=True, tag="oapl"):
    oapl_beta: Annotated[
        float,
        Meta(
            gt=0,
            description="Coefficient beta of the log ratio: a completion is pulled to a log "
            "ratio of A / beta. Larger moves the policy less.",
        ),
    ] = 1e-3


class BandLoss(Loss, frozen=True, kw_only=True, tag="band"):
    band_lo: Annotated[
        NonNegative,
        Meta(
            description="Smallest ratio to mu that counts. Tokens outside [band_lo, band_hi] get 0."
        ),
    ] = 0.7
    band_hi: Annotated[float, Meta(gt=0, description="Largest ratio to mu that counts.")] = 6.0
    pull: Pull = 0.0


class GepoLoss(Loss, frozen=True, kw_only=True, tag="gepo"):
    pass


class BapoLoss(Loss, frozen=True, kw_only=True, tag="bapo"):
    bapo_share: Annotated[
        Share,
        Meta(
            description="Share of the loss that tokens of positive advantage must have. The "
            "clip bounds move until they have it."
        ),
    ] = 0.4


class MinproLoss(ClippedLoss, frozen=True, kw_only=True, tag="minpro"):
    pass


class GmpoLoss(ClippedLoss, frozen=True, kw_only=True, tag="gmpo"):
    pass


class Reshape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """IS-reshape, with loss.surrogate = reshape and correction.proximal = behavior."""

    form: Annotated[
        Form,
        Meta(
            description="Objective. power: w^gamma A, without a gradient at gamma = 0; "
            "box_cox: A (w^gamma - 1) / gamma, weighted log-likelihood at gamma = 0."
        ),
    ] = "power"
    mode: Annotated[
        Mode,
        Meta(
            description="Source of gamma. v3.1: per token, as in the report; base: gamma_base "
            "for the whole batch; constant: `gamma`."
        ),
    ] = "v3.1"
    gamma: Annotated[
        Share, Meta(description="Constant gamma. 1: plain ratios."), read_with("mode", "constant")
    ] = 1.0
    rho_min: Annotated[
        float,
        Meta(
            gt=0,
            lt=1,
            description="Smallest effective sample size that gamma_base aims at. Higher: lower "
            "gamma, less variance.",
        ),
    ] = 0.3
    tau: Annotated[
        float,
        Meta(gt=0, description="Scale of A log w in the gate between gamma_base and gamma_target."),
        read_with("mode", "v3.1"),
    ] = 1.0
    temperature: Annotated[
        NonNegative,
        Meta(description="Temperature T of gamma_target = sigmoid(-T log w)."),
        read_with("mode", "v3.1"),
    ] = 5.0
    gamma_min: Annotated[
        Share,
        Meta(description="Lower bound of gamma, before repair D."),
        read_with("mode", "v3.1", "base"),
    ] = 0.05
    weight_max: Annotated[
        NonNegative,
        Meta(description="Upper bound of w^gamma (the report's clip_threshold: 10). 0: off."),
    ] = 0.0
    clip: Annotated[
        NonNegative,
        Meta(
            description="Repair B: no gradient where the ratio of clip_on has left 1 +- clip in "
            "the direction of A. 0: off."
        ),
    ] = 0.0
    clip_on: Annotated[
        Literal["w", "w_gamma"],
        Meta(
            description="The ratio that `clip` bounds. w_gamma: w^gamma, as the report words it; "
            "w itself may then leave the interval by 1 / gamma of it."
        ),
        read_with("clip"),
    ] = "w"
    kl_penalty: Annotated[
        NonNegative, Meta(description="Repair C: coefficient of KL(theta, mu) in the loss. 0: off.")
    ] = 0.0
    kl_estimator: Annotated[
        Estimator,
        Meta(
            description="Estimator of kl_penalty. With +: the estimator's value and the "
            "gradient of k2."
        ),
        read_with("kl_penalty"),
    ] = "k2"
    budget: Annotated[
        Budget,
        Meta(
            description="Repair D: lower gamma so that the KL to mu stays in kl_budget. "
            "tokens: for tokens that push away; global: for the whole batch."
        ),
    ] = "none"
    kl_budget: Annotated[
        float, Meta(gt=0, description="Budget of repair D, in nats per token."), read_with("budget")
    ] = 0.05


class KLReward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KL to the reference subtracted from the reward, before the advantage."""

    coefficient: Annotated[
        NonNegative, Meta(description="Coefficient beta of the KL penalty in the reward. 0: none.")
    ] = 0.0
    estimator: Annotated[
        Estimator,
        Meta(
            description="Estimator of the KL. Use k1; k3 in the reward is known to collapse. "
            "With +: the estimator's value and the gradient of k2."
        ),
        read_with("coefficient"),
    ] = "k1"
    reference: Annotated[
        str,
        Meta(description="Directory of the reference policy of this term. Empty: model.reference."),
        read_with("coefficient"),
    ] = ""
    at: Annotated[
        Literal["start", "behavior"],
        Meta(
            description="Policy whose KL is penalized. start: the learner as the batch begins "
            "(one more forward pass where the loss needs none); behavior: the recorded policy, "
            "whose gradient is biased by staleness and mismatch."
        ),
        read_with("coefficient"),
    ] = "start"
    controller: Annotated[
        Literal["fixed", "adaptive"],
        Meta(
            description="fixed: a constant coefficient; adaptive: the adaptive KL controller "
            "steers the coefficient to kl.reward.target."
        ),
        read_with("coefficient"),
    ] = "fixed"
    target: Annotated[
        NonNegative,
        Meta(description="adaptive: KL to hold, in nats per completion (kl/answer)."),
        read_with("coefficient"),
        read_with("controller", "adaptive"),
    ] = 6.0
    horizon: Annotated[
        Positive,
        Meta(description="adaptive: samples over which the coefficient adapts. Larger is slower."),
        read_with("coefficient"),
        read_with("controller", "adaptive"),
    ] = 10000


class KLLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KL to the reference as a term of the loss."""

    coefficient: Annotated[
        NonNegative, Meta(description="Coefficient beta of the KL penalty in the loss. 0: none.")
    ] = 0.0
    estimator: Annotated[
        Estimator,
        Meta(
            description="Estimator of the KL. Use k3 or k2; k1 has no expected gradient on "
            "policy. With +: the estimator's value and the gradient of k2."
        ),
        read_with("coefficient"),
        read_with("off_policy", "none", "ratio", "prefix"),
    ] = "k3"
    reference: Annotated[
        str,
        Meta(description="Directory of the reference policy of this term. Empty: model.reference."),
        read_with("coefficient"),
    ] = ""
    off_policy: Annotated[
        OffPolicy,
        Meta(
            description="Correction of the term on stale samples. none: no correction; ratio: "
            "a ratio per token; prefix: the exact sequence-level gradient; prefix_full: the same "
            "with less variance, by the KL over the whole vocabulary."
        ),
        read_with("coefficient"),
    ] = "none"
    discount: Annotated[
        Share,
        Meta(
            description="prefix, prefix_full: discount of later terms. 1: exact; 0: token "
            "level, with less variance."
        ),
        read_with("coefficient"),
        read_with("off_policy", "prefix", "prefix_full"),
    ] = 1.0
    truncate: Annotated[
        float,
        Meta(
            gt=0, description="prefix, prefix_full: upper bound of the prefix weights. inf: exact."
        ),
        read_with("coefficient"),
        read_with("off_policy", "prefix", "prefix_full"),
    ] = float("inf")


class KL(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Towards a reference policy: in the reward, in the loss, or both at once."""

    preset: Annotated[
        Literal["", "grpo", "dr_grpo", "rloo", "distill"],
        Meta(
            description="A published setting of the keys that you do not give. grpo: k3 in the "
            "loss with 0.04; dr_grpo: no KL in the loss; rloo: k1 in the reward with 0.05; "
            "distill: the full KL to the teacher in model.reference, token by token."
        ),
    ] = ""
    reward: KLReward = KLReward()
    loss: KLLoss = KLLoss()


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kl_max: Annotated[
        NonNegative,
        Meta(
            description="KL early stopping: how far the updates of one batch may move the "
            "policy, in nats per token. 0: off."
        ),
    ] = 0.0
    against: Annotated[
        Literal["start", "behavior"],
        Meta(
            description="start: KL(start || policy), where start is the learner as the batch "
            "begins; behavior: KL(mu || policy) less what the batch arrived with."
        ),
        read_with("kl_max"),
    ] = "start"
    action: Annotated[
        Literal["skip", "slow"],
        Meta(
            description="Past kl_max, skip the rest of the batch, or slow: scale each step's "
            "learning rate so that it fits into kl_max."
        ),
        read_with("kl_max"),
    ] = "skip"
    every: Annotated[
        Literal["step", "epoch"],
        Meta(
            description="When kl_max is checked. step: before each optimizer step, on its own "
            "samples; epoch: before each pass over the batch but the first, on the whole batch, "
            "at one forward pass over it."
        ),
        read_with("kl_max"),
        read_with("action", "skip"),
    ] = "step"
    ess_min: Annotated[
        Share,
        Meta(
            description="Skip the rest of the batch once the effective sample size of pi_theta "
            "/ mu falls below this; the whole batch if it arrives below it. 0: off."
        ),
    ] = 0.0
    lr_by_ess: Annotated[
        Literal["off", "sqrt", "linear"],
        Meta(
            description="Multiply each step's learning rate by the effective sample size of "
            "its completions' whole ratios pi_theta / mu (linear) or its square root (sqrt) "
            "(VCPO)."
        ),
    ] = "off"
    ess_on_policy: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="lr_by_ess: effective sample size from which the learning rate is not "
            "reduced.",
        ),
        read_with("lr_by_ess"),
    ] = 1.0


if TYPE_CHECKING:
    AnyAdvantage = Advantage
    AnyCorrection = Correction
    AnyLoss = Loss
else:
    AnyAdvantage = functools.reduce(operator.or_, list_variants(Advantage))
    AnyCorrection = functools.reduce(operator.or_, list_variants(Correction))
    AnyLoss = functools.reduce(operator.or_, list_variants(Loss))


class StalenessKeys(Protocol):
    """Keys read from [staleness]."""

    @property
    def on_exceed(self) -> str: ...
    @property
    def limit(self) -> float: ...
    @property
    def half_life(self) -> float: ...


class GeneratorKeys(Protocol):
    """Keys read from [generator]."""

    @property
    def max_new_tokens(self) -> int: ...


class LearnerKeys(Protocol):
    """Keys read from [learner]."""

    @property
    def epochs(self) -> int: ...
    @property
    def minibatches(self) -> int: ...
    @property
    def backend(self) -> str: ...


class Settings(Protocol):
    """All sections that the algorithms read: `asyncrl.config.tree.Config` or an equivalent."""

    @property
    def seed(self) -> int: ...
    @property
    def staleness(self) -> StalenessKeys: ...
    @property
    def generator(self) -> GeneratorKeys: ...
    @property
    def learner(self) -> LearnerKeys: ...
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
    settings = []
    advantage = config.advantage
    if advantage.name == "gae":
        settings.append("advantage.name = gae")
    if isinstance(advantage, ReinforcePpAdvantage) and advantage.gamma < 1:
        settings.append(f"advantage.gamma = {advantage.gamma:g}")
    if advantage.name == "reinforce_pp" and config.kl.reward.coefficient > 0:
        settings.append(
            f"kl.reward.coefficient = {config.kl.reward.coefficient:g} with reinforce_pp"
        )
    if advantage.name == "otb":
        settings.append("advantage.name = otb")
    if config.loss.surrogate == "minpro":
        settings.append("loss.surrogate = minpro")
    if config.kl.loss.coefficient > 0 and config.kl.loss.off_policy in ("prefix", "prefix_full"):
        settings.append(f"kl.loss.off_policy = {config.kl.loss.off_policy}")
    return settings
