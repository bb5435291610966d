"""The configuration: TOML to a frozen tree of msgspec structs.  Imports no torch.

A key's meaning, unit and range stand in its `Meta`; configs/README.md and the JSON schema are
generated from here. `load` reads a file, applies `--set` overrides to the raw table, converts it
(unknown keys and wrong types are one clear line) and checks the rules that span several keys."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: Annotated[
        str, Meta(description="Hugging Face directory of the initial policy and its tokenizer")
    ]
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N")] = "auto"
    reference: Annotated[
        str,
        Meta(
            description="directory of the reference policy of KL terms that name none; empty: the "
            "initial one"
        ),
    ] = ""
    warm_start: Annotated[
        bool,
        Meta(
            description="build and warm-start a tiny model at `path` for the task when nothing is "
            "there"
        ),
    ] = False


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(description="a built-in task, or `file` for prompts of your own")]
    prompts: Annotated[
        str, Meta(description="JSONL or parquet with prompt or messages, and answer")
    ] = ""
    heldout: Annotated[str, Meta(description="the same for held-out prompts")] = ""
    ood: Annotated[str, Meta(description="the same for out-of-distribution prompts")] = ""


class Reward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    function: Annotated[
        str, Meta(description="module:function or file.py:function; empty: the task's own")
    ] = ""
    deadline_s: Annotated[float, Meta(gt=0, description="seconds for one call")] = 10.0
    workers: Annotated[
        Count | Literal["auto"],
        Meta(
            description="reward processes per generator; auto: none for the task's own, which runs "
            "in place, else from one to the "
            "number of cores, doubled while answers wait, cores are idle and it pays; 0: as auto, "
            "but never more than one"
        ),
    ] = "auto"
    concurrency: Annotated[
        Positive,
        Meta(description="calls of an `async def` function awaited together, in each process"),
    ] = 64
    batch: Annotated[
        Positive,
        Meta(
            description="most answers in one call of a function that takes lists (`batched = True`)"
        ),
    ] = 64
    on_error: Annotated[
        Literal["drop", "stop"],
        Meta(description="a failed reward: the sample is written again, or the run stops"),
    ] = "drop"
    error_budget: Annotated[
        Share,
        Meta(
            description="share of a batch's samples whose reward may raise, hang or be no number "
            "before the run stops"
        ),
    ] = 0.1
    machinery_budget: Annotated[
        Share, Meta(description="the same for samples that fail because a reward process died")
    ] = 0.1


class Generator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    engine: Annotated[
        Literal["embedded", "vllm"], Meta(description="`asyncrl engines` says which work here")
    ] = "embedded"
    dtype: Annotated[
        Literal["same", "float32", "bfloat16"], Meta(description="same: the model's")
    ] = "same"
    mantissa_bits: Annotated[
        int,
        Meta(
            ge=0,
            le=23,
            description="embedded: round the weights to so many bits (bfloat16: 7, fp8: 3), to "
            "study a mismatch with the learner; 0: off",
        ),
    ] = 0
    slots: Annotated[Positive, Meta(description="answers written at once")] = 256
    max_new_tokens: Positive = 64
    context: Annotated[Positive, Meta(description="prompt and answer, in tokens")] = 256
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[Count, Meta(description="0: all")] = 0
    stop: Annotated[
        list[str],
        Meta(
            description="texts that end an answer beside the tokenizer's and the model's "
            "end-of-sequence tokens; each of them one token"
        ),
    ] = []
    kv_cache_mib: Annotated[
        Count, Meta(description="vllm: memory for keys and values; 0: what slots x context need")
    ] = 0
    threads: Annotated[Positive, Meta(description="OMP threads of each generator process")] = 1
    gpus: Annotated[
        list[Count],
        Meta(description="GPU numbers, dealt to the generators in turn; empty: model.device"),
    ] = []


class Learner(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    backend: Literal["torch", "deepspeed"] = "torch"
    ranks: Annotated[Positive, Meta(description="deepspeed: processes that share the learning")] = 1
    zero_stage: Annotated[
        int,
        Meta(
            ge=0,
            le=3,
            description="deepspeed: 0 nothing, 1 optimizer state, 2 and gradients, 3 and "
            "parameters are partitioned",
        ),
    ] = 2
    offload: Annotated[
        bool, Meta(description="deepspeed: optimizer state and optimizer step in the CPU's memory")
    ] = False
    rank_timeout_s: Annotated[
        float,
        Meta(
            gt=0, description="deepspeed: a rank that does not answer another for this long is lost"
        ),
    ] = 120.0
    steps: Annotated[Positive, Meta(description="batches to train")] = 100
    groups: Annotated[Positive, Meta(description="groups (prompts) in a batch")] = 32
    group_size: Annotated[Positive, Meta(description="samples of each prompt")] = 8
    epochs: Positive = 1
    minibatches: Annotated[Positive, Meta(description="optimizer steps in an epoch")] = 1
    micro_batch_tokens: Annotated[
        Positive, Meta(description="tokens (prompt and answer, padded) in one forward")
    ] = 16384
    lr: NonNegative = 2e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    beta1: Share = 0.9
    beta2: Share = 0.99
    weight_decay: NonNegative = 0.0
    optimizer: Literal["adamw", "sgd"] = "adamw"
    clip_norm: Annotated[float, Meta(ge=0, description="gradient norm; 0: no clipping")] = 1.0
    prefetch: Annotated[Count, Meta(le=1, description="batches leased ahead")] = 1
    checkpoint_every: Annotated[Positive, Meta(description="batches")] = 20
    keep_checkpoints: Positive = 2
    threads: Annotated[Positive, Meta(description="OMP threads of the learner process")] = 1
    gpus: Annotated[
        list[Count], Meta(description="GPU number of each rank; empty: model.device")
    ] = []


class Staleness(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_lag: Annotated[
        float, Meta(ge=0, description="versions; a whole number or inf; 0: synchronous")
    ] = 4.0
    on_exceed: Literal["pace", "drop", "mask", "downweight"] = "pace"
    half_life: Annotated[
        float, Meta(gt=0, description="downweight: excess lag at which a token counts half")
    ] = 2.0
    order: Annotated[
        Literal["auto", "ticket", "completion", "freshest"],
        Meta(
            description="which groups make the next batch: oldest tickets, those complete first, "
            "those of least lag; auto: ticket with pace, else completion"
        ),
    ] = "auto"
    inject: Annotated[
        int | list[float] | None,
        Meta(description="lag to inject: a constant, or the probabilities of 0, 1, 2, ..."),
    ] = None
    delay: Annotated[
        NonNegative,
        Meta(
            description="long tails on purpose: decode steps a token by which a ticket's answers "
            "come late; scale of a draw per ticket; 0: none"
        ),
    ] = 0.0


class Advantage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[
        Literal[
            "reinforce", "rloo", "grpo", "dr_grpo", "reinforce_pp", "opo", "gpg", "remax", "gae"
        ],
        Meta(
            description="gae trains a value head ([value]); remax draws the first sample of each "
            "group greedily, as a baseline that is not trained on"
        ),
    ] = "rloo"
    baseline: Annotated[
        Literal["none", "batch", "ema"],
        Meta(description="reinforce; of the rewards after truncation, scaling and KL"),
    ] = "batch"
    ema_decay: Share = 0.9
    ddof: Annotated[Literal[0, 1], Meta(description="grpo")] = 1
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
    group_baseline: Annotated[
        bool, Meta(description="reinforce_pp: subtract the group's mean reward first")
    ] = False
    rewards: Annotated[
        Literal["raw", "unit", "whiten"],
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
    proximal: Literal["recompute", "behavior", "interpolate"] = "recompute"
    level: Literal["none", "token", "sequence", "geometric"] = "token"
    bound: Literal["none", "truncate", "clip", "mask"] = "truncate"
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
        Literal["none", "ratio", "k1", "k2", "k3"],
        Meta(
            description="drop what leaves [reject_lo, reject_hi] in this statistic of pi_prox / mu"
        ),
    ] = "none"
    reject_over: Annotated[
        Literal["token", "sum", "mean", "max"],
        Meta(description="token: drops tokens; sum, mean, max over the answer: drops answers"),
    ] = "token"
    reject_lo: Annotated[
        float | None, Meta(description="absent: 0.5 (ratio; mean: 0.99), or none (k1, k2, k3)")
    ] = None
    reject_hi: Annotated[
        float | None, Meta(description="absent: 2 (ratio; mean: 1.01); k1, k2, k3 need one")
    ] = None
    veto: Annotated[
        Literal["none", "probability", "ratio"],
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
    surrogate: Literal[
        "vanilla",
        "reinforce",
        "ppo",
        "decoupled_ppo",
        "gspo",
        "cispo",
        "dppo",
        "sapo",
        "topr",
        "dro",
        "kl_cov",
        "clip_cov",
        "gpg",
        "sft",
        "reshape",
    ] = "decoupled_ppo"
    eps_low: Annotated[
        NonNegative | None, Meta(description="absent: the surrogate's default (0.2; gspo 3e-4)")
    ] = None
    eps_high: Annotated[
        NonNegative | None, Meta(description="absent: the surrogate's default (0.2; gspo 4e-4)")
    ] = None
    dual_clip: Annotated[float, Meta(ge=0, description="c of dual-clip PPO, above 1; 0: off")] = 0.0
    reduction: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    norm_length: Annotated[
        Count, Meta(description="seq-mean-token-sum-norm: the constant; 0: max_new_tokens")
    ] = 0
    entropy: Annotated[float, Meta(description="c_h")] = 0.0
    dppo_threshold: NonNegative = 0.2
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


class Reshape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """IS-reshape, with loss.surrogate = reshape and correction.proximal = behavior."""

    form: Annotated[
        Literal["power", "box_cox"],
        Meta(description="gamma -> 0 is no gradient, or weighted log-likelihood"),
    ] = "power"
    mode: Annotated[
        Literal["v3.1", "base", "constant"], Meta(description="where gamma comes from")
    ] = "v3.1"
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
    kl_estimator: Literal[
        "k1", "k2", "k3", "abs", "low_var_kl", "k1+", "k2+", "k3+", "abs+", "low_var_kl+"
    ] = "k2"
    budget: Annotated[
        Literal["none", "tokens", "global"],
        Meta(description="repair D on gamma: of tokens that push away, or of the whole batch"),
    ] = "none"
    kl_budget: Annotated[float, Meta(gt=0, description="repair D: nats a token")] = 0.05


Estimator = Literal[
    "k1", "k2", "k3", "abs", "low_var_kl", "k1+", "k2+", "k3+", "abs+", "low_var_kl+"
]


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
        Literal["none", "ratio", "prefix", "prefix_full"],
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
        Literal["", "grpo", "dr_grpo", "rloo"],
        Meta(
            description="sets the keys that are not given, as published: k3 in the loss with 0.04; "
            "no KL in the loss; k1 in the reward with 0.05"
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


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    in_flight: Annotated[
        Literal["keep_kv", "recompute_kv", "between_groups"],
        Meta(
            description="what new weights do to answers being written: continue them (partial "
            "rollouts) with the keys and values as they are, "
            "or computed anew; between_groups: finish them first"
        ),
    ] = "keep_kv"
    transport: Annotated[
        Literal["auto", "shared_memory", "tcp", "nccl", "gloo"],
        Meta(
            description="auto: shared memory on one machine, else tcp; nccl: from GPU to GPU of "
            "one machine; gloo: the same path between CPUs"
        ),
    ] = "auto"
    slots: Annotated[int, Meta(ge=2, description="ring slots, beside those injection needs")] = 4


class Durability(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    mode: Annotated[
        Literal["memory", "process", "disk"],
        Meta(
            description="what the buffer survives: nothing (its death ends the run) | any killed "
            "process | a power cut (replies wait for the disk)"
        ),
    ] = "memory"


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    every: Annotated[Count, Meta(description="versions; 0: only at the start and the end")] = 20
    prompts: Annotated[
        Positive, Meta(description="held-out prompts in an evaluation along the way")
    ] = 256
    final_prompts: Annotated[
        Positive, Meta(description="held-out prompts of the first and the last evaluation")
    ] = 1024
    ood_every: Annotated[
        Count,
        Meta(
            description="the same for out-of-distribution prompts, at most `prompts` of them; 0: "
            "only at the start and the end"
        ),
    ] = 0
    ood_prompts: Annotated[
        Count, Meta(description="out-of-distribution prompts of the first and the last evaluation")
    ] = 512
    temperature: Annotated[float, Meta(gt=0)] = 1.0


class Wires(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    address: Annotated[
        str,
        Meta(description="of the buffer: ipc:// or tcp://; empty: ipc in the run's own directory"),
    ] = ""
    weights_address: Annotated[
        str, Meta(description="tcp address of the learner's chunk server; empty: none")
    ] = ""
    credit_bytes: Positive = 8 * 1024 * 1024
    frame_bytes: Annotated[
        Positive, Meta(description="several samples travel in one frame up to this size")
    ] = 256 * 1024
    lease_s: Annotated[
        float, Meta(gt=0, description="a lease ends this long after the last decode progress")
    ] = 20.0
    retry_s: Annotated[
        float, Meta(gt=0, description="an unanswered request is repeated after this long")
    ] = 1.0
    connect_s: Annotated[
        float, Meta(gt=0, description="a peer that has never answered is given up after this long")
    ] = 120.0
    curve_dir: Annotated[str, Meta(description="CURVE keys, needed beyond loopback")] = ""


class Watchdog(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    multiple: Annotated[
        float,
        Meta(gt=1, description="a step is overdue after this many medians of the run's own steps"),
    ] = 20.0
    floor_s: Annotated[float, Meta(gt=0, description="and never before this")] = 60.0
    startup_s: Annotated[float, Meta(gt=0, description="grace until the first step")] = 300.0
    restarts: Annotated[Count, Meta(description="restarts of each process")] = 3


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    samples_every: Annotated[
        Count, Meta(description="batches between the samples shown in samples.jsonl; 0: none")
    ] = 10
    samples: Annotated[
        Count, Meta(description="samples of such a batch that are shown; 0: all")
    ] = 4
    split_every: Annotated[
        Count,
        Meta(
            description="batches between splits of log pi_theta / mu into engine mismatch, "
            "staleness and update, with weights out of the ring; 0: none"
        ),
    ] = 10
    split_samples: Annotated[
        Positive,
        Meta(
            description="answers of such a batch that are split, or measured against the reference"
        ),
    ] = 32
    reference_kl_every: Annotated[
        Count,
        Meta(
            description="batches between measurements of the KL to the reference where no KL term "
            "is on (a second model in memory); 0: none"
        ),
    ] = 10
    kl_moved: Annotated[
        Count,
        Meta(
            description="batches between measurements of kl/moved, at two forward passes each; 0: "
            "none"
        ),
    ] = 0
    stream: Annotated[
        bool,
        Meta(
            description="keep every batch as it was trained: what `asyncrl replay` trains on again"
        ),
    ] = False
    stream_mib: Annotated[
        Positive,
        Meta(
            description="stream: MiB that it may take in all; recording stops there, the run goes "
            "on"
        ),
    ] = 1024
    weights_every: Annotated[
        Count,
        Meta(
            description="stream: batches between the weights that are kept; 0: the first ones only"
        ),
    ] = 0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole tree.  `model.path` and `task.name` have no default."""

    name: Annotated[
        str, Meta(description="of the run directory; empty: the file's name and the time")
    ] = ""
    runs: Annotated[str, Meta(description="directory of run directories")] = "runs"
    seed: Count = 0
    generators: Annotated[
        Positive, Meta(description="generator processes that `asyncrl run` starts")
    ] = 1
    exact: Annotated[
        bool | Literal["try"],
        Meta(
            description="bitwise equal logprobs in engine and learner; a self-test decides, and "
            "its failure ends the run (true) or is only said (try)"
        ),
    ] = False
    model: Model
    task: Task
    reward: Reward = Reward()
    generator: Generator = Generator()
    learner: Learner = Learner()
    staleness: Staleness = Staleness()
    advantage: Advantage = Advantage()
    value: Value = Value()
    correction: Correction = Correction()
    loss: Loss = Loss()
    reshape: Reshape = Reshape()
    kl: KL = KL()
    stop: Stop = Stop()
    weights: Weights = Weights()
    durability: Durability = Durability()
    evaluation: Evaluation = Evaluation()
    wires: Wires = Wires()
    watchdog: Watchdog = Watchdog()
    record: Record = Record()
