"""vLLM behind the engine interface: its scheduler and kernels, our weights.

The engine core runs in this process (no worker, no socket), so a swap happens between two of its
steps and needs no pause. A swap writes the pulled bytes into the layers of vLLM's model
(`DirectWriter`) and sets the version label. Other models go through vLLM's
layerwise reload, and weights that stay stale are packed again. vLLM then reports per response which
tokens each version sampled. Either way can fail without an error, so every swap is probed: the
engine's log-probabilities of a few fixed tokens are compared with those that the learner published
with the weights. No completion leaves the engine between a swap and its probe.

Where samples are sessions, the prompt of a call extends the earlier calls of its session. vLLM
keeps the keys and values of prompts and responses in whole blocks while memory lasts, and encodes a
prompt only behind the kept ones. The load count salts the block hashes, so that a call never reuses
keys of other weights.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Generator, Tensor
from torch.nn.functional import linear

from actors.decoding.constraints import TokenConstraint
from actors.engine import (
    Completion,
    CompletionRequest,
    Engine,
    Key,
    PromptScores,
    TokenCounts,
    VersionMark,
    build_completion,
    build_spans,
    draw_uniform_rows,
    list_kept_ids,
    require_room,
)
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError, ProtocolError
from asyncrl.contract.importing import pause_collection
from asyncrl.contract.messages import Numbers, VersionSpan
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.contract.versions import Label
from asyncrl.models.adapters import AdapterBase
from asyncrl.models.installed import explain_missing
from asyncrl.models.policy import (
    compute_probe_logprobs,
    list_probe_ids,
    load_policy,
    load_text_config,
    resolve_device,
)

Weights = Mapping[str, Tensor]
# elements; a smaller fp32 matrix multiplies faster unpacked than packed for oneDNN (0.4 to 0.9 of
# the time at 8 to 64 rows)
PLAIN = 256 * 768
# tolerance of packed products, relative to the largest output
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class UnsupportedModel(Exception):
    """A model that cannot be written directly; the text gives the reason."""


@dataclass(frozen=True)
class StackedTensor:
    """One tensor of a vLLM layer, and the published weights stacked in it."""

    layer: Any
    kind: str  # attribute of the layer: weight, bias
    names: list[str]
    product: bool  # the matrix of a linear layer or of the output head
    tied: bool  # shared with another part, which fills it


class DirectWriter:
    """A writer of weights into the layers of one model. Raises UnsupportedModel.

    vLLM's reload handles any checkpoint and any quantization: it rebuilds every layer, loads into
    fresh memory, packs, and copies the result over the old layer. Plain layers, whose weights are
    stacked Hugging Face weights, need less: a copy into the live parameters. On a CPU vLLM packs
    the matrix of a linear layer and frees the plain one; here the old packing is dropped and the
    published bytes are packed in place. The names tell which layer takes which weights. This
    mapping is used only after a comparison with the result of vLLM's own reload of the same
    weights. Anything that is not plain (quantized, experts, latent attention, other names) is
    reported and keeps the reload.

    dtype: the engine's.
    """

    def __init__(self, model: torch.nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.cpu = next(model.parameters()).device.type == "cpu"
        self.parts = list(find_stacked_tensors(model, weights))
        names = [name for part in self.parts if not part.tied for name in part.names]
        if (missing := weights.keys() - set(names)) or len(names) > len(weights):
            raise UnsupportedModel(
                f"no layer of vLLM's takes {min(missing)}"
                if missing
                else "a weight belongs to several layers"
            )
        heads = [part.layer for part in self.parts if part.product]
        # embeddings, which vLLM packs needlessly
        self.idle: list[Any] = [
            module
            for module in model.modules()
            if hasattr(module, "cpu_linear") and not any(module is h for h in heads)
        ]
        self.scratch = torch.empty(0, dtype=dtype)

    def check_same(self, weights: Weights) -> None:
        """Compare with the result of vLLM's reload of these weights.

        Raises UnsupportedModel.
        """
        for part in self.parts:
            expected = self.stack(weights, part)
            live = getattr(part.layer, part.kind)
            differs = live.numel() and not torch.equal(
                live[: len(expected)].float(), expected.to(live.device, self.dtype).float()
            )
            if live.numel() == 0 or (part.product and self.cpu):
                probe = torch.randn(4, expected.shape[1], generator=Generator().manual_seed(0)).to(
                    self.dtype
                )
                product = part.layer.cpu_linear(probe, part.layer.weight, None).float()
                plain = linear(probe, expected).float()
                if live.numel():
                    product = product[:, : len(expected)]
                differs |= (
                    product.shape != plain.shape
                    or not (product - plain).abs().max() <= CLOSE[self.dtype] * plain.abs().max()
                )
            if differs:
                raise UnsupportedModel(f"vLLM's own loading changes {part.names[0]}")

    def stack(self, weights: Weights, part: StackedTensor) -> Tensor:
        """Return one part's tensor in the engine's dtype, valid until the next call."""
        size = sum(weights[name].numel() for name in part.names)
        if self.scratch.numel() < size:
            self.scratch = torch.empty(size, dtype=self.dtype, device=weights[part.names[0]].device)
        stacked = self.scratch[:size].view(-1, *weights[part.names[0]].shape[1:])
        self.copy(weights, part, stacked)
        return stacked

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Write `weights` into all layers."""
        for module in self.idle:
            module.cpu_linear = linear
        for part in self.parts:
            layer = part.layer
            is_product = self.cpu and part.product
            packed = is_product and (
                self.dtype != torch.float32
                or sum(weights[name].numel() for name in part.names) >= PLAIN
            )
            if is_product:  # frees an old packing first, so that the new one reuses its memory
                layer.cpu_linear = None if packed else linear
                if not layer.weight.numel():  # vLLM has freed the plain form
                    stacked = self.stack(weights, part)
                    if packed:
                        layer.weight = torch.nn.Parameter(stacked, requires_grad=False)
                        pack(layer, remove_weight=True)
                    else:
                        layer.cpu_linear = lambda probe, _weight, bias, own=stacked.clone(): linear(
                            probe, own, bias
                        )
                    continue
            if not part.tied:
                self.copy(weights, part, getattr(layer, part.kind))
            if packed:
                pack(layer, remove_weight=False)

    @staticmethod
    def copy(weights: Weights, part: StackedTensor, live: Tensor) -> None:
        """Fill the published rows of `live`; the padding of a vocabulary stays zero."""
        row = 0
        for name in part.names:
            live[row : row + len(weights[name])].copy_(weights[name])
            row += len(weights[name])


