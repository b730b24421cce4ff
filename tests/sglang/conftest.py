"""Real servers of SGLang on a CPU; collected by ``make test-sglang`` only, which names interpreter and model."""

from __future__ import annotations

import os

PYTHON = os.environ.get("DFLASH2_SGLANG_PYTHON", "")
MODEL = os.environ.get("DFLASH2_SGLANG_MODEL", "")

collect_ignore_glob = [] if PYTHON and MODEL else ["test_*.py"]
