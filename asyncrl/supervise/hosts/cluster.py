"""A plan of a run on a cluster: what runs where, the memory of each GPU, the bytes of an update.

All of it is arithmetic over the config and the shapes in the model's config.json (docs/machines.md
has the formulas). Nothing is started, and no weights are read.
"""

import math
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers

WIDTHS = {"float32": 4, "bfloat16": 2}  # bytes per number
GIB = 1 << 30
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# what a GPU is assumed to reach, in operations and bytes of its memory a second (two fifths and
# three fifths of an H100's peak in bfloat16), and a host's disk or link, in bytes a second
OPERATIONS, MEMORY_SPEED, LINK_SPEED = 4e14, 2e12, 5e9


class ClusterPlan(NamedTuple):
    """The plan of a run; bytes, and seconds under the assumed speeds."""

    placement: list[str]  # hosts, their GPUs and what runs on these
    parameters: int
    learner_gpu: Numbers  # bytes by use
    server_gpu: Numbers
    swap: Numbers  # bytes that an update moves
    times: Numbers  # see `asyncrl.experiments.simulate.times.TimeModel`


def place_processes(config: Config) -> list[str]:
    """Give each learner rank and each server its GPUs.  Raises ConfigError without room."""
    placement, ranks = config.placement, config.learner.process_count
    size, width = placement.gpus_per_node, config.generator.tensor_parallel or 1
    tensor = config.learner.mesh.tensor
    groups = f", tensor groups of {tensor}" if tensor > 1 else ""
    placed = []
    for first in range(0, ranks, size):
        last = min(first + size, ranks) - 1
        host = f"node {first // size + 1} GPUs 0-{last - first}"
        placed.append(f"{host}: learner ranks {first} to {last}{groups}")
    hosts: dict[str, int] = {}  # -> GPUs of its servers so far
    for url in config.generator.servers:
        host = urlsplit(url).hostname or url
        first = hosts.get(host, 0)
        hosts[host] = first + width
        if hosts[host] > size:
            raise ConfigError(
                f"generator.servers: {url} is server {first // width + 1} of its host, each with "
                f"{width} GPU(s) (generator.tensor_parallel); a host has {size} "
                "(placement.gpus_per_node)"
            )
        placed.append(f"{host} GPUs {first}-{first + width - 1}: server {url}")
    learner_hosts = math.ceil(ranks / size)
    if (needed := learner_hosts + len(hosts)) > placement.nodes:
        raise ConfigError(
            f"placement.nodes: {placement.nodes}, but {ranks} ranks (learner.ranks) take "
            f"{learner_hosts} and the servers (generator.servers) {len(hosts)}; set it to {needed}"
        )
    return placed


def count_parameters(shape: Any) -> tuple[int, int, int]:
    """Count the parameters of a layer, those outside of the layers, and all.

    shape: transformers' config of a dense Llama, Mistral, Qwen2 or Qwen3.
    """
    hidden = shape.hidden_size
    head = getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads
    queries, keys = shape.num_attention_heads * head, shape.num_key_value_heads * head
    layer = 2 * hidden * (queries + keys) + 3 * hidden * shape.intermediate_size + 2 * hidden
    if shape.model_type == "qwen2":
        layer += queries + 2 * keys  # biases
    elif shape.model_type == "qwen3":
        layer += 2 * head  # norms of queries and keys
    tables = 1 if shape.tie_word_embeddings else 2
    outside = tables * shape.vocab_size * hidden + hidden
    return layer, outside, shape.num_hidden_layers * layer + outside