def pack(layer: Any, *, remove_weight: bool) -> None:
    """Pack `layer.weight` for the CPU kernel that vLLM chooses."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(layer, remove_weight=remove_weight)


def find_stacked_tensors(model: torch.nn.Module, weights: Weights) -> Iterator[StackedTensor]:
    """Yield every parameter of the model with its sources.

    Raises UnsupportedModel for a layer that is not plain.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    def fits(tensor: Tensor, sources: Sequence[Tensor], *, padded: bool) -> bool:
        rows, widths = sum(map(len, sources)), {source.shape[1:] for source in sources}
        if not tensor.numel():  # packed, its plain form gone
            return len(widths) == 1
        has_rows = len(tensor) == rows or (padded and len(tensor) > rows)
        return has_rows and widths == {tensor.shape[1:]}

    stacks: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
    names_by_tensor: dict[int, list[str]] = {}
    for path, layer in model.named_modules():
        method: Any = getattr(layer, "quant_method", None)
        square = isinstance(layer, LinearBase) and type(method) is UnquantizedLinearMethod
        table = (
            isinstance(layer, VocabParallelEmbedding) and type(method) is UnquantizedEmbeddingMethod
        )
        if not (square or table) and (
            method is not None
            or (hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention)
        ):
            raise UnsupportedModel(f"{path} ({type(layer).__name__}) is not plain")
        prefix, _, leaf = path.rpartition(".")
        for kind, tensor in layer.named_parameters(recurse=False):
            head = (
                table and kind == "weight" and (isinstance(layer, ParallelLMHead) or not has_head)
            )
            names = [".".join(filter(None, (prefix, s, kind))) for s in stacks.get(leaf, [leaf])]
            tied = head and names[0] not in weights and id(tensor) in names_by_tensor
            if tied:
                names = names_by_tensor[id(tensor)]
            elif any(name not in weights for name in names):
                raise UnsupportedModel(
                    f"no published weight is called {min(set(names) - set(weights))}"
                )
            elif not fits(tensor, [weights[name] for name in names], padded=table):
                raise UnsupportedModel(f"{path}.{kind} has another shape than {names[0]}")
            names_by_tensor[id(tensor)] = names
            yield StackedTensor(layer, kind, names, kind == "weight" and (square or head), tied)


