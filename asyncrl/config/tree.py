"""The configuration: TOML to a frozen tree of msgspec structs.  Imports no torch.

A key's meaning, unit and range stand in its `Meta`; configs/README.md and the JSON schema are
generated from here. `load` reads a file, applies `--set` overrides to the raw table, converts it
(unknown keys and wrong types are one clear line) and checks the rules that span several keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import (
    KL,
    AnyAdvantage,
    AnyCorrection,
    AnyLoss,
    BehaviorCorrection,
    Count,
    NonNegative,
    Positive,
    PpoLoss,
    Reshape,
    RlooAdvantage,
    Seed,
    Share,
    Stop,
    Value,
    read_with,
)
from asyncrl.config.agents import AgentConfig
from asyncrl.config.engines import EngineName
from asyncrl.config.placement import Placement
from asyncrl.config.scorers import JudgeConfig, RewardModelConfig
from asyncrl.config.transports import TransportName


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: Annotated[
        str,
        Meta(
            description="Hugging Face directory of the initial policy and its tokenizer, or "
            "hf://ORG/NAME[@REVISION], fetched once"
        ),
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
            "there; in a project's folder `model` or `models` alone"
        ),
    ] = False


class TaskConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[
        str,
        Meta(
            description="a built-in task, `file` for prompts of your own, or "
            "reasoning_gym:GENERATOR"
        ),
    ]
    prompts: Annotated[
        str, Meta(description="JSONL or parquet with prompt or messages, and answer")
    ] = ""
    heldout: Annotated[str, Meta(description="the same for held-out prompts")] = ""
    ood: Annotated[str, Meta(description="the same for out-of-distribution prompts")] = ""
    columns: Annotated[
        dict[Literal["prompt", "messages", "answer"], str],
        Meta(
            description='of `file`: what its columns are called, as { prompt = "question", '
            'answer = "solution" }; empty: as here'
        ),
    ] = {}
    options: Annotated[
        dict[str, Any],
        Meta(description="of a reasoning_gym:GENERATOR: its own settings, as max_terms = 3"),
    ] = {}


class RewardConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    function: Annotated[
        str, Meta(description="module:function or file.py:function; empty: the task's own")
    ] = ""
    share: Annotated[
        bool,
        Meta(
            description="`asyncrl join --trust-code` may fetch the function's file from the run, "
            "and runs it: else it must be there"
        ),
    ] = False
    deadline_s: Annotated[
        float, Meta(gt=0, description="seconds for one call; of the import, at least 60")
    ] = 10.0
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
    judge: JudgeConfig = JudgeConfig()
    model: RewardModelConfig = RewardModelConfig()

    @property
    def uses_reward_processes(self) -> bool:
        """Is it judged by something other than the task, in processes of their own?"""
        return bool(self.function or self.judge.url or self.model.path)


class GeneratorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    engine: Annotated[EngineName, Meta(description="`asyncrl engines` says which work here")] = (
        "embedded"
    )
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
    prefix_cache_tokens: Annotated[
        Count,
        Meta(
            description="with sessions: tokens whose keys and values stay for later calls that "
            "begin with them, until the next weights; 0: each call is encoded whole, as always in "
            "exact mode"
        ),
    ] = 16384
    kv_cache_mib: Annotated[
        Count,
        Meta(
            description="vllm: memory for keys and values; 0: what slots x context and, with "
            "sessions, prefix_cache_tokens need"
        ),
    ] = 0
    threads: Annotated[Positive, Meta(description="OMP threads of each generator process")] = 1
    gpus: Annotated[
        list[Count],
        Meta(description="GPU numbers, dealt to the generators in turn; empty: model.device"),
    ] = []


class LearnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
    gradient_checkpointing: Annotated[
        bool,
        Meta(
            description="keep the states between layers alone, and compute each layer again in the "
            "backward pass: less memory, for one more forward pass"
        ),
    ] = False
    lr: NonNegative = 2e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    beta1: Share = 0.9
    beta2: Share = 0.99
    weight_decay: NonNegative = 0.0
    optimizer: Literal["adamw", "sgd"] = "adamw"
    clip_norm: Annotated[float, Meta(ge=0, description="gradient norm; 0: no clipping")] = 1.0
    gradient_cosine: Annotated[
        Literal["off", "log", "project"],
        Meta(
            description="of each step's gradient with that of the step before; project: not above "
            "cosine_max"
        ),
    ] = "off"
    cosine_max: Annotated[
        float,
        Meta(ge=0, lt=1, description="project: 0 leaves nothing"),
        read_with("gradient_cosine", "project"),
    ] = 0.0
    prefetch: Annotated[Count, Meta(le=1, description="batches leased ahead")] = 1
    checkpoint_every: Annotated[Positive, Meta(description="batches")] = 20
    keep_checkpoints: Positive = 2
    threads: Annotated[Positive, Meta(description="OMP threads of the learner process")] = 1
    gpus: Annotated[
        list[Count], Meta(description="GPU number of each rank; empty: model.device")
    ] = []


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    rank: Annotated[
        Count,
        Meta(description="of the adapters, which alone are trained and published; 0: all weights"),
    ] = 0
    alpha: Annotated[
        float,
        Meta(gt=0, description="the adapters' product counts alpha / rank"),
        read_with("rank"),
    ] = 16.0
    target_modules: Annotated[
        list[str],
        Meta(
            description="the linear layers that get one, by the end of their names, such as "
            "q_proj; empty: all but the head"
        ),
        read_with("rank"),
    ] = []


class ExportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    lora: Annotated[
        Literal["merged", "adapter"],
        Meta(
            description="RUN/model: base and adapter as one model, or the adapter in peft's format"
        ),
        read_with("lora.rank"),
    ] = "merged"


class AutoLimitConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A limit that sets itself, from 1 to `most`."""

    auto: Annotated[
        Literal["ess"],
        Meta(description="by the effective sample size (is/ess) and the learner's idle time"),
    ]
    floor: Annotated[
        float, Meta(gt=0, lt=1, description="the limit falls while is/ess is below this")
    ] = 0.5
    most: Annotated[int, Meta(ge=1, description="versions; never more")] = 16


class StalenessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_lag: Annotated[
        Annotated[float, Meta(ge=0)] | AutoLimitConfig,
        Meta(
            description='versions; a whole number or inf; 0: synchronous; or { auto = "ess", '
            "floor = 0.5, most = 16 }: it sets itself"
        ),
    ] = 2.0
    on_exceed: Literal["pace", "drop", "mask", "downweight"] = "pace"
    half_life: Annotated[
        float,
        Meta(gt=0, description="downweight: excess lag at which a token counts half"),
        read_with("on_exceed", "downweight"),
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
    delay_of: Annotated[
        Literal["ticket", "answer"],
        Meta(
            description="whose draw `delay` is: all answers of a ticket are late together, or"
            " each by itself"
        ),
        read_with("delay"),
    ] = "ticket"

    @property
    def limit(self) -> float:
        """Versions that no token may pass: where the limit sets itself, its hard bound."""
        limit = self.max_lag
        return float(limit.most) if isinstance(limit, AutoLimitConfig) else limit

    @property
    def ess_floor(self) -> float:
        """Of a limit that sets itself; 0: it is constant."""
        return self.max_lag.floor if isinstance(self.max_lag, AutoLimitConfig) else 0.0


class WeightsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    in_flight: Annotated[
        Literal["keep_kv", "recompute_kv", "between_groups"],
        Meta(
            description="what new weights do to answers being written: continue them (partial "
            "rollouts) with the keys and values as they are, "
            "or computed anew; between_groups: finish them first"
        ),
    ] = "keep_kv"
    transport: Annotated[
        TransportName,
        Meta(
            description="auto: shared memory on one machine, else tcp; nccl: from GPU to GPU of "
            "one machine; gloo: the same path between CPUs"
        ),
    ] = "auto"
    slots: Annotated[int, Meta(ge=2, description="ring slots, beside those injection needs")] = 4
    fan_out: Annotated[
        Count,
        Meta(
            description="over tcp, copies of a version that leave the learner's machine; further "
            "generators get it from each other, each handing on as many; 0: all from the learner"
        ),
    ] = 0


class DurabilityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    mode: Annotated[
        Literal["memory", "process", "disk"],
        Meta(
            description="what the buffer survives: nothing (its death ends the run) | any killed "
            "process | a power cut (replies wait for the disk)"
        ),
    ] = "memory"


class EvaluationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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


class WiresConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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


class WatchdogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    multiple: Annotated[
        float,
        Meta(gt=1, description="a step is overdue after this many medians of the run's own steps"),
    ] = 20.0
    floor_s: Annotated[float, Meta(gt=0, description="and never before this")] = 60.0
    startup_s: Annotated[float, Meta(gt=0, description="grace until the first step")] = 300.0
    restarts: Annotated[Count, Meta(description="restarts of each process")] = 3


class RecordConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
    ] = 5
    split_samples: Annotated[
        Positive,
        Meta(
            description="answers of such a batch that are split, of as few groups as can be; "
            "kl/moved is measured on them, too"
        ),
    ] = 8
    reference_kl_every: Annotated[
        Count,
        Meta(
            description="batches between measurements of the KL to the reference where no KL term "
            "is on (a second model in memory); 0: none"
        ),
    ] = 10
    reference_samples: Annotated[
        Positive,
        Meta(description="answers of such a batch that are measured against the reference"),
    ] = 32
    kl_moved: Annotated[
        Count,
        Meta(
            description="batches between measurements of kl/moved on the whole batch, at two "
            "forward passes each; 0: it is measured where the split is, on its answers"
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
    seed: Seed = 0
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
    model: ModelConfig
    task: TaskConfig
    reward: RewardConfig = RewardConfig()
    agent: AgentConfig = AgentConfig()
    generator: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    lora: LoraConfig = LoraConfig()
    export: ExportConfig = ExportConfig()
    staleness: StalenessConfig = StalenessConfig()
    advantage: AnyAdvantage = RlooAdvantage()
    value: Annotated[Value, read_with("advantage.name", "gae")] = Value()
    correction: AnyCorrection = BehaviorCorrection()
    loss: AnyLoss = PpoLoss()
    reshape: Annotated[Reshape, read_with("loss.surrogate", "reshape")] = Reshape()
    kl: KL = KL()
    stop: Stop = Stop()
    weights: WeightsConfig = WeightsConfig()
    durability: DurabilityConfig = DurabilityConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    wires: WiresConfig = WiresConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    placement: Placement = Placement()
    record: RecordConfig = RecordConfig()
