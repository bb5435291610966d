"""What others published for samples of an old policy, each whole: surrogate, advantage, reduction
and correction, as `--set` items; and plain corrections beside them.

An arm of `compare` and a correction of `sweep` is one by its name alone.  docs/algorithms.md says
where each comes from and what of it could be read."""

from __future__ import annotations

from asyncrl.config import presets

KL_STOP = 0.05  # nats a token that a batch's updates may move: repair A of the IS-reshape report

PLAIN = [
    "correction.preset=''",
    "correction.reject=none",
    "correction.reject_when=always",
    "correction.reject_at=proximal",
    "correction.reject2=none",
    "correction.veto=none",
    "correction.m2=0.0",
    "correction.m2_over=all",
]
BEHAVIOR = [*PLAIN, "correction.proximal=behavior"]
RECOMPUTE = [*PLAIN, "correction.proximal=recompute"]
_ANSWERS = "loss.reduction=seq-mean-token-mean"

# of what the policy is at each optimizer step, whatever the anchor
_AT_TARGET = [*BEHAVIOR, "correction.reject_at=target"]

_VCPO = [
    *RECOMPUTE,
    "loss.surrogate=reinforce",
    "correction.level=sequence",
    "correction.bound=truncate",
    "correction.hi=8.0",
    "stop.lr_by_ess=sqrt",
    "advantage.name=opob",
    _ANSWERS,
]

METHODS: dict[str, tuple[str, list[str]]] = {
    "vcpo": (
        "VCPO: whole answers' weights, a learning rate by their ESS, a baseline by their gradients",
        _VCPO,
    ),
    "vcpo-length": (
        "VCPO with answers' lengths for the norms of their gradients: a proxy, not VCPO's",
        [*_VCPO, "advantage.squared_norm=length"],
    ),
    "vcpo-logits": (
        "VCPO with gradients of the logits alone: a proxy, not VCPO's",
        [*_VCPO, "advantage.squared_norm=logits"],
    ),
    "gac": (
        "PPO on mu; a gradient's part along the one before it is taken off (GAC, reconstructed)",
        [*BEHAVIOR, "loss.surrogate=ppo", "learner.gradient_cosine=project"],
    ),
    "vespo": (
        "VESPO: answers by a soft bound on their whole ratio",
        [*BEHAVIOR, "loss.surrogate=vespo", "advantage.name=dr_grpo", "loss.reduction=token-mean"],
    ),
    "oapl": (
        "OAPL: regression of answers' log ratios on their advantage",
        [
            *BEHAVIOR,
            "loss.surrogate=oapl",
            "advantage.name=oapl",
            "loss.reduction=seq-mean-token-sum",
        ],
    ),
    "asymre": (
        "AsymRE: no ratio, a baseline below the mean",
        [*BEHAVIOR, "loss.surrogate=gpg", "advantage.name=asymre", _ANSWERS],
    ),
    "dis": (
        "double-sided importance sampling (GLM-5, SAO): ratios of tokens, none outside a band",
        [*BEHAVIOR, "loss.surrogate=band", "loss.band_lo=0.7", "loss.band_hi=6.0"],
    ),
    "k25": (
        "Kimi K2.5: ratios of tokens within a band, all of them drawn to mu; both chosen by us",
        [*BEHAVIOR, "loss.surrogate=band", "loss.band_lo=0.5", "loss.band_hi=2.0", "loss.pull=0.1"],
    ),
    "ipo": (
        "IPO (prime-rl): tokens whose probability has moved little, all of them drawn to mu",
        [*BEHAVIOR, "loss.surrogate=ipo", "loss.pull=1e-3", "loss.reduction=token-mean"],
    ),
    "dppo-kl": (
        "DPPO by its binary KL from mu",
        [
            *BEHAVIOR,
            "loss.surrogate=dppo",
            "loss.dppo_divergence=kl",
            "loss.dppo_threshold=0.05",
        ],
    ),
    "gepo": (
        "GEPO: answers' probabilities over their group's",
        [*BEHAVIOR, "loss.surrogate=gepo", "advantage.name=grpo", _ANSWERS],
    ),
    "bapo": (
        "BAPO: PPO with bounds moved until positive tokens have their share",
        [*BEHAVIOR, "loss.surrogate=bapo"],
    ),
    "minpro": (
        "MinPRO: a token's ratio times the smallest before it",
        [*BEHAVIOR, "loss.surrogate=minpro", "loss.reduction=token-mean"],
    ),
    "gmpo": (
        "GMPO: answers by their geometric mean, tokens cut in it",
        [*BEHAVIOR, "loss.surrogate=gmpo", "advantage.name=grpo", _ANSWERS],
    ),
    "opsm": (
        "PPO on mu; answers of negative advantage that have left mu are dropped (DeepSeek-V3.2)",
        [
            *_AT_TARGET,
            "loss.surrogate=ppo",
            "correction.reject=k1",
            "correction.reject_over=mean",
            "correction.reject_hi=0.5",
            "correction.reject_when=negative",
        ],
    ),
    "m2po-published": (
        "M2PO as published: of tokens that push on, the farthest go; plain ratios on the others",
        [
            *BEHAVIOR,
            "correction.m2=0.04",
            "correction.m2_over=pushing",
            "loss.surrogate=vanilla",
            "loss.reduction=token-mean",
        ],
    ),
    "kpop": (
        "KPop: tokens by their ratio, those whose binary KL has left a bound dropped",
        [
            *RECOMPUTE,
            "correction.level=token",
            "correction.bound=none",
            "correction.reject=kb",
            "correction.reject_over=token",
            "correction.reject_hi=2.0",
            "loss.surrogate=decoupled_ppo",
        ],
    ),
    "flash-reinforce": (
        "FlashREINFORCE: a baseline of the batch; answers by their mean binary KL; plain ratios",
        [
            *_AT_TARGET,
            "loss.surrogate=vanilla",
            "advantage.name=reinforce",
            "advantage.baseline=batch",
            "correction.reject=kb_mu",
            "correction.reject_over=mean",
            "correction.reject_hi=0.01",
            _ANSWERS,
        ],
    ),
}


