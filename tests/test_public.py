"""The public names are there, and importing the package costs nothing."""

from __future__ import annotations

import dflash2
from dflash2 import _HOME


def test_every_public_name_can_be_had() -> None:
    assert set(dflash2.__all__) == {*_HOME, "__version__"}
    for name in dflash2.__all__:
        assert getattr(dflash2, name) is not None
