from typing import Any

# An untrained model is never right: the entropy term is what moves its weights.
SMALL_TEXT = """
learner.steps=4 learner.groups=4 learner.group_size=4 generator.slots=16
generator.max_new_tokens=12 evaluation.every=2 evaluation.prompts=8 evaluation.final_prompts=8
evaluation.ood_prompts=0 loss.entropy=0.1
"""
SMALL = SMALL_TEXT.split()


def make_record(accuracy: Any, curve: Any = (), **more: Any) -> dict[str, Any]:
    """The record of a run in a warm process, empty but for what is given."""
    nothing = dict.fromkeys(("abandoned", "weights_digest", "trained_ids"), "")
    known = {"accuracy": accuracy, "curve": [*curve], "lag_histogram": {"0": 1}, "ledger_lines": {}}
    return {"steps": accuracy[0][-1], "wall_s": 1.0, **nothing, **known, **more}
