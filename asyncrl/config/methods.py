"""Published methods: surrogate, advantage, reduction, correction and all other keys of each.

`method = "gmpo"` in a config, `--set method=gmpo` and an arm of compare choose one by its name.
Keys that are set explicitly take precedence.  docs/methods.md lists which part of each source was
available, and the measurements."""

from __future__ import annotations

import difflib
import re
from typing import Any, NamedTuple

from asyncrl.algorithms import settings
from asyncrl.config import layers, presets

DESCRIPTION = (
    "A published method: it sets all its keys that you do not give. `asyncrl methods` lists them."
)
KL_STOP = 0.05  # nats per token that a batch's updates may move: repair A of the IS-reshape report
LAG_GRID = "docs/staleness-study.md#what-lag-costs"
HIGH_LAG = "docs/staleness.md#which-method-at-which-lag"
RESHAPE = "docs/reshape.md"
UNMEASURED = ""


class Method(NamedTuple):
    """A published method: its summary, source, page of measurements (UNMEASURED: none) and keys."""

    summary: str
    source: str
    evidence: str
    keys: dict[str, Any]


BEHAVIOR = {"correction.proximal": "behavior"}
RECOMPUTE = {"correction.proximal": "recompute"}
_ANSWERS = {"loss.reduction": "seq-mean-token-mean"}

_VCPO = {
    **RECOMPUTE,
    **_ANSWERS,
    "loss.surrogate": "reinforce",
    "correction.level": "sequence",
    "correction.bound": "truncate",
    "correction.hi": 8.0,
    "stop.lr_by_ess": "sqrt",
    "advantage.name": "opob",
}

_NO_KL = {"kl.loss.coefficient": 0.0}

# the best-known methods; docs/methods.md says where their papers, TRL and verl differ
STANDARD: dict[str, Method] = {
    "grpo": Method(
        "GRPO: PPO's clip, advantages of a group by its standard deviation, k3 in the loss",
        "arXiv 2402.03300; TRL, verl (code)",
        UNMEASURED,
        {
            **BEHAVIOR,
            **_ANSWERS,
            "loss.surrogate": "ppo",
            "advantage.name": "grpo",
            "kl.loss.coefficient": 0.04,
            "kl.loss.estimator": "k3",
        },
    ),
    "dapo": Method(
        "DAPO: GRPO with clip-higher, dynamic sampling, soft length penalty, mean over tokens",
        "arXiv 2503.14476; TRL, verl (code)",
        UNMEASURED,
        {
            **BEHAVIOR,
            **_NO_KL,
            "loss.surrogate": "ppo",
            "loss.eps_high": 0.28,
            "loss.reduction": "token-mean",
            "advantage.name": "grpo",
            "advantage.no_spread": "filter",
            "advantage.truncated": "soft",
            "advantage.truncation_penalty": 1.0,
        },
    ),
    "dr_grpo": Method(
        "Dr. GRPO: GRPO without standard deviation, length and KL",
        "arXiv 2503.20783; TRL, verl (code)",
        UNMEASURED,
        {
            **BEHAVIOR,
            **_NO_KL,
            "loss.surrogate": "ppo",
            "loss.reduction": "seq-mean-token-sum-norm",
            "advantage.name": "dr_grpo",
        },
    ),
    "gspo": Method(
        "GSPO: GRPO with a clip on the geometric mean ratio of a completion",
        "arXiv 2507.18071; TRL, verl (code)",
        UNMEASURED,
        {
            **BEHAVIOR,
            **_ANSWERS,
            **_NO_KL,
            "loss.surrogate": "gspo",
            "advantage.name": "grpo",
        },
    ),
    "sapo": Method(
        "SAPO: GRPO with a soft gate in place of the clip",
        "arXiv 2511.20347; TRL, verl (code)",
        UNMEASURED,
        {
            **BEHAVIOR,
            **_ANSWERS,
            **_NO_KL,
            "loss.surrogate": "sapo",
            "advantage.name": "grpo",
        },
    ),
    "cispo": Method(
        "CISPO: token ratios of at most 1.2 as fixed weights, so that no token loses its gradient",
        "arXiv 2506.13585; TRL, verl (code)",
        UNMEASURED,
        {
            **BEHAVIOR,
            **_NO_KL,
            "loss.surrogate": "cispo",
            "loss.reduction": "token-mean",
            "advantage.name": "grpo",
        },
    ),
    "rloo": Method(
        "RLOO: the others' mean reward as baseline, a ratio per completion, KL in the reward",
        "arXiv 2402.14740; TRL (code)",
        UNMEASURED,
        {
            **BEHAVIOR,
            "loss.surrogate": "ppo",
            "loss.ratio": "sequence",
            "loss.reduction": "seq-mean-token-sum",
            "advantage.name": "rloo",
            "kl.reward.coefficient": 0.05,
            "kl.reward.estimator": "k1",
        },
    ),
    "reinforce": Method(
        "REINFORCE: no ratio, a running mean of the rewards as baseline",
        "Williams 1992",
        UNMEASURED,
        {
            **BEHAVIOR,
            "loss.surrogate": "gpg",
            "loss.reduction": "seq-mean-token-sum",
            "advantage.name": "reinforce",
            "advantage.baseline": "ema",
        },
    ),
    "reinforce_pp": Method(
        "REINFORCE++: PPO's clip, advantages whitened over the batch, KL in the reward",
        "arXiv 2501.03262; verl (code)",
        UNMEASURED,
        {
            **BEHAVIOR,
            "loss.surrogate": "ppo",
            "loss.reduction": "token-mean",
            "advantage.name": "reinforce_pp",
            "kl.reward.coefficient": 0.01,
            "kl.reward.estimator": "k1",
        },
    ),
    "remax": Method(
        "ReMax: REINFORCE with the reward of a greedy completion as baseline",
        "arXiv 2310.10505; verl (code)",
        UNMEASURED,
        {
            **BEHAVIOR,
            "loss.surrogate": "gpg",
            "loss.reduction": "seq-mean-token-sum",
            "advantage.name": "remax",
        },
    ),
}