class RecordedRequest(NamedTuple):
    """A request whose support is recorded.

    kept: position -> int32, the tokens that it was sampled from; empty: all. A position that vLLM
    samples again, as it was preempted or its prompt is encoded in parts, replaces the earlier one.
    """

    constraint: TokenConstraint | None
    kept: dict[int, ndarray]


class SupportRecorder:
    """A record of the requests that have a support, whose distributions it restricts."""

    def __init__(self) -> None:
        self.requests: dict[str, RecordedRequest] = {}  # by the name at the engine
        self.vocabulary = 0

    def end(self, name: str, length: int = 0) -> SampledSupport | None:
        """Forget a request; return the support of its `length` tokens, if recorded."""
        recorded = self.requests.pop(name, None)
        if recorded is None:
            return None
        kept = [recorded.kept[position] for position in range(length)]
        return SampledSupport.from_lists(kept, self.vocabulary)

    def install(self, runner: Any) -> None:
        """Put this in front of the sampler of vLLM's model runner."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        inner = runner.sampler.topk_topp_sampler
        plain: Callable[..., Any] = inner.forward

        def forward(
            logits: Tensor,
            generators: dict[int, Generator],
            keys: Tensor | None,
            parameter: Tensor | None,
        ) -> Any:
            rows = {}  # the recorded requests by their row, each with its tokens so far
            batch = runner.input_batch
            for row, internal in enumerate(batch.req_ids[: len(logits)] if self.requests else ()):
                # vLLM appends a random part to the name
                recorded = self.requests.get(internal.rpartition("-")[0])
                if recorded is not None:
                    rows[row] = recorded, batch.req_output_token_ids[row]
            if not rows:
                return plain(logits, generators, keys, parameter)
            for row, (recorded, tokens) in rows.items():
                if recorded.constraint is not None:
                    recorded.constraint.advance_to(tokens)
                    allowed = recorded.constraint.compute_allowed(logits.shape[1])
                    mask = torch.from_numpy(allowed).to(logits.device)
                    logits[row].masked_fill_(~mask, -torch.inf)
            logits = apply_top_k_top_p(logits, keys, parameter)
            self.vocabulary = logits.shape[1]
            chosen = torch.tensor(list(rows), device=logits.device)
            for (recorded, tokens), ids in zip(
                rows.values(), list_kept_ids(logits[chosen] > -torch.inf), strict=True
            ):
                recorded.kept[len(tokens)] = ids
            return plain(logits, generators, None, None)

        inner.forward = forward


PROBE = "probe"
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # nats, see `check_probe`
AHEAD = 64  # random numbers of a request that are drawn at once
UPDATE = "/asyncrl/update"  # the route of a server (actors/vllm_transfer.py)
BLOCK = 32  # tokens in a block of keys and values; vLLM's CPU kernels need multiples of 32
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the core in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
CPU_SETTINGS = {
    # the default binds every generator to the same cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM compiles one small function even in eager mode, which takes seconds at the start
    "TORCHDYNAMO_DISABLE": "1",
}


class SeedExtension:
    """Requests with seeds in vLLM's worker on a CPU (`worker_extension_cls`)."""

    def asyncrl_seed_rows(self) -> None:
        """On a CPU, replace vLLM's sampling by `SeededSampler`, once."""
        worker: Any = self
        runner = worker.model_runner
        inner = runner.sampler.topk_topp_sampler
        if getattr(inner.forward, "__name__", "") != "forward_cpu":
            return
        inner.forward = SeededSampler(inner.forward, runner)
        plain = runner._bookkeeping_sync

        def keep_books(*args: Any, **options: Any) -> Any:
            # vLLM turns back the generator of a partly encoded prompt, whose sample it discards:
            # a CPU generator cannot be, and those of `SeededSampler` need not
            batch = runner.input_batch
            generators, batch.generators = batch.generators, {}
            try:
                return plain(*args, **options)
            finally:
                batch.generators = generators

        runner._bookkeeping_sync = keep_books


