"""The exception of a failed check."""

from jaxtyping import AnnotationError, TypeCheckError


class ShapeError(TypeCheckError, AnnotationError):
    """An array, or another value, does not fit its annotation.

    It is a `jaxtyping.TypeCheckError`, for those who catch that. It is an `AnnotationError` too because `jaxtyped`
    lets these through as they are, where it would replace the message of any other error by its own.
    """


ShapeError.__module__ = "equikd.typing"