def _preset(name: str) -> list[str]:
    keys = {"level": "none", "bound": "none"} | presets.PRESETS[name]
    return [
        *RECOMPUTE,
        *(f"correction.{k}={v}" for k, v in keys.items()),
        f"loss.surrogate={'vanilla' if name == 'none' else 'decoupled_ppo'}",
    ]


CORRECTIONS: dict[str, tuple[str, list[str]]] = {
    "none": ("stale samples as if they were fresh", _preset("none")),
    "ppo": (
        "PPO, the ratio and its clip against the behaviour policy",
        [*BEHAVIOR, "loss.surrogate=ppo"],
    ),
    **{
        n: (
            f"decoupled PPO with the preset {n}; its clip acts from a batch's second update on",
            _preset(n),
        )
        for n in ("tis", "seq_tis", "icepop", "mis", "m2po")
    },
    "reshape": (
        "IS-reshape v3.1",
        [*BEHAVIOR, "loss.surrogate=reshape", "reshape.mode=v3.1"],
    ),
    "reshape-stop": (
        f"IS-reshape v3.1, two optimizer steps a batch, the second only below {KL_STOP} nats a "
        "token from the batch's start (repair A)",
        [
            *BEHAVIOR,
            "loss.surrogate=reshape",
            "reshape.mode=v3.1",
            "learner.minibatches=2",
            f"stop.kl_max={KL_STOP}",
        ],
    ),
    "k3": (
        "PPO as above, and 0.1 k3 towards the initial model in the loss",
        [
            *BEHAVIOR,
            "loss.surrogate=ppo",
            "kl.loss.coefficient=0.1",
            "kl.loss.estimator=k3",
        ],
    ),
    **METHODS,
    "configured": ("as the config says", []),
}
