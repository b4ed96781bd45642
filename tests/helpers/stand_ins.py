"""Stand-ins for packages that a program imports and a test does not use: modules in which every
name is an empty class. Such a class returns None when it is called, and a decorator returns the
function that it decorates."""

from __future__ import annotations

import abc
import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any


class _StandIn(abc.ABCMeta):
    """Class of the names of a stand-in. Programs derive from them, subscript them and use them with
    isinstance."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return None if "stands_in" in vars(cls) else super().__call__(*args, **kwargs)


def _stand_in(name: str) -> Any:
    return _StandIn(name, (), {"stands_in": True})


def _decorator(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else _decorator


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorator if name in _DECORATORS else _stand_in(name)


# Packages that Megatron-Bridge imports even without a GPU, and that stand-ins replace: for fault
# tolerance (PyPI has no version that Megatron accepts), image data, kernels, distillation and
# quantisation, and diffusion.
OF_BRIDGE = (
    "nvidia_resiliency_ext.inprocess",
    "megatron.energon",
    "transformer_engine.pytorch",
    "modelopt",
    "diffusers",
)
_DECORATORS = ("stateless",)  # names of Megatron-Energon's decorators


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        for package in self._packages:
            is_parent = package.startswith(f"{name}.") and name not in sys.modules
            if is_parent or f"{name}.".startswith(f"{package}."):
                return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def stand_ins(*packages: str) -> Iterator[None]:
    """Let imports in the block find stand-ins for ``packages``; later imports do not find them."""
    finder = _Finder(packages)
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if isinstance(sys.modules[name], _Module):
                del sys.modules[name]
