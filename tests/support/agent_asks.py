"""What another's agent does: it asks OPENAI_BASE_URL, and pays for the answer's length."""

import json
import os
import urllib.request

body = {"model": os.environ["ASYNCRL_MODEL"], "messages": [{"role": "user", "content": "low"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request))
print(len(answer["choices"][0]["message"]["content"]))
