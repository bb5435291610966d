"""An agent of two calls that says, by a file of its process's number, that a call of its own is
under way: from after it was sent until its answer is read.
"""

import http.client
import json
import os
import urllib.parse
from pathlib import Path

url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
head = {
    "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
    "content-type": "application/json",
}
mark = Path(os.environ["AGENT_MARKS"]) / str(os.getpid())
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
