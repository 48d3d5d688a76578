"""Errors meant for the person at the keyboard: one line, no traceback."""


class HeadraceError(Exception):
    """Something the user can act on; its text is one line saying what, where and what to do."""

    exit_code = 1


class UsageError(HeadraceError, ValueError):
    """The request or the flags are at fault, not the machine or the files."""

    exit_code = 2


class ModelError(HeadraceError):
    """The model's files are missing, damaged or of a kind that is not supported."""


class StartError(HeadraceError):
    """The pipeline could not be brought up: memory, ports, a stage that did not answer."""


class PipelineError(HeadraceError):
    """The pipeline broke while it was running: a stage died, a link timed out."""


class StallError(PipelineError):
    """The pipeline stood still. Its notes, a few lines each, say what every stage did last.

    ranks: those that hold up the others, where that is known.
    """

    ranks: tuple[int, ...] = ()


class ServerError(HeadraceError):
    """A server could not be reached over HTTP, refused, or broke its answer off.

    status: that of the HTTP answer where it was a refusal.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
