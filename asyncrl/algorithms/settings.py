"""What the mathematics reads of a config: frozen structs, one a section.  Imports no torch.

The config is built of them (`asyncrl.config.tree`); a caller without a config makes them itself.
Each advantage, surrogate and correction is a struct of its own, with the keys that it reads: one
more is a struct here, a function and its line in the dict that has it by its tag.  A key that acts
under one value of another key alone says so with `read_with`; every other place that a key is
given in is an error, which `asyncrl.config.layers` derives from here.

A key that names a function takes the names of the dict that holds it: the choices of the config, of
its schema and of its error messages, without a second list."""

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
def _tables(module: str) -> dict[str, tuple[str, ...]]:
    """Every dict with text for keys, and every tuple of texts, that the module assigns at its top
    level."""
    found = {}
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
            found[name.id] = texts
    return found


def names(module: str, table: str) -> tuple[str, ...]:
    """The keys of the dict `table` (or the words of a tuple) in MODULE.py of this folder.

    Read from its source: importing it would import torch, which a config must not.  Raises KeyError
    where there is no such table."""
    return _tables(module)[table]


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
    Baseline = Literal[names("advantages", "BASELINES")]
    Scale = Literal[names("batch", "SCALES")]
    Level = Literal[names("correction", "LEVELS")]
    Bound = Literal[names("correction", "BOUNDS")]
    Reject = Literal[names("correction", "STATISTICS")]
    Over = Literal[names("correction", "OVER")]
    Veto = Literal[names("correction", "VETO")]
    Reduction = Literal[names("reductions", "REDUCTIONS")]
    Mode = Literal[names("reshape", "MODES")]
    Budget = Literal[names("reshape", "BUDGETS")]
    Form = Literal[names("surrogates", "FORMS")]
    _KL = names("kl", "ESTIMATORS")
    Estimator = Literal[_KL + tuple(f"{name}+" for name in _KL)]
    OffPolicy = Literal[names("kl", "OFF_POLICY")]
# surrogates whose ratio is pi_theta / mu as published
ON_BEHAVIOR = names("surrogates", "ON_BEHAVIOR")
# statistics of rejection that are never negative
NOT_NEGATIVE = names("correction", "NOT_NEGATIVE")
# advantages that compare the samples of one prompt
BY_GROUP = names("advantages", "BY_GROUP")


def read_with(key: str, *values: str) -> Meta:
    """The annotation of a key that is read only while `key` has one of `values`, or, without
    values, only while it is on: neither absent, 0, empty, false, "none" nor "off".

    key: of the same section, or with dots from the root of the config."""
    return Meta(extra={"read_with": (key, values)})


def variants(kind: Any) -> tuple[Any, ...]:
    """The tagged structs below `kind`, in the order of their definition."""
    found = []
    for below in kind.__subclasses__():
        if isinstance(below.__struct_config__.tag, str) and not below.__subclasses__():
            found.append(below)
        found += variants(below)
    return tuple(found)


def variant(kind: Any, tag: str, **keys: Any) -> Any:
    """The struct below `kind` that has this tag, made of `keys`: `variant(Loss, "dppo",
    dppo_threshold=0.1)`.  Raises KeyError for a tag that there is not."""
    return {below.__struct_config__.tag: below for below in variants(kind)}[tag](**keys)


Ddof = Annotated[Literal[0, 1], Meta(description="1: the unbiased standard deviation")]
Eps = Annotated[
    NonNegative,
    Meta(description="added to the standard deviation; groups of equal rewards get 0 with any"),
]
Pull = Annotated[NonNegative, Meta(description="tau of -tau (log ratio)^2, to mu; 0: none")]
CovShare = Annotated[Share, Meta(description="share of the tokens that are held back")]


