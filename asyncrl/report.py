"""placeholder"""
from pathlib import Path


def write(run_dir: Path) -> Path: return run_dir
