"""`Iterable`: batches from a function that returns an iterator; and `pipeline`, which takes what users have.

Streaming data cannot be indexed, so a position in it is reached by reading: a run that goes on at batch 1000 draws the
1000 before it again. A source that can seek should follow the `Pipeline` protocol itself. Every element is compared
with the first one, because another shape would compile the step again, and another structure would fail inside it.
"""

import dataclasses
import inspect
import itertools
import types
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from equikd.config import config, resolve
from equikd.config._dataclass import raw
from equikd.config._names import display_name
from equikd.config._values import Ref, is_config, is_node, is_part
from equikd.data._arrays import spell_array, spell_value
from equikd.data._memory import InMemory
from equikd.data._pipeline import Batch, Pipeline, batch_size, element_spec, own_batch, pad, resolved
from equikd.errors import DataError, message
from equikd.tree import named_leaves


@config
class Iterable:
    """Batches from a function that returns an iterator.

    Elements are bare pytrees of arrays, all of whose rows are real, or `Batch(data, mask)`. In training all have one
    shape; in an eval a smaller one is padded to the size of the first. An error of the function passes as it is, with a
    note that says which element was being drawn.

    Raises:
        DataError: when drawn, an element differs from the first, is no batch, or the function gives no fresh iterator.

    Example:
        >>> def read(seed):
        ...     for number in range(3):
        ...         yield {"x": np.full((2, 4), number)}
        >>> [batch.data["x"][0, 0].item() for batch in Iterable(read).batches(start=1, seed=0)]
        [1, 2]
    """

    make: Callable[..., Any]
    """Returns a new iterator at each call; given the arguments `seed` and `epoch` (which pass it is) where it has them.

    A node is called anew for each iterator: `Iterable(ek.lazy(read)("data/*.gz"))`. Evals are given seed 0, epoch 0.
    """
    repeat: bool = False
    """Whether training starts again with a new iterator where one ends."""

    def batches(self, start: int, seed: int) -> Iterator[Batch]:
        """The training stream from batch number `start` on; those before it are drawn and dropped.

        Args:
            start: number of the first batch, over all passes.
            seed: given to `make` where it has an argument of this name.

        Raises:
            DataError: when drawn, an element is not like the first; or the data ends before `start`.
        """
        expected, number, epoch = self.__dict__.get("_spec"), 0, 0
        while True:
            before = number
            for index, batch in enumerate(self._elements(int(seed), epoch)):
                if expected is None:
                    expected = self.__dict__["_spec"] = element_spec(batch)
                if not _fits(batch, expected):
                    raise _unlike(batch, expected, self._label(index, epoch))
                number += 1
                if number > start:
                    yield batch
            epoch += 1
            if not self.repeat or number == before:
                break
        if number < start or not number:
            raise self._ended(number, start)

    def epoch(self) -> Iterator[Batch]:
        """One pass; batches smaller than the first are padded to its size.

        Raises:
            DataError: when drawn, an element is not like the first but for fewer rows; or there is none.
        """
        expected, size = None, 0
        for index, batch in enumerate(self._elements(0, 0)):
            if expected is None:
                expected, size = element_spec(batch), batch_size(batch)
            if batch_size(batch) > size:
                raise _too_large(batch_size(batch), size, self._label(index, 0))
            padded = pad(batch, size)
            if not _fits(padded, expected):
                raise _unlike(padded, expected, self._label(index, 0))
            yield padded
        if expected is None:
            raise self._ended(0, 0)

    def spec(self) -> Batch:
        """Shapes and dtypes of the first element, drawn from an iterator of its own the first time."""
        if "_spec" not in self.__dict__:
            first = next(self._elements(0, 0), None)
            if first is None:
                raise self._ended(0, 0)
            self.__dict__["_spec"] = element_spec(first)
        return self.__dict__["_spec"]

    @property
    def _name(self) -> str:
        if isinstance(self.make, _Source):
            return self.make.name
        return repr(self.make) if is_part(self.make) else display_name(self.make)

    def _label(self, index: int, epoch: int) -> str:
        return f"element {index} of {self._name}" + (f" in pass {epoch}" if epoch else "")

    def _elements(self, seed: int, epoch: int) -> Iterator[Batch]:
        iterator = self._iterator(seed, epoch)
        for index in itertools.count():
            try:
                element = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                error.add_note(f"while drawing {self._label(index, epoch)}")
                raise
            try:
                batch = own_batch(element)  # loaders may fill the same arrays anew
            except DataError as error:
                raise DataError(f"{self._label(index, epoch)}: {error}") from None
            yield batch

    def _iterator(self, seed: int, epoch: int) -> Iterator[Any]:
        try:
            made = resolve(self.make) if is_part(self.make) else self.make
            made = made() if isinstance(made, _Source) else made
            if callable(made) and not isinstance(made, abc.Iterable):
                made = made(**_wanted(made, {"seed": seed, "epoch": epoch}))
            iterator = iter(made) if isinstance(made, abc.Iterable) else None
        except Exception as error:
            error.add_note(f"while starting {self._name}")
            raise
        if iterator is None:
            raise DataError(
                message(
                    f"{self._name} returns no iterator",
                    got=spell_value(made),
                    expected="an iterator of batches: write a generator function, or return iter(...)",
                )
            )
        # Other iterators may be reset by the function, as loaders with persistent workers are.
        if isinstance(iterator, types.GeneratorType) or type(iterator).__module__ in ("builtins", "itertools"):
            self._refuse_used(iterator)
        return iterator

    def _refuse_used(self, iterator: Iterator[Any]) -> None:
        """Generators, `map` and the like cannot start again: given twice, they have lost their first elements."""
        last = self.__dict__.get("_last", lambda: None)()
        try:
            self.__dict__["_last"] = weakref.ref(iterator)  # a strong one would keep its files open
        except TypeError:  # `map` and the like have no weak references
            self.__dict__["_last"] = lambda: iterator
        if last is iterator:
            kind = "generator" if isinstance(iterator, types.GeneratorType) else "iterator"
            raise DataError(
                message(
                    f"{self._name} gives the same {kind} again, whose first elements are gone",
                    got=spell_value(iterator),
                    fix=f"make the {kind} inside the function, so that each call gives a new one",
                )
            )

    def _ended(self, drawn: int, start: int) -> DataError:
        if not drawn:
            return DataError(message(f"{self._name} yields no batch at all", expected="one batch at least"))
        return DataError(
            message(
                f"{self._name}: the data ended after {drawn} batches, but the run goes on from batch {start}",
                fix="give data that goes on, such as ek.data.Iterable(make, repeat=True)",
            )
        )