class Advantage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name"
):
    """What every advantage reads.  Each has its own struct below, tagged by `advantage.name`, with
    the keys that it alone reads."""

    rewards: Annotated[
        Scale,
        Meta(description="scaled to [0, 1] or whitened over the batch"),
    ] = "raw"
    truncated: Annotated[
        Literal["keep", "penalty", "fixed", "zero", "mask", "soft"],
        Meta(
            description="answers cut at max_new_tokens: penalty: their reward less "
            "truncation_penalty; fixed: minus truncation_penalty in place of "
            "their reward; zero: only answers that end get a reward, others 0; mask: out of the "
            "loss; soft: a linear ramp of the penalty before the limit"
        ),
    ] = "keep"
    truncation_penalty: Annotated[
        NonNegative,
        Meta(description="penalty, fixed, soft: above 0"),
        read_with("truncated", "penalty", "fixed", "soft"),
    ] = 0.0
    truncation_ramp: Annotated[
        Positive,
        Meta(description="soft: tokens before max_new_tokens where the penalty starts"),
        read_with("truncated", "soft"),
    ] = 16
    no_spread: Annotated[
        Literal["keep", "filter"],
        Meta(
            description="groups whose rewards are all equal; filter: other prompts take their "
            "place (dynamic sampling)"
        ),
    ] = "keep"

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)


class AnswerAdvantage(Advantage, frozen=True, kw_only=True):
    """One number for a whole answer."""

    whiten: Annotated[bool, Meta(description="advantages over the batch")] = False


class ReinforceAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="reinforce"):
    baseline: Annotated[
        Baseline,
        Meta(
            description="of the rewards after truncation, scaling and KL; prompt: the running mean "
            "of each prompt's own rewards, ema_decay of it kept each time"
        ),
    ] = "batch"
    ema_decay: Annotated[Share, read_with("baseline", "ema", "prompt")] = 0.9


class RlooAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="rloo"):
    pass


class GrpoAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="grpo"):
    ddof: Ddof = 1
    std: Annotated[
        Literal["group", "batch"], Meta(description="of which rewards, whole answers")
    ] = "group"
    eps: Eps = 1e-4


class DrGrpoAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="dr_grpo"):
    pass


class OpoAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="opo"):
    pass


class GpgAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="gpg"):
    pass


class RemaxAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="remax"):
    """Draws the first sample of each group greedily, as a baseline that is not trained on."""


class OaplAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="oapl"):
    beta: Annotated[
        NonNegative,
        Meta(
            description="temperature of a group's value, between the largest reward (0) and their "
            "mean (inf)"
        ),
    ] = 0.5


class AsymreAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="asymre"):
    shift: Annotated[
        float, Meta(description="added to the group's mean, the baseline; below 0: A rises")
    ] = -0.1


class OpobAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="opob"):
    squared_norm: Annotated[
        Literal["gradient", "length", "logits"],
        Meta(
            description="of an answer's gradient; length and logits are cheap proxies: its tokens, "
            "or the gradient with respect to the logits"
        ),
    ] = "gradient"


class MaxrlAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="maxrl"):
    pass


class PassAtKAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="pass_at_k"):
    k: Annotated[
        Count, Meta(description="answers of which the best counts; 0: the whole group")
    ] = 0


class GdpoAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="gdpo"):
    part_weights: Annotated[
        dict[str, float],
        Meta(description="of the reward's named parts; a part that is not named counts 1"),
    ] = {}
    ddof: Ddof = 1
    eps: Eps = 1e-4


class ReinforcePpAdvantage(Advantage, frozen=True, kw_only=True, tag="reinforce_pp"):
    gamma: Annotated[Share, Meta(description="discount of a token")] = 1.0
    group_baseline: Annotated[bool, Meta(description="subtract the group's mean reward first")] = (
        False
    )


