"""The configuration as a frozen tree of msgspec structs, one per section.  Imports no torch.

The string behind a key is its description. The JSON schema is generated from it and from the
key's type.
`asyncrl.config.load` reads a file, applies `--set`, converts the result and checks the rules that
span several keys."""

from __future__ import annotations

import math
import re
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
    Decay,
    NonNegative,
    Positive,
    PositiveFloat,
    PositiveShare,
    PpoLoss,
    Reshape,
    RlooAdvantage,
    Section,
    Seed,
    Share,
    Stop,
    Value,
    read_with,
)
from asyncrl.config.agents import AgentConfig, AgentSource
from asyncrl.config.engines import ENGINES, EngineInfo, EngineName
from asyncrl.config.transports import TransportName


class ModelConfig(Section):
    path: str
    """Hugging Face directory of the initial policy and its tokenizer, or hf://ORG/NAME[@REVISION],
    which is downloaded once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the learner's weights. bfloat16 halves the memory and is less precise."""
    device: str = "auto"
    """Device of the learner and the generators: auto, cpu, cuda or cuda:N. auto takes a GPU if
    there is one."""
    reference: str = ""
    """Directory of the reference policy for KL terms that do not name their own. Empty: the initial
    policy."""
    warm_start: bool = False
    """If `path` does not exist, build a tiny model there and pretrain it on the task. `path` must
    then be a project's folder `model` or a folder in its `models`."""
    warm_start_experts: Annotated[int, Meta(ge=0, le=256)] = 0
    """Experts in each layer of that tiny model, of which a token uses 2. 0: a dense model."""


class TaskSource(Section):
    """The keys of a task that a run and a part of a mixture share."""

    name: str
    """A built-in task, `file` for your own prompts, `env` for those of agent.env = verifiers:NAME,
    reasoning_gym:GENERATOR, or `mixture` for several ([[task.mixture]])."""
    prompts: str = ""
    """Training prompts of task `file`, with the columns prompt or messages, and answer: JSONL, CSV
    or parquet, a directory of a data set, or hf://datasets/ORG/NAME, each with #SPLIT if it has
    several."""
    heldout: str = ""
    """Held-out prompts of task `file`, in the same format as `prompts`. They are never trained
    on."""
    ood: str = ""
    """Out-of-distribution prompts of task `file`, in the same format as `prompts`. Give them to see
    what training unlearns."""
    columns: dict[Literal["prompt", "messages", "answer", "image", "images"], str] = {}
    """Names of the columns in the files of task `file`, for example { prompt = "question", answer =
    "reward_model.ground_truth" }; a dot names a part of a column. Empty: prompt, messages, answer,
    image and images."""
    options: dict[str, Any] = {}
    """Settings of a reasoning_gym:GENERATOR, for example max_terms = 3."""


class JudgeConfig(Section):
    url: str = ""
    """Address of an OpenAI-compatible server, up to /v1, that grades completions. Empty: no
    judge."""
    model: str = ""
    """Name of the judge's model on that server."""
    key_env: str = ""
    """Environment variable that holds the server's key. Empty: send no key."""
    template: str = ""
    """File with the judge's prompt, with {question}, {answer} and {reference}. Empty: the one in
    actors/scorers/judge.py."""
    low: float = 0.0
    """Lowest grade."""
    high: float = 10.0
    """Highest grade. A grade outside [low, high] is a failed reward."""
    max_tokens: Positive = 512
    """Maximum length of the judge's reply, in tokens."""
    temperature: NonNegative = 0.0
    """Sampling temperature of the judge."""
    concurrency: Positive = 16
    """Most requests at the same time in each reward process."""
    timeout_s: PositiveFloat = 30.0
    """Seconds that one request may take."""
    attempts: Positive = 6
    """Most requests for one grade. A request is repeated after status 408, 409, 425, 429 or 5xx, or
    without a reply."""
    requests_per_minute: Count = 0
    """Most requests per minute of all processes on this machine. 0: no limit."""
    tokens_per_minute: Count = 0
    """Most tokens per minute, input and output, of all processes on this machine. 0: no limit."""
    budget_requests: Count = 0
    """Most requests of the whole run, including restarts and resumes. The run ends at this limit.
    0: no limit."""
    budget_tokens: Count = 0
    """Most tokens of the whole run, including restarts and resumes. The run ends at this limit. 0:
    no limit."""