class SwapExtension(SeedExtension):
    """Methods that vLLM mixes into its worker of this process."""

    def asyncrl_load(self, weights: Mapping[str, Tensor]) -> str:
        """Load `weights` (transformers' names) into the model in vLLM's layout.

        The tensors need not outlive the call. The first load uses vLLM's reload; later ones write
        directly if that gives the same result. Returns why it does not, or "".
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        direct = getattr(worker, "asyncrl_direct", None)
        if not isinstance(direct, DirectWriter):
            worker.reload_weights(weights_iterator=iter(weights.items()))
            repack(model)
        if direct is None:
            try:
                direct = DirectWriter(model, weights, worker.model_runner.model_config.dtype)
                direct.check_same(weights)
            except UnsupportedModel as error:
                direct = str(error)
            worker.asyncrl_direct = direct
        if isinstance(direct, str):
            return direct
        direct.load(weights)
        return ""

    def asyncrl_install_recorder(self, recorder: SupportRecorder) -> None:
        """Put `recorder` in front of vLLM's sampling."""
        self.asyncrl_seed_rows()
        worker: Any = self
        recorder.install(worker.model_runner)


def repack(model: torch.nn.Module) -> None:
    """Pack again the CPU linears that vLLM's reload leaves packed from old weights.

    These also keep their plain weight (tied heads).
    """
    for module in model.modules():
        if (
            hasattr(module, "cpu_linear")
            and isinstance(weight := getattr(module, "weight", None), Tensor)
            and weight.numel()
        ):
            pack(module, remove_weight=False)


class SeededSampler:
    """vLLM's sampling on a CPU, for requests with seeds.

    vLLM asks each row's generator for one number per token, in one call each. Here the number of a
    token follows from its request's seed and its position, and AHEAD of them are drawn at once.

    A row without a generator belongs to a probe, whose sample is unused: its number is 0.
    """

    def __init__(self, plain: Callable[..., Any], runner: Any) -> None:
        self.plain = plain
        self.runner = runner

    def __call__(
        self,
        logits: Tensor,
        generators: dict[int, Generator],
        keys: Tensor | None,
        parameter: Tensor | None,
    ) -> Any:
        if not generators:
            return self.plain(logits, generators, keys, parameter)
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits = apply_top_k_top_p(logits, keys, parameter)
        seeds = torch.zeros(len(logits), dtype=torch.int64)
        for row, generator in generators.items():
            block, position = divmod(len(self.runner.input_batch.req_output_token_ids[row]), AHEAD)
            seeds[row] = draw_numbers(generator.initial_seed(), block)[position]
        return torch.ops._C.fused_gumbel_argmax(logits.float(), seeds), logits.log_softmax(
            -1, dtype=torch.float32
        )


