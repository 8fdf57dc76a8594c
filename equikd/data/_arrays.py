"""Arrays on their way into a program: rows counted, dtypes those that JAX computes with.

JAX computes in 32 bits unless x64 is enabled, and would convert wider arrays at each call, in silence: an int64 that
does not fit wraps around, a large float64 becomes inf. Here arrays are converted once, and a number that does not fit
is an error. Whatever numpy reads as an array is one; JAX arrays, tracers and `jax.ShapeDtypeStruct` stay as they are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.config._names import array_spec, shortened
from equikd.errors import DataError, message, report
from equikd.tree import named_leaves


def aligned(data: Any, owner: str) -> tuple[list[Any], Any, int]:
    """The arrays of a pytree in the dtypes that JAX computes with, its structure, and the rows that all of them have.

    Args:
        data: any pytree.
        owner: what messages call it.

    Raises:
        DataError: a leaf is no array or has no rows, a number does not fit its dtype, or the arrays disagree about the
            number of rows; all at once, each with its path.
    """
    leaves, structure = jax.tree.flatten(data)
    try:
        arrays = [canonical(leaf) for leaf in leaves]  # numbers in a list are leaves, which have no rows
    except DataError:
        raise DataError(_faults(data, owner)) from None
    sizes = {array.shape[0] for array in arrays}
    if len(sizes) != 1 or 0 in sizes:
        raise DataError(_unequal(data, arrays, owner))
    return arrays, structure, sizes.pop()


def _faults(data: Any, owner: str) -> str:
    texts = []
    for path, leaf in named_leaves(data, _is_listed).items():
        if _is_listed(leaf):  # one fault, not one for each number
            texts.append(_listed(leaf, path or "it", owner))
            continue
        try:
            canonical(leaf)
        except DataError as error:
            texts.append(f"{owner}: {path} {error}" if path else f"{owner} {error}")
    return report(f"{len(texts)} arrays are wrong", texts)


def _is_listed(value: Any) -> bool:
    """Whether a value is a list or tuple of numbers or texts, nested or not."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(part, bool | int | float | complex | str | np.generic) or _is_listed(part) for part in value)


def _listed(value: Any, path: str, owner: str) -> str:
    fix = f"give np.asarray({path})"
    try:
        canonical(np.asarray(value))
    except (DataError, ValueError):  # texts, or rows of several lengths
        fix = "make it an array of numbers or bools: text and categories as integers, rows of one length"
    expected = "an array whose first axis counts the rows"
    return message(f"{owner}: {path} is a {type(value).__name__}", got=spell_value(value), expected=expected, fix=fix)


def _unequal(data: Any, arrays: list[Any], owner: str) -> str:
    if not arrays:
        return message(f"{owner} holds no arrays", got=spell_value(data), expected="a pytree of arrays")
    spelt = {path or "the array": spell_array(array) for path, array in zip(named_leaves(data), arrays, strict=True)}
    got = "\n".join(f"{path}: {array}" for path, array in spelt.items())
    if all(array.shape[0] == 0 for array in arrays):
        return message(f"{owner} has no rows", got=got, expected="one row at least")
    what = f"{owner}: its arrays disagree about the number of rows"
    return message(what, got=got, expected="a first axis of the same size in all")


def canonical(leaf: Any) -> Any:
    """A leaf as an array with rows, in the dtype that JAX computes with.

    Raises:
        DataError: a text to put after the path of the leaf.
    """
    if type(leaf) is not np.ndarray and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):  # the first test is fast
        array = leaf
    elif isinstance(leaf, np.ma.MaskedArray):
        fix = "put a value in the masked places (array.filled(0.0)), and give the mask as an array of its own"
        raise DataError(message("is a masked array, whose mask would be lost", got=spell_array(leaf), fix=fix))
    else:
        array = np.asarray(leaf)
        dtype = _computed_dtype(array.dtype, x64_enabled())
        if dtype is None:
            wanted = "numbers or bools; text and categories as integers"
            raise DataError(message("is nothing that JAX computes with", got=spell_value(leaf), expected=wanted))
        if dtype != array.dtype:
            array = _converted(array, dtype)
    if not array.shape:
        raise DataError(
            message("has no leading axis", got=spell_value(leaf), expected="an array whose first axis counts the rows")
        )
    return array


@functools.lru_cache(maxsize=256)
def _computed_dtype(dtype: np.dtype, x64: bool) -> np.dtype | None:
    """The dtype that JAX computes with; None where it computes with nothing like it."""
    del x64  # part of the key: the answer depends on it
    dtype = dtype.newbyteorder("=")  # numpy computes with foreign byte orders, JAX does not
    if dtype.char in "gG":  # long doubles, which only numpy has
        return None
    if dtype.kind != "b" and not jnp.issubdtype(dtype, np.number):
        return None
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _converted(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    what = None
    if dtype.kind in "iu" and array.size:
        low, high = array.min(), array.max()
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            what = str(low if low < limits.min else high)
    try:
        with np.errstate(over="raise"):  # costs nothing, unlike a search for inf
            converted = array.astype(dtype)
    except FloatingPointError:
        what = str(array.flat[np.argmax(np.nan_to_num(np.abs(array), posinf=0))])
        converted = array
    if what is None:
        return converted
    fix = f"give values that {dtype.name} can hold, or enable x64"
    raise DataError(message(f"holds a number that {dtype.name} cannot", got=f"{what} in {array.dtype.name}", fix=fix))


def x64_enabled() -> bool:
    """Whether JAX computes with 64-bit numbers."""
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  # set up at run time by jax


def spell_array(array: Any) -> str:
    """Dtype and shape, such as `float32[32,64]`."""
    return array_spec(array)


def spell_value(value: Any) -> str:
    """A value of any kind, at most about a line of it."""
    if isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return spell_array(value)
    return "None" if value is None else f"{type(value).__name__} {shortened(value)}"
