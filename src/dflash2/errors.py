"""Every error this package raises on purpose.

DFlash2Error
├── ConfigError          the configuration file: says the JSON path and what to write instead
├── StorageError         a tier cannot be built or used: path, permission, space, owner, format
├── CapacityError        there is not enough room
│   ├── RequestTooLarge  and there never will be: the request is larger than the whole
│   └── QueueFull        nor in the queue for it: come back later
├── RequestError         a request that cannot be served as asked: names the field
├── ModelError           a model that cannot be loaded or is not supported
├── DeadlineExceeded     a bounded wait came to its end
├── TraceError           recorded traffic that cannot be read: names the file and the line
├── EngineStopped        the engine is dead, shutting down or closed
└── IntegrityError       an invariant does not hold; found by ``check_integrity()``
"""

from __future__ import annotations


class DFlash2Error(Exception):
    """Root of the tree."""


class ConfigError(DFlash2Error):
    """The configuration is wrong.

    Args:
        message: what is wrong and what to do.
        path: JSON path of the value, such as ``memory.dram_capacity_mb``; empty for the whole file.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class StorageError(DFlash2Error):
    """A tier cannot be built or used."""


class CapacityError(DFlash2Error):
    """Not enough room at this moment."""


class RequestTooLarge(CapacityError):
    """The request is larger than the whole and is refused at once."""


class QueueFull(CapacityError):
    """So many requests wait already that another one is refused at once.

    Args:
        message: how many wait, and what to do.
        retry_after_s: when it is worth trying again, as far as can be told.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestError(DFlash2Error):
    """A request that cannot be served as asked.

    Args:
        message: what is wrong and what is allowed.
        param: name of the offending field, if one can be named.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelError(DFlash2Error):
    """A model cannot be loaded or is not supported."""


class DeadlineExceeded(DFlash2Error):
    """A bounded wait came to its end.

    Args:
        message: what was waited for.
        retry_after_s: when it is worth trying again, as far as can be told.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TraceError(DFlash2Error):
    """Recorded traffic cannot be read."""


class EngineStopped(DFlash2Error):
    """The engine is dead, shutting down or closed; no request can be served by it any more."""


class IntegrityError(DFlash2Error):
    """An invariant does not hold."""
