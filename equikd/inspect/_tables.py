"""The tables that a preflight prints."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from equikd.inspect._readers import read_by
from equikd.train._exhausted import readable
from equikd.tree import parse

if TYPE_CHECKING:
    from equikd.inspect._preflight import Leaves, Preflight


def short(shape: Any) -> str:
    """Dtype and shape, such as `f32[32,64]`.

    Example:
        >>> import jax
        >>> short(jax.ShapeDtypeStruct((32, 64), "float32")), short(jax.ShapeDtypeStruct((), "bool"))
        ('f32[32,64]', 'bool[]')
    """
    name = re.sub(r"<.*>", "", str(shape.dtype))
    for long, letter in (("bfloat", "bf"), ("uint", "u"), ("float", "f"), ("int", "i"), ("complex", "c")):
        if name.startswith(long) and name[len(long) :].isdigit():
            name = letter + name[len(long) :]
            break
    return f"{name}[{','.join(map(str, shape.shape))}]"


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows in columns that line up, indented."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def tables(found: "Preflight") -> str:
    """All that a preflight has found, as text."""
    return "\n".join(
        [
            "Model",
            *columns(
                (kind, _leaves(leaves))
                for kind, leaves in (
                    ("trainable", found.trainable),
                    ("frozen", found.frozen),
                    ("hyperparameters", found.hyperparameter),
                )
            ),
            *([] if found.init_from is None else ["", "Starts from", f"  {found.init_from}"]),
            "",
            contexts(found, most=_MOST),
            "",
            "Results",
            *columns(
                (name, shape if isinstance(shape, str) else "as its rows say" if shape is None else short(shape))
                for name, shape in found.results.items()
            ),
            "",
            "Floats of the config",
            *(columns(found.floats.items()) or ["  none"]),
            *_devices(found),
            *_memory(found),
            "",
            *(["Warnings", *(f"  {text}" for text in found.warnings)] if found.warnings else ["No warnings."]),
        ]
    )


def _leaves(leaves: "Leaves") -> str:
    if not leaves.leaves:
        return "none"
    count = f"{leaves.leaves} {'leaf' if leaves.leaves == 1 else 'leaves'}"
    return f"{count}, {leaves.elements:,} {'element' if leaves.elements == 1 else 'elements'}, {readable(leaves.bytes)}"


def contexts(found: "Preflight", most: int | None = None) -> str:
    """What key paths can name, in training and in each eval; `most` rows for each name of the context."""
    shape = "shape" if found.accumulate == 1 else f"shape over all {found.accumulate} micro-batches"
    parts = [_context(found.paths, found, f"Context of a training step (key path, {shape}, read by)", most)]
    parts += [_context(paths, found, f"Context of the eval {name!r}", most) for name, paths in found.evals.items()]
    return "\n\n".join("\n".join(lines) for lines in parts)


_MOST = 12  # rows of one name of the context, such as `opt_state`, in the summary; `equikd paths` has all
_ONE_LINE = ("grads", "updates")  # they have the tree of `params`
_AS_IN_TRAINING = ("step", "model", "extra", "config")  # in an eval


def _context(paths: Mapping[str, Any], found: "Preflight", title: str, most: int | None) -> list[str]:
    tops = {path: "grads.interms" if path.startswith("grads.interms.") else str(parse(path)[0]) for path in paths}
    folded = _ONE_LINE if paths is found.paths else _AS_IN_TRAINING
    rows: dict[str, tuple[str, ...]] = {}
    for path, shape in paths.items():
        top = tops[path]
        if top == path or top not in folded:
            rows[path] = (path, short(shape), ", ".join(read_by(path, found.readers)))
        else:
            same = "as params" if top in _ONE_LINE else "as in training"
            rows[top] = (f"{top}.**", same, ", ".join(read_by(top, found.readers)))
    kept = []
    for top in dict.fromkeys(tops.values()):
        own = [row for path, row in rows.items() if tops.get(path, path) == top]
        kept += own if most is None or len(own) <= most else [*own[:most], (f"{top}.**", f"{len(own) - most} more", "")]
    return [title, *columns(kept)]


def _devices(found: "Preflight") -> list[str]:
    held = found.devices
    if held is None:
        return []
    rows = [
        ("devices", str(held.count)),
        ("rows of a batch", f"{held.rows} on each"),
        ("train state", f"{readable(held.bytes)}, {readable(held.bytes_each)} on each"),
        ("spread", f"{len(held.spread)} {'array' if len(held.spread) == 1 else 'arrays'}"),
    ]
    rows += [("no axis to spread", f"{path} {short(leaf)}") for path, leaf in list(held.undivided.items())[:_MOST]]
    rows += [("", f"{len(held.undivided) - _MOST} more")] if len(held.undivided) > _MOST else []
    return ["", "Devices", *columns(rows)]


def _memory(found: "Preflight") -> list[str]:
    if found.memory is None:
        return []
    rows = [(name, readable(count)) for name, count in (*found.memory._asdict().items(), ("peak", found.memory.peak))]
    return ["", "Memory of the compiled step", *columns(rows)]
