"""The HTTP routes of `asyncrl watch` (starlette): JSON for the page in static/, and the page."""

import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.printable import LONGEST_LINE, escape_line
from asyncrl.records import jsonl, page_kit
from asyncrl.supervise.report import plots
from asyncrl.supervise.report.run_view import RunView, list_differences
from asyncrl.supervise.report.token_samples import SHADES, SampleFilter
from asyncrl.transport.http_server import authorize, open_body
from asyncrl.viewer import run_search

STATIC = Path(__file__).parent / "static"
COOKIE = "asyncrl_watch"
LARGEST_NUMBER = 2.0**53
LARGEST_BODY = 1024  # bytes of a request, which has none
# Text of samples cannot run as a script, because scripts come only from this server's files.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
Query = Mapping[str, str]
QueryHandler = Callable[[Query], Any]


class WatchApp:
    """Handlers of the page's requests for some runs.

    One lock guards the runs, because threads handle the requests.
    """

    def __init__(
        self, places: list[Path], token: str = "", *, expected: bool = False, host: str = ""
    ) -> None:
        """Find the runs.

        places: runs, or directories of runs; new runs in them appear while the page is open.
        host: the address of this machine that is listened on, which requests must name; "": any.

        Raises ConfigError if the directory holds no run yet, unless one is expected.
        """
        self.places = places
        self.token = token
        self.host = host
        self.lock = threading.Lock()
        self.runs: dict[str, RunView] = {}
        if not expected:
            run_search.find_runs(places)
        self.refresh()

    def refresh(self) -> None:
        """Read what the runs have written, and find new ones."""
        runs: list[RunView] = []
        # no run has begun, or all were removed: the page shows the problem of each
        with contextlib.suppress(ConfigError):
            runs = run_search.find_runs(self.places)
        paths = {run.path for run in self.runs.values()}
        for run in runs:
            if run.path not in paths:
                run.id = run.id if run.id not in self.runs else str(run.path)
                self.runs[run.id] = run
        for run in self.runs.values():
            run.refresh()

    def select_runs(self, query: Query) -> list[RunView]:
        """Return the runs that `run` or `runs` names, all by default. Raises ConfigError."""
        names = query.get("runs") or query.get("run")
        if not names:
            return list(self.runs.values())
        missing = [name for name in names.split("|") if name not in self.runs]
        if missing:
            raise ConfigError(f"no run of this page is named {missing[0]}")
        return [self.runs[name] for name in names.split("|")]

    def select_run(self, query: Query) -> RunView:
        """Return the first run that a request selects. Raises ConfigError before the first run."""
        selected = self.select_runs(query)
        if not selected:
            raise ConfigError("this page has no run yet")
        return selected[0]

    # ---- handlers --------------------------------------------------------------------------------

    def list_runs(self, query: Query) -> Any:
        self.refresh()
        return [run.describe_state() for run in self.runs.values()]

    def render(self, method: str, query: Query) -> Any:
        """Render the blocks that a method of the views lists, by run."""
        return {
            run.id: page_kit.fill("blocks.html", blocks=getattr(run, method)(run.read_summary()))
            for run in self.select_runs(query)
        }

    def draw_plots(self, query: Query) -> Any:
        page, axis = query.get("page", "overview"), query.get("axis", "step")
        if page not in plots.PAGES or axis not in plots.AXES:
            raise ConfigError(
                f"page: one of {', '.join(plots.PAGES)}; axis: one of {', '.join(plots.AXES)}"
            )
        smooth = min(max(_parse_number(query, "smooth", 0.0), 0.0), 0.99)
        series = {run.id: run.series for run in self.select_runs(query)}
        drawings = plots.build_plots(page, series, axis, smooth)
        if page == "staleness":
            for run in self.select_runs(query):
                lags = plots.plot_lag_over_time(jsonl.read(run.path / "trained.jsonl"))
                lags.title += f": {run.id}" if len(series) > 1 else ""
                drawings += [lags] if lags.lines else []
        if page == "learner":
            drawings += plots.build_step_plots(
                {r.id: r.read_optimizer_steps() for r in self.select_runs(query)}
            )
        return drawings

    def list_processes(self, query: Query) -> Any:
        # the models of a Tinker server have the same processes
        runs = {
            run.id if run.home == run.path else str(run.home): run
            for run in self.select_runs(query)
        }
        return {name: run.list_processes() for name, run in runs.items()}

    def find_samples(self, query: Query) -> Any:
        run = self.select_run(query)
        ticket, heads = query.get("ticket"), run.samples.heads
        words = ("step", "reward", "lag", "rule", "text", "sort")
        selection = SampleFilter(
            **{word: query[word] for word in words if query.get(word)},
            ticket=int(ticket[:20]) if ticket and ticket.isdecimal() else None,
            group_key=query.get("group_key"),
            limit=int(_parse_number(query, "limit", 60)),
        )
        return {
            "rows": [
                {k: v for k, v in heads[number].items() if k != "text"}
                | {"number": number, "preview": heads[number]["text"][:400]}
                for number in run.samples.find(selection)
            ],
            "all": len(heads),
            "shades": SHADES,
            "none": run.no_samples,
        }

    def read_sample(self, query: Query) -> Any:
        run = self.select_run(query)
        number = int(_parse_number(query, "number", -1))
        if not 0 <= number < len(run.samples.heads):
            raise ConfigError(f"sample {number}: the run has {len(run.samples.heads)} samples")
        return run.samples.read_row(number)

    def compare_settings(self, query: Query) -> Any:
        runs = self.select_runs(query)
        return {
            "runs": {run.id: run.read_settings() for run in runs},
            "changed": {run.id: run.list_changed_settings() for run in runs},
            "differences": list_differences(runs) if len(runs) > 1 else [],
        }

    def read_log(self, query: Query) -> Any:
        run = self.select_run(query)
        names = run.list_logs()
        name = query.get("file") or (names[0] if names else "")
        return {"files": names, "file": name, "text": run.read_log_tail(name) if name else ""}

    # ---- HTTP ------------------------------------------------------------------------------------

    def build_application(self) -> Starlette:
        """Build the application."""
        handlers: dict[str, QueryHandler] = {
            "runs": self.list_runs,
            "overview": partial(self.render, "list_overview"),
            "plots": self.draw_plots,
            "processes": self.list_processes,
            "ledger": partial(self.render, "list_ledger"),
            "samples": self.find_samples,
            "sample": self.read_sample,
            "config": self.compare_settings,
            "logs": self.read_log,
        }
        return Starlette(
            routes=[
                Route("/", self.serve_file),
                Route("/static/{name}", self.serve_file),
                *(Route(f"/api/{name}", self.make_endpoint(f)) for name, f in handlers.items()),
            ],
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=self.require_token)],
        )

    def make_endpoint(self, handle: QueryHandler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: the endpoint sends JSON, or the error as one line with status 400."""

        def compute(query: Query) -> Response:
            place = query.get("runs") or query.get("run") or ", ".join(map(str, self.places))
            try:
                with self.lock, jsonl.name_damaged(place):
                    content, status = msgspec.json.encode(handle(query)), 200
            except (AsyncrlError, OSError) as error:
                content, status = (
                    msgspec.json.encode({"error": escape_line(str(error), LONGEST_LINE)}),
                    400,
                )
            return Response(content, status, media_type="application/json")

        async def respond(request: Request) -> Response:
            return await run_in_threadpool(compute, request.query_params)

        return respond

    async def serve_file(self, request: Request) -> Response:
        """Send the page or one of its files. Style sheet and plots are those of every page."""
        name = request.path_params.get("name", "index.html")
        for folder in (STATIC, page_kit.FILES):
            if name in {path.name for path in folder.iterdir()}:
                return FileResponse(folder / name)
        return Response("no such file", 404, media_type="text/plain")

    async def require_token(
        self, request: Request, call: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Refuse requests without the token; the first one moves it from the address to a cookie.

        A token in the address would stay in the browser's history and be sent as a referrer.
        """
        try:
            # otherwise a page could read this one through a name that its owner lets point here
            host = request.headers.get("host", "")
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            names = {"localhost", "127.0.0.1", "::1", self.host}
            if self.host and name.strip("[]").lower() not in names:
                raise HTTPException(
                    421,
                    "asyncrl watch: open it by the address that it printed, not by another name "
                    "of this machine",
                )
            token = request.query_params.get("token")
            if token is not None and self.token and authorize(request, self.token, token):
                reply: Response = RedirectResponse("/", 303)
                reply.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
                return reply
            if not authorize(request, self.token, request.cookies.get(COOKIE, "")):
                raise HTTPException(
                    403, "asyncrl watch: open the address that it printed, with its token"
                )
            async with open_body(request, LARGEST_BODY):
                reply = await call(request)
        except HTTPException as error:
            text = error.detail + "\n"
            reply = Response(text, error.status_code, error.headers, "text/plain")
        reply.headers["Content-Security-Policy"] = POLICY
        reply.headers["X-Content-Type-Options"] = "nosniff"
        reply.headers["Referrer-Policy"] = "no-referrer"
        return reply


def _parse_number(query: Query, name: str, default: float) -> float:
    with contextlib.suppress(ValueError):
        if abs(number := float(query.get(name) or default)) < LARGEST_NUMBER:
            return number
    raise ConfigError(f"{name}={query[name]}: give a number")
