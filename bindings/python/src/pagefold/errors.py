"""What a store can refuse, one class for each error code that a program can act on."""

from __future__ import annotations

from typing import Dict, Type


class StoreError(Exception):
    """An operation of a store failed. ``code`` is the number that ``forrest.h`` gives it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        # KeyError, a base of one of us, would show the text in quotes.
        return self.message


class NotFound(StoreError, KeyError):
    """There is no entry of this key, or no store of this name."""


class Exists(StoreError):
    """There is an entry, or a store, already."""


class Mismatch(StoreError):
    """The value is not the expected one."""


class Invalid(StoreError, ValueError):
    """An argument is out of range."""


class Closed(StoreError, ValueError):
    """The store was closed."""


class Forked(StoreError):
    """The store was opened before a fork: open it again in the child."""


class Full(StoreError, MemoryError):
    """The store's limit is reached, or the system has no memory left."""


class TooLong(StoreError, ValueError):
    """The key is longer than 64 KiB or the value longer than 1 GiB."""


class NotANumber(StoreError, ValueError):
    """The value is not a number of 8 bytes."""


class BadName(StoreError, ValueError):
    """The name cannot name a store."""


class Foreign(StoreError):
    """The file is not a store, or was made with other settings."""


class WrongVersion(StoreError):
    """The store was written by another version or on another kind of machine."""


class Damaged(StoreError):
    """The store is truncated or damaged."""


class Busy(StoreError):
    """Too many threads or handles use stores."""


class NotOrdered(StoreError):
    """The store does not keep its keys in order: open it with ``ordered=True``; a shared one cannot."""


class Untrusted(StoreError):
    """The file of this name is another user's, or others may write it."""


NOT_FOUND = 1
EXISTS = 2
MISMATCH = 3
TOO_SMALL = 4
CLOSED = 6

BY_CODE: Dict[int, Type[StoreError]] = {
    NOT_FOUND: NotFound,
    EXISTS: Exists,
    MISMATCH: Mismatch,
    5: Invalid,
    CLOSED: Closed,
    7: Forked,
    8: Full,
    9: Full,
    10: TooLong,
    11: TooLong,
    12: NotANumber,
    13: BadName,
    14: Foreign,
    15: WrongVersion,
    16: WrongVersion,
    17: Damaged,
    18: Busy,
    21: NotOrdered,
    22: Untrusted,
}