class RewardModelConfig(Section):
    path: str = ""
    """Hugging Face directory of a sequence classifier with one label, which scores completions.
    Empty: none."""
    device: str = "cpu"
    """Device of the reward model: auto, cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the reward model's weights."""
    context: Count = 0
    """Maximum length of prompt and completion, in tokens. Longer ones are failed rewards. 0: the
    model's own maximum."""
    threads: Positive = 1
    """OpenMP threads of the reward model's process."""


class CurriculumConfig(Section):
    """Pools of prompts by success rate, and how often the prompts of each pool are used."""

    easy: PositiveShare = 1.0
    """Share of the passes that include an easy prompt."""
    hard: PositiveShare = 1.0
    """Share of the passes that include a hard prompt."""
    easy_from: Share = 1.0
    """A prompt is easy if this share of its last group passed, or more."""
    hard_to: Share = 0.0
    """A prompt is hard if this share of its last group passed, or less."""
    passing: float = 1.0
    """Smallest reward of a completion that counts as passed."""


def interpolate_weight(weight: float | list[tuple[int, float]], batch: float) -> float:
    """Return a part's weight at a batch: constant, or linear between the points of a schedule.

    >>> falling = [(10, 1.0), (20, 0.0)]
    >>> interpolate_weight(2.0, 7), interpolate_weight(falling, 0), interpolate_weight(falling, 15)
    (2.0, 1.0, 0.5)
    """
    if not isinstance(weight, list):
        return float(weight)
    previous = weight[0]
    for point in weight:
        if point[0] > batch:
            share = max(batch - previous[0], 0.0) / max(point[0] - previous[0], 1)
            return previous[1] + share * (point[1] - previous[1])
        previous = point
    return previous[1]


def compute_learning_rate_share(settings: Any, number: int) -> float:
    """Return the share of `lr` at step `number`, which counts from 0.

    settings: a LearnerConfig (a step is a batch) or an SftTraining, which also has an `lr_end`.
    The rate rises from 0 over `warmup_steps`, then decays over the remaining steps: the formulas
    of transformers' constant_with_warmup, linear and cosine (cosine_with_min_lr with an `lr_end`).
    """
    warmup = settings.warmup_steps
    if number < warmup:
        return float(number / warmup)
    if settings.schedule == "constant":
        return 1.0
    decay_steps = max(1, settings.steps - warmup)
    share = max(0.0, (settings.steps - number) / decay_steps)
    if settings.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * ((number - warmup) / decay_steps)))
    end = getattr(settings, "lr_end", 0.0)
    return float(share * (1 - end) + end)


def explain_changed_steps(settings: Any, earlier_steps: int, number: int) -> str:
    """Return what a changed number of steps does to the learning rate of step `number`, or "".

    settings: a LearnerConfig or an SftTraining.  earlier_steps: its `steps` before the resume."""
    earlier = msgspec.structs.replace(settings, steps=earlier_steps)
    old, new = (x.lr * compute_learning_rate_share(x, number) for x in (earlier, settings))
    if old == new:
        return ""
    return (
        f"steps was {earlier_steps} and is {settings.steps}: the {settings.schedule} schedule now "
        f"covers the new length, so the learning rate of step {number} is {new:.3g} instead of "
        f"{old:.3g}"
    )


class MixedTaskConfig(TaskSource):
    """A part of a mixture: a table `[[task.mixture]]`."""

    label: Annotated[str, Meta(pattern="^([a-z][a-z0-9-]*)?$")] = ""
    """Name in the metrics, task/LABEL: small letters, digits and hyphens. Empty: the task's
    name."""
    weight: NonNegative | Annotated[list[tuple[Count, NonNegative]], Meta(min_length=1)] = 1.0
    """Share of the groups, relative to the other parts. A list [[batch, weight], ...] is a
    schedule: linear between its points, constant before and after."""
    reward: str = ""
    """Reward function of the part: module:function or file.py:function. Empty: the run's reward, or
    else that of the task."""
    max_new_tokens: Count = 0
    """Maximum length of a completion of the part, at most generator.max_new_tokens. 0: the same."""
    passes: Count = 0
    """Passes through the training prompts of task `file`, after which its share goes to the other
    parts. 0: no limit."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """How often easy and hard prompts are used, by the success rate of their last group. All
    prompts of a generated task are in one pool."""
    judge: JudgeConfig = JudgeConfig()
    """Judge of the part, a table [task.mixture.judge] with the keys of [reward.judge]."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Reward model of the part, a table [task.mixture.reward_model] with the keys of
    [reward.model]."""
    agent: AgentSource = AgentSource()
    """Environment, tools or agent of the part, a table [task.mixture.agent] with the keys of
    [agent]. Without one, the part uses the run's agent, or single completions."""

    @property
    def has_own_reward(self) -> bool:
        """Whether the part has another reward than its task's and the run's."""
        return bool(self.reward or self.judge.url or self.reward_model.path)

    @property
    def title(self) -> str:
        """The label, or the task's name in the characters of a label."""
        return self.label or re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")


