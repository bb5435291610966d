"""Which engines and backends work on this machine; for those that do not, why and what to install.
Imports none of them itself.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

from asyncrl.config.engines import ENGINES

VLLM = ENGINES["vllm"].pinned
VISION = ("torchvision", "torchaudio", "torchcodec")
INSTALL = "make env (on a CUDA machine: make env TARGET=gpu)"
TRIAL_S = 180.0  # seconds that a trial import may take on a busy machine

# name -> (setting, distributions that bring it, what a trial imports)
KNOWN = {
    name: (f'generator.engine = "{name}"', row.distributions, row.trial)
    for name, row in ENGINES.items()
} | {
    "torch": ('learner.backend = "torch"', ("torch",), "import torch; torch.optim.AdamW"),
    "deepspeed": ('learner.backend = "deepspeed"', ("deepspeed",), "import deepspeed"),
}


def version(*names: str) -> str:
    """The version of the first of these distributions that is installed; empty for none."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def missing(engine: str) -> str:
    """Why this engine cannot be used here, and what to do; empty when it can.  Quick: nothing is
    imported.
    """
    row = ENGINES[engine]
    if importlib.util.find_spec(row.package) is None:
        return f"{row.title} is not installed: {INSTALL}"
    found = version(*row.distributions).partition("+")[0]
    if row.pinned and found != row.pinned:
        return (
            f"{row.title} {found} is installed, and its inside differs between versions; this "
            f"needs {row.pinned}: {INSTALL}"
        )
    return ""


def explain(name: str, error: str) -> str:
    """One line on why the trial import of `name` failed, with what to do."""
    last = error.strip().splitlines()[-1] if error.strip() else "no message"
    present = [p for p in VISION if version(p)]
    if present and ("torchvision" in error or "torchaudio" in error or "torchcodec" in error):
        return (
            f"{', '.join(present)} of another build than torch {version('torch')} "
            f"({last}): pip uninstall -y {' '.join(present)}"
        )
    return f"importing it fails: {last}; {INSTALL}"


def look() -> list[dict[str, Any]]:
    """One row an engine or backend: name, setting, version, works, why (empty when it works).
    Trial imports run side by side.
    """
    env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    trials = {}
    for name, (_, names, code) in KNOWN.items():
        if version(*names):
            trials[name] = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
    rows = []
    for name, (setting, names, _) in KNOWN.items():
        why = f"not installed: {INSTALL}"
        if name in trials:
            why = tried(name, trials[name])
        if name in ENGINES and not why:
            why = missing(name)
        rows.append(
            {
                "name": name,
                "setting": setting,
                "version": version(*names).partition("+")[0],
                "works": not why,
                "why": why,
            }
        )
    return rows


def tried(name: str, trial: subprocess.Popen[str]) -> str:
    """The verdict of a trial import; empty when it went well."""
    try:
        _, error = trial.communicate(timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        trial.kill()
        trial.communicate()
        return f"importing it takes more than {TRIAL_S:g} s"
    return explain(name, error) if trial.returncode else ""


def device() -> str:
    """What torch would compute on."""
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"cpu ({os.cpu_count()} cores; torch {torch.__version__} sees no CUDA device)"
