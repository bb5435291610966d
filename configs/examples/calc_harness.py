"""An agent in a program of its own, trained through the endpoint: sums with a calculator.

    asyncrl run configs/calc.toml --set 'agent.env=""' --set agent.serve=true
    python configs/examples/calc_harness.py RUN

It leases samples, asks the policy with OpenAI's client, runs the calculator, and scores."""

import sys
import threading
import time
import uuid
from pathlib import Path

import httpx
import openai
from openai import OpenAI

from asyncrl.tasks.calc import TURNS, calculate

THREADS = 64


def play(text: str, answer: str, policy: OpenAI) -> float:
    """One session: the reward."""
    for _ in range(TURNS):
        said = policy.completions.create(model="policy", prompt=text).choices[0].text
        if said.startswith("#"):
            return float(said == answer)
        text += said + calculate(said)
    return 0.0


def work(url: str, run_key: str, client: httpx.Client) -> None:
    """Sessions one after another, until the run is over."""
    head = {"authorization": f"Bearer {run_key}"}
    while True:
        try:
            lease = {"lease": uuid.uuid4().hex, "wait_s": 10}
            leased = client.post(f"{url}/asyncrl/v1/sessions", json=lease, headers=head)
        except httpx.TransportError:
            return  # the endpoint has gone, and the run with it
        if leased.status_code == 410:
            return
        if leased.status_code != 200:
            continue
        got = leased.json()
        policy = OpenAI(base_url=got["base_url"], api_key=got["api_key"], http_client=client)
        at = f"{url}/s/{got['session']}"
        mine = {"authorization": f"Bearer {got['api_key']}"}
        try:
            # the answer is the harness's own knowledge: the endpoint never tells it
            reward = play(got["task"]["text"], solved(got["task"]["text"]), policy)
            client.post(f"{at}/reward", json={"reward": reward}, headers=mine)
        except openai.APIStatusError as error:
            if error.code == "session_limit":
                client.post(f"{at}/reward", json={"reward": 0.0}, headers=mine)
        except (openai.APIConnectionError, httpx.TransportError):
            return


def solved(text: str) -> str:
    """What the problem before the = comes to, as an answer."""
    total = 0
    for term in text.rstrip("=").replace("-", "+-").split("+"):
        sign, product = (-1, term[1:]) if term.startswith("-") else (1, term)
        left, _, right = product.partition("*")
        total += sign * int(left) * int(right or 1)
    return f"#{total}"


def main(run_dir: Path) -> None:
    while not (run_dir / "agent.url").exists():
        time.sleep(0.1)
    url = (run_dir / "agent.url").read_text().strip()
    key = (run_dir / "agent.key").read_text().strip()
    client = httpx.Client(timeout=600, limits=httpx.Limits(max_connections=None))
    threads = [threading.Thread(target=work, args=(url, key, client)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
