"""Train an external framework through the endpoint: the openai-agents SDK on the calculator task.

The SDK, its runner and its tool loop are unchanged.  It is not a dependency: make an environment
with openai-agents, and run

    cp -r models/calc models/calc_tools              # a warm start of configs/calc.toml
    python benchmarks/openai_agents.py template > models/calc_tools/chat_template.jinja
    asyncrl run configs/calc.toml --set 'agent.env=""' --set agent.serve=true \
        --set model.path=models/calc_tools --set agent.parser=benchmarks/openai_agents.py:called
    python benchmarks/openai_agents.py RUN           # by that environment's Python

The model does not write JSON: `called` converts the text before its answer into a tool call, and
the template converts it back.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
import uuid
from pathlib import Path
from typing import Any

AT_ONCE = 64
TURNS = 6
CALL = re.compile(r"\?(\d{1,4})([*+-])(\d{1,4})")
TEMPLATE = (
    "{%- for m in messages -%}{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}{{ c.function.arguments.call }}{%- endfor -%}"
    "{%- if m.role == 'assistant' -%}<eos>{%- endif -%}{%- endfor -%}"
)


class Hopeless(Exception):
    """No further session could do better."""


def called(text: str) -> dict[str, Any]:
    """agent.parser: `#341` is an answer, all else a call of the tool."""
    if text.startswith("#"):
        return {"content": text}
    function = {"name": "calculate", "arguments": {"call": text}}
    return {"content": "", "tool_calls": [{"type": "function", "function": function}]}


def calculate(call: str) -> str:
    """The calculator."""
    found = CALL.fullmatch(call)
    if found is None:
        return "e="
    left, right = int(found[1]), int(found[3])
    result = {"*": left * right, "+": left + right, "-": left - right}[found[2]]
    return f"{result}=" if 0 <= result < 10_000 else "e="


def solved(text: str) -> str:
    """Solve a problem such as `37*8+45=`, and return the answer."""
    # type: ignore[union-attr]
    left, factor, sign, last = re.fullmatch(r"(\d+)\*(\d+)([+-])(\d+)=", text).groups()
    product = int(left) * int(factor)
    return f"#{product + int(last) if sign == '+' else product - int(last)}"


async def work(url: str, key: str, http: Any, name: str = "") -> int:
    """Sessions one after another, until the run is over; how many were scored.  name: the model's,
    if it is not to be the one that the lease gives.

    Raises Hopeless where no further session could do better, and the client's own errors when the
    endpoint has gone without a word that the run is over."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
    from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
    from openai import APIStatusError, AsyncOpenAI

    tool = function_tool(calculate)
    scored = 0
    while True:
        said = {"lease": uuid.uuid4().hex, "wait_s": 10}
        leased = await http.post(
            f"{url}/asyncrl/v1/sessions", json=said, headers={"authorization": f"Bearer {key}"}
        )
        if leased.status_code == 410:
            return scored
        if leased.status_code == 204:
            continue
        if leased.status_code != 200:
            raise Hopeless(f"{url}: no lease: {leased.status_code} {leased.text[:200]}")
        got = leased.json()
        client = AsyncOpenAI(base_url=got["base_url"], api_key=got["api_key"], http_client=http)
        model = OpenAIChatCompletionsModel(model=name or got["model"], openai_client=client)
        agent = Agent(name="sums", model=model, tools=[tool])
        text = got["task"]["text"]
        own = {"authorization": f"Bearer {got['api_key']}"}
        at = f"{url}/s/{got['session']}"
        try:
            result = await Runner.run(agent, text, max_turns=TURNS)
            reward = float(result.final_output == solved(text))
        except (MaxTurnsExceeded, ModelBehaviorError):  # the policy's doing: worth nothing
            reward = 0.0
        except APIStatusError as error:
            if error.status_code == 410:  # this session is over, perhaps the run: the lease tells
                continue
            if error.code != "session_limit":
                await http.post(f"{at}/end", json={"failed": str(error)}, headers=own)
                if error.status_code in (401, 404):  # every session would meet it
                    raise Hopeless(f"{at}: {error}") from error
                continue
            reward = 0.0
        done = await http.post(f"{at}/reward", json={"reward": reward}, headers=own)
        scored += done.status_code == 200


async def main(run_dir: Path, name: str = "") -> None:
    import agents
    import httpx2
    import openai
    from openai import DefaultAsyncHttpxClient

    agents.set_tracing_disabled(True)
    while not (run_dir / "agent.url").exists():
        time.sleep(0.1)
    url = (run_dir / "agent.url").read_text().strip()
    key = (run_dir / "agent.key").read_text().strip()
    async with DefaultAsyncHttpxClient(timeout=600) as http:
        each = [work(url, key, http, name) for _ in range(AT_ONCE)]
        try:
            scored = await asyncio.gather(*each)
        except Hopeless as error:
            raise SystemExit(str(error)) from error
        except (openai.APIConnectionError, httpx2.TransportError) as error:
            raise SystemExit(f"{url} has gone: {type(error).__name__} {error}") from error
    print(f"{sum(scored)} sessions by openai-agents {agents.version.__version__}")


if __name__ == "__main__":
    if sys.argv[1] == "template":
        print(TEMPLATE, end="")
    else:
        asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:3]))
