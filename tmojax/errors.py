"""Errors that a user can cause, each with the exit code that the command line returns for it."""


class TmojaxError(Exception):
    """Base of all errors that carry a message meant for a person."""

    exit_code = 1


class InputError(TmojaxError):
    """A configuration, input file or argument is wrong; the message names the field, the value and the remedy."""

    exit_code = 2


class InfeasibleError(TmojaxError):
    """No schedule can exist; the message names the limit and by how many bytes it is exceeded."""

    exit_code = 3
