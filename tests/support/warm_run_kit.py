# An untrained model is never right: the entropy term is what moves its weights.
SMALL = (
    "learner.steps=4",
    "learner.groups=4",
    "learner.group_size=4",
    "generator.slots=16",
    "generator.max_new_tokens=12",
    "evaluation.every=2",
    "evaluation.prompts=8",
    "evaluation.final_prompts=8",
    "evaluation.ood_prompts=0",
    "loss.entropy=0.1",
)
