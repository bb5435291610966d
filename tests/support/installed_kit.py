import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from process_kit import ENV, ROOT, Ended, shared

PLAIN_ENV = {k: v for k, v in ENV.items() if k != "PYTHONPATH"}
PACKED = (
    "asyncrl",
    "actors",
    "buffer",
    "learner",
    "configs",
    "pyproject.toml",
    "README.md",
    "Makefile",
)


def called(argv: list[str], folder: Path, timeout: float = 3600.0) -> Ended:
    done = subprocess.run(
        argv, cwd=folder, env=PLAIN_ENV, capture_output=True, text=True, timeout=timeout
    )
    return Ended(done)


def _install(path: Path) -> None:
    tree = path / "tree"
    tree.mkdir()
    for name in PACKED:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tree)
    # with this environment's setuptools, and without installing what `make demo` would
    make = ["make", "wheel", f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.demo"]
    called(["env", "PIP_NO_BUILD_ISOLATION=0", *make], tree).check()
    (built,) = (tree / "dist").glob("asyncrl-*.whl")
    shutil.move(built, path)
    shutil.rmtree(tree)
    called([sys.executable, "-m", "venv", "--without-pip", str(path / "env")], path).check()
    (wheel,) = path.glob("asyncrl-*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(path / "env" / "bin" / "python")]
    called([*pip, "install", "--no-index", "--no-deps", str(wheel)], path).check()
    # what asyncrl needs is found where these tests have it; of the path, not of its .pth files,
    # which would bring the checkout
    (site,) = (path / "env").glob("lib/python*/site-packages")
    (site / "needs.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is (asyncrl-*.whl), and env/, which it is installed in."""
    return shared(tmp_path_factory, "installed", _install)