class TaskConfig(TaskSource):
    mixture: list[MixedTaskConfig] = []
    """The parts of task `mixture`, each a table [[task.mixture]] with the keys of [task] and some
    more. See docs/prompts.md."""


class RewardConfig(Section):
    function: str = ""
    """Reward function: module:function or file.py:function. Empty: the task's own reward."""
    functions: list[str] = []
    """Several reward functions, each as in `function`. Their weighted sum is the reward, and each
    is a part of it under its name. A function that returns None does not apply to the
    completion."""
    weights: list[float] = []
    """Weights of `functions`, one each. Empty: 1 for each."""
    share: bool = False
    """Send the file of `function` to machines that join with `asyncrl join --trust-code`, which run
    it. Otherwise the file must already be there."""
    deadline_s: PositiveFloat = 10.0
    """Seconds that one call of the reward function may take. Its import may take at least 60
    seconds."""
    workers: Count | Literal["auto"] = "auto"
    """Reward processes of each generator. auto: none for a task's own reward, which runs in the
    generator; otherwise from one to the number of cores, doubled while completions wait, cores are
    idle and the last doubling helped. 0: at most one."""
    concurrency: Positive = 64
    """Calls of an `async def` reward function that each reward process awaits at the same time."""
    batch: Positive = 64
    """Most completions in one call of a reward function that accepts lists (`batched = True`)."""
    on_error: Literal["drop", "stop"] = "drop"
    """After a failed reward, drop the sample and generate it again, or stop the run."""
    error_budget: Share = 0.1
    """Share of a batch's samples whose reward may raise, time out or return something other than a
    number. Above it the run stops."""
    machinery_budget: Share = 0.1
    """Share of a batch's samples that may fail because a reward process exited. Above it the run
    stops."""
    judge: JudgeConfig = JudgeConfig()
    model: RewardModelConfig = RewardModelConfig()

    @property
    def uses_reward_processes(self) -> bool:
        """Whether separate processes compute the reward instead of the task."""
        return bool(self.function or self.functions or self.judge.url or self.model.path)

    @property
    def function_names(self) -> dict[str, str]:
        """The path of each of `functions`, by its name as a part of the reward.

        A name that is not unique, or is `reward`, has its module's in front."""
        pairs = [path.rpartition(":") for path in self.functions]
        names = [name for _, _, name in pairs]
        modules = [re.split("[./]", module.removesuffix(".py"))[-1] for module, _, _ in pairs]
        return {
            name if names.count(name) == 1 and name != "reward" else f"{module}.{name}": path
            for module, name, path in zip(modules, names, self.functions, strict=True)
        }


# bytes per token of a bitmap over the largest vocabulary in use (262,144 tokens) and its length
LARGEST_BITMAP = (1 << 15) + 4


