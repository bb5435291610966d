"""The batch script of `--on slurm`, with commands in place of Slurm's and ours."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from process_kit import ROOT, run_cli

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.supervise.hosts import cluster

DEMO = ROOT / "configs" / "demo.toml"
WAIT_S = 600.0
# each says how it was called; the run goes on until it is told to end
OURS = """#!/bin/bash
echo "asyncrl $*" >> {log}
case $1 in
  keys) mkdir -p "$2"; touch "$2/server.key";;
  run) trap 'echo "told to end" >> {log}; exit 130' TERM; touch {log}.up
    while :; do sleep 0.05; done;;
  join) [ -n "${{SLURM_PROCID:-}}" ];;
esac
"""
SRUN = """#!/bin/bash
echo "srun $1 $2" >> {log}
shift 2
for n in 0 1; do SLURM_PROCID=$n "$@"; done
"""
# read by the script's bash: who was told to end has gone before it goes on
SLOW = """kill() {
  builtin kill "$@"
  local code=$?
  if [ "$1" = -TERM ]; then while builtin kill -0 "$2" 2>/dev/null; do sleep 0.01; done; fi
  return $code
}
"""


def text(tmp_path: Path, *sets: str) -> str:
    return cluster.render_script(load.load(DEMO, sets), str(DEMO), sets, tmp_path / "runs" / "r")


def test_the_script_starts_a_run_and_who_joins_it_and_ends_in_time(tmp_path: Path) -> None:
    script, log = tmp_path / "r.sbatch", tmp_path / "log"
    sets = ("placement.generator={count=3, cpus=2, gpus=1}", "placement.learner={cpus=4}")
    script.write_text(text(tmp_path, *sets))
    head = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert head[-3:] == [
        "#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=4",
        "#SBATCH hetjob",
        "#SBATCH --ntasks=2 --cpus-per-task=2 --gpus-per-task=1",
    ]
    (tmp_path / "bin").mkdir()
    for name, body in (("asyncrl", OURS), ("srun", SRUN)):
        (tmp_path / "bin" / name).write_text(body.format(log=log))
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "1007"}

    (tmp_path / "slow.sh").write_text(SLOW)
    held = env | {"BASH_ENV": str(tmp_path / "slow.sh")}

    def job(env: dict[str, str]) -> list[str]:
        log.write_text("")
        (tmp_path / "log.up").unlink(missing_ok=True)
        process = subprocess.Popen(["bash", str(script)], env=env, start_new_session=True)
        until = time.monotonic() + WAIT_S
        try:
            while not (tmp_path / "log.up").exists() or log.read_text().count("join") < 2:
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 130
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return log.read_text().splitlines()

    keys = tmp_path / "runs" / "r.keys"
    lines = job(env)
    assert lines[0] == f"asyncrl keys {keys} --generators 3" and lines[-1] == "told to end"
    run = next(line for line in lines if line.startswith("asyncrl run"))
    address = run.partition("wires.address=")[2].split()[0]
    assert address.startswith("tcp://") and address.endswith(":22012")
    assert f"asyncrl run {DEMO} --set {sets[0]}" in run and "--set name='r'" in run
    assert f"wires.curve_dir={keys}" in run and run.endswith("--set generators=1")
    assert "gateway" not in run and "srun --het-group=1 --kill-on-bad-exit=0" in lines
    for n in (1, 2):
        joined = f"asyncrl join {address} --keys {keys}/generator-{n} --index {n} --wait 600"
        assert joined in lines
    # the same script again goes on with the run, with the same keys
    (tmp_path / "runs" / "r").mkdir()
    (tmp_path / "runs" / "r" / "config.toml").touch()
    again = job(held)
    assert not [line for line in again if "keys " + str(keys) + " --gen" in line]
    assert [x for x in again if f"asyncrl run --resume {tmp_path / 'runs' / 'r'} --set" in x]


def test_sessions_have_an_address_for_their_gateway(tmp_path: Path) -> None:
    """The generators of the other hosts take its calls there."""
    config = load.load(ROOT / "configs" / "calc.toml", ["placement.generator.count=2"])
    body = cluster.render_script(config, "calc", [], tmp_path / "runs" / "r")
    lines = body[body.index("ip=$(") : body.index("[ -e ")]
    shown = subprocess.run(
        ["bash", "-uc", f'{lines}printf "%s\\n" "${{wires[@]}}"'],
        env=os.environ | {"SLURM_JOB_ID": "11008", "keys": "K"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    named = [word.partition("=")[::2] for word in shown if word.startswith("wires.")]
    ports = {name: value.rpartition(":")[2] for name, value in named if "address" in name}
    assert ports == {
        "wires.address": "22016",
        "wires.weights_address": "22017",
        "wires.gateway_address": "22018",
    }
    for sets, why in (
        (("generators=1",), "one generator needs one machine"),
        (("placement.generator={count=2, gpus=0.5}",), "0.5 GPUs; Slurm needs whole numbers"),
        (("generators=2", "weights.transport='shared_memory'"), "only works on one machine"),
    ):
        with pytest.raises(ConfigError, match=why):
            text(tmp_path, *sets)
    ended = run_cli("run", "--resume", str(tmp_path), "--on", "slurm")
    assert ended.code == 2 and "submit it again with sbatch" in ended.err
    ended = run_cli("run", str(DEMO), "--on", "sge")
    assert ended.code == 2 and "choose one of local, ray, ray://HOST:PORT, slurm" in ended.err


def test_the_untried_files_are_of_their_format_and_name_commands_there_are() -> None:
    parts = list(yaml.safe_load_all((ROOT / "docs" / "clusters" / "kubernetes.yaml").read_text()))
    assert [part["kind"] for part in parts] == ["Service", "Job", "StatefulSet"]
    sky = yaml.safe_load((ROOT / "docs" / "clusters" / "skypilot.yaml").read_text())
    texts = [p["spec"]["template"]["spec"]["containers"][0]["args"][0] for p in parts[1:]]
    for each in (*texts, sky["run"]):
        assert "asyncrl " in each
        assert subprocess.run(["bash", "-n"], input=each.encode()).returncode == 0
    for name in ("kubernetes", "skypilot"):
        first = (ROOT / "docs" / "clusters" / f"{name}.yaml").read_text().splitlines()[0]
        assert first.startswith("# UNTRIED")
