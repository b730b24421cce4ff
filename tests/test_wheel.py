"""What a wheel carries besides modules."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_in_the_wheel(tmp_path: Path) -> None:
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
