import json
import os
import sys

from anthropic import Anthropic

task = json.load(sys.stdin)
policy = Anthropic()  # ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY
ask = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 200}

integers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
multiply = {"name": "multiply", "input_schema": {"type": "object", "properties": integers}}
value = {"value": {"type": "integer"}}
answer = {"name": "answer", "input_schema": {"type": "object", "properties": value}}
messages = [{"role": "user", "content": task["text"] + " Give the result to the tool `answer`."}]
response = policy.messages.create(messages=messages, tools=[multiply, answer], **ask)
messages.append({"role": "assistant", "content": response.content})
results = [
    {
        "type": "tool_result",
        "tool_use_id": block.id,
        "content": str(block.input["a"] * block.input["b"]),
    }
    for block in response.content
    if block.type == "tool_use" and block.name == "multiply"
]
messages.append({"role": "user", "content": results or "Go on."})
response = policy.messages.create(
    messages=messages,
    tools=[multiply, answer],
    tool_choice={"type": "tool", "name": "answer"},
    **ask,
)
given = [block.input for block in response.content if block.type == "tool_use"]
parsed = len(given) == 1 and isinstance(given[0].get("value"), int)
right = parsed and str(given[0]["value"]) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(parsed)}))