class GeneratorConfig(Section):
    engine: EngineName = "embedded"
    """Inference engine that generates completions. `asyncrl engines` shows which work on this
    machine."""
    dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Data type of the engine's weights. same: that of the model."""
    mantissa_bits: Annotated[int, Meta(ge=0, le=23)] = 0
    """Embedded engine: round the weights to this many mantissa bits (bfloat16: 7, fp8: 3) to study
    a mismatch with the learner. 0: off."""
    quantize: Literal["none", "int8", "fp8"] = "none"
    """Embedded engine: cast the weights of the linear layers to this format when they arrive, with
    one scale a row, and compute with the rounded numbers. fp8: e4m3."""
    speculate: Count = 0
    """Embedded engine: draft up to this many tokens of a completion from earlier continuations of
    the same tokens, in it or its group, and verify them in one step. The samples stay the same. 0:
    off."""
    draft_rows: Annotated[Count | Literal["auto"], read_with("speculate")] = "auto"
    """Draft while at most this many completions are being generated. auto: while it saves time, by
    the cost measured at the start and the tokens accepted since the last weight update."""
    slots: Positive = 256
    """Completions that a generator samples at the same time. More slots use more memory."""
    max_new_tokens: Positive = 64
    """Maximum length of a completion, in tokens. Longer ones are cut; see advantage.truncated."""
    context: Positive = 256
    """Maximum length of prompt and completion together, in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature during training. Log-probabilities are recorded after it."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of tokens whose probability adds up to this. 1: all tokens. The
    learner normalizes over the same tokens."""
    top_k: Count = 0
    """Sample from this many most probable tokens. 0: all tokens. The learner normalizes over the
    same tokens."""
    stop: list[str] = []
    """Texts that end a completion, besides the end-of-sequence tokens of tokenizer and model. Each
    must be a single token."""
    prefix_cache_tokens: Count = 16384
    """Sessions: tokens whose keys and values are kept for later calls that begin with them, until
    the next weight update. 0: encode each call in full, which exact mode always does."""
    kv_cache_mib: Count = 0
    """vLLM: memory for keys and values, in MiB. 0: as much as slots x context and, with sessions,
    prefix_cache_tokens need."""
    servers: list[Annotated[str, Meta(pattern="^https?://")]] = []
    """vLLM's server: addresses of running servers, such as "http://10.0.0.7:8000". Empty: the
    generator starts its own on this machine."""
    own_servers: Count = 0
    """vLLM's server: how many the generator starts. 0: one, or none beside `servers`."""
    tensor_parallel: Count = 0
    """vLLM's server: GPUs that divide each server. 0: one."""
    weights_dir: str = ""
    """vLLM's server: directory for the file by which servers get new weights; each must be able to
    read it. Empty: this machine's shared memory, which servers elsewhere cannot read."""
    threads: Positive = 1
    """OpenMP threads of each generator process."""
    gpus: list[Count] = []
    """GPU numbers, assigned to the generators in turn. Empty: model.device."""

    @property
    def abilities(self) -> EngineInfo:
        """The abilities of the engine."""
        return ENGINES[self.engine]


class MeshConfig(Section):
    replicate: Positive = 1
    """FSDP2: copies of the model among the ranks. Each is divided among ranks that follow each
    other, and the copies add up their gradients. Links between machines then carry gradients alone,
    once a backward pass."""
    shard: Count = 0
    """FSDP2: ranks that divide the parameters of one copy. 0: all others."""
    tensor: Positive = 1
    """FSDP2: ranks that follow each other and compute each token together, with heads, feed-forward
    and vocabulary divided among them (tensor parallelism): Llama, Qwen2, Qwen3 and Mistral."""


