"""Estimate the peak memory of learner and generator, in bytes of each part, from a model's shape.

benchmarks/memory_sizes.py compares it with real processes; docs/gpus.md has it for models
that were not run.

The packed forward stores for every layer what its backward pass needs, and only recomputes the
logits.  So memory grows with `learner.micro_batch_tokens`; where attention pads rows, also with the
square of their length.  With `learner.gradient_checkpointing` it stores the states between layers,
and everything else of one layer."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.models.packed_attention import ROWS_UP_TO

WIDTHS = {"float32": 4, "bfloat16": 2}
LOGITS = 1 << 24  # held at once on a CPU, asyncrl.models.packed_forward.LOGIT_CHUNK
LOGITS_80GB = 80 * 10**9 // (32 * 4 * 4)  # on a GPU of 80 GB, or those of 1,024 tokens
COPIES = 4  # float32 tensors of that size in the loss's backward pass
RING = 4  # weights.slots
PROGRAM = 450 << 20  # bytes of a process with torch that holds no model: 300 to 450 MiB


class Shape(NamedTuple):
    """A Llama-like model.  norms: whether queries and keys have norms of their own (Qwen3)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    vocabulary: int
    tied: bool = True
    norms: bool = False

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head if self.norms else 0)
        return attention + 3 * self.hidden * self.intermediate + norms

    @property
    def root(self) -> int:
        """Parameters outside the layers: embeddings, head and last norm."""
        return self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.root


SHAPES = {
    "84k": Shape(64, 2, 4, 4, 16, 128, 23, norms=True),
    "2.6M": Shape(256, 4, 8, 8, 32, 512, 23, norms=True),
    "135M": Shape(576, 30, 9, 3, 64, 1536, 49152),
    "1B": Shape(2048, 16, 32, 8, 64, 8192, 128256),
    "8B": Shape(4096, 32, 32, 8, 128, 14336, 128256, tied=False),
}


class Micro(NamedTuple):
    """A micro-batch: prompts of a length, answers to them, their mean length and the longest one,
    to which attention pads them.
    """

    prompts: int
    prompt: int
    answers: int
    answer: int
    longest: int

    @property
    def tokens(self) -> int:
        return self.prompts * self.prompt + self.answers * (self.answer - 1)


LONG = Micro(1, 256, 2, 897, 897)  # 2,048 tokens, in docs/gpus.md


def activations(
    shape: Shape, width: int, micro: Micro, recompute: bool = False, device: str = "cpu"
) -> int:
    """Bytes that are stored for the backward pass.

    Of each layer: the two normed states, in float32 and in the model's dtype, attention's result,
    the MLP's four products, queries, keys and values.  Flash attention stores sums for each head;
    padded rows store shares, and the keys of a prompt for each of its responses.
    recompute: with gradient checkpointing.  device: its type, which determines the attention."""
    queries, keys = shape.head * shape.heads, shape.head * shape.kv_heads
    token = width * (2 * shape.hidden + queries + 4 * shape.intermediate) + 8 * shape.hidden
    if shape.norms:
        token += 4 * (queries + keys)
    inner = micro.longest - 1  # the last token of an answer predicts nothing
    if width == 2 if device == "cuda" else max(micro.prompt, inner) > ROWS_UP_TO:
        layer = (token + width * (queries + 2 * keys) + 4 * shape.heads) * micro.tokens
    else:
        rows = micro.prompts * micro.prompt + micro.answers * inner
        columns = micro.prompts * micro.prompt + micro.answers * (micro.prompt + inner)
        kept = micro.prompts * micro.prompt**2 + micro.answers * inner * (micro.prompt + inner)
        attention = queries * rows + 2 * keys * columns + shape.heads * kept
        layer = token * micro.tokens + width * attention
    between = width * shape.hidden * micro.tokens
    return layer + shape.layers * between if recompute else shape.layers * layer