class GaeAdvantage(AnswerAdvantage, frozen=True, kw_only=True, tag="gae"):
    """Trains a value head ([value])."""

    gamma: Annotated[Share, Meta(description="discount of a token")] = 1.0
    lam: Annotated[Share, Meta(description="1 is return minus value, 0 the one-step residual")] = (
        0.95
    )
    k_step: Annotated[Count, Meta(description="cut after so many residuals; 0: never")] = 0


class OtbAdvantage(Advantage, frozen=True, kw_only=True, tag="otb"):
    pass


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The value head, with advantage.name = gae."""

    trunk: Annotated[
        Literal["own", "shared"],
        Meta(description="a second model, or a head on the policy's last states"),
    ] = "own"
    init: Annotated[
        Literal["policy", "reward_model", "zeros", "random"],
        Meta(
            description="policy: the policy's trunk, or that at `path`, and a small random head; "
            "reward_model: trunk and head at `path`; zeros: V = 0 first; random: a new trunk"
        ),
    ] = "policy"
    path: Annotated[
        str,
        Meta(
            description="a Hugging Face directory, whose model is the trunk; under init = "
            "reward_model it has a sequence-classification head of one label; empty: the policy's"
        ),
        read_with("trunk", "own"),
    ] = ""
    coefficient: Annotated[NonNegative, Meta(description="c_v of the value loss")] = 0.1
    clip: Annotated[
        NonNegative,
        Meta(
            description="clipped value loss: V stays within this of its value at the batch's "
            "start; 0: off"
        ),
    ] = 0.0
    lr: Annotated[NonNegative, Meta(description="0: learner.lr")] = 0.0


class Correction(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="proximal"
):
    """What every proximal policy reads: the policy that ratios and clips are taken against.  Each
    has its own struct below, tagged by `correction.proximal`."""

    preset: Annotated[
        Literal["", "none", "tis", "seq_tis", "icepop", "mis", "m2po"],
        Meta(description="sets the keys below that are not given"),
    ] = ""
    reject: Annotated[
        Reject,
        Meta(
            description="drop what leaves [reject_lo, reject_hi] in this statistic of pi_prox / "
            "mu: the ratio, k1, k2, k3 of KL(mu || pi), chi2 (rho^2 - 1), tv (|pi - mu|), kb (the "
            "larger binary KL of the two), kb_mu (the one from mu)"
        ),
    ] = "none"
    reject_over: Annotated[
        Over,
        Meta(description="token: drops tokens; sum, mean, max over the answer: drops answers"),
        read_with("reject"),
    ] = "token"
    reject_lo: Annotated[
        float | None,
        Meta(description="absent: 0.5 (ratio; mean: 0.99), or none (k1, k2, k3)"),
        read_with("reject"),
    ] = None
    reject_hi: Annotated[
        float | None,
        Meta(description="absent: 2 (ratio; mean: 1.01); the others need one"),
        read_with("reject"),
    ] = None
    reject_when: Annotated[
        Literal["always", "negative"],
        Meta(description="negative: only where the advantage is below 0"),
        read_with("reject"),
    ] = "always"
    reject_at: Annotated[
        Literal["proximal", "target"],
        Meta(
            description="target: the statistics are of pi_theta / mu at each optimizer step, "
            "whatever the anchor"
        ),
        read_with("reject"),
    ] = "proximal"
    reject2: Annotated[
        Reject,
        Meta(description="a second statistic: what leaves either band is dropped"),
        read_with("reject"),
    ] = "none"
    reject2_over: Annotated[Over, read_with("reject2")] = "token"
    reject2_lo: Annotated[float | None, read_with("reject2")] = None
    reject2_hi: Annotated[float | None, read_with("reject2")] = None
    veto: Annotated[
        Veto,
        Meta(description="drop answers with a token of pi_prox < 1e-6, or of pi_prox / mu < 1e-4"),
    ] = "none"
    veto_below: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="absent: the veto's own threshold"),
        read_with("veto"),
    ] = None
    m2: Annotated[
        NonNegative,
        Meta(
            description="M2PO: the largest log-ratios go until the mean of their squares is this; "
            "0: off"
        ),
    ] = 0.0
    m2_over: Annotated[
        Literal["all", "pushing"],
        Meta(
            description="all: log pi_prox / mu of all tokens; pushing, as published: log pi_theta "
            "/ mu of those that go where their advantage pushes them, at each optimizer step"
        ),
        read_with("m2"),
    ] = "all"
    denominator: Annotated[
        Literal["before", "after"],
        Meta(description="the loss counts tokens before or after rejection"),
    ] = "before"

    @property
    def proximal(self) -> str:
        return str(self.__struct_config__.tag)

    # pi_prox / mu is 1 on the behavior policy: there is nothing to weigh

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

    level: Level = "token"
    bound: Annotated[Bound, read_with("level")] = "truncate"
    lo: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="absent: the level's default"),
        read_with("level"),
        read_with("bound", "clip", "mask"),
    ] = None
    hi: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="absent: the level's default"),
        read_with("level"),
        read_with("bound", "truncate", "clip", "mask"),
    ] = None
    self_normalize: Annotated[
        bool,
        Meta(description="divide by the mean weight of the whole batch, after the bound"),
        read_with("level"),
    ] = False
    function: Annotated[
        str,
        Meta(
            description="module:function of your own for the weights: (log_rho, mask, seq, n, "
            "correction) -> [N]"
        ),
    ] = ""


class RecomputedCorrection(WeightedCorrection, frozen=True, kw_only=True, tag="recompute"):
    """The learner's policy as the batch begins (decoupled PPO)."""