# methods for stale samples
FOR_OLD_SAMPLES: dict[str, Method] = {
    "vcpo": Method(
        "VCPO: weights of whole completions, learning rate by their ESS, baseline by gradient norm",
        "arXiv 2602.17616 (in notes); mit-han-lab/vcpo (code)",
        HIGH_LAG,
        _VCPO,
    ),
    "gac": Method(
        "GAC, reconstructed: PPO on mu, without the gradient's part along the previous gradient",
        "arXiv 2603.01501 (summary)",
        HIGH_LAG,
        {**BEHAVIOR, "loss.surrogate": "ppo", "learner.gradient_cosine": "project"},
    ),
    "vespo": Method(
        "VESPO: a soft bound on the ratio of a whole completion",
        "arXiv 2602.10693 (paper, code)",
        HIGH_LAG,
        {
            **BEHAVIOR,
            "loss.surrogate": "vespo",
            "advantage.name": "dr_grpo",
            "loss.reduction": "token-mean",
        },
    ),
    "oapl": Method(
        "OAPL: regression of completions' log ratios on their advantage",
        "arXiv 2602.19362 (in notes; loss in two ports)",
        HIGH_LAG,
        {
            **BEHAVIOR,
            "loss.surrogate": "oapl",
            "advantage.name": "oapl",
            "loss.reduction": "seq-mean-token-sum",
        },
    ),
    "asymre": Method(
        "AsymRE: no ratio, a baseline below the mean",
        "arXiv 2506.20520 (in notes)",
        HIGH_LAG,
        {**BEHAVIOR, **_ANSWERS, "loss.surrogate": "gpg", "advantage.name": "asymre"},
    ),
    "dis": Method(
        "double-sided importance sampling (GLM-5, SAO): token ratios, 0 outside an interval",
        "arXiv 2602.15763, 2607.07508 (in notes)",
        HIGH_LAG,
        {**BEHAVIOR, "loss.surrogate": "band", "loss.band_lo": 0.7, "loss.band_hi": 6.0},
    ),
    "ipo": Method(
        "IPO (prime-rl): tokens whose probability has moved little, pulled towards mu",
        "prime-rl (in a port)",
        UNMEASURED,
        {
            **BEHAVIOR,
            "loss.surrogate": "ipo",
            "loss.pull": 1e-3,
            "loss.reduction": "token-mean",
        },
    ),
    "dppo-kl": Method(
        "DPPO by its binary KL from mu",
        "arXiv 2602.04879 (in two ports)",
        UNMEASURED,
        {
            **BEHAVIOR,
            "loss.surrogate": "dppo",
            "loss.dppo_divergence": "kl",
            "loss.dppo_threshold": 0.05,
        },
    ),
    "gepo": Method(
        "GEPO: a completion's probability over that of its group",
        "arXiv 2508.17850 (code)",
        HIGH_LAG,
        {**BEHAVIOR, **_ANSWERS, "loss.surrogate": "gepo", "advantage.name": "grpo"},
    ),
    "bapo": Method(
        "BAPO: PPO whose bounds move until positive tokens have their share",
        "arXiv 2510.18927 (in notes, code)",
        HIGH_LAG,
        {**BEHAVIOR, "loss.surrogate": "bapo"},
    ),
    "minpro": Method(
        "MinPRO: a token's ratio times the smallest before it",
        "arXiv 2601.22718 (in notes)",
        HIGH_LAG,
        {**BEHAVIOR, "loss.surrogate": "minpro", "loss.reduction": "token-mean"},
    ),
    "gmpo": Method(
        "GMPO: the geometric mean ratio of a completion, with clipped tokens",
        "arXiv 2507.20673 (code)",
        HIGH_LAG,
        {**BEHAVIOR, **_ANSWERS, "loss.surrogate": "gmpo", "advantage.name": "grpo"},
    ),
    "opsm": Method(
        "DeepSeek-V3.2: PPO on mu without completions of negative advantage that have left mu",
        "arXiv 2512.02556 (in two ports)",
        HIGH_LAG,
        {
            **BEHAVIOR,
            "loss.surrogate": "ppo",
            "correction.reject": "k1",
            "correction.reject_over": "mean",
            "correction.reject_hi": 0.5,
            "correction.reject_when": "negative",
            "correction.reject_at": "target",
        },
    ),
    "m2po-published": Method(
        "M2PO as published: without the outermost tokens that push further; plain ratios",
        "arXiv 2510.01161 v2 (paper)",
        HIGH_LAG,
        {
            **BEHAVIOR,
            "correction.m2": 0.04,
            "loss.surrogate": "vanilla",
            "loss.reduction": "token-mean",
        },
    ),
    "kpop": Method(
        "KPop: token ratios, without tokens whose binary KL has left a bound",
        "AReaL (code)",
        UNMEASURED,
        {
            **RECOMPUTE,
            "correction.level": "token",
            "correction.bound": "none",
            "correction.reject": "kb",
            "correction.reject_over": "token",
            "correction.reject_hi": 2.0,
            "loss.surrogate": "decoupled_ppo",
        },
    ),
    "flash-reinforce": Method(
        "FlashREINFORCE: batch baseline, rejection of completions by mean binary KL, plain ratios",
        "a reference port (in notes)",
        UNMEASURED,
        {
            **BEHAVIOR,
            **_ANSWERS,
            "loss.surrogate": "vanilla",
            "advantage.name": "reinforce",
            "advantage.baseline": "batch",
            "correction.reject": "kb_mu",
            "correction.reject_over": "mean",
            "correction.reject_hi": 0.01,
            "correction.reject_at": "target",
        },
    ),
}


