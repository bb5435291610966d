import json
import os
import sys

from litellm import completion
from pydantic import BaseModel, ValidationError

task = json.load(sys.stdin)
model = "openai/" + os.environ["OPENAI_MODEL"]  # at OPENAI_BASE_URL, with OPENAI_API_KEY


class Answer(BaseModel):
    value: int


integers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
multiply = {
    "type": "function",
    "function": {"name": "multiply", "parameters": {"type": "object", "properties": integers}},
}
messages = [{"role": "user", "content": task["text"] + ' Answer as JSON: {"value": 1}'}]
message = completion(model, messages, tools=[multiply]).choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or []:
    given = json.loads(call.function.arguments)
    product = str(given["a"] * given["b"])
    messages.append({"role": "tool", "tool_call_id": call.id, "content": product})

response = completion(model, messages, tools=[multiply], response_format=Answer)
try:
    answer = Answer.model_validate_json(response.choices[0].message.content)
except ValidationError:  # the completion is not an Answer
    answer = None
right = answer is not None and str(answer.value) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(answer is not None)}))