def loss(shape: Shape, width: int, tokens: int, device: str = "cpu") -> int:
    """A chunk of logits, forward and backward, and the head's gradient before it is added."""
    least, logits = (16, LOGITS) if device == "cpu" else (1024, LOGITS_80GB)
    rows = min(tokens, max(logits // shape.vocabulary, least) + 15)
    return 4 * COPIES * rows * shape.vocabulary + width * shape.embedding


def learner(
    shape: Shape,
    dtype: str,
    micro: Micro = LONG,
    stage: int | str | None = None,
    ranks: int = 1,
    *,
    recompute: bool = False,
    device: str = "cpu",
) -> dict[str, int]:
    """Bytes of each part, of one rank.  stage: of ZeRO, "fsdp2", None: by torch.

    FSDP2 keeps parts in float32.  It gathers what is outside the layers, a layer and the next one,
    and adds up one whole gradient of them at a time, in float32.

    torch keeps gradient and moments in the type of the weights; DeepSpeed in bfloat16 keeps a
    float32 copy of the weights with the moments.
    """
    width = WIDTHS[dtype]
    passes = {
        "activations": activations(shape, width, micro, recompute, device),
        "loss": loss(shape, width, micro.answers * micro.answer, device),
    }
    if stage == "fsdp2":
        part = 4 * shape.parameters // ranks
        whole = width * (shape.root + 2 * shape.layer)
        summed = (width + 4) * max(shape.root, shape.layer)
        held = {"weights": part, "gradient": part, "moments": 2 * part}
        return held | {"gathered": whole + summed} | passes
    assert not isinstance(stage, str)
    weights = gradient = width * shape.parameters
    master = 4 * shape.parameters if stage is not None and dtype == "bfloat16" else 0
    moments = 2 * (4 if master else width) * shape.parameters
    if stage is not None and stage >= 1:
        moments, master = moments // ranks, master // ranks
    if stage is not None and stage >= 2:
        gradient //= ranks
    if stage == 3:
        weights //= ranks
    return {
        "weights": weights,
        "gradient": gradient,
        "moments": moments + master,
    } | passes


def generator(shape: Shape, dtype: str, slots: int, context: int) -> dict[str, int]:
    """Bytes of each part, with the embedded engine: the model as read, the version pulled last (in
    the host's memory, also where the rest is on a GPU), and the matrices that it multiplies by, a
    tied head apart.
    """
    width = WIDTHS[dtype]
    model = width * shape.parameters
    keys = 2 * width * shape.layers * shape.kv_heads * shape.head
    return {
        "model": model,
        "pulled": model,
        "fused": model + (width * shape.embedding if shape.tied else 0),
        "keys and values": slots * context * keys,
    }


def ring(shape: Shape, dtype: str) -> int:
    """Bytes of shared memory, once a machine: the versions that are published."""
    return RING * WIDTHS[dtype] * shape.parameters


def gpu_rows(slots: int = 64, context: int = 4096) -> list[list[str]]:
    """The table of docs/gpus.md: model, GPUs, the learner's GB on each GPU in bfloat16,
    without and with gradient checkpointing, the generator's, GB of shared memory on the host.
    """
    rows = []
    for name in ("1B", "8B"):
        shape = SHAPES[name]
        serve = generator(shape, "bfloat16", slots, context)
        engine = sum(serve.values()) - serve["pulled"]
        for ranks, stage, how in (
            (1, None, "torch"),
            (1, 2, "ZeRO 2"),
            (8, 2, "ZeRO 2"),
            (8, 3, "ZeRO 3"),
            (8, "fsdp2", "FSDP2"),
        ):
            learn, less = (
                sum(
                    learner(
                        shape, "bfloat16", LONG, stage, ranks, recompute=again, device="cuda"
                    ).values()
                )
                for again in (False, True)
            )
            sizes = (learn, less, engine, ring(shape, "bfloat16"))
            rows.append([name, str(ranks), how, *(f"{size / 1e9:.0f}" for size in sizes)])
    return rows
