"""Every error rcq raises on purpose; the class fixes the exit code of the command line."""


class RcqError(Exception):
    """What happened, why, and what to do about it.

    `what` holds the value that came, `why` what was observed, `fix` one flag or command.
    `id` is stable (`RCQ-USE-01`), so that a message can be looked up.
    """

    exit_code = 1

    def __init__(self, what: str, why: str = "", fix: str = "", id: str = "RCQ-RUN-00") -> None:
        super().__init__(what)
        self.what, self.why, self.fix, self.id = what, why, fix, id

    def __str__(self) -> str:
        return "; ".join(part for part in (self.what, self.why, self.fix) if part)

    def __reduce__(self) -> tuple[type["RcqError"], tuple[str, str, str, str]]:
        """Keep all four parts when an executor sends the error between processes."""
        return type(self), (self.what, self.why, self.fix, self.id)


class SpecError(RcqError):
    """A value that is not allowed: wrong shape, dtype, option or flag."""

    exit_code = 2


class UnknownEntry(SpecError):
    """A name that is in no registry; the message lists what is there and the nearest match."""


class UnsupportedModel(RcqError):
    """A model whose attention rcq cannot take over without changing what it computes."""

    exit_code = 2


class CertificateViolated(RcqError):
    """A measured error above its proven bound."""

    exit_code = 4


class NotComparable(RcqError):
    """Two runs whose contracts differ in a field that must agree."""

    exit_code = 5


class BrokenRun(RcqError):
    """A run that cannot be completed or read: NaN, out of memory, corrupted data, failed control."""

    exit_code = 6


class UnsupportedHere(RcqError):
    """Something this machine cannot provide: a device, a package, a model, a data set."""

    exit_code = 7
