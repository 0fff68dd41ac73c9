"""Every exception that cgdnn raises.

A message reads ``where: what is wrong; got, expected. One remedy.`` Classes below
:class:`CgdnnError` are for what a user can mend; :class:`InternalError` marks a bug of cgdnn.
Each class carries the exit code that the command line ends with.
"""

from __future__ import annotations


class CgdnnError(Exception):
    """Base of everything that a user can mend; ``exit_code`` is the command line's."""

    exit_code = 1


class UsageError(CgdnnError):
    """A call or a command line that makes no sense (unknown option, wrong argument)."""

    exit_code = 2


class DescriptionError(CgdnnError):
    """A network or solver description that cannot be right (syntax, fields, graph, shapes)."""

    exit_code = 2


class DataError(CgdnnError):
    """Data that cannot be read or used (missing file, torn record, label out of range)."""

    exit_code = 3


class NonFiniteError(CgdnnError):
    """A loss, activation, gradient or weight became NaN or infinite."""

    exit_code = 4


class RunError(CgdnnError):
    """A failure while running (a task failed, a file could not be written)."""

    exit_code = 1


class InternalError(Exception):
    """A broken invariant inside cgdnn: a bug to report, never the user's fault."""
