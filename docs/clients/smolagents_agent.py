import json
import os
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

task = json.load(sys.stdin)


@tool
def multiply(a: int, b: int) -> int:
    """The product of two integers.

    Args:
        a: the first
        b: the second
    """
    return a * b


model = OpenAIModel(os.environ["OPENAI_MODEL"])  # OPENAI_BASE_URL, OPENAI_API_KEY
agent = ToolCallingAgent([multiply], model, max_steps=4, verbosity_level=LogLevel.OFF)
answer = agent.run(task["text"])  # of the tool final_answer
right = str(answer) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "steps": float(agent.step_number)}))
