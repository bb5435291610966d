import json
import os
import sys

from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

task = json.load(sys.stdin)


class Answer(BaseModel):
    """The result."""

    value: int


def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"])  # OPENAI_BASE_URL, OPENAI_API_KEY
agent = create_agent(model, tools=[multiply], response_format=ToolStrategy(Answer))
result = agent.invoke({"messages": [("user", task["text"])]}, {"recursion_limit": 12})
answer = result.get("structured_response")  # absent when the policy never called `Answer`
right = answer is not None and str(answer.value) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(answer is not None)}))