class InterpolatedCorrection(WeightedCorrection, frozen=True, kw_only=True, tag="interpolate"):
    """Between the two, nearer to the learner's the older a token is."""


class Loss(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="surrogate"
):
    """What every surrogate reads.  Each has its own struct below, tagged by `loss.surrogate`, with
    the keys that it alone reads."""

    coefficient: Annotated[
        NonNegative,
        Meta(
            description="of the surrogate, which carries the reward, beside the other terms; 0: "
            "kl.loss and entropy alone, as in distillation"
        ),
    ] = 1.0
    reduction: Reduction = "token-mean"
    norm_length: Annotated[
        Count,
        Meta(description="the constant; 0: max_new_tokens"),
        read_with("reduction", "seq-mean-token-sum-norm"),
    ] = 0
    entropy: Annotated[float, Meta(description="c_h")] = 0.0

    @property
    def surrogate(self) -> str:
        return str(self.__struct_config__.tag)


class ClippedLoss(Loss, frozen=True, kw_only=True):
    eps_low: Annotated[
        NonNegative | None,
        Meta(description="absent: the surrogate's default (0.2; gspo 3e-4; gmpo 0.4 nats)"),
    ] = None
    eps_high: Annotated[
        NonNegative | None,
        Meta(
            description="absent: the surrogate's default (0.2; gspo 4e-4; gmpo 0.4 nats; minpro "
            "0.28)"
        ),
    ] = None


Ratio = Annotated[
    Literal["token", "sequence", "geometric"], Meta(description="of a token, or of its answer")
]


class PpoFamilyLoss(ClippedLoss, frozen=True, kw_only=True):
    dual_clip: Annotated[float, Meta(ge=0, description="c of dual-clip PPO, above 1; 0: off")] = 0.0
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
            description="the upper bound is eps_high itself, which must be given, not 1 + eps_high"
        ),
    ] = False


class MovedLoss(Loss, frozen=True, kw_only=True):
    dppo_threshold: Annotated[
        NonNegative, Meta(description="how far a token's probability may move; kl: 0.05 in use")
    ] = 0.2
    dppo_high: Annotated[
        NonNegative | None,
        Meta(description="how far up; absent: dppo_threshold, which is then for down"),
    ] = None


