"""A hub that breaks off: a local server in its place cuts answers short, refuses, or sends nonsense.

The hub's library reads its settings when it is imported, so every download runs in a process of its own.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.faults.foreign import _tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FAULTS = ("cut", "500", "404", "nonsense", "429", "401")
CLIENT = """
import sys
from rcq_cli.main import run
sys.exit(run(["models", "pull", "someone/tiny"]))
"""


class Hub(ThreadingHTTPServer):
    """Serves one model; `fault` says what goes wrong with the weights, or with everything."""

    daemon_threads = True

    def __init__(self, files, fault, rng):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.fault, self.rng = files, fault, rng


class Answer(BaseHTTPRequestHandler):
    """The three answers that a download asks for: what there is, about a file, and the file."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        name = self.path.partition("?")[0].rpartition("/")[2]
        fault, files = self.server.fault, self.server.files
        if "/api/models/" in self.path:
            if fault == "nonsense":
                return self.send(200, b"<html>", {"Content-Type": "application/json"}, body)
            if fault in ("401", "404", "429"):
                return self.send(int(fault), b"{}", {}, body)
            if "/tree/" in self.path:
                return self.send(
                    200, json.dumps(tree(files)).encode(), {"Content-Type": "application/json"}, body
                )
            told = {"id": "someone/tiny", "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
            return self.send(200, json.dumps(told).encode(), {"Content-Type": "application/json"}, body)
        if name not in files:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        if fault == "500" and name.endswith(".safetensors"):
            return self.send(500, b"", {}, body)
        data = files[name]
        facts = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self.send(200, data, facts, body, cut=name.endswith(".safetensors") and fault == "cut")

    def send(self, status, data, headers, body, *, cut=False):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        self.wfile.write(data[: self.server.rng.randrange(len(data))] if cut else data)
        if cut:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()


def tree(files):
    """Return the listing of a repository."""
    return [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in files.items()
    ]


@contextmanager
def serving(files, fault, rng):
    server = Hub(files, fault, rng)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def pull(address, home):
    """Pull the model in a process of its own; return exit code and stderr."""
    settings = {
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "RCQ_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        [sys.executable, "-c", CLIENT],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | settings,
    )
    return done.returncode, done.stderr


def cut_download(seed, folder):
    """The hub breaks off; nothing usable may be left, and the next attempt brings the whole model."""
    rng = random.Random(seed)
    place = _tiny(str(folder.parent))
    files = {path.name: path.read_bytes() for path in place.iterdir()}
    home = folder / "home"
    with serving(files, FAULTS[seed % len(FAULTS)], rng) as address:
        code, err = pull(address, home)
    if code != 7 or "fix:" not in err or "internal error" in err:
        return "wrong"
    with serving(files, "", rng) as address:
        code, _ = pull(address, home)
    (snapshot,) = home.glob("hub/models--*/snapshots/*")
    same = {path.name: path.read_bytes() for path in snapshot.iterdir()} == files
    return "error" if code == 0 and same else "wrong"


CASES = {"interrupted download from the hub": cut_download}
