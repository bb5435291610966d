"""Serve the page of `asyncrl watch`: address, token, and a process of its own."""

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import end_with_parent
from asyncrl.contract.printable import Say
from asyncrl.supervise.notebook import LoadedRun
from asyncrl.viewer import run_search

PORT = 7860
PORTS = 20  # ports from PORT on that are tried if none was chosen


def serve(
    places: list[Path],
    host: str,
    port: int | None,
    announce: Callable[[str, int], None],
    *,
    token: bool,
    expected: bool = False,
) -> None:
    """Serve until interrupted. Raises ConfigError for places without a run or a bad address.

    announce: called with the page's address and the number of runs once it accepts requests.
    token: require the token in that address. Without one, only an address of this machine is
    allowed.
    expected: the runs may begin later.
    """
    from asyncrl.transport.http_server import HttpServer, ListenAddress
    from asyncrl.transport.sockets import is_loopback
    from asyncrl.viewer.app import WatchApp

    if not token and not is_loopback(host):
        raise ConfigError(
            f"--no-token --host {host}: everyone with access to this address could read prompts "
            "and logs; leave out --no-token, or listen on 127.0.0.1"
        )
    secret = secrets.token_urlsafe(18) if token else ""
    own = host if is_loopback(host) else ""
    app = WatchApp(places, secret, expected=expected, host=own)
    ports = [port] if port is not None else [*range(PORT, PORT + PORTS), 0]
    address = ListenAddress(host, ports[0], port_name="--port", further_ports=ports[1:])
    query = f"/?token={secret}" if secret else "/"
    server = HttpServer(app.build_application(), address)
    asyncio.run(server.serve(lambda url: announce(url + query, len(app.runs))))


class PageProcess:
    """A page of runs, served by a process of its own that ends with this one.

    Its failures and its work do not affect the run. Ctrl-C in this process does not reach it.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        """Start it and wait for its address; `url` is "" if it could not start."""
        self.process = subprocess.Popen(
            importing.make_command("asyncrl.viewer.server", *map(str, places)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def __repr__(self) -> str:
        return f"page at {self.url or 'no address: it could not start'}"

    def _repr_html_(self) -> str:
        """Return a link for a notebook."""
        return f'<a href="{self.url}" target="_blank">watch the run in a new tab</a>'

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def watch(*runs: str | Path | LoadedRun) -> PageProcess:
    """Serve the page of runs as `asyncrl watch` does, until its `close` or this process's end.

    runs: run directories, directories of runs, or loaded runs. A notebook shows the result as a
    link.

    Raises ConfigError for a place without a run."""
    places = [run.path if isinstance(run, LoadedRun) else Path(run) for run in runs]
    run_search.find_runs(places)
    return PageProcess(places)


@contextmanager
def serve_page_beside(run_dir: Path, say: Say) -> Iterator[None]:
    """Serve the page of a run that is about to begin until the block ends."""
    page = PageProcess([run_dir])
    say(f"watch it at {page.url}" if page.url else "note: the page of this run could not start")
    try:
        yield
    finally:
        page.close()
        say(f"its page has ended too; open it again with: asyncrl watch {run_dir}")


if __name__ == "__main__":
    serve(
        [Path(word) for word in sys.argv[1:]],
        "127.0.0.1",
        None,
        lambda url, _: print(url, flush=True),
        token=True,
        expected=True,
    )
