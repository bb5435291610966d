import json
import os
import sys

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel

task = json.load(sys.stdin)


class Answer(BaseModel):
    value: int


@tool
def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


model = LLM(model="openai/" + os.environ["OPENAI_MODEL"], base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(
    role="solver", goal="Solve it.", backstory="-", llm=model, tools=[multiply], max_iter=4
)
work = Task(description=task["text"], expected_output="JSON", agent=agent, output_pydantic=Answer)
answer = None
try:
    answer = Crew(agents=[agent], tasks=[work]).kickoff().pydantic
except Exception as error:  # CrewAI has no narrower class for a failed conversion
    print(f"no answer: {error}", file=sys.stderr)
right = answer is not None and str(answer.value) == task["meta"]["value"]
print(json.dumps({"reward": float(right), "parsed": float(answer is not None)}))