@lru_cache(4096)
def draw_numbers(seed: int, block: int) -> list[int]:
    """Return the numbers AHEAD * block to AHEAD * (block + 1) of a seed's generator."""
    drawn = torch.randint(0, 2**31, (AHEAD * (block + 1),), generator=Generator().manual_seed(seed))
    return drawn[-AHEAD:].tolist()


class ReferenceWeights:
    """The published weights under plain transformers, for versions without a probe.

    Such versions precede a resume, and injected lag may name them. The parameters view the
    published bytes, without a copy.
    """

    def __init__(self, path: str, dtype: str) -> None:
        self.model = load_policy(path, dtype, "cpu", with_modules=True)
        self.model.fast = None

    def compute_logprobs(self, weights: Mapping[str, Tensor]) -> ndarray:
        """See `asyncrl.models.policy.compute_probe_logprobs`."""
        for name, parameter in self.model.hf.named_parameters():
            parameter.data = weights[name].cpu()
        logprobs = compute_probe_logprobs(self.model)
        for parameter in self.model.hf.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        return logprobs


class ProbedEngine(Engine):
    """The common part of vLLM's engines: versions by name, salted prompts, a probe of each version.

    kept_tokens: for sessions, the tokens kept beside those of `slots` running samples, for later
    calls that begin with them. 0: a prompt shares keys only with equal prompts. None: samples are
    single completions, whose prompts share keys within the memory of the running samples.
    """

    def __init__(self, config: Config) -> None:
        settings = config.generator
        self.slots = settings.slots
        self.steps_made = 0
        self.context = settings.context
        self.in_flight = config.weights.in_flight
        self.kept_tokens = settings.prefix_cache_tokens if config.uses_sessions else None
        self.published, self.path = config.model.dtype, config.model.path
        dtype = choose_dtype(config)
        self.dtype = getattr(torch, dtype)
        self.reference: ReferenceWeights | None = None  # built on first use
        self.base: AdapterBase | None = None
        if config.lora.rank:
            self.base = AdapterBase(load_policy(self.path, dtype, "cpu"), config.lora)
        with pause_collection():
            self.shape = load_text_config(self.path)
        self.ids = list_probe_ids(self.shape)
        self.layers = int(self.shape.num_hidden_layers)
        self.label = Label(0, 0)
        self.digest = ""
        self.loads = 0
        self.probes = 0

    @property
    def version(self) -> str:
        """The name of the loaded version at vLLM."""
        return f"{self.label.epoch}.{self.label.number}.{self.digest}"

    def merge(self, weights: Mapping[str, Any], probe: bytes) -> tuple[Mapping[str, Any], ndarray]:
        """Return whole weights, and the log-probabilities that their probe must have."""
        if self.base is not None:
            merged = self.base.merge(weights, probe)
            weights = {name: merged[name] for name in merged}
            probe = b""  # an adapter's probe identifies its base, so logprobs are computed here
        if probe:
            return weights, np.frombuffer(probe, "<f4")
        if self.reference is None:
            self.reference = ReferenceWeights(self.path, self.published)
        return weights, self.reference.compute_logprobs(weights)

    def add(self, requests: Iterable[CompletionRequest]) -> None:
        """See `actors.engine.Engine`.  A sample does not depend on the others: each has a seed."""
        requests = list(requests)
        numbers = draw_uniform_rows([request.stream for request in requests], 1)[:, 0].tolist()
        for request, number in zip(requests, numbers, strict=True):
            require_room(request, self.context)
            self.begin(request, int(number * 2**31))

    def begin(self, request: CompletionRequest, seed: int) -> None:
        """Begin a completion that fits into the context."""

    def score(self, prompts: Sequence[ndarray], most_likely: int = 1) -> list[PromptScores]:
        """See `actors.engine.Engine`."""
        raise ConfigError(
            "generator.engine: vLLM's engines do not score prompts; set generator.engine = "
            "embedded, or serve the exported model with vLLM's own server"
        )

    def salt(self, group: Hashable, loads: int | str) -> str:
        """Return the salt of a prompt's keys, which only requests of the same load share.

        Where calls keep no keys, sharing is further limited to the request's group.
        """
        return str(loads) if self.kept_tokens != 0 else f"{loads}-{hash(group)}"

    def check_probe(self, expected: ndarray, logprobs: Sequence[float]) -> None:
        """Compare a probe.

        Raises ProtocolError, which stops the run, when the engine computes with other weights.
        """
        measured = np.array(logprobs, np.float32)
        # Two programs round differently. The difference grows for an unlikely token, whose logit is
        # far from the largest, and with the square root of the number of layers, as independent
        # errors add up. Measured in bfloat16: 1e-2 with 2 layers; 0.35 at -8 nats with 30
        # (SmolLM2), where transformers' own is 0.2 from float32. Without one of its 30 layers'
        # outputs it is 1.8 off.
        depth_factor = max(1.0, self.layers / 8) ** 0.5
        limits = TOLERANCE[self.dtype] * (1 + np.abs(expected) / 5) * depth_factor
        difference = np.abs(measured - expected)
        worst = int(np.nan_to_num(difference / limits, nan=np.inf).argmax())
        distance, limit = float(difference[worst]), float(limits[worst])
        if not distance <= limit:  # also when it is not a number
            raise ProtocolError(
                f"vLLM does not compute with the weights it was given: after loading {self.label} "
                f"(digest {self.digest}) the log-probabilities of the probe are {distance:.2g} "
                f"nats off those that the learner published (limit {limit:.2g}); its swap does not "
                "work for this model: use generator.engine = embedded"
            )
        self.probes = self.probes + 1

    def build_spans(self, spans: Sequence[Any], born: Label) -> list[VersionSpan]:
        """Build the version spans of an answer from vLLM's; born: the version it began under."""
        marks: list[VersionMark] = [(0, born, "")]
        for span in spans:
            epoch, number, digest = span.version.split(".")
            marks.append((span.start, Label(int(epoch), int(number)), digest))
        return build_spans(marks, spans[-1].end if spans else 0, self.in_flight)

    @staticmethod
    def describe_sampling(request: CompletionRequest, seed: int) -> dict[str, Any]:
        """Return vLLM's sampling parameters of a completion."""
        return {
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop_token_ids": list(request.stop),
            "logprobs": 0,
            "seed": seed,
            "ignore_eos": True,
            "detokenize": False,
        }


