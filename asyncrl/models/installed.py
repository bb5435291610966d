"""Check which engines and backends work on this machine, and what to install for the others.

Imports none of them in this process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncrl.config.engines import ENGINES
from asyncrl.config.tree import Config

# the versions of pyproject.toml, with which the tests run; others are warned about
TESTED = {"torch": "2.13.0", "transformers": "5.19.0"}
VISION = ("torchvision", "torchaudio", "torchcodec")
CHECKOUT = Path(__file__).resolve().parents[2]
TRIAL_S = 180.0  # deadline of a trial import, for a busy machine

# name -> (setting, distributions that provide it, code of the trial import)
KNOWN = {
    name: (f'generator.engine = "{name}"', row.distributions, row.trial)
    for name, row in ENGINES.items()
} | {
    "torch": ('learner.backend = "torch"', ("torch",), "import torch; torch.optim.AdamW"),
    "deepspeed": ('learner.backend = "deepspeed"', ("deepspeed",), "import deepspeed"),
}


def build_install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml; `make env` in a checkout."""
    if (CHECKOUT / "Makefile").is_file() and (CHECKOUT / "requirements").is_dir():
        return "make env (on a CUDA machine: make env TARGET=gpu)"
    if extra == "vllm":
        return (
            "pip install 'asyncrl[vllm]' on a CUDA machine; on a CPU use the source tree and "
            "`make env`"
        )
    return f"pip install 'asyncrl[{extra}]'"


def find_missing_package(config: Config) -> str:
    """Describe the first package that a config needs and this environment lacks; "" if none.

    Quick: nothing is imported.
    """
    engine = config.generator.engine
    if problem := explain_missing(engine):
        return f"generator.engine = {engine}: {problem}"
    needs = [
        (config.learner.backend == "deepspeed", "learner.backend", "deepspeed", "deepspeed"),
        (config.lora.rank > 0, "lora.rank", "peft", "lora"),
        (config.agent.forced == "constrain", "agent.forced: constrain", "llguidance", "agents"),
        *((True, f"record.trackers: {name}", name, name) for name in config.record.trackers),
    ]
    return next(
        (
            f"{key}: needs {package}, which is not installed: {build_install_command(extra)}"
            for is_needed, key, package, extra in needs
            if is_needed and importlib.util.find_spec(package) is None
        ),
        "",
    )


def find_version(*names: str) -> str:
    """Return the version of the first installed distribution of `names`; "" for none."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def list_untested_versions() -> str:
    """Name the packages of TESTED that have another version here; "" for none.

    Quick: nothing is imported.
    """
    installed = {name: find_version(name).partition("+")[0] for name in TESTED}
    untested = [
        f"{name} {installed[name] or 'is not installed'} (tested: {tested})"
        for name, tested in TESTED.items()
        if installed[name] != tested
    ]
    return ", ".join(untested)


def explain_missing(engine: str) -> str:
    """Explain why this engine cannot be used here, and what to do; "" when it can.

    Quick: nothing is imported.
    """
    row = ENGINES[engine]
    if importlib.util.find_spec(row.package) is None:
        return f"{row.title} is not installed: {build_install_command(engine)}"
    installed = find_version(*row.distributions).partition("+")[0]
    if row.pinned and installed != row.pinned:
        return (
            f"{row.title} {installed} is installed, and its internals differ between versions; "
            f"asyncrl needs {row.pinned}: {build_install_command(engine)}"
        )
    return ""


def check_installed() -> list[dict[str, Any]]:
    """Return a row per engine or backend: name, setting, version, works, why ("" if it works).

    Trial imports run in parallel.
    """
    with ThreadPoolExecutor() as pool:
        problems = list(pool.map(_explain_failure, KNOWN))
    return [
        {
            "name": name,
            "setting": setting,
            "version": find_version(*names).partition("+")[0],
            "works": not problem,
            "why": problem,
        }
        for (name, (setting, names, _)), problem in zip(KNOWN.items(), problems, strict=True)
    ]


def _explain_failure(name: str) -> str:
    """Try to import an engine or backend; say why that fails, "" if it does not."""
    _, names, code = KNOWN[name]
    if not find_version(*names):
        return f"not installed: {build_install_command(name)}"
    env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-P", "-c", code]
    try:
        trial = subprocess.run(
            argv, capture_output=True, text=True, env=env, timeout=TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {TRIAL_S:g} s"
    if not trial.returncode:
        return explain_missing(name) if name in ENGINES else ""
    reason = trial.stderr.strip().rpartition("\n")[2] or "no message"
    present = [package for package in VISION if find_version(package)]
    if present and any(package in trial.stderr for package in VISION):
        return (
            f"{', '.join(present)} of another build than torch "
            f"{find_version('torch')} ({reason}): pip uninstall -y {' '.join(present)}"
        )
    return f"importing it fails: {reason}; {build_install_command(name)}"


def describe_device() -> str:
    """Describe the device that torch uses."""
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"cpu ({os.cpu_count()} cores; torch {torch.__version__} sees no CUDA device)"
