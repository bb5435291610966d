"""What the mathematics reads of a config: frozen structs, one a section.  Imports no torch.

The config is built of them (`asyncrl.config.tree`); who has no config hands them in themselves.  A
key that names a function takes the names of the dict that holds it: a function and its line in the
dict are a choice of the config, of its schema and of its error messages, without a second list."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
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
    AdvantageName = str
    Baseline = str
    Scale = str
    Level = str
    Bound = str
    Reject = str
    Over = str
    Veto = str
    Surrogate = str
    Reduction = str
    Mode = str
    Form = str
    Budget = str
    Estimator = str
    OffPolicy = str
else:
    AdvantageName = Literal[names("advantages", "BY_ANSWER") + names("advantages", "BY_TOKEN")]
    Baseline = Literal[names("advantages", "BASELINES")]
    Scale = Literal[names("batch", "SCALES")]
    Level = Literal[names("correction", "LEVELS")]
    Bound = Literal[names("correction", "BOUNDS")]
    Reject = Literal[names("correction", "STATISTICS")]
    Over = Literal[names("correction", "OVER")]
    Veto = Literal[names("correction", "VETO")]
    Surrogate = Literal[names("surrogates", "SURROGATES")]
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


class Advantage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[
        AdvantageName,
        Meta(
            description="gae trains a value head ([value]); remax draws the first sample of each "
            "group greedily, as a baseline that is not trained on"
        ),
    ] = "rloo"
    baseline: Annotated[
        Baseline,
        Meta(
            description="reinforce; of the rewards after truncation, scaling and KL; prompt: the "
            "running mean of each prompt's own rewards, ema_decay of it kept each time"
        ),
    ] = "batch"
    ema_decay: Share = 0.9
    ddof: Annotated[Literal[0, 1], Meta(description="grpo")] = 1
    std: Annotated[
        Literal["group", "batch"], Meta(description="grpo: of which rewards, whole answers")
    ] = "group"
    k: Annotated[
        Count, Meta(description="pass_at_k: answers of which the best counts; 0: the whole group")
    ] = 0
    eps: Annotated[
        NonNegative,
        Meta(
            description="grpo: added to the standard deviation; groups of equal rewards get 0 with "
            "any"
        ),
    ] = 1e-4
    gamma: Annotated[Share, Meta(description="reinforce_pp, gae: discount of a token")] = 1.0
    lam: Annotated[
        Share, Meta(description="gae: 1 is return minus value, 0 the one-step residual")
    ] = 0.95
    k_step: Annotated[Count, Meta(description="gae: cut after so many residuals; 0: never")] = 0
    beta: Annotated[
        NonNegative,
        Meta(
            description="oapl: temperature of a group's value, between the largest reward (0) and "
            "their mean (inf)"
        ),
    ] = 0.5
    shift: Annotated[
        float,
        Meta(description="asymre: added to the group's mean, the baseline; below 0: A rises"),
    ] = -0.1
    squared_norm: Annotated[
        Literal["gradient", "length", "logits"],
        Meta(
            description="opob: of an answer's gradient; length and logits are cheap proxies: its "
            "tokens, or the gradient with respect to the logits"
        ),
    ] = "gradient"
    part_weights: Annotated[
        dict[str, float],
        Meta(description="gdpo: of the reward's named parts; a part that is not named counts 1"),
    ] = {}
    group_baseline: Annotated[
        bool, Meta(description="reinforce_pp: subtract the group's mean reward first")
    ] = False
    rewards: Annotated[
        Scale,
        Meta(description="scaled to [0, 1] or whitened over the batch"),
    ] = "raw"
    whiten: Annotated[bool, Meta(description="advantages over the batch")] = False
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
        NonNegative, Meta(description="penalty, fixed, soft: above 0")
    ] = 0.0
    truncation_ramp: Annotated[
        Positive, Meta(description="soft: tokens before max_new_tokens where the penalty starts")
    ] = 16
    no_spread: Annotated[
        Literal["keep", "filter"],
        Meta(
            description="groups whose rewards are all equal; filter: other prompts take their "
            "place (dynamic sampling)"
        ),
    ] = "keep"


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The value head, with advantage.name = gae."""

    trunk: Annotated[
        Literal["own", "shared"],
        Meta(description="a second model, or a head on the policy's last states"),
    ] = "own"
    init: Annotated[
        Literal["policy", "reward_model", "zeros", "random"],
        Meta(
            description="policy: its weights, a small random head; reward_model: trunk and head at "
            "`path`; zeros: V = 0 first; random: a new trunk"
        ),
    ] = "policy"
    path: Annotated[
        str,
        Meta(
            description="reward_model: a Hugging Face directory with a sequence-classification "
            "head of one label"
        ),
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


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    preset: Annotated[
        Literal["", "none", "tis", "seq_tis", "icepop", "mis", "m2po"],
        Meta(description="sets the keys below that are not given"),
    ] = ""
    proximal: Annotated[
        Literal["recompute", "behavior", "interpolate"],
        Meta(
            description="the policy that ratios and clips are taken against: the learner's as the "
            "batch begins (decoupled PPO), the behavior policy itself, or halfway by age"
        ),
    ] = "behavior"
    level: Level = "token"
    bound: Bound = "truncate"
    lo: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="absent: the level's default")
    ] = None
    hi: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="absent: the level's default")
    ] = None
    self_normalize: Annotated[
        bool, Meta(description="divide by the mean weight of the whole batch, after the bound")
    ] = False
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
    ] = "token"
    reject_lo: Annotated[
        float | None, Meta(description="absent: 0.5 (ratio; mean: 0.99), or none (k1, k2, k3)")
    ] = None
    reject_hi: Annotated[
        float | None, Meta(description="absent: 2 (ratio; mean: 1.01); the others need one")
    ] = None
    reject_when: Annotated[
        Literal["always", "negative"],
        Meta(description="negative: only where the advantage is below 0"),
    ] = "always"
    reject_at: Annotated[
        Literal["proximal", "target"],
        Meta(
            description="target: the statistics are of pi_theta / mu at each optimizer step, "
            "whatever the anchor"
        ),
    ] = "proximal"
    reject2: Annotated[
        Reject, Meta(description="a second statistic: what leaves either band is dropped")
    ] = "none"
    reject2_over: Over = "token"
    reject2_lo: float | None = None
    reject2_hi: float | None = None
    veto: Annotated[
        Veto,
        Meta(description="drop answers with a token of pi_prox < 1e-6, or of pi_prox / mu < 1e-4"),
    ] = "none"
    veto_below: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="absent: the veto's own threshold")
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
    ] = "all"
    denominator: Annotated[
        Literal["before", "after"],
        Meta(description="the loss counts tokens before or after rejection"),
    ] = "before"
    function: Annotated[
        str,
        Meta(
            description="module:function of your own for the weights: (log_rho, mask, seq, n, "
            "correction) -> [N]"
        ),
    ] = ""


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    surrogate: Surrogate = "ppo"
    coefficient: Annotated[
        NonNegative,
        Meta(
            description="of the surrogate, which carries the reward, beside the other terms; 0: "
            "kl.loss and entropy alone, as in distillation"
        ),
    ] = 1.0
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
    dual_clip: Annotated[float, Meta(ge=0, description="c of dual-clip PPO, above 1; 0: off")] = 0.0
    reduction: Reduction = "token-mean"
    norm_length: Annotated[
        Count, Meta(description="seq-mean-token-sum-norm: the constant; 0: max_new_tokens")
    ] = 0
    entropy: Annotated[float, Meta(description="c_h")] = 0.0
    ratio: Annotated[
        Literal["token", "sequence", "geometric"],
        Meta(description="ppo, decoupled_ppo, sapo: of a token, or of its whole answer"),
    ] = "token"
    dppo_threshold: Annotated[
        NonNegative, Meta(description="dppo, ipo: how far a token may move; kl: 0.05 in use")
    ] = 0.2
    dppo_high: Annotated[
        NonNegative | None,
        Meta(description="dppo, ipo: how far up; absent: dppo_threshold, which is then for down"),
    ] = None
    dppo_divergence: Annotated[
        Literal["tv", "kl"],
        Meta(description="dppo: |pi - anchor| of the token, or the binary KL(anchor || pi)"),
    ] = "tv"
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    cispo_absolute: Annotated[
        bool,
        Meta(
            description="cispo: the upper bound is eps_high itself, which must be given, not 1 + "
            "eps_high"
        ),
    ] = False
    dro_beta: NonNegative = 0.05
    cov_share: Annotated[
        Share, Meta(description="kl_cov, clip_cov: share of the tokens that are held back")
    ] = 2e-4
    cov_lo: Annotated[float, Meta(description="clip_cov: covariances to draw from")] = 1.0
    cov_hi: float = 5.0
    cov_coefficient: Annotated[
        NonNegative, Meta(description="kl_cov: weight of |log ratio| on the chosen tokens")
    ] = 1.0
    vespo_k_pos: Annotated[
        float, Meta(ge=1, description="vespo: W^k e^(l (1 - W)) where A >= 0")
    ] = 2.0
    vespo_l_pos: NonNegative = 3.0
    vespo_k_neg: Annotated[float, Meta(ge=1, description="vespo: the same where A < 0")] = 3.0
    vespo_l_neg: NonNegative = 2.0
    oapl_beta: Annotated[
        float,
        Meta(
            gt=0,
            description="oapl: beta of the log ratio, the brake: an answer is drawn to a log ratio "
            "of A / beta",
        ),
    ] = 1e-3
    band_lo: Annotated[
        NonNegative, Meta(description="band: ratios to mu between these two count, others are 0")
    ] = 0.7
    band_hi: Annotated[float, Meta(gt=0)] = 6.0
    pull: Annotated[
        NonNegative, Meta(description="band, ipo: tau of -tau (log ratio)^2, to mu; 0: none")
    ] = 0.0
    bapo_share: Annotated[
        Share, Meta(description="bapo: share of tokens of A > 0 that its bounds are moved for")
    ] = 0.4