class DppoLoss(MovedLoss, frozen=True, kw_only=True, tag="dppo"):
    dppo_divergence: Annotated[
        Literal["tv", "kl"],
        Meta(description="|pi - proximal| of the token, or the binary KL(proximal || pi)"),
    ] = "tv"


class IpoLoss(MovedLoss, frozen=True, kw_only=True, tag="ipo"):
    pull: Pull = 0.0


class SapoLoss(Loss, frozen=True, kw_only=True, tag="sapo"):
    sapo_tau_pos: Annotated[float, Meta(gt=0, description="of the gate where A > 0")] = 1.0
    sapo_tau_neg: Annotated[float, Meta(gt=0, description="of the gate elsewhere")] = 1.05
    ratio: Ratio = "token"


class ToprLoss(Loss, frozen=True, kw_only=True, tag="topr"):
    pass


class DroLoss(Loss, frozen=True, kw_only=True, tag="dro"):
    dro_beta: NonNegative = 0.05


class KlCovLoss(Loss, frozen=True, kw_only=True, tag="kl_cov"):
    cov_share: CovShare = 2e-4
    cov_coefficient: Annotated[
        NonNegative, Meta(description="weight of |log ratio| on the chosen tokens")
    ] = 1.0


class ClipCovLoss(ClippedLoss, frozen=True, kw_only=True, tag="clip_cov"):
    cov_share: CovShare = 2e-4
    cov_lo: Annotated[float, Meta(description="covariances to draw from")] = 1.0
    cov_hi: float = 5.0


class GpgLoss(Loss, frozen=True, kw_only=True, tag="gpg"):
    pass


class SftLoss(Loss, frozen=True, kw_only=True, tag="sft"):
    pass


class ReshapeLoss(Loss, frozen=True, kw_only=True, tag="reshape"):
    """IS-reshape, whose keys are those of [reshape]."""


class VespoLoss(Loss, frozen=True, kw_only=True, tag="vespo"):
    vespo_k_pos: Annotated[float, Meta(ge=1, description="W^k e^(l (1 - W)) where A >= 0")] = 2.0
    vespo_l_pos: NonNegative = 3.0
    vespo_k_neg: Annotated[float, Meta(ge=1, description="the same where A < 0")] = 3.0
    vespo_l_neg: NonNegative = 2.0


class OaplLoss(Loss, frozen=True, kw_only=True, tag="oapl"):
    oapl_beta: Annotated[
        float,
        Meta(
            gt=0,
            description="beta of the log ratio, the brake: an answer is drawn to a log ratio of A "
            "/ beta",
        ),
    ] = 1e-3


class BandLoss(Loss, frozen=True, kw_only=True, tag="band"):
    band_lo: Annotated[
        NonNegative, Meta(description="ratios to mu between these two count, others are 0")
    ] = 0.7
    band_hi: Annotated[float, Meta(gt=0)] = 6.0
    pull: Pull = 0.0


class GepoLoss(Loss, frozen=True, kw_only=True, tag="gepo"):
    pass


class BapoLoss(Loss, frozen=True, kw_only=True, tag="bapo"):
    bapo_share: Annotated[
        Share, Meta(description="share of tokens of A > 0 that its bounds are moved for")
    ] = 0.4


class MinproLoss(ClippedLoss, frozen=True, kw_only=True, tag="minpro"):
    pass


class GmpoLoss(ClippedLoss, frozen=True, kw_only=True, tag="gmpo"):
    pass


