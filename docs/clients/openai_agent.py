import json
import os
import sys

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ValidationError

task = json.load(sys.stdin)
policy = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
model = os.environ["OPENAI_MODEL"]


class Answer(BaseModel):
    value: int


class Multiply(BaseModel):
    """The product of two integers."""

    a: int
    b: int


tools = [pydantic_function_tool(Multiply, name="multiply")]
messages = [{"role": "user", "content": task["text"] + ' Answer as JSON: {"value": 1}'}]
response = policy.chat.completions.create(model=model, messages=messages, tools=tools)
message = response.choices[0].message
messages.append(message)
for call in message.tool_calls or []:
    given = json.loads(call.function.arguments)
    product = str(given["a"] * given["b"])
    messages.append({"role": "tool", "tool_call_id": call.id, "content": product})

answer = None
for _ in range(2):
    try:
        response = policy.chat.completions.parse(
            model=model, messages=messages, tools=tools, response_format=Answer
        )
        answer = response.choices[0].message.parsed
        break
    except ValidationError:  # the completion is not an Answer
        continue
right = answer is not None and str(answer.value) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(answer is not None)}))
