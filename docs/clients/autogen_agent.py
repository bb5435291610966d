import asyncio
import json
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel, ValidationError

task = json.load(sys.stdin)


class Answer(BaseModel):
    value: int


def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


model = OpenAIChatCompletionClient(
    model=os.environ["OPENAI_MODEL"],  # OPENAI_BASE_URL, OPENAI_API_KEY
    model_info={
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": ModelFamily.UNKNOWN,
    },
)
agent = AssistantAgent(
    "solver",
    model,
    tools=[FunctionTool(multiply, description=multiply.__doc__, strict=True)],
    system_message='Answer as JSON: {"value": 1}',
    max_tool_iterations=3,
    output_content_type=Answer,
)
try:
    answer = asyncio.run(agent.run(task=task["text"])).messages[-1].content
except ValidationError:  # the completion is not an Answer
    answer = None
right = isinstance(answer, Answer) and str(answer.value) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(isinstance(answer, Answer))}))
