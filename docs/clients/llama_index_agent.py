import asyncio
import json
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ValidationError

task = json.load(sys.stdin)


class Answer(BaseModel):
    value: int


def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


model = OpenAILike(
    model=os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
)
agent = FunctionAgent(
    tools=[multiply], llm=model, streaming=False, system_prompt='Answer as JSON: {"value": 1}'
)


async def main():
    return str(await agent.run(task["text"], max_iterations=4))


try:
    answer = Answer.model_validate_json(asyncio.run(main()))
except ValidationError:  # the completion is not an Answer
    answer = None
right = answer is not None and str(answer.value) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(answer is not None)}))
