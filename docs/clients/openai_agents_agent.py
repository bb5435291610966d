import json
import os
import sys

from agents import Agent, ModelBehaviorError, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel

set_tracing_disabled(True)  # it would send traces to OpenAI, with the session's key
task = json.load(sys.stdin)


class Answer(BaseModel):
    value: int


@function_tool
def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


agent = Agent(
    name="solver",
    instructions='Answer as JSON: {"value": 1}',
    model=os.environ["OPENAI_MODEL"],  # at OPENAI_BASE_URL, by the responses API
    tools=[multiply],
    output_type=Answer,
)
answer = None
for _ in range(2):
    try:
        answer = Runner.run_sync(agent, task["text"], max_turns=4).final_output
        break
    except ModelBehaviorError:  # the completion is not an Answer
        continue
right = answer is not None and str(answer.value) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(answer is not None)}))
