"""What `--json` of a benchmark appends to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rcq_cli.environment import collect


def append(path: Path | None, row: Mapping[str, Any], device: str = "cpu") -> None:
    """Append a row, with the machine it was measured on, as one line of JSON; do nothing without a path."""
    if path is None:
        return
    record = {**row, "environment": collect(device)}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, sort_keys=True, default=str) + "\n")