class LearnerConfig(Section):
    backend: Literal["torch", "deepspeed", "fsdp2"] = "torch"
    """Training backend. With several ranks, torch keeps the whole model in each, while deepspeed
    and fsdp2 can divide it among them; fsdp2 is part of PyTorch."""
    ranks: Positive | Literal["auto"] = 1
    """Number of learner processes that share the training. auto: one, whose number of threads is
    chosen after the first batches."""
    mesh: MeshConfig = msgspec.field(default_factory=MeshConfig)
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 2
    """DeepSpeed: what the ranks partition. 0: nothing; 1: optimizer state; 2: also gradients; 3:
    also parameters. Higher stages save memory."""
    offload: bool = False
    """DeepSpeed, FSDP2: keep the optimizer state, and run the optimizer step, in the CPU's memory.
    Saves GPU memory and is slower."""
    rank_timeout_s: PositiveFloat = 120.0
    """Seconds without a response from another rank after which that rank counts
    as lost."""
    steps: Count = 100
    """Batches to train on. The run ends after them. 0: only evaluate the model."""
    groups: Positive = 32
    """Groups (prompts) in a batch."""
    group_size: Positive = 8
    """Samples of each prompt. Advantages compare the samples of a group, so most need at least
    2."""
    epochs: Positive = 1
    """Passes over each batch."""
    minibatches: Positive = 1
    """Optimizer steps in each pass over a batch. More steps use a batch better and move the policy
    further from the one that sampled it."""
    micro_batch_tokens: Positive = 16384
    """Tokens (prompts and completions, padded) in one forward pass. Lower it when the learner runs
    out of memory; the result stays the same."""
    gradient_checkpointing: bool = False
    """Keep only the states between layers and compute each layer again in the backward pass. Saves
    memory and costs one more forward pass."""
    replay_routing: bool = False
    """Mixtures of experts: the generators record the experts of every token, and the learner uses
    the same ones instead of its routers' own choice."""
    shared_rounding: Annotated[bool, read_with("generator.quantize")] = False
    """Multiply with the weights as generator.quantize rounds them, in every forward pass of the
    learner. The weights keep their precision and get the gradient at the rounded ones
    (straight-through)."""
    lr: NonNegative = 2e-4
    """Learning rate at the end of the warm-up. Absent with AdamW: 2e-4 for a model of at most ten
    million parameters, 1e-5 up to a billion, 1e-6 above that and for hf://, and ten times as much
    for adapters. Tune it for each method before you compare methods."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up: constant, or falling to 0 at the end of the
    run."""
    warmup_steps: Count = 0
    """Batches over which the learning rate rises linearly from 0 to learner.lr; batch 0 is trained
    at 0. 0: none."""
    beta1: Decay = 0.9
    """AdamW: decay of the running mean of the gradient."""
    beta2: Decay = 0.99
    """AdamW: decay of the running mean of the squared gradient."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of the optimizer. 0: none."""
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """Optimizer: AdamW, plain SGD without momentum, or torch's Muon for the matrices of the layers
    with AdamW for all else, at AdamW's learning rate. Muon ignores the gradient's scale, so
    clipping does not shrink its step."""
    lr_lag: Literal["off", "inverse"] = "off"
    """inverse: divide each batch's learning rate by 1 + its mean lag, in updates (arXiv
    2607.01083)."""
    clip_norm: NonNegative = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down. 0: no clipping."""
    gradient_cosine: Literal["off", "log", "project"] = "off"
    """Cosine between each step's gradient and that of the step before. log: record it; project:
    also reduce it to at most cosine_max (GAC)."""
    cosine_max: Annotated[float, Meta(ge=0, lt=1), read_with("gradient_cosine", "project")] = 0.0
    """project: largest cosine between two successive gradients. 0 removes all of the shared
    direction."""
    prefetch: Annotated[Count, Meta(le=1)] = 1
    """Batches that the learner leases ahead. 0: it requests a batch only when it needs one, and
    waits for the transfer."""
    checkpoint_every: Positive = 20
    """Batches between checkpoints. A restarted learner repeats the batches since the last one."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints to keep. Older ones are deleted."""
    threads: Positive = 1
    """OpenMP threads of the learner process."""
    gpus: list[Count] = []
    """GPU number of each rank. Empty: model.device."""

    @property
    def process_count(self) -> int:
        return 1 if self.ranks == "auto" else self.ranks

    @property
    def thread_count(self) -> int:
        """OpenMP threads of all learner processes."""
        return self.process_count * self.threads

    @property
    def distributed(self) -> bool:
        """Whether gradients add up over processes, in another order than in one."""
        return self.process_count > 1 or self.backend != "torch"


class LoraConfig(Section):
    rank: Count = 0
    """Rank of the LoRA adapters. Only the adapters are then trained and published. 0: train all
    weights."""
    alpha: Annotated[PositiveFloat, read_with("rank")] = 16.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    target_modules: Annotated[list[str], read_with("rank")] = []
    """Linear layers that get an adapter, by the end of their names, such as q_proj. Empty: all
    except the output head."""


class ExportConfig(Section):
    lora: Annotated[Literal["merged", "adapter"], read_with("lora.rank")] = "merged"
    """Content of RUN/model: base model and adapter merged into one model, or only the adapter in
    peft's format."""


