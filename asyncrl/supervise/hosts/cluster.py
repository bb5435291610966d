"""The plan of a run on a cluster, and the script that starts a run under Slurm.

The plan, what runs where, the memory of each GPU and the bytes of an update, is arithmetic over the
config and the shapes in the model's config.json (docs/machines.md has the formulas). Nothing is
started, and no weights are read.
"""

import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from asyncrl.config import rules
from asyncrl.config.tree import Config, HostPlacement
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers
from asyncrl.contract.toml_writer import fill
from asyncrl.supervise import join

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


# ---- `asyncrl run --on slurm`: a batch script, to review and submit with sbatch ------------------

WARN_S = 120  # Slurm sends SIGTERM this long before the time limit; the learner then checkpoints

# The job has two components. The first runs this script, the buffer, the learner, the gateway of
# sessions and one generator. The second has a task for each further generator, which joins.
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={{ quote("asyncrl-" ~ directory.name) }}
#SBATCH --output={{ directory }}-%j.out
#SBATCH --signal=B:TERM@{{ warn_s }}
#SBATCH --requeue
#SBATCH --nodes=1 --ntasks=1 {{ resources(placement.learner) }}
#SBATCH hetjob
#SBATCH --ntasks={{ joining }} {{ resources(placement.generator) }}
# Add the options of your site (--partition, --account, --time) and the commands that make the
# package available (module load, source .../bin/activate).  The run directory and {{ quote(cwd) }}
# have to be on a disk that all hosts share.
set -u
cd {{ quote(cwd) }}
run_dir={{ quote(directory | string) }}
keys=$run_dir.keys
ip=$(getent ahostsv4 "$(hostname)" | awk 'NR == 1 { print $1 }')
port=$((20000 + SLURM_JOB_ID % 10000 / 2 * 4))
wires=(--set "wires.address=tcp://$ip:$port" --set "wires.weights_address=tcp://$ip:$((port + 1))"
  --set "wires.curve_dir=$keys" --set generators=1)
{% if sessions %}
{# the generators receive calls from the gateway, which runs beside the buffer #}
wires+=(--set "wires.gateway_address=tcp://$ip:$((port + 2))")
{% endif %}
[ -e "$keys/server.key" ] || asyncrl keys "$keys" --generators {{ joining + 1 }} || exit
if [ -e "$run_dir/config.toml" ]; then
  asyncrl run --resume "$run_dir" "${wires[@]}" &
else
  asyncrl run {{ command }} "${wires[@]}" &
fi
run=$!
# TERM instead of INT, which background processes of a shell ignore
trap 'kill -TERM $run' TERM INT
srun --het-group=1 --kill-on-bad-exit=0 bash -c 'n=$((SLURM_PROCID + 1))
  exec asyncrl join "$0" --keys "$1/generator-$n" --index "$n" --wait 600{{ trust }}' \\
  "tcp://$ip:$port" "$keys" &
joined=$!
# a wait interrupted by a signal returns the signal's code; bash keeps the exit code of the run
while kill -0 $run 2>/dev/null; do wait $run; done
wait $run
code=$?
kill -TERM $joined 2>/dev/null
wait $joined
exit $code
"""


def format_resources(host: HostPlacement) -> str:
    """Format the resource options of a task; Slurm only allocates whole CPUs and GPUs.

    >>> format_resources(HostPlacement(cpus=2, gpus=1)), format_resources(HostPlacement())
    ('--cpus-per-task=2 --gpus-per-task=1', '--cpus-per-task=1')
    """
    if host.cpus % 1 or host.gpus % 1:
        raise ConfigError(
            f"--on slurm: placement asks for {host.cpus:g} CPUs and {host.gpus:g} GPUs; Slurm "
            "needs whole numbers"
        )
    gpus = f" --gpus-per-task={host.gpus:g}" if host.gpus else ""
    return f"--cpus-per-task={host.cpus:g}{gpus}"


def render_script(config: Config, source: str, sets: Sequence[str], run_dir: Path) -> str:
    """Return the batch script for `asyncrl run SOURCE --set ...`.

    Raises ConfigError for a config that cannot run on several hosts or needs only one."""
    for problem in rules.apply_table("hosts", config):
        raise ConfigError(f"--on slurm: {problem}")
    joining = (config.placement.generator.count or config.generators) - 1
    if joining < 1:
        raise ConfigError(
            "--on slurm: one generator needs one machine: run it there, or raise "
            "placement.generator.count"
        )
    directory = run_dir.resolve()
    items = [*sets, f"name={directory.name!r}", f"runs={str(directory.parent)!r}"]
    command = [source if not Path(source).exists() else str(Path(source).resolve())]
    command += [word for item in items for word in ("--set", item)]
    return fill(
        SCRIPT,
        directory=directory,
        placement=config.placement,
        joining=joining,
        command=shlex.join(command),
        sessions=config.uses_sessions,
        trust="".join(f" {word}" for word in join.list_trust_options(config)),
        cwd=os.getcwd(),
        warn_s=WARN_S,
        quote=shlex.quote,
        resources=format_resources,
    )
