"""Policy settings changed by hand while running: validated, logged, and undone one by one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from dflash2.config.changing import running_values
from dflash2.monitoring.observer import Observed

REMEMBERED = 50
"""Changes that can be undone; older ones are forgotten."""


class PolicyDial:
    """The changes made since the start. Its methods run in the thread that drives the runtime."""

    def __init__(self) -> None:
        self._changes: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)

    def state(self, observed: Observed) -> dict[str, Any]:
        """As JSON: ``values`` in effect, ``limits`` where there are some, ``changes`` to undo, oldest first."""
        return {
            "values": running_values(observed.config),
            "limits": observed.policy_limits(),
            "changes": list(self._changes),
        }

    def change(self, observed: Observed, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Set some of them; returns ``state``. What is set to the value it has is no change.

        Raises:
            ConfigError: a name or a value is not valid; nothing has changed.
        """
        before = running_values(observed.config)
        after = observed.set_policy(**changes)
        names = [name for name in changes if after[name] != before[name]]
        if names:
            old, new = ({name: values[name] for name in names} for values in (before, after))
            self._changes.append({"time": time.time(), "before": old, "after": new})
        return self.state(observed)

    def undo(self, observed: Observed) -> dict[str, Any]:
        """Take the newest change back, if there is one; returns ``state``.

        Raises:
            ConfigError: the old value does not go with what was changed since.
        """
        if self._changes:
            observed.set_policy(**self._changes[-1]["before"])
            self._changes.pop()
        return self.state(observed)
