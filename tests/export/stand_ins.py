"""PyTorch and its like as stand-ins, so that frameworks' configuration classes run on a machine without them.

A stand-in has every attribute, can be called, inherited from and used as a decorator. Only what a configuration checks
by its own Python is then checked: no tensor is there.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol


class _Meta(type(Protocol)):  # type: ignore[misc]  # of abstract classes and protocols too
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Meta(name, (StandIn,), {"__module__": cls.__module__})
        setattr(cls, name, made)
        return made

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class StandIn(metaclass=_Meta):
    """An object of which everything can be asked."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Itself, or as a decorator what it decorates."""
        if cls.__dict__.get("__init__") is None and len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator what it decorates."""
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __bool__(self) -> bool:
        return False


class StandInModule(ModuleType):
    """A module that has every attribute; those that are classes keep their identity."""

    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        made: Any = "2.11.0" if name == "__version__" else _Meta(name, (StandIn,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some modules of a framework below its folder, stand-ins for its others and for other packages."""

    def __init__(self, folder: Path, real: Sequence[str], stood_in: Sequence[str]) -> None:
        self.folder, self.real = folder, real
        self.roots = {name.split(".")[0] for name in real} | set(stood_in)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname in self.real:
            place = self.folder.joinpath(*fullname.split("."))
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            return importlib.util.spec_from_file_location(fullname, file)
        if fullname.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@contextlib.contextmanager
def framework(folder: Path, real: Sequence[str], stood_in: Sequence[str]) -> Iterator[None]:
    """Import modules of a framework, with stand-ins for all else that they import; everything is taken back after.

    Parameters
    ----------
    folder
        Holds the framework's package.
    real
        Modules of the framework that run as they are.
    stood_in
        Other packages that stand-ins take the place of.
    """
    finder = _Finder(folder, real, stood_in)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in finder.roots}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in finder.roots]:
            del sys.modules[name]
        sys.modules.update(before)