def _build_preset(name: str, source: str) -> Method:
    surrogate = "vanilla" if name == "none" else "decoupled_ppo"
    keys = {f"correction.{key}": value for key, value in presets.PRESETS[name].items()}
    if name == "none":
        summary = "no correction: stale samples as if they were fresh"
    else:
        summary = f"decoupled PPO with the preset {name}; its clip acts from a batch's second "
        summary += "update on"
    return Method(summary, source, LAG_GRID, keys | {"loss.surrogate": surrogate})


_RESHAPE = {**BEHAVIOR, "loss.surrogate": "reshape", "reshape.mode": "v3.1"}
METHODS: dict[str, Method] = {
    "none": _build_preset("none", "Kakade and Langford 2002"),
    "ppo": Method(
        "PPO, the ratio and its clip against the behavior policy",
        "arXiv 1707.06347 (paper)",
        LAG_GRID,
        {**BEHAVIOR, "loss.surrogate": "ppo"},
    ),
    "tis": _build_preset("tis", "Yao et al. 2025 (in notes); arXiv 2110.00641 (paper)"),
    "seq_tis": _build_preset("seq_tis", "Liu et al. 2025 (in notes); arXiv 2110.00641 (paper)"),
    "icepop": _build_preset("icepop", "IcePop (in notes); arXiv 2110.00641 (paper)"),
    "mis": _build_preset("mis", "Liu et al. 2025 (in notes); arXiv 2110.00641 (paper)"),
    "reshape": Method("IS-reshape v3.1", "technical report v3.1", RESHAPE, _RESHAPE),
    "reshape-stop": Method(
        f"IS-reshape v3.1, two optimizer steps a batch, the second only below {KL_STOP} nats a "
        "token from the batch's start (repair A)",
        "technical report v3.1",
        RESHAPE,
        _RESHAPE | {"learner.minibatches": 2, "stop.kl_max": KL_STOP},
    ),
    "k3": Method(
        "PPO on the behavior policy, with a k3 penalty of 0.1 towards the initial model",
        "arXiv 2402.03300 (paper)",
        LAG_GRID,
        {
            **BEHAVIOR,
            "loss.surrogate": "ppo",
            "kl.loss.coefficient": 0.1,
            "kl.loss.estimator": "k3",
        },
    ),
    **STANDARD,
    **FOR_OLD_SAMPLES,
}


