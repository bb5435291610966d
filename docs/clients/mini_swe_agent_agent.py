import json
import os
import sys
import tempfile

os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"  # no price is known for a policy
os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches one, at each start
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

task = json.load(sys.stdin)
model = LitellmModel(model_name="openai/" + os.environ["OPENAI_MODEL"])  # at OPENAI_BASE_URL
with tempfile.TemporaryDirectory() as folder:
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=folder),
        system_template="You answer with one call of the tool bash.",
        instance_template="{{task}} Write the result to answer.txt, then "
        "`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`.",
        step_limit=6,
    )
    agent.run(task["text"])
    try:
        answer = open(f"{folder}/answer.txt", encoding="utf-8").read().strip()
    except FileNotFoundError:
        answer = ""
print(float(answer == task["meta"]["value"]))
