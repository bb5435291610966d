from __future__ import annotations

from process_kit import RUN_SEED
from warm_python import FORKED

# The run, with as much patience as a busy machine may need with a harness that ends.
PATIENT = (
    f"{FORKED}import sys; from asyncrl.supervise import launch; "
    "launch.LATE_S = launch.END_S = 600.0; from asyncrl.cli import main; main(sys.argv[1:])"
)


SETS = tuple(
    f"""
seed={RUN_SEED} agent.env="" agent.serve=true model.warm_start=false learner.steps=2
learner.groups=2 learner.group_size=4 generator.slots=32 evaluation.every=0 evaluation.prompts=2
evaluation.final_prompts=2 evaluation.ood_prompts=2 wires.lease_s=600.0 agent.idle_s=600.0
agent.deadline_s=1800.0
""".split()
)
