"""Ending a server that cannot do what its configuration asks for."""

from __future__ import annotations

import sys
from typing import NoReturn

EXIT_CODE = 2


def refuse(message: str) -> NoReturn:
    """Say why and end the process: SGLang logs an exception of a plug-in and goes on without it."""
    print(f"DFlash2: cannot start: {message}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)
