import json
import os
import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel, ValidationError

task = json.load(sys.stdin)


class Answer(BaseModel):
    value: int


def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"])  # OPENAI_BASE_URL, OPENAI_API_KEY
calling = model.bind_tools([multiply])
graph = StateGraph(MessagesState)
graph.add_node("policy", lambda state: {"messages": [calling.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([multiply]))
graph.set_entry_point("policy")
graph.add_conditional_edges("policy", tools_condition)
graph.add_edge("tools", "policy")
asked = task["text"] + ' At last answer as JSON: {"value": 1}'
result = graph.compile().invoke({"messages": [("user", asked)]}, {"recursion_limit": 12})
try:
    answer = Answer.model_validate_json(result["messages"][-1].text)
except ValidationError:  # the completion is not an Answer
    answer = None
right = answer is not None and str(answer.value) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(answer is not None)}))