@dataclasses.dataclass(frozen=True)
class _Source:
    """Stands in `make` where the user wrote no function: gives a loader, or what a node builds, under a name."""

    give: Callable[[], Any]
    name: str

    def __call__(self) -> Any:
        return self.give()


def _wanted(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that the function has an argument for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return {}
    return {name: value for name, value in values.items() if name in parameters}


def _fits(batch: Batch, expected: Batch) -> bool:
    leaves, structure = jax.tree.flatten(batch)
    specs, wanted = jax.tree.flatten(expected)
    return structure == wanted and all(
        leaf.shape == spec.shape and leaf.dtype == spec.dtype for leaf, spec in zip(leaves, specs, strict=True)
    )


def _unlike(batch: Batch, expected: Batch, label: str) -> DataError:
    """The error for a batch that is not like the first, with every path that differs."""
    got = {path: spell_array(leaf) for path, leaf in named_leaves(batch.data).items()}
    first = {path: spell_array(leaf) for path, leaf in named_leaves(expected.data).items()}
    differing = [path for path in {**first, **got} if got.get(path) != first.get(path)]
    ragged = got.keys() == first.keys() and batch_size(batch) < batch_size(expected)
    return DataError(
        message(
            f"{label} is not like the first",
            got=_differences(differing, got) or f"containers: {jax.tree.structure(batch.data)}",
            expected=_differences(differing, first) or f"containers: {jax.tree.structure(expected.data)}",
            fix="drop the ragged end, or yield ek.data.pad(ek.data.as_batch(element), size)" if ragged else None,
        )
    )


def _too_large(rows: int, size: int, label: str) -> DataError:
    return DataError(
        message(
            f"{label} is larger than the first",
            got=f"{rows} rows",
            expected=f"{size} rows at most, as in element 0",
            fix="yield a batch of the largest size first",
        )
    )


def _differences(paths: list[str], specs: dict[str, str]) -> str:
    return "\n".join(f"{path or 'the array'}: {specs.get(path, 'not there')}" for path in paths)


def pipeline(data: Any, *, root: Any = None, path: str = "data") -> Pipeline:
    """Whatever describes batches, as a pipeline.

    Args:
        data: a `Pipeline`; a function that returns an iterator of batches, or a node of such a call; an object that is
            iterated anew each time, such as a list of batches or a loader of torch.
        root: the config that references in `data` are looked up in.
        path: where `data` stands in `root`, for messages.

    Returns:
        A pipeline; nodes are resolved, and the arrays of an `InMemory` loaded and checked, once.

    Raises:
        DataError: `data` is an iterator, which cannot be started again; bare arrays; an `InMemory` of wrong arrays; or
            nothing that yields batches.

    Example:
        >>> stream = pipeline([np.zeros((2, 3)), np.ones((2, 3))])
        >>> len(list(stream.batches(start=0, seed=0)))
        2
    """
    if isinstance(data, Ref):
        return pipeline(resolve(data, root=root, path=path), root=root, path=path)
    if is_node(data):
        built = resolve(data, root=root, path=path)
        if isinstance(built, abc.Iterator):  # the node says how to make it, which can be done again
            return _iterable(_Source(lambda: resolve(data, root=root, path=path), path))
        return pipeline(built, root=root, path=path)
    if isinstance(data, Iterable):
        if not is_part(data.make):
            return data
        made_at = f"{path}.make"
        return _iterable(_Source(lambda: resolve(data.make, root=root, path=made_at), made_at), data.repeat)
    if isinstance(data, Pipeline) and not isinstance(data, type):
        ready = resolved(data, root, path) if is_config(data) else data
        return _checked(ready, path) if isinstance(ready, InMemory) else ready
    _refuse(data, path)
    if isinstance(data, abc.Iterable):
        return _iterable(_Source(lambda: data, path))
    return _iterable(data)


def _checked(data: InMemory, path: str) -> InMemory:
    try:
        data.spec()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return data


def _iterable(make: Callable[..., Any], repeat: bool = False) -> Iterable:
    # Without the constructor, which admits only functions with a name, as a config needs that is written to JSON.
    return raw(Iterable, {"make": make, "repeat": repeat})


def _refuse(data: Any, path: str) -> None:
    arrays = (np.ndarray, jax.Array)
    what = fix = None
    if isinstance(data, type) and isinstance(data, Pipeline):
        what, fix = f"got the class {data.__name__}, not an instance", f"write {data.__name__}(...)"
    elif data is None:
        what, fix = "there is no data", "give ek.data.InMemory(arrays, batch_size=...)"
    elif isinstance(data, abc.Iterator):
        what = "an iterator can be read only once, so the data could not be started again"
        fix = "give the function that makes it: lambda: iter(...), or a generator function without its call"
    elif isinstance(data, Batch | abc.Mapping | jax.Array | np.ndarray) or (
        isinstance(data, tuple) and data and all(isinstance(part, arrays) for part in data)
    ):
        what, fix = "these are arrays, not batches of them", "give ek.data.InMemory(arrays, batch_size=...)"
    elif isinstance(data, str | bytes) or not (isinstance(data, abc.Iterable) or callable(data)):
        what = "this yields no batches"
    if what is not None:
        got = _spell_arrays(data) or spell_value(data)
        expected = "a pipeline, a function that returns an iterator of batches, or a list or loader of them"
        raise DataError(message(f"{path}: {what}", got=got, expected=expected, fix=fix))


def _spell_arrays(data: Any) -> str | None:
    if not isinstance(data, Batch | abc.Mapping | tuple):
        return None
    return "\n".join(f"{path or 'it'}: {spell_value(leaf)}" for path, leaf in named_leaves(data).items())