class AutoLimitConfig(Section):
    """An adaptive limit, from 1 to `most`."""

    auto: Literal["ess"]
    """Adapt the limit to the effective sample size (is/ess) and the learner's idle time."""
    floor: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Lower the limit while is/ess is below this."""
    most: Positive = 16
    """Upper bound of the limit, in versions."""


USUAL_WAIT = 0.02  # staleness.wait = auto


class StalenessConfig(Section):
    max_lag: NonNegative | AutoLimitConfig = 2.0
    """Largest lag of a token, in versions: a whole number or inf. 0: synchronous. { auto = "ess",
    floor = 0.5, most = 16 } adapts it during the run. Raise it when the learner or the generators
    are idle; lower it when is/ess is low."""
    wait: Annotated[float, Meta(ge=0, lt=1)] | Literal["auto"] = "auto"
    """Share of its time that the run may wait for fresher samples. Tickets are granted only as far
    ahead as this requires, at most up to max_lag. 0: always up to max_lag. auto: 0.02 with pace and
    without injected lag; 0 in comparisons and sweeps, which need a known lag."""
    on_exceed: Literal["pace", "drop", "mask", "downweight"] = "pace"
    """Treatment of samples above max_lag. pace: prevent them, by limiting how far ahead tickets are
    granted; drop: discard the sample; mask: exclude its tokens above the limit from the loss;
    downweight: halve the weight of a token for every half_life versions above the limit."""
    half_life: Annotated[PositiveFloat, read_with("on_exceed", "downweight")] = 2.0
    """downweight: versions above the limit at which a token has half its weight."""
    order: Literal["auto", "ticket", "completion", "freshest"] = "auto"
    """Groups that form the next batch: those of the oldest tickets, those completed first, or those
    of the smallest lag. auto: ticket with pace, otherwise completion."""
    inject: int | list[float] | None = None
    """Lag to inject for experiments, in versions: a constant, or a list of the probabilities of lag
    0, 1, 2, ..."""
    delay: NonNegative = 0.0
    """Delay completions on purpose, to study long tails: scale of a random delay in decode steps
    per token. 0: none."""
    delay_of: Annotated[Literal["ticket", "answer"], read_with("delay")] = "ticket"
    """Sample `delay` once per ticket (the whole group is late) or once per sample."""

    @property
    def limit(self) -> float:
        """The largest allowed lag in versions; the upper bound of an adaptive limit."""
        limit = self.max_lag
        return float(limit.most) if isinstance(limit, AutoLimitConfig) else limit

    @property
    def most_injected(self) -> int:
        """The largest lag to inject, in versions; 0 without any."""
        return len(self.inject) - 1 if isinstance(self.inject, list) else self.inject or 0

    @property
    def wait_target(self) -> float:
        """`wait` as a share; 0: tickets are always granted up to the limit."""
        if not self.allows_window:
            return 0.0
        return USUAL_WAIT if self.wait == "auto" else self.wait

    @property
    def allows_window(self) -> bool:
        """Whether tickets may be granted less far ahead than the limit allows."""
        bounded = 0 < self.limit < math.inf
        return bounded and self.on_exceed == "pace" and self.inject is None

    @property
    def ess_floor(self) -> float:
        """`floor` of an adaptive limit; 0: the limit is constant."""
        return self.max_lag.floor if isinstance(self.max_lag, AutoLimitConfig) else 0.0


class WeightsConfig(Section):
    in_flight: Literal["keep_kv", "recompute_kv", "between_groups"] = "keep_kv"
    """Treatment of unfinished completions when new weights arrive. keep_kv and recompute_kv
    continue them under the new weights (partial rollouts) with the old keys and values, or with
    recomputed ones; between_groups finishes them first."""
    transport: TransportName = "auto"
    """Path of the weights from learner to generators. auto: shared memory on one machine, otherwise
    tcp; nccl: from GPU to GPU on one machine; gloo: the same between CPUs."""
    slots: Annotated[int, Meta(ge=2)] = 4
    """Versions that the ring in shared memory holds, besides those that lag injection needs. Each
    takes the memory of one model."""


class DurabilityConfig(Section):
    mode: Literal["memory", "process", "disk"] = "memory"
    """Failures that the buffer survives. memory: none, and its exit ends the run; process: any
    killed process; disk: also a power cut, because replies wait for the disk."""


class EvaluationSetConfig(Section):
    """A further held-out set: a table `[[evaluation.sets]]`."""

    name: Annotated[str, Meta(pattern="^[a-z][a-z0-9-]*$")]
    """Name in the metrics, eval/NAME: small letters, digits and hyphens."""
    file: str = ""
    """Prompts of the set, from a source like that of task.prompts, with the columns of
    task.columns."""
    task: str = ""
    """Built-in task, or reasoning_gym:GENERATOR, with the set's prompts and reward. Without `file`
    and `task`, the set has prompts of the run's task."""
    options: dict[str, Any] = {}
    """Settings of a reasoning_gym:GENERATOR in `task`."""
    split: Literal["heldout", "ood"] = "heldout"
    """Split of a task whose prompts the set has."""
    reward: str = ""
    """Reward function of the set: module:function or file.py:function. Empty: the run's reward, or
    with `task` that of the task."""
    every: Count = 0
    """Versions between evaluations. 0: only at the start and the end."""
    prompts: Positive = 256
    """Most prompts of an evaluation."""
    samples: Positive = 1
    """Completions of each prompt."""
    temperature: NonNegative = 1.0
    """Sampling temperature. 0: greedy, with one sample per prompt."""
    greedy: bool = False
    """Also score one greedy completion of each prompt."""
    passing: float = 1.0
    """Smallest reward of a completion that counts as passed, for pass@k."""
    pass_at: list[Positive] = []
    """The k of pass@k, each at most `samples`. []: 1 and `samples`."""

    @property
    def counts(self) -> tuple[int, ...]:
        """The k of pass@k."""
        return tuple(self.pass_at) or tuple(dict.fromkeys((1, self.samples)))


