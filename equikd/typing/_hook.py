"""The import hook: `typechecked` on every function and class of a package, without a decorator.

    with ek.typing.install_import_hook("my_package"):
        import my_package.model

The source is compiled with the decorator added: below all others on a function (so that `jax.custom_vjp` and the like
stay outside), above all others on a class (so that `dataclass` has done its work). Nothing is written to the bytecode
cache, so a module imported without the hook is the plain one. `@typing.no_type_check` leaves a definition alone.
"""

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

_MODULE = "equikd.typing._decorate"


class Hook:
    """An installed hook; a context manager that uninstalls it."""

    def __init__(self, finder: importlib.abc.MetaPathFinder) -> None:
        self._finder = finder

    def uninstall(self) -> None:
        """Check no further imports; what has been imported stays checked."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def __enter__(self) -> "Hook":
        return self

    def __exit__(self, *details: object) -> None:
        self.uninstall()


def install_import_hook(modules: str | Sequence[str]) -> Hook:
    """Check all functions and classes of modules that are imported from now on.

    Args:
        modules: names of packages or modules; a package stands for all of its modules. One that has been imported
            already stays as it is.

    Returns:
        The hook: `uninstall()` it, or use it as a context manager.

    Example:
        >>> with install_import_hook("my_package"):
        ...     pass  # import my_package
    """
    finder = _Finder((modules,) if isinstance(modules, str) else tuple(modules))
    sys.meta_path.insert(0, finder)
    return Hook(finder)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self._modules):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        tree = _Decorate().visit(ast.parse(data, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)


class _Decorate(ast.NodeTransformer):
    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        # After the docstring and `from __future__ import ...`, which must come first.
        place = 0
        while place < len(node.body) and _is_header(node.body[place]):
            place += 1
        node.body.insert(place, ast.Import([ast.alias(_MODULE, "_equikd_typing")]))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._decorated(node, first=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self._decorated(node, first=False)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return self._decorated(node, first=False)

    def _decorated(self, node: Any, *, first: bool) -> Any:
        if any(ast.unparse(one).rpartition(".")[2] == "no_type_check" for one in node.decorator_list):
            return node
        self.generic_visit(node)
        decorator = ast.Attribute(ast.Name("_equikd_typing", ast.Load()), "hooked", ast.Load())
        ast.copy_location(decorator, node)
        node.decorator_list.insert(0 if first else len(node.decorator_list), decorator)
        return node


def _is_header(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