def plan_memory(config: Config, shape: Any) -> tuple[Numbers, Numbers]:
    """Return the bytes by use on a learner rank's GPU and on a server's, without activations."""
    from actors.engine_vllm import choose_dtype, count_cache_bytes
    from asyncrl.models.model_check import list_references

    learner, settings = config.learner, config.generator
    layer, outside, parameters = count_parameters(shape)
    width, shards = WIDTHS[config.model.dtype], 1
    gathered, part = 0, width
    if learner.backend == "fsdp2":
        # divides float32 numbers, and gathers layers and their gradients in the model's format
        shards, part = learner.process_count // learner.mesh.replicate, 4
        gathered = 2 * (outside + 2 * layer) * width // learner.mesh.tensor
    held = 0 if learner.offload else parameters * part / shards
    several = settings.tensor_parallel or 1
    slots = -(-settings.slots // len(settings.servers))
    return {
        "weights": held,
        "gradients": held,
        "optimizer": 0 if learner.optimizer == "sgd" else 2 * held,
        "gathered layers": gathered,
        "references": len(list_references(config)) * parameters * width,
    }, {
        "weights": parameters * WIDTHS[choose_dtype(config)] / several,
        "KV cache": count_cache_bytes(config, shape, slots)
        / min(several, shape.num_key_value_heads),
    }


def make_plan(config: Config) -> ClusterPlan:
    """Plan a run.  Raises ConfigError for one that does not fit, with the number and the key."""
    from asyncrl.models.policy import load_text_config

    learner, settings = config.learner, config.generator
    if not settings.servers or learner.backend == "deepspeed" or config.lora.rank:
        raise ConfigError(
            "placement.nodes: a cluster is planned for generator.servers and learner.backend = "
            "torch or fsdp2, without lora.rank"
        )
    shape = load_text_config(config.model.path)
    if shape.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"model.path: {config.model.path} is a {shape.model_type}; a cluster is planned for "
            f"{', '.join(ARCHITECTURES)}"
        )
    placed = place_processes(config)
    rank, server = plan_memory(config, shape)
    several = settings.tensor_parallel or 1
    tensor = learner.mesh.tensor
    heads, key_heads = shape.num_attention_heads, shape.num_key_value_heads
    if key_heads % tensor or shape.intermediate_size % tensor:
        raise ConfigError(
            f"learner.mesh.tensor: {tensor} ranks cannot divide {config.model.path}, whose heads, "
            "key heads and intermediate_size have to be multiples of it"
        )
    if heads % several or (key_heads % several and several % key_heads):
        raise ConfigError(
            f"generator.tensor_parallel: {several} GPUs cannot divide the {heads} heads and "
            f"{key_heads} key heads of {config.model.path}"
        )
    shards = learner.process_count // learner.mesh.replicate // tensor
    remedies = {
        f"a learner rank: raise learner.mesh.shard of backend fsdp2 (now {shards}), or set "
        "learner.offload = true": rank,
        f"a server: raise generator.tensor_parallel (now {several}), or lower generator.slots "
        f"(now {settings.slots})": server,
    }
    for remedy, used in remedies.items():
        if (total := sum(used.values()) / GIB) > config.placement.gpu_gib:
            raise ConfigError(
                f"placement.gpu_gib: {config.placement.gpu_gib:g}, but {total:.1f} GiB "
                f"({describe_bytes(used)}) are needed on each GPU of {remedy}"
            )
    parameters = count_parameters(shape)[-1]
    file = parameters * WIDTHS[config.model.dtype]
    passes = 8 if learner.gradient_checkpointing else 6
    return ClusterPlan(
        placed,
        parameters,
        rank,
        server,
        {"file": file, "read by servers": file * several * len(settings.servers)},
        {
            "step": server["weights"] / MEMORY_SPEED,
            # half a context's keys and values; samples are divided among the servers
            "row": server["KV cache"] / settings.slots / 2 / MEMORY_SPEED,
            "train": 1.0,
            "train_tokens": learner.process_count * OPERATIONS / (passes * parameters),
            "publish": file / LINK_SPEED,
            "swap": 2 * file / LINK_SPEED,
        },
    )


def describe_bytes(used: Numbers) -> str:
    """Describe bytes by use, in GiB."""
    return ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in used.items() if size)
