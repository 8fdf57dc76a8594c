"""The error of intermediates, and the names that its messages are built from."""

from equikd.errors import WiringError


class IntermediateError(WiringError):
    """An intermediate is not there, is not called, or cannot be taken out of where it is computed."""