class EvaluationConfig(Section):
    every: Count = 20
    """Versions between evaluations. 0: only at the start and the end."""
    prompts: Positive = 256
    """Held-out prompts of an evaluation during the run."""
    final_prompts: Positive = 1024
    """Held-out prompts of the first and the last evaluation. More prompts make smaller gains
    visible."""
    ood_every: Count = 0
    """Versions between evaluations on out-of-distribution prompts, with at most `prompts` of them.
    0: only at the start and the end."""
    ood_prompts: Count = 512
    """Out-of-distribution prompts of the first and the last evaluation."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of evaluations."""
    generators: Count = 0
    """How many of `generators` serve only evaluations. The others then never pause for one. 0: all
    serve both, evaluations first."""
    sets: list[EvaluationSetConfig] = []
    """Further held-out sets, each a table [[evaluation.sets]] with a name. See docs/evaluation.md
    for its keys."""

    @property
    def names(self) -> list[str]:
        """The names of all sets, which are splits of their prompts."""
        return ["heldout", "ood", *(evaluation_set.name for evaluation_set in self.sets)]


class WiresConfig(Section):
    address: str = ""
    """Address of the buffer: ipc:// or tcp://. Empty: ipc in the run directory. Use tcp for a run
    on several machines."""
    weights_address: str = ""
    """tcp address where the learner serves weights. Empty: none."""
    gateway_address: str = ""
    """tcp address where the gateway of sessions ([agent]) serves generators on other machines.
    Empty: ipc, for generators of its machine."""
    credit_bytes: Positive = 8 * 1024 * 1024
    """Bytes of samples that a generator may have sent without an acknowledgment from the buffer."""
    frame_bytes: Positive = 256 * 1024
    """Bytes up to which several samples are sent in one message."""
    lease_s: PositiveFloat = 20.0
    """Seconds without decode progress after which the lease of a ticket ends, so that another
    generator may lease it."""
    retry_s: PositiveFloat = 1.0
    """Seconds without a reply after which a request is repeated."""
    connect_s: PositiveFloat = 120.0
    """Seconds after which a process exits if a peer has never replied."""
    curve_dir: str = ""
    """Directory of the CURVE keys made by `asyncrl keys`. Required for every address other than
    loopback."""


class WatchdogConfig(Section):
    multiple: Annotated[float, Meta(gt=1)] = 20.0
    """A step is overdue after this multiple of the median duration of the run's steps."""
    floor_s: PositiveFloat = 60.0
    """Seconds before which no step is overdue."""
    startup_s: PositiveFloat = 300.0
    """Seconds that a process may take until its first step."""
    restarts: Count = 3
    """Restarts of each process before the run ends."""


class HostPlacement(Section):
    cpus: PositiveFloat = 1.0
    """CPUs of each process."""
    gpus: NonNegative = 0.0
    """GPUs of each process."""


class GeneratorPlacement(HostPlacement):
    count: Count = 0
    """Generators on the cluster. 0: as `generators`."""