class VllmEngine(ProbedEngine):
    """See `actors.engine.Engine`. Raises ConfigError when vLLM refuses the model.

    weights.in_flight: keep_kv leaves the keys of live rows unchanged; recompute_kv makes vLLM
    preempt them, drop all keys and encode them again with the weights just loaded. With adapters,
    each is added to a copy of the base that is kept beside vLLM's.
    """

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.generator.threads)
        if reason := explain_missing("vllm"):
            raise ConfigError(f"generator.engine = vllm: {reason}")
        super().__init__(config)
        self.hits = self.reused = self.encoded = 0  # prompts with kept keys; tokens
        self.llm = start(config, self.shape)
        self.recorder = SupportRecorder()
        self.llm.collective_rpc("asyncrl_install_recorder", args=(self.recorder,))
        # id -> (request, label when it was added)
        self.requests: dict[str, tuple[CompletionRequest, Label]] = {}
        self.expected: ndarray | None = None  # logprobs of the running probe
        self.unprobed: deque[Completion] = deque()  # completions that wait for the probe

    # ---- the protocol ----------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return len(self.requests) + len(self.unprobed)

    def load(
        self, weights: Mapping[str, Any], label: Label, digest: str, probe: bytes = b""
    ) -> None:
        weights, expected = self.merge(weights, probe)
        reasons = self.llm.collective_rpc("asyncrl_load", args=(weights,))
        if reasons and reasons[0] and not self.loads:
            print(
                f"generator: loading weights by vLLM's own reload, which is slow: {reasons[0]}",
                file=sys.stderr,
            )
        # replace the probe of the last swap, which has not run yet
        if self.expected is not None:
            self.llm.abort_request([f"{PROBE}-{self.loads}"])
        if self.in_flight == "recompute_kv":
            self.llm.reset_prefix_cache(reset_running_requests=True)
        self.label = label
        self.digest = digest
        self.loads = self.loads + 1
        self.llm.set_weight_version(self.version)
        self.expected = expected
        settings = make_sampling_params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        self.llm.add_request(
            f"{PROBE}-{self.loads}",
            self._build_prompt(self.ids, PROBE),
            settings,
            priority=-1,
        )

    def begin(self, request: CompletionRequest, seed: int) -> None:
        name = "-".join(map(str, request.key))
        settings = make_sampling_params(**self.describe_sampling(request, seed), flat_logprobs=True)
        self.requests[name] = (request, self.label)
        if request.has_support:
            self.recorder.requests[name] = RecordedRequest(request.constraint, {})
        prompt = self._build_prompt(request.prompt.tolist(), request.group)
        self.llm.add_request(name, prompt, settings)

    def step(self, steps: int = 8) -> list[Completion]:
        completions: list[Completion] = []
        for _ in range(steps):
            if not self.llm.has_unfinished_requests():
                break
            self.steps_made += 1
            for output in self.llm.step():
                if not output.finished:
                    continue
                if output.request_id.startswith(PROBE):
                    assert self.expected is not None
                    positions = output.prompt_logprobs[1:]
                    self.check_probe(
                        self.expected, [next(iter(x.values())).logprob for x in positions]
                    )
                    self.expected = None
                elif output.request_id in self.requests:
                    self.unprobed.append(self._build_completion(output))
            if self.expected is None:
                completions += self.unprobed
                self.unprobed.clear()
        return completions

    def abort(self, keys: Iterable[Key]) -> TokenCounts:
        dropped = set(keys)
        tokens = self.count_tokens() | {x.key: len(x.tokens) for x in self.unprobed}
        self.unprobed = deque(x for x in self.unprobed if x.key not in dropped)
        names = [name for name, (request, _) in self.requests.items() if request.key in dropped]
        for name in names:
            del self.requests[name]
            self.recorder.end(name)
        self.llm.abort_request(names)
        return {key: count for key, count in tokens.items() if key in dropped}

    def count_tokens(self) -> TokenCounts:
        states = self.llm.output_processor.request_states
        count = {
            s.external_req_id: s.detokenizer.num_output_tokens()
            for s in states.values()
            if s.detokenizer is not None
        }
        return {request.key: count.get(name, 0) for name, (request, _) in self.requests.items()}

    def collect_metrics(self) -> Numbers:
        if not self.kept_tokens:
            return {}
        return {
            "prefix/hits": self.hits,
            "prefix/reused_tokens": self.reused,
            "prefix/encoded_tokens": self.encoded,
        }

    def close(self) -> None:
        """Release memory and vLLM's process group, so that another engine can start here."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    # ---- internals -------------------------------------------------------------------------------

    def _build_prompt(self, ids: list[int], group: Hashable) -> dict[str, Any]:
        return {"prompt_token_ids": ids, "cache_salt": self.salt(group, self.loads)}

    def _build_completion(self, output: Any) -> Completion:
        request, born = self.requests.pop(output.request_id)
        response = output.outputs[0]
        self.hits += output.num_cached_tokens > 0
        self.reused += output.num_cached_tokens
        self.encoded += len(request.prompt) - output.num_cached_tokens
        spans = self.build_spans(response.weight_versions, born)
        logprobs = response.logprobs.logprobs
        support = self.recorder.end(output.request_id, len(response.token_ids))
        return build_completion(request, response.token_ids, logprobs, spans, support)


def make_sampling_params(**settings: Any) -> Any:
    """Build vLLM's sampling parameters of a request that is returned when finished."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = {"ignore_eos": True, "detokenize": False} | settings
    return SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY)


