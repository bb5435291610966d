"""The reward of shared_reward.py, with which a run does not get beyond a prompt until a file is
there: a test that has something to do in mid-run comes in time, however slow it is."""

import os
import time
from pathlib import Path

import shared_reward

from asyncrl.contract.messages import Prompt

FIRST = 40  # of the training prompts: from this one on it waits
# of a run: what waits here is neither overdue nor lost
SETS = (
    "reward.function='held_reward:reward'",
    "reward.workers=1",
    "reward.deadline_s=1200.0",
    "wires.lease_s=1200.0",
    "watchdog.floor_s=1200.0",
    "watchdog.startup_s=1200.0",
)


def reward(prompt: Prompt, text: str) -> float:
    gate = Path(os.environ["REWARD_GATE"])
    while prompt.split == "train" and prompt.id >= FIRST and not gate.exists():
        time.sleep(0.01)
    return shared_reward.reward(prompt, text)
