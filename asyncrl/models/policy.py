"""Policy models: load, build and export them, their flat weights, and response log-probabilities.

The only module that imports transformers' models. `PolicyModel.logprobs` has two paths with the
same result: a packed one for Llama-like models (packed_forward.py), and plain transformers for
every other causal LM. Neither holds logits [B, T, V] of a whole batch.
"""

from __future__ import annotations

import json
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, cat
from torch.utils.checkpoint import checkpoint

from asyncrl.contract.blobs import images as image_blobs
from asyncrl.contract.blobs.images import MARKER, ImageShape
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import RoutingShape
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.models import (
    adapter_files,
    fetch,
    packed_forward,
    pictures,
    router_hooks,
    without_transformers,
)
from asyncrl.models.image_tokens import FAMILY, read_shape
from asyncrl.models.packed_forward import ForwardInput, ForwardOutput
from asyncrl.models.tokenizer import describe_missing_weights
from asyncrl.records import atomic_write
from asyncrl.records.jsonl import read_object

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

PROBE_TOKENS = 8
# relative noise between rows that only differ in a later token: experts see other batches
NOISE = 1e-5
NOISE_BF16 = 2e-2
KEPT_IMAGES = 512  # images whose pixel tensors are cached
NEVER_SAMPLED = -1e30  # the logit of the image token
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
PLAIN_ROWS = 8  # of a forward pass on the plain path
PLAIN_TOKENS = 1024  # the same for a model that reads images, where its rows are short
CHOSEN = 2  # experts of a token in a tiny mixture of experts
ALIGN = 64  # bytes; every tensor of the flat layout starts at a multiple of it
Manifest = list[tuple[str, str, list[int], int, int]]  # name, dtype, shape, offset, bytes
Arrays = Sequence[np.ndarray]
RowImages = Sequence[Sequence[bytes]]  # the blobs of each row, in the order of its image tokens


