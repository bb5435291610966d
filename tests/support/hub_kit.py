"""As much of the hub as its own client asks for: a repository's list of files, and the files."""

import base64
import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, org/name, of models or (kind = "datasets") data sets."""

    files: Path
    kind = "models"
    commit = COMMIT
    taken: dict[str, Any]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix(f"/{self.kind}")
        kind, _, name = path.removeprefix("/org/name/").partition("/")
        file = self.files / name.partition("/")[2]
        found = {
            p.relative_to(self.files).as_posix(): p
            for p in sorted(self.files.rglob("*"))
            if p.is_file()
        }
        if f"/api/{self.kind}/org/name/tree" in self.path:
            rows = [
                {"type": "file", "path": name, "size": p.stat().st_size, "oid": name}
                for name, p in found.items()
            ]
            body = json.dumps(rows).encode()
        elif f"/api/{self.kind}/org/name" in self.path:
            names = [{"rfilename": name} for name in found]
            body = json.dumps({"id": "org/name", "sha": self.commit, "siblings": names}).encode()
        elif kind == "resolve" and file.is_file():
            body = file.read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Make a repository and take a commit; `taken` keeps what came."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://{self.headers['Host']}"
        answer: dict[str, Any] = {}
        if self.path == "/api/repos/create":
            self.taken["repository"] = json.loads(body)
            answer = {"url": f"{address}/org/name"}
        elif self.path.startswith("/api/models/org/name/preupload/"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            kept = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": path, **kept} for path in paths]}
        elif self.path.startswith("/api/models/org/name/commit/"):
            for line in body.splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    content = base64.b64decode(part["value"]["content"])
                    self.taken[part["value"]["path"]] = content
            answer = {"commitUrl": f"{address}/org/name/commit/{COMMIT}", "commitOid": COMMIT}
        elif self.path != "/api/validate-yaml":
            self.send_error(403, "only org/name")
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(
    files: Path, kind: str = "models", taken: dict[str, Any] | None = None
) -> Iterator[str]:
    """The address of a hub that serves the repository until the block ends."""
    handler = type("OneHub", (Hub,), {"files": files, "kind": kind, "taken": taken})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
