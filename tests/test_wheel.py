"""What a wheel carries besides modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_and_the_native_copier_are_in_the_wheel(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        timeout=240,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    page = ROOT / "src/dflash2/monitoring/page"
    assert {f"dflash2/monitoring/page/{file.name}" for file in page.iterdir()} <= names
    assert "dflash2/py.typed" in names and not any(name.startswith("tests/") for name in names)
    built = "dflash2/pools/librows.so" in names
    assert built == (shutil.which("cc") is not None)
    # It is called through ctypes: of one platform, but of any Python.
    assert ("-py3-none-linux_" in wheel.name) == built and wheel.name.endswith("-py3-none-any.whl") != built


def test_without_a_compiler_there_is_a_wheel_all_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CC": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert "the native copier cannot be built, NumPy copies instead" in done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "dflash2/pools/librows.so" not in zipfile.ZipFile(wheel).namelist()