@dataclass(eq=False)
class ImageEncoder:
    """Image processor and vision tower of the LLaVA `hf`, whose directory is `path`.

    Each distinct image is encoded once for all the rows of a forward pass.
    """

    hf: Any
    path: str
    shape: ImageShape

    @classmethod
    def from_model(cls, hf: Any, path: str) -> ImageEncoder | None:
        """Return the encoder of a model; None: it reads only text."""
        if hf.config.model_type != FAMILY:
            return None
        shape = read_shape(path)
        if shape is None:  # built in memory: there is no directory yet
            shape = ImageShape(hf.config.image_token_id, hf.config.image_seq_length)
        return cls(hf, path, shape)

    @cached_property
    def processor(self) -> Any:
        """The image processor. Raises ConfigError where the directory has none."""
        import transformers

        try:
            return transformers.AutoImageProcessor.from_pretrained(self.path, backend="pil")
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ConfigError(
                f"model.path: the image processor in {self.path} cannot be loaded "
                f"({' or '.join(PROCESSOR_FILES)}): {str(error).splitlines()[0]}"
            ) from error

    @cached_property
    def load_pixels(self) -> Callable[[bytes], Tensor]:
        """Return the pixels of a blob as the model reads them, [3, H, W]."""
        processor = self.processor
        return lru_cache(KEPT_IMAGES)(
            lambda blob: processor(pictures.as_pil(blob), return_tensors="pt")["pixel_values"][0]
        )

    def compute_features(self, blobs: Mapping[str, bytes], *, single: bool) -> dict[str, Tensor]:
        """Return digest -> features [length, hidden] of images, differentiable.

        single: encode each image by itself, so that its features do not depend on the others.
        Raises ConfigError where the vision tower gives another number of features.
        """
        if not blobs:
            return {}
        pixels = [self.load_pixels(blob) for blob in blobs.values()]
        encoded: list[Tensor] = []
        for group in [[image] for image in pixels] if single else [pixels]:
            stacked = torch.stack(group).to(self.hf.device, self.hf.dtype)
            features = self.hf.get_image_features(pixel_values=stacked, return_dict=True)
            encoded += features.pooler_output
        for image in encoded:
            if len(image) != self.shape.length:
                raise ConfigError(
                    f"model.path: the vision tower in {self.path} makes {len(image)} features of "
                    f"an image, and image_seq_length in its config.json is {self.shape.length}"
                )
        return dict(zip(blobs, encoded, strict=True))

    @staticmethod
    def build_inputs(names: Iterable[str], features: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of a forward pass whose image tokens are `names`, in row order."""
        encoded = [features[name] for name in names]
        if not encoded:
            return {}
        return {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=encoded)}}

    def exclude_image_token(self, logits: Tensor) -> Tensor:
        """Exclude the image token from sampling: only a prompt may hold one.

        logits: fp32 [..., V].
        """
        token = torch.tensor([self.shape.token], device=logits.device)
        return logits.index_fill(-1, token, NEVER_SAMPLED)


@dataclass
class PolicyModel:
    """A causal LM with its parameters (`hf`) and the directory of its tokenizer."""

    hf: Any
    tokenizer_dir: str
    # plain path: one forward per call and no recomputation, as hooks on the modules may need
    one_pass: bool = False
    recompute: bool = False  # recompute each layer in the backward pass
    exact: bool = False  # use the operators of exact mode (asyncrl/models/exact_operators.py)
    # exact mode of the plain path: every row is computed by itself, padded to this length
    exact_length: int = 0
    # with low-rank adapters: only these are published, loaded and stored as its weights
    adapter: adapter_files.AdapterInfo | None = None
    generation_config: str = ""  # the text of the directory's file, which is exported as it is

    def __post_init__(self) -> None:
        self.fast = packed_forward.ModelLayout.from_model(self.hf)
        self.vision = ImageEncoder.from_model(self.hf, self.tokenizer_dir)  # None: it reads text

    @property
    def device(self) -> torch.device:
        return next(self.hf.parameters()).device  # type: ignore[no-any-return]

    @property
    def hidden_size(self) -> int:
        return int(self.hf.config.get_text_config().hidden_size)

    @property
    def routing(self) -> RoutingShape | None:
        """The shape of the ids of routed experts; None: a dense model."""
        return self.fast.routing if self.fast is not None else router_hooks.find_routing(self.hf)

    def require_replayable_routing(self) -> RoutingShape:
        """The shape of the ids of routed experts.

        Raises ConfigError for a dense model, or for routers whose choice cannot be replayed.
        """
        shape = self.routing
        if shape is None:
            raise ConfigError(
                f"learner.replay_routing: {self.tokenizer_dir} is a dense "
                f"{self.hf.config.model_type}, it has no experts; set it to false"
            )
        if self.fast is None:
            router_hooks.check_replayable(self.hf)
        return shape

    def logprobs(
        self, prompts: Arrays, responses: Arrays, temperature: Tensor, **more: Any
    ) -> ForwardOutput:
        """Log-probabilities of response tokens under this model, differentiable.

        The arguments are those of `ForwardInput`.
        Returns tensors packed in sample order, N = sum of response lengths: logprobs [N] fp32,
        entropy [N] in nats or None, hidden [N, H] (the state that predicts each token) or None.
        """
        rows = ForwardInput(prompts, responses, temperature, **more)
        if self.fast is not None:
            return packed_forward.compute_logprobs(
                self.fast, rows, fixed=self.exact, recompute=self.recompute
            )
        width, at_once = 0, PLAIN_ROWS
        if self.exact and self.exact_length:
            width, at_once = self.exact_length, 1
        elif self.one_pass:
            at_once = len(prompts)
        elif self.vision is not None:  # rows of one group share their images
            longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
            at_once = max(PLAIN_ROWS, PLAIN_TOKENS // longest)
        recompute = not self.one_pass
        return compute_plain_logprobs(self.hf, rows, at_once, recompute, self.vision, width)


def recompute_modules(hf: Any) -> None:
    """Let transformers' modules recompute each layer in the backward pass.

    Raises ConfigError for a model that does not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"learner.gradient_checkpointing: {error}; set it to false") from error
    for module in hf.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # required for checkpointing; its submodules stay in eval mode