# names that earlier versions accepted -> their replacements
REMOVED = {
    "vcpo-length": 'method = "vcpo", which uses the true norms',
    "vcpo-logits": 'method = "vcpo", which uses the true norms',
    "k25": 'method = "dis" with loss.band_lo = 0.5, loss.band_hi = 2.0 and loss.pull = 0.1',
    "m2po": 'method = "m2po-published", or your own weights by correction.function',
}


def find_method(raw: dict[str, Any]) -> Method | None:
    """Return the method that a table names, or None."""
    name = raw.get("method")
    return METHODS.get(name) if isinstance(name, str) else None


def simplify(name: str) -> str:
    """Return the name without case, separators and doubled letters, a plus as a p.

    >>> simplify("REINFORCE++") == simplify("reinforce_pp")
    True
    """
    letters = re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "p"))
    return re.sub(r"(.)\1+", r"\1", letters)


def suggest_method(name: str) -> str:
    """Return " (did you mean X?)" for a misspelled method, or "".

    A short name with another letter is often another published algorithm (GRPO, GMPO), so that one
    slip counts only in a long name."""
    methods = {simplify(method): method for method in METHODS}
    simple = simplify(name)
    close = difflib.get_close_matches(simple, methods, 1, 0.93 if len(simple) > 7 else 1.0)
    return f" (did you mean {methods[close[0]]}?)" if close else ""


def explain_unknown_method(name: Any) -> str:
    """Return the error text for an unknown method."""
    if instead := REMOVED.get(str(name)):
        return f"method: {name} was removed; write {instead}"
    return (
        f"method: {name!r} is unknown{suggest_method(str(name))}; choose one of "
        f"{', '.join(METHODS)}, or build it of advantage, loss, correction and kl: docs/papers.md"
    )


def replace(raw: dict[str, Any]) -> None:
    """Remove from `raw` the keys that a method of a later layer replaces.

    These are its own keys, the correction, and the keys that only the earlier surrogate and
    advantage read."""
    method = find_method(raw)
    if method is None:
        return
    raw.pop("correction", None)
    for section, common in (("loss", settings.Loss), ("advantage", settings.Advantage)):
        table = raw.get(section)
        if isinstance(table, dict) and any(key.startswith(f"{section}.") for key in method.keys):
            for key in set(table) - set(layers.map_fields(common)):
                table.pop(key)
    for key in method.keys:
        layers.remove(raw, key)


def fill(raw: dict[str, Any]) -> None:
    """Set the keys of `raw`'s method that `raw` does not have."""
    if method := find_method(raw):
        for key, value in method.keys.items():
            layers.put(raw, key, value)
