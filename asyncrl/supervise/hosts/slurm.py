"""`asyncrl run --on slurm`: write a batch script for Slurm, to review and submit with sbatch.

The job has two components.  The first runs the batch script, the buffer, the learner, the gateway
of sessions and one generator.  The second has a task for each further generator, which joins."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config import rules
from asyncrl.config.tree import Config, HostPlacement
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import fill
from asyncrl.supervise import join

WARN_S = 120  # Slurm sends SIGTERM this long before the time limit; the learner then checkpoints

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
