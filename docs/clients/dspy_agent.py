import json
import os
import sys

import dspy
from dspy.utils.exceptions import AdapterParseError

task = json.load(sys.stdin)
model = dspy.LM("openai/" + os.environ["OPENAI_MODEL"], cache=False)  # at OPENAI_BASE_URL
dspy.configure(lm=model, adapter=dspy.JSONAdapter())


def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


agent = dspy.ReAct("question -> value: int", tools=[multiply], max_iters=3)
try:
    answer = agent(question=task["text"]).value
except AdapterParseError:  # what the policy wrote has not the fields
    answer = None
right = str(answer) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(answer is not None)}))
