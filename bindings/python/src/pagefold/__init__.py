"""One copy of every page.

:class:`Store` is forrest, a key-value store in memory, private to a process or shared by name between several.
:class:`Daemon` asks a running pagefold daemon; :func:`scan` tells what merging would save.
"""

from .control import Daemon, DaemonError, Moved, Status, Totals, Unmerged, Verified, scan
from .errors import (
    BadName,
    Busy,
    Closed,
    Damaged,
    Exists,
    Foreign,
    Forked,
    Full,
    Invalid,
    Mismatch,
    NotANumber,
    NotFound,
    NotOrdered,
    StoreError,
    TooLong,
    Untrusted,
    WrongVersion,
)
from .store import Stats, Store, library_version

__all__ = [
    "BadName",
    "Busy",
    "Closed",
    "Daemon",
    "DaemonError",
    "Damaged",
    "Exists",
    "Foreign",
    "Forked",
    "Full",
    "Invalid",
    "Mismatch",
    "Moved",
    "NotANumber",
    "NotFound",
    "NotOrdered",
    "Stats",
    "Status",
    "Store",
    "StoreError",
    "TooLong",
    "Totals",
    "Untrusted",
    "Unmerged",
    "Verified",
    "WrongVersion",
    "library_version",
    "scan",
]
__version__ = "0.1.0"