class Reshape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """IS-reshape, with loss.surrogate = reshape and correction.proximal = behavior."""

    form: Annotated[
        Form,
        Meta(description="gamma -> 0 is no gradient, or weighted log-likelihood"),
    ] = "power"
    mode: Annotated[Mode, Meta(description="where gamma comes from")] = "v3.1"
    gamma: Annotated[Share, Meta(description="constant"), read_with("mode", "constant")] = 1.0
    rho_min: Annotated[
        float,
        Meta(gt=0, lt=1, description="smallest effective sample size that gamma_base aims at"),
    ] = 0.3
    tau: Annotated[float, Meta(gt=0), read_with("mode", "v3.1")] = 1.0
    temperature: Annotated[
        NonNegative, Meta(description="T of gamma_target"), read_with("mode", "v3.1")
    ] = 5.0
    gamma_min: Annotated[Share, read_with("mode", "v3.1", "base")] = 0.05
    weight_max: Annotated[
        NonNegative, Meta(description="bound of w^gamma (the report's clip_threshold: 10); 0: off")
    ] = 0.0
    clip: Annotated[
        NonNegative,
        Meta(
            description="repair B: no gradient where w has left 1 +- clip in A's direction; 0: off"
        ),
    ] = 0.0
    kl_penalty: Annotated[
        NonNegative, Meta(description="repair C: coefficient of KL(theta, mu); 0: off")
    ] = 0.0
    kl_estimator: Annotated[Estimator, read_with("kl_penalty")] = "k2"
    budget: Annotated[
        Budget,
        Meta(description="repair D on gamma: of tokens that push away, or of the whole batch"),
    ] = "none"
    kl_budget: Annotated[
        float, Meta(gt=0, description="repair D: nats a token"), read_with("budget")
    ] = 0.05


class KLReward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KL to the reference taken off the reward, before the advantage."""

    coefficient: Annotated[NonNegative, Meta(description="beta; 0: none")] = 0.0
    estimator: Annotated[Estimator, read_with("coefficient")] = "k1"
    reference: Annotated[
        str,
        Meta(description="directory of its reference policy; empty: model.reference"),
        read_with("coefficient"),
    ] = ""
    at: Annotated[
        Literal["start", "behavior"],
        Meta(
            description="of which policy: the learner's as the batch begins (one forward more "
            "where the loss does not need it), "
            "or the recorded one that wrote the tokens, whose gradient staleness and mismatch bias"
        ),
        read_with("coefficient"),
    ] = "start"
    controller: Annotated[
        Literal["fixed", "adaptive"],
        Meta(description="adaptive: the adaptive KL controller, which steers to kl.reward.target"),
        read_with("coefficient"),
    ] = "fixed"
    target: Annotated[
        NonNegative,
        Meta(description="adaptive: nats an answer (kl/answer)"),
        read_with("coefficient"),
        read_with("controller", "adaptive"),
    ] = 6.0
    horizon: Annotated[
        Positive,
        Meta(description="adaptive: samples"),
        read_with("coefficient"),
        read_with("controller", "adaptive"),
    ] = 10000


class KLLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KL to the reference as a term of the loss."""

    coefficient: Annotated[NonNegative, Meta(description="beta; 0: none")] = 0.0
    estimator: Annotated[
        Estimator, read_with("coefficient"), read_with("off_policy", "none", "ratio", "prefix")
    ] = "k3"
    reference: Annotated[
        str,
        Meta(description="directory of its reference policy; empty: model.reference"),
        read_with("coefficient"),
    ] = ""
    off_policy: Annotated[
        OffPolicy,
        Meta(
            description="on stale samples: ratio per token; prefix: the exact sequence-level "
            "gradient; prefix_full: with less variance"
        ),
        read_with("coefficient"),
    ] = "none"
    discount: Annotated[
        Share,
        Meta(description="prefix, prefix_full: of later terms; 1: exact, 0: token level"),
        read_with("coefficient"),
        read_with("off_policy", "prefix", "prefix_full"),
    ] = 1.0
    truncate: Annotated[
        float,
        Meta(gt=0, description="prefix, prefix_full: bound of the prefix weights; inf: exact"),
        read_with("coefficient"),
        read_with("off_policy", "prefix", "prefix_full"),
    ] = float("inf")