class Placement(Section):
    learner: HostPlacement = HostPlacement()
    """Resources of all learner ranks, and of the buffer beside them."""
    generator: GeneratorPlacement = GeneratorPlacement()
    """Resources of each generator."""
    nodes: Count = 0
    """Hosts of a cluster, for which `asyncrl run --dry-run` makes a plan. 0: none."""
    gpus_per_node: Positive = 8
    """GPUs of each of these hosts."""
    gpu_gib: PositiveFloat = 80.0
    """Memory of each of these GPUs, in GiB."""
    strategy: Literal["PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Use few hosts, many hosts, or a host for each process."""
    deadline_s: PositiveFloat = 300.0
    """Seconds to wait until the cluster has room for all processes."""


TrackerName = Literal["wandb", "trackio", "mlflow"]
SampleRule = Literal["group", "best", "worst", "off_policy", "longest", "random"]


class RecordConfig(Section):
    samples_every: Count = 10
    """Batches between the samples written to samples.jsonl. 0: none."""
    samples: Annotated[Count, read_with("samples_every")] = 4
    """Samples of such a batch to write. 0: all."""
    token_samples: Annotated[list[SampleRule], read_with("samples_every")] = msgspec.field(
        default_factory=lambda: ["group", "best", "worst", "off_policy", "longest"]
    )
    """Samples of such a batch to log with every token in token_samples.jsonl: a whole group (by
    rotation), the best and the worst by reward, the one furthest from its behavior policy, the
    longest, a random one. `asyncrl samples` and `asyncrl watch` show them. []: none."""
    token_samples_mib: Annotated[Positive, read_with("samples_every")] = 64
    """Largest size of token_samples.jsonl, in MiB."""
    optimizer_steps_mib: Positive = 64
    """Largest size of optimizer_steps.jsonl, in MiB: about 1 KiB for each optimizer step with
    loss.surrogate = reshape, half of that otherwise."""
    trackers: list[TrackerName] = msgspec.field(default_factory=list)
    """Trackers that receive every row of metrics.jsonl besides TensorBoard, each from its own
    process (docs/watch.md). []: none."""
    split_every: Count = 5
    """Batches between splits of log pi_theta / mu into engine mismatch, staleness and update. A
    split reads old weights from the ring and costs forward passes. 0: none."""
    split_samples: Positive = 8
    """Samples of such a batch to split, from as few groups as possible. kl/moved is also measured
    on them."""
    reference_kl_every: Count = 10
    """Batches between measurements of the KL to the reference policy in runs without a KL term.
    They hold a second model in memory. 0: none."""
    reference_samples: Positive = 32
    """Samples of such a batch to measure."""
    kl_moved: Count = 0
    """Batches between measurements of kl/moved on the whole batch, at two forward passes each. 0:
    measure it only on the samples of the split."""
    stream: bool = False
    """Record every batch as it was trained, so that `asyncrl replay` can train on it again."""
    stream_mib: Positive = 1024
    """stream: MiB that the recording may take. Recording then stops and the run continues."""
    weights_every: Count = 0
    """stream: batches between recorded weights. 0: only the initial ones."""


class Config(Section, kw_only=True):
    """The config of a run.  `model.path` and `task.name` have no default."""

    name: str = ""
    """Name of the run directory. Empty: the config file's name and the time."""
    runs: str = "runs"
    """Directory that holds the run directories."""
    seed: Seed = 0
    """Seed of prompts, sampling and training. Repeat a comparison under several seeds."""
    generators: Positive = 1
    """Generator processes that `asyncrl run` starts."""
    exact: bool | Literal["try"] = False
    """Make log-probabilities of engine and learner bitwise equal. A self-test decides; its failure
    ends the run (true) or is only reported (try)."""
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

    @property
    def agents(self) -> dict[str, AgentConfig]:
        """Agents by the title of their part of a mixture; "" is the agent of all other samples.

        An agent without a source stands for single completions."""
        parts_with_agents = (part for part in self.task.mixture if part.agent.uses_sessions)
        return {"": self.agent} | {
            part.title: msgspec.structs.replace(
                self.agent,
                **{name: getattr(part.agent, name) for name in AgentSource.__struct_fields__},
            )
            for part in parts_with_agents
        }

    @property
    def uses_sessions(self) -> bool:
        """Whether all samples, or those of some parts of a mixture, are sessions."""
        return any(agent.uses_sessions for agent in self.agents.values())

    @property
    def serves_agents(self) -> bool:
        """Whether some agents call over HTTP."""
        return any(agent.http for agent in self.agents.values())

    @property
    def reads_versions(self) -> bool:
        """Whether the learner needs the weights of the versions that sampled a batch."""
        return self.correction.proximal == "version" or self.loss.center != "off"

    @property
    def support_bytes(self) -> int:
        """The most bytes per token that a message needs for the tokens it was sampled from."""
        if self.generator.top_k > 0:
            return 4 * (self.generator.top_k + 1)
        restricted = self.generator.top_p < 1 or self.agent.forced == "constrain"
        return LARGEST_BITMAP if restricted else 0