class PlaceholderModule(ModuleType):
    """A stand-in for a module that `import vllm` loads first.

    The real one imports torch's whole compiler, a tenth of the cost of a start, to patch parts of
    it that an eager engine on a CPU never runs. It is imported as soon as one of its names is used.
    """

    NAME = "vllm.env_override"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        sys.modules.pop(self.NAME, None)
        return getattr(importlib.import_module(self.NAME), name)


def get_head_size(shape: Any) -> int:
    """Return the dimensions of a head."""
    size: int = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return size


def count_cache_bytes(config: Config, shape: Any, slots: int) -> int:
    """Return the memory for keys and values: as configured, or of `slots` samples and a probe."""
    settings = config.generator
    kept_tokens = settings.prefix_cache_tokens if config.uses_sessions else 0
    blocks = (slots + 1) * -(-settings.context // BLOCK) + -(-kept_tokens // BLOCK) + 16
    heads: int = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    numbers: int = 2 * shape.num_hidden_layers * heads * get_head_size(shape)  # of a token
    number_bytes = 4 if choose_dtype(config) == "float32" else 2
    return settings.kv_cache_mib << 20 or blocks * BLOCK * numbers * number_bytes


def choose_dtype(config: Config) -> str:
    """Return the number format that the engine computes in."""
    dtype = config.generator.dtype
    return config.model.dtype if dtype == "same" else dtype


def list_options(config: Config, shape: Any, slots: int) -> dict[str, Any]:
    """Return vLLM's options for `slots` samples at a time and a probe."""
    return {
        "model": str(Path(config.model.path).resolve()),
        "skip_tokenizer_init": True,
        "dtype": choose_dtype(config),
        "seed": config.seed,
        "max_model_len": config.generator.context,
        "max_num_seqs": slots + 1,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": count_cache_bytes(config, shape, slots),
        # only a check at the start, because the cache has a fixed size: the learner may share the
        # GPU
        "gpu_memory_utilization": 0.05,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "enforce_eager": resolve_device(config.model.device) == "cpu",
    }


def start(config: Config, shape: Any) -> Any:
    """Start vLLM on the model's directory, its core in this process."""
    path, options = config.model.path, list_options(config, shape, config.generator.slots)
    cpu = options["enforce_eager"]
    for name, value in (SETTINGS | (CPU_SETTINGS if cpu else {})).items():
        os.environ.setdefault(name, value)
    if cpu and "vllm" not in sys.modules:
        sys.modules[PlaceholderModule.NAME] = PlaceholderModule(PlaceholderModule.NAME)
    with pause_collection():
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

    head = get_head_size(shape)
    if cpu:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        if head not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
            raise ConfigError(
                f"model.path: {path} has {head} dimensions a head; vLLM on a CPU has kernels for "
                f"{', '.join(map(str, sizes))}: use generator.engine = embedded"
            )
    args = EngineArgs(
        **options,
        tokenizer=path,
        max_num_batched_tokens=max(2048, config.generator.context),
        enable_prefix_caching=True,
        async_scheduling=False,
        scheduling_policy="priority",
        use_tqdm_on_load=False,
        worker_extension_cls="actors.engine_vllm.SwapExtension",
    )
    try:
        with pause_collection():  # a second large round of imports
            return LLMEngine.from_engine_args(args)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise ConfigError(
            f"model.path: vLLM refuses {Path(path)}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        ) from error


make_engine = VllmEngine
