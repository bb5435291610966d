import json
import os
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel

task = json.load(sys.stdin)


class Answer(BaseModel):
    value: int


model = OpenAIChatModel(os.environ["OPENAI_MODEL"])  # OPENAI_BASE_URL, OPENAI_API_KEY
agent = Agent(model, output_type=Answer, retries=2)


@agent.tool_plain
def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


try:
    answer = agent.run_sync(task["text"]).output
except UnexpectedModelBehavior:  # after the retries no tool call that gives an Answer
    answer = None
right = answer is not None and str(answer.value) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(answer is not None)}))