class KL(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Towards a reference policy: in the reward, in the loss, or both at once."""

    preset: Annotated[
        Literal["", "grpo", "dr_grpo", "rloo", "distill"],
        Meta(
            description="sets the keys that are not given, as published: k3 in the loss with 0.04; "
            "no KL in the loss; k1 in the reward with 0.05; distill: the whole KL to the teacher "
            "in model.reference, token by token"
        ),
    ] = ""
    reward: KLReward = KLReward()
    loss: KLLoss = KLLoss()


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kl_max: Annotated[
        NonNegative, Meta(description="KL early stopping: budget of one batch; 0: off")
    ] = 0.0
    against: Annotated[
        Literal["start", "behavior"],
        Meta(
            description="what this batch's updates moved: KL(start || policy), start being the "
            "learner's policy as the batch began; "
            "or KL(behaviour || policy) less what the batch arrived with"
        ),
        read_with("kl_max"),
    ] = "start"
    action: Annotated[
        Literal["skip", "slow"],
        Meta(
            description="past kl_max: skip the rest of the batch; or scale each step by what fits "
            "into kl_max"
        ),
        read_with("kl_max"),
    ] = "skip"
    ess_min: Annotated[
        Share,
        Meta(
            description="skip the rest of the batch below this ESS of pi_theta / mu, all of it "
            "where it arrives so; 0: off"
        ),
    ] = 0.0
    lr_by_ess: Annotated[
        Literal["off", "sqrt", "linear"],
        Meta(
            description="each step's learning rate times the root of the ESS of its answers' whole "
            "ratios pi_theta / mu, or times that ESS itself (VCPO)"
        ),
    ] = "off"
    ess_on_policy: Annotated[
        float,
        Meta(gt=0, le=1, description="lr_by_ess: the ESS from which on the rate is whole"),
        read_with("lr_by_ess"),
    ] = 1.0


if TYPE_CHECKING:
    AnyAdvantage = Advantage
    AnyCorrection = Correction
    AnyLoss = Loss
else:
    AnyAdvantage = functools.reduce(operator.or_, variants(Advantage))
    AnyCorrection = functools.reduce(operator.or_, variants(Correction))
    AnyLoss = functools.reduce(operator.or_, variants(Loss))


class StalenessKeys(Protocol):
    """What is read of [staleness]."""

    @property
    def on_exceed(self) -> str: ...
    @property
    def limit(self) -> float: ...
    @property
    def half_life(self) -> float: ...


class GeneratorKeys(Protocol):
    """What is read of [generator]."""

    @property
    def max_new_tokens(self) -> int: ...


class LearnerKeys(Protocol):
    """What is read of [learner]."""

    @property
    def epochs(self) -> int: ...
    @property
    def minibatches(self) -> int: ...
    @property
    def backend(self) -> str: ...


class Settings(Protocol):
    """All that the mathematics reads: `asyncrl.config.tree.Config`, or anything with these."""

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


def ordered(config: Settings) -> list[str]:
    """What of a config needs the order of all tokens of a sample, which the rows of a session that
    forked have not: `key = value` of each.
    """
    out = []
    advantage = config.advantage
    if advantage.name == "gae":
        out.append("advantage.name = gae")
    if isinstance(advantage, ReinforcePpAdvantage) and advantage.gamma < 1:
        out.append(f"advantage.gamma = {advantage.gamma:g}")
    if advantage.name == "reinforce_pp" and config.kl.reward.coefficient > 0:
        out.append(f"kl.reward.coefficient = {config.kl.reward.coefficient:g} with reinforce_pp")
    if advantage.name == "otb":
        out.append("advantage.name = otb")
    if config.loss.surrogate == "minpro":
        out.append("loss.surrogate = minpro")
    if config.kl.loss.coefficient > 0 and config.kl.loss.off_policy in ("prefix", "prefix_full"):
        out.append(f"kl.loss.off_policy = {config.kl.loss.off_policy}")
    return out
