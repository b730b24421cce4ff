"""CPU ONLY. A stand-in for SGLang's compiled kernels, so that its server can be imported where there is no GPU.

Every name of ``sgl_kernel`` and of its sub-modules can be imported; every call raises. It is never installed with the
package and must not be on the path of a machine with a GPU, whose real ``sglang-kernel`` it would hide.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__version__ = "0.0.0+cpu.stub"


class _Missing:
    """A kernel that is not there; attributes of it are not there either."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{self._name} is a GPU kernel; this environment has a CPU stub of sgl_kernel only")


def _getattr_of(module_name: str) -> Any:
    def getattr_(name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{module_name}.{name}")

    return getattr_


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes ``sgl_kernel.anything`` importable."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        inside = fullname.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if inside else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__getattr__"] = _getattr_of(module.__name__)


__getattr__ = _getattr_of(__name__)
sys.meta_path.append(_Submodules())
