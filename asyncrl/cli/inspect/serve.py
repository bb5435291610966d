"""`asyncrl serve`: serve a model by OpenAI's completions API, without a run."""

from __future__ import annotations

import os
import secrets

from asyncrl.cli.base import command, option_table, print_progress
from asyncrl.contract.errors import ConfigError


@command("asyncrl serve runs/R/model", "asyncrl serve models/smollm2 --port 8000 --context 2048")
@option_table("serve")
def serve(
    model: str,
    name: str | None,
    port: int,
    host: str,
    certificate: str,
    private_key: str,
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
    from asyncrl.models import fetch
    from asyncrl.transport.http_server import ListenAddress
    from asyncrl.transport.sockets import is_loopback

    if no_key and not is_loopback(host):
        raise ConfigError(
            f"--no-key --host {host}: everyone with access to this address could use the model; "
            "leave out --no-key, or listen on 127.0.0.1"
        )
    bind = ListenAddress(host, port, certificate, private_key, port_name="--port")
    bind.require_encryption()
    path = fetch.locate_model(model, "MODEL")
    from actors import completions_app  # imports torch

    config = completions_app.build_config(
        path, context=context or 0, slots=slots, dtype=dtype, device=device, threads=threads or 0
    )
    own_key = os.environ.get("OPENAI_API_KEY", "")
    key = "" if no_key else own_key or secrets.token_urlsafe(18)
    print_progress(f"loading {path}")
    app = completions_app.CompletionsApp(config, name or model, key)

    def announce(url: str) -> None:
        print_progress(f"serving {app.name} with up to {app.context} tokens; stop with Ctrl-C")
        if key and not own_key:
            print_progress(f"export OPENAI_API_KEY={key}")
        print(f"{url}/v1", flush=True)

    completions_app.serve(app, bind, announce)
