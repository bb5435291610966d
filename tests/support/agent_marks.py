"""An agent of two calls that says, by a file of its process's number, that a call of its own is
under way: from after it was sent until its answer is read.  Before its first one it waits for a
gate, once a file is there (AGENT_AFTER)."""

import http.client
import json
import os
import time
import urllib.parse
from pathlib import Path

url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
head = {
    "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
    "content-type": "application/json",
}
mark = Path(os.environ["AGENT_MARKS"]) / str(os.getpid())
gate, after = Path(os.environ["AGENT_GATE"]), Path(os.environ["AGENT_AFTER"])
if after.exists() and after.stat().st_size > 0:
    gate.with_suffix(".reached").touch()
    while not gate.exists():
        time.sleep(0.01)
text = json.loads(Path(os.environ["ASYNCRL_TASK"]).read_text())["text"]
for _ in range(2):
    connection = http.client.HTTPConnection(url.netloc)
    body = json.dumps({"model": os.environ["ASYNCRL_MODEL"], "prompt": text})
    connection.request("POST", url.path + "/completions", body, head)
    mark.touch()
    answer = json.load(connection.getresponse())
    mark.unlink()
    if "choices" not in answer:
        break  # a limit of the session
    text += answer["choices"][0]["text"]
print(len(text) % 3)
