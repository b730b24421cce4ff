"""Build hook: compiles ``rows.c`` and ``blocks.c`` into the wheel, or into the tree for an editable installation.

Without a compiler the package is built all the same, for any platform, and copies rows with NumPy and
moves NVMe blocks one by one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("src/dflash2/pools/rows.c", "src/dflash2/pools/blocks.c")
LIBRARY = "dflash2/pools/librows.so"
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-pthread")


class RowsHook(BuildHookInterface[Any]):
    """Has ``librows.so`` built before a wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling. ``version`` is ``standard`` or ``editable``."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "librows.so"
            if not self._compile([root / source for source in SOURCES], built):
                return
            if version == "editable":
                target = root / "src" / LIBRARY
            else:
                target = root / "build" / "wheel" / "librows.so"
                build_data["force_include"][str(target)] = LIBRARY
                # It is called through ctypes and knows nothing of Python: one wheel for all versions.
                build_data["pure_python"] = False
                build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
            _put(built, target)

    def _compile(self, sources: list[Path], target: Path) -> bool:
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        if shutil.which(compiler[0]) is None:
            compiler = ["cc"]
        try:
            subprocess.run([*compiler, *FLAGS, "-o", target, *sources], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()
            self.app.display_warning(f"the native copier cannot be built, NumPy copies instead: {reason}")
            return False
        return True


def _put(built: Path, target: Path) -> None:
    """Whole or not at all: a running process may have the old one mapped."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(built, beside)
    beside.replace(target)
