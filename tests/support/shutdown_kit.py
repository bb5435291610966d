from pathlib import Path

from asyncrl.records import rundir


def left(run_dir: Path) -> list[str]:
    name = rundir.read_run_id(run_dir)
    return [
        str(p) for base in ("/dev/shm", "/tmp") for p in Path(base).glob(f"asyncrl-*{name}*")
    ] + [str(p) for p in Path("/tmp").glob(f"asyncrl-*/{name}*")]
