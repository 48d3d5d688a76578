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
    """The pipeline stood still. Its notes, a few lines each, say what every stage did last."""