class Reshape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """IS-reshape, with loss.surrogate = reshape and correction.proximal = behavior."""

    form: Annotated[
        Form,
        Meta(description="gamma -> 0 is no gradient, or weighted log-likelihood"),
    ] = "power"
    mode: Annotated[Mode, Meta(description="where gamma comes from")] = "v3.1"
    gamma: Annotated[Share, Meta(description="constant")] = 1.0
    rho_min: Annotated[
        float,
        Meta(gt=0, lt=1, description="smallest effective sample size that gamma_base aims at"),
    ] = 0.3
    tau: Annotated[float, Meta(gt=0)] = 1.0
    temperature: Annotated[NonNegative, Meta(description="T of gamma_target")] = 5.0
    gamma_min: Share = 0.05
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
    kl_estimator: Estimator = "k2"
    budget: Annotated[
        Budget,
        Meta(description="repair D on gamma: of tokens that push away, or of the whole batch"),
    ] = "none"
    kl_budget: Annotated[float, Meta(gt=0, description="repair D: nats a token")] = 0.05


class KLReward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KL to the reference taken off the reward, before the advantage."""

    coefficient: Annotated[NonNegative, Meta(description="beta; 0: none")] = 0.0
    estimator: Estimator = "k1"
    reference: Annotated[
        str, Meta(description="directory of its reference policy; empty: model.reference")
    ] = ""
    at: Annotated[
        Literal["start", "behavior"],
        Meta(
            description="of which policy: the learner's as the batch begins (one forward more "
            "where the loss does not need it), "
            "or the recorded one that wrote the tokens, whose gradient staleness and mismatch bias"
        ),
    ] = "start"
    controller: Annotated[
        Literal["fixed", "adaptive"],
        Meta(description="adaptive: the adaptive KL controller, which steers to kl.reward.target"),
    ] = "fixed"
    target: Annotated[NonNegative, Meta(description="adaptive: nats an answer (kl/answer)")] = 6.0
    horizon: Annotated[Positive, Meta(description="adaptive: samples")] = 10000


class KLLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KL to the reference as a term of the loss."""

    coefficient: Annotated[NonNegative, Meta(description="beta; 0: none")] = 0.0
    estimator: Estimator = "k3"
    reference: Annotated[
        str, Meta(description="directory of its reference policy; empty: model.reference")
    ] = ""
    off_policy: Annotated[
        OffPolicy,
        Meta(
            description="on stale samples: ratio per token; prefix: the exact sequence-level "
            "gradient; prefix_full: with less variance"
        ),
    ] = "none"
    discount: Annotated[
        Share, Meta(description="prefix, prefix_full: of later terms; 1: exact, 0: token level")
    ] = 1.0
    truncate: Annotated[
        float,
        Meta(gt=0, description="prefix, prefix_full: bound of the prefix weights; inf: exact"),
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
    ] = "start"
    action: Annotated[
        Literal["skip", "slow"],
        Meta(
            description="past kl_max: skip the rest of the batch; or scale each step by what fits "
            "into kl_max"
        ),
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
        float, Meta(gt=0, le=1, description="lr_by_ess: the ESS from which on the rate is whole")
    ] = 1.0


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
    if config.advantage.name == "gae":
        out.append("advantage.name = gae")
    if config.advantage.name == "reinforce_pp" and config.advantage.gamma < 1:
        out.append(f"advantage.gamma = {config.advantage.gamma:g}")
    if config.advantage.name == "reinforce_pp" and config.kl.reward.coefficient > 0:
        out.append(f"kl.reward.coefficient = {config.kl.reward.coefficient:g} with reinforce_pp")
    if config.advantage.name == "otb":
        out.append("advantage.name = otb")
    if config.loss.surrogate == "minpro":
        out.append("loss.surrogate = minpro")
    if config.kl.loss.coefficient > 0 and config.kl.loss.off_policy in ("prefix", "prefix_full"):
        out.append(f"kl.loss.off_policy = {config.kl.loss.off_policy}")
    return out