def compute_plain_logprobs(
    hf: Any,
    rows: ForwardInput,
    at_once: int = PLAIN_ROWS,
    recompute: bool = True,
    vision: ImageEncoder | None = None,
    width: int = 0,
) -> ForwardOutput:
    """`PolicyModel.logprobs` through plain transformers, `at_once` rows at a time.

    recompute: each chunk is recomputed in the backward pass. width: see `_compute_plain_rows`.
    """
    run: Any = operator.call
    if recompute and torch.is_grad_enabled():
        run = partial(checkpoint, use_reentrant=False)
    chunks = (slice(at, at + at_once) for at in range(0, len(rows.prompts), at_once))
    parts = [run(_compute_plain_rows, hf, rows.take(chunk), vision, width) for chunk in chunks]
    return ForwardOutput(*_join_parts(parts))


def run_modules(
    hf: Any,
    sequences: Sequence[Sequence[int] | np.ndarray],
    width: int,
    routed: Sequence[RoutedExperts | None] | None = None,
    recorded: list[Tensor] | None = None,
    **more: Any,
) -> Any:
    """Run a transformers model over token sequences padded to `width`.

    routed: the experts to use for the tokens of each; None: the routers' own.
    recorded: see `router_hooks.replay_routing`.
    """
    ids = np.zeros((len(sequences), width), np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    device = next(hf.parameters()).device
    tensors = {"input_ids": ids, "attention_mask": mask}
    padded = {name: torch.from_numpy(array).to(device) for name, array in tensors.items()}
    shape = router_hooks.find_routing(hf) if routed is not None else None
    replayed = router_hooks.build_padded_table(routed, shape, width, device)
    with router_hooks.replay_routing(hf, replayed, recorded):
        return hf(**padded, use_cache=False, **more)


def _join_parts(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Join the tensors of several parts column by column; None: a column that is not wanted."""
    return [None if column[0] is None else cat(column) for column in zip(*parts, strict=True)]


def _compute_plain_rows(
    hf: Any, rows: ForwardInput, vision: ImageEncoder | None, width: int
) -> list[Any]:
    """Compute a chunk of `compute_plain_logprobs` in one forward pass.

    width: the length that rows are padded to; 0: that of the longest.
    """
    device = next(hf.parameters()).device
    sequences = [
        np.concatenate([prompt, response])
        for prompt, response in zip(rows.prompts, rows.responses, strict=True)
    ]
    exact = bool(width)
    width = width or max(map(len, sequences))
    more = {} if vision is None else _encode_images(vision, rows.images or (), single=exact)
    more["output_hidden_states"] = rows.want_hidden
    output = run_modules(hf, sequences, width, rows.routed, **more)
    targets = rows.targets
    if targets is None:
        targets = torch.from_numpy(np.concatenate(rows.responses).astype(np.int64))
    scored = torch.split(targets.to(device), [len(response) for response in rows.responses])
    parts = []
    for row, (prompt, response) in enumerate(zip(rows.prompts, rows.responses, strict=True)):
        states = slice(len(prompt) - 1, len(prompt) + len(response) - 1)  # that predict a token
        logits = output.logits[row, states].float()
        if vision is not None:
            logits = vision.exclude_image_token(logits)
        # times the inverse, as the engine does
        logs = torch.log_softmax(logits * (1.0 / rows.temperature[row].float()).to(device), -1)
        support = rows.take(slice(row, row + 1)).build_support(device)
        picked = logs if support is None else support.renormalize(logs, 0)
        entropy = -(logs.exp() * logs).sum(-1) if rows.want_entropy else None
        hidden = output.hidden_states[-1][row, states] if rows.want_hidden else None
        parts.append((picked.gather(1, scored[row][:, None])[:, 0], entropy, hidden))
    return _join_parts(parts)


def _encode_images(vision: ImageEncoder, images: RowImages, *, single: bool) -> dict[str, Any]:
    """Return the arguments of a forward pass for the images of its rows."""
    pairs = [(image_blobs.digest(blob), blob) for of_row in images for blob in of_row]
    features = vision.compute_features(dict(pairs), single=single)
    return vision.build_inputs((name for name, _ in pairs), features)


# ---- directories ---------------------------------------------------------------------------------


def load_policy(
    path: str | Path,
    dtype: str = "float32",
    device: str = "auto",
    *,
    with_modules: bool = False,
    attention: str | None = None,
) -> PolicyModel:
    """Load the causal LM in the Hugging Face directory `path`.

    with_modules: use transformers' modules even where without_transformers.py can load it.
    attention: of transformers' modules; None: sdpa, or eager where sdpa would compute another
        model. Raises ConfigError when the directory is missing or does not hold a causal LM.
    """
    fetch.require_directory(path)
    target_device = resolve_device(device)
    hf: Any = None if with_modules else without_transformers.load(path, dtype)
    if hf is None:
        import transformers

        maker = transformers.AutoModelForCausalLM
        if read_shape(path) is not None:
            maker = transformers.AutoModelForImageTextToText
        try:
            config = transformers.AutoConfig.from_pretrained(str(path))
            # None: sdpa where the architecture supports it, whatever config.json names
            config._attn_implementation = attention or ("eager" if caps_scores(config) else None)
            hf, info = maker.from_pretrained(
                str(path), config=config, dtype=getattr(torch, dtype), output_loading_info=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ConfigError(
                f"model.path: {path} cannot be loaded as a causal LM: {str(error).splitlines()[0]}"
            ) from error
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(f"model.path: {describe_missing_weights(path, missing)}")
        hf = hf.to(target_device).eval()
        # When read, parameters start at any offset of their file. A matrix product may round
        # differently for operands at other alignments, so that results would not be bitwise equal
        # between copies of a model
        for parameter in hf.parameters():
            if parameter.data_ptr() % ALIGN:
                parameter.data = parameter.data.clone()
        if is_bidirectional(hf):
            raise ConfigError(
                f"model.path: {path} is not a causal LM: its logits at a token depend on later "
                f"tokens ({type(hf).__name__})"
            )
    file = Path(path) / fetch.GENERATION_CONFIG
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return PolicyModel(hf.to(target_device).eval(), str(path), generation_config=text)


def caps_scores(config: Any) -> bool:
    """Return whether attention scores are capped, which sdpa ignores without an error."""
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def resolve_device(name: str) -> str:
    """Return the device that `model.device` = `name` means on this machine."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


@torch.no_grad()
def is_bidirectional(hf: Any) -> bool:
    """Return whether the logits at a token depend on a later token, as in an encoder."""
    first, second, third, fourth = list_probe_ids(hf.config.get_text_config())[:4]
    ids = torch.tensor(
        [[first, second, third], [first, second, fourth]], device=next(hf.parameters()).device
    )
    logits = (
        hf(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        .logits[:, :2]
        .float()
    )
    noise = NOISE if hf.dtype == torch.float32 else NOISE_BF16
    return bool((logits[0] - logits[1]).abs().max() > noise * logits.abs().max())


def load_text_config(path: str | Path) -> Any:
    """Load transformers' config of the language model in `path`, without its weights.

    Raises ConfigError like `load_policy`.
    """
    import transformers

    fetch.require_directory(path)
    try:
        return transformers.AutoConfig.from_pretrained(str(path)).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path: {path} cannot be loaded as a causal LM: {str(error).splitlines()[0]}"
        ) from error


def export(model: PolicyModel, path: str | Path, ends: Sequence[int] = ()) -> None:
    """Write a Hugging Face directory with model and tokenizer, by rename.

    Of a model with adapters, only the adapter is written. ends: the tokens that end a completion,
    if they differ from the model's own.
    """
    with atomic_write.replace(Path(path), part=Path(f"{path}.part{os.getpid()}")) as part:
        part.mkdir(parents=True)
        if model.adapter is not None:
            adapter_files.save(model.hf, model.adapter, model.tokenizer_dir, part)
            copy_tokenizer(model.tokenizer_dir, part)
            return
        fetch.save(model.hf, part, model.generation_config)
        copy_tokenizer(model.tokenizer_dir, part)
        if ends:
            file = part / fetch.GENERATION_CONFIG
            settings = read_object(file) | {"eos_token_id": list(ends)}
            file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(source: str | Path, target: Path) -> None:
    """Copy the tokenizer's files, and those of an image processor."""
    for pattern in (
        *PROCESSOR_FILES,
        "tokenizer*",
        "special_tokens*",
        "chat_template*",
        "vocab*",
        "merges*",
        "added_tokens*",
    ):
        for file in Path(source).glob(pattern):
            shutil.copy(file, target / file.name)


def build_text_config(
    tokenizer: Any,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    tied: bool = True,
    family: str = "qwen3",
    max_positions: int = 256,
    experts: int = 8,
) -> Any:
    """Build transformers' config of a tiny causal LM.

    family: llama, qwen2, qwen3 or mistral; qwen3_moe or mixtral for a model with experts, of which
        a token uses CHOSEN.
    """
    import transformers

    extra: dict[str, Any] = {} if family == "qwen2" else {"head_dim": hidden // heads}
    extra |= {"sliding_window": None} if family in ("mistral", "mixtral") else {}
    if family == "qwen3_moe":
        extra |= {"num_experts": experts, "moe_intermediate_size": intermediate or hidden}
        extra |= {"norm_topk_prob": True}
    if family == "mixtral":
        extra |= {"num_local_experts": experts}
    if family in packed_forward.SPARSE:
        extra |= {"num_experts_per_tok": CHOSEN}
    return transformers.AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        intermediate_size=intermediate or 2 * hidden,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **extra,
    )


def build_model(
    path: str | Path, symbols: Sequence[str], *, seed: int = 0, **sizes: Any
) -> PolicyModel:
    """Build a tiny causal LM with a character tokenizer in the Hugging Face directory `path`.

    symbols: characters and words; pad, end-of-text and unknown tokens are added.
    sizes: of `build_text_config`.
    """
    import transformers

    tokenizer = build_character_tokenizer(symbols)
    config = build_text_config(tokenizer, **sizes)
    return initialize_model(path, transformers.AutoModelForCausalLM, config, seed, tokenizer)


def initialize_model(
    path: str | Path, maker: Any, config: Any, seed: int, *processors: Any
) -> PolicyModel:
    """Write a model with random weights, and its tokenizer and processor, to `path`."""
    torch.manual_seed(seed)
    hf = maker.from_config(config, dtype=torch.float32)
    Path(path).mkdir(parents=True, exist_ok=True)
    for processor in processors:
        processor.save_pretrained(str(path))
    fetch.save(hf, path)
    return PolicyModel(hf.eval(), str(path))


def build_llava(
    path: str | Path,
    symbols: Sequence[str],
    *,
    side: int,
    patch: int,
    seed: int = 0,
    **sizes: Any,
) -> PolicyModel:
    """Build a LLaVA in the directory `path`: a CLIP tower, a projector and a Qwen3.

    side: pixels of a side of an image, which is one token for each patch of `patch` pixels a side.
    symbols: characters of the tokenizer, as in `build_model`; the image token is added.
    sizes: of the Qwen3, as in `build_text_config`.
    """
    import transformers

    tokenizer = build_character_tokenizer([*symbols, MARKER])
    text = build_text_config(tokenizer, **sizes)
    tower = transformers.CLIPVisionConfig(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        projection_dim=text.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=text.num_attention_heads,
        image_size=side,
        patch_size=patch,
    )
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(MARKER),
        image_seq_length=(side // patch) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",  # without the class token
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    square = {"height": side, "width": side}
    processor = transformers.CLIPImageProcessorPil(
        size=square, crop_size=square, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    maker = transformers.AutoModelForImageTextToText
    return initialize_model(path, maker, config, seed, tokenizer, processor)


def build_character_tokenizer(symbols: Sequence[str]) -> Any:
    """Build a fast tokenizer with one token per character, `<pad>` = 0 and `<eos>` = 1.

    Symbols of several characters are words, of which the longest match is taken.
    """
    import tokenizers
    import transformers

    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {
        c: i + 3 for i, c in enumerate(dict.fromkeys(symbols))
    }
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    words = sorted((word for word in symbols if len(word) > 1), key=len, reverse=True)
    pattern = "|".join([*map(re.escape, words), r"[\s\S]"]) if words else "."
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


# ---- flat weights --------------------------------------------------------------------------------


def list_published(model: PolicyModel) -> list[tuple[str, torch.nn.Parameter]]:
    """Return (name, parameter) of every parameter in a fixed order, tied ones once.

    Of a model with adapters, only those of the adapters.
    """
    if model.adapter is not None:
        return adapter_files.list_adapter_weights(model.hf)
    return list(model.hf.named_parameters())


def list_named_weights(model: PolicyModel) -> list[tuple[str, Tensor]]:
    """Return `list_published` without gradient."""
    return [(name, parameter.detach()) for name, parameter in list_published(model)]


def build_manifest(model: PolicyModel) -> Manifest:
    """Lay the weights out flat: name, dtype, shape, offset and bytes of each tensor."""
    rows = []
    offset = 0
    for name, tensor in list_named_weights(model):
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((name, dtype, list(tensor.shape), offset, size))
        offset += -(-size // ALIGN) * ALIGN
    return rows


def count_flat_bytes(layout: Manifest) -> int:
    """Return the size of the flat layout in bytes."""
    return -(-(layout[-1][3] + layout[-1][4]) // ALIGN) * ALIGN


def write_flat(model: PolicyModel, buffer: memoryview) -> None:
    """Copy the weights into `buffer` (at least `count_flat_bytes`); gaps are not written."""
    copy_flat(list_named_weights(model), buffer, build_manifest(model))


def copy_flat(weights: Iterable[tuple[str, Tensor]], buffer: memoryview, layout: Manifest) -> float:
    """Copy named weights into `buffer` according to `layout`.

    Returns at least the square of the largest weight; NaN or inf if one is not finite.
    """
    targets = read_flat(buffer, layout)
    squares = []
    with torch.no_grad():
        for name, tensor in weights:
            targets[name].copy_(tensor)
            # while the tensor is in the cache. On a CPU a dot product takes a thirtieth of the time
            # of a maximum of magnitudes
            if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
                flat = tensor.reshape(-1)
                squares.append(torch.dot(flat, flat))
            else:
                squares.append(torch.linalg.vector_norm(tensor, torch.inf).float().square())
    return float(torch.stack(squares).amax())


def read_flat(buffer: memoryview, layout: Manifest) -> dict[str, Tensor]:
    """Return name -> tensor views of a writable `buffer`, which share one storage."""
    return build_views(torch.frombuffer(buffer, dtype=torch.uint8), layout)


def build_views(flat: Tensor, layout: Manifest) -> dict[str, Tensor]:
    """Return name -> tensor views of `flat` (uint8, on any device)."""
    return {
        name: flat[offset : offset + size].view(getattr(torch, dtype)).view(shape)
        for name, dtype, shape, offset, size in layout
    }


def list_probe_ids(text_config: Any) -> list[int]:
    """Return PROBE_TOKENS fixed tokens, whose logprobs identify the weights an engine uses."""
    return [(7 * i * i + 3 * i + 1) % int(text_config.vocab_size) for i in range(PROBE_TOKENS)]


@torch.no_grad()
def compute_probe_logprobs(model: PolicyModel) -> np.ndarray:
    """Return the log-probabilities of the probe's tokens after the first.

    Shape [PROBE_TOKENS - 1], float32.
    """
    ids = np.array(list_probe_ids(model.hf.config.get_text_config()), np.int32)
    logprobs: np.ndarray = (
        model.logprobs([ids[:1]], [ids[1:]], torch.ones(1, device=model.device))
        .logprobs.float()
        .cpu()
        .numpy()
    )
    return logprobs


@dataclass(eq=False)
class LazyWeights(Mapping[str, Tensor]):
    """Weights by name, each computed from its name and value when it is read."""

    weights: Mapping[str, Tensor]
    compute: Callable[[str, Tensor], Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.compute(name, self.weights[name])

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def load_weights(model: PolicyModel, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the model's parameters, in place."""
    with torch.no_grad():
        for name, tensor in list_named_weights(model):
            tensor.copy_(weights[name])


def compute_digest(buffer: memoryview | bytes | bytearray) -> str:
    """Return the xxh3-64 of the flat bytes, in hex."""
    return xxhash.xxh3_64_hexdigest(buffer)


def copy_flat_bytes(model: PolicyModel) -> bytearray:
    """Return the model's weights in their flat layout, with gaps of zeros."""
    buffer = bytearray(count_flat_bytes(build_manifest(model)))
    write_flat(model, memoryview(buffer))
    return buffer


def compute_weights_digest(model: PolicyModel) -> str:
    """Return the digest of the model's flat weights."""
    return compute_digest(copy_flat_bytes(model))
