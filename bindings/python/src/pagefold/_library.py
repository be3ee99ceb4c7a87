"""libforrest, found and declared.

By ctypes, which is in every Python: nothing is compiled, nothing else is installed, and calls let other threads run.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from typing import List

CREATE, EXISTING, KEYED, SMALL_PAGES, ORDERED = 1, 2, 4, 8, 32


class Options(ctypes.Structure):
    """``forrest_options``."""

    _fields_ = [("limit_bytes", c_uint64), ("seed", c_uint64), ("flags", c_uint), ("reserved", c_uint)]


class Bytes(ctypes.Structure):
    """``forrest_bytes``."""

    _fields_ = [("data", c_char_p), ("length", c_size_t)]


class StatsStruct(ctypes.Structure):
    """``forrest_stats``."""

    _fields_ = [
        (name, c_uint64)
        for name in (
            "entry_count",
            "allocated_bytes",
            "held_bytes",
            "kept_bytes",
            "fixed_bytes",
            "limit_bytes",
            "thread_count",
            "recovery_count",
        )
    ]


VISIT = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t)
EACH = CFUNCTYPE(None, c_void_p, c_size_t, c_void_p, c_size_t)

_DECLARATIONS = {
    "forrest_open": [c_char_p, POINTER(Options), POINTER(c_void_p)],
    "forrest_close": [c_void_p],
    "forrest_remove": [c_char_p],
    "forrest_get": [c_void_p, c_char_p, c_size_t, c_void_p, c_size_t, POINTER(c_size_t)],
    "forrest_set": [c_void_p, c_char_p, c_size_t, c_char_p, c_size_t],
    "forrest_insert": [c_void_p, c_char_p, c_size_t, c_char_p, c_size_t],
    "forrest_delete": [c_void_p, c_char_p, c_size_t],
    "forrest_add": [c_void_p, c_char_p, c_size_t, c_int64, POINTER(c_int64)],
    "forrest_compare_swap": [c_void_p, c_char_p, c_size_t, POINTER(Bytes), POINTER(Bytes)],
    "forrest_get_many": [c_void_p, POINTER(Bytes), c_size_t, EACH, c_void_p],
    "forrest_set_many": [c_void_p, POINTER(Bytes), POINTER(Bytes), c_size_t],
    "forrest_for_each": [c_void_p, VISIT, c_void_p],
    "forrest_scan": [c_void_p, POINTER(Bytes), POINTER(Bytes), c_int, VISIT, c_void_p],
    "forrest_reserve": [c_void_p, c_uint64],
    "forrest_clear": [c_void_p, POINTER(c_uint64)],
    "forrest_count": [c_void_p, POINTER(c_uint64)],
    "forrest_get_stats": [c_void_p, POINTER(StatsStruct)],
    "forrest_trim": [c_void_p],
    "forrest_recover": [c_void_p],
}


def _candidates() -> List[str]:
    named = os.environ.get("PAGEFOLD_FORREST")
    if named:
        return [named]
    # A wheel has its own.
    own = os.path.join(os.path.dirname(__file__), "libforrest.so")
    if os.path.exists(own):
        return [own]
    found = ctypes.util.find_library("forrest")
    return ([found] if found else []) + ["libforrest.so.0", "libforrest.so"]


@functools.lru_cache(maxsize=None)
def load() -> ctypes.CDLL:
    """The library, loaded once: the file that ``PAGEFOLD_FORREST`` names, else that of the wheel, else the system's."""
    candidates = _candidates()
    said = ""
    for name in candidates:
        try:
            library = ctypes.CDLL(name)
            break
        except OSError as error:
            said = said or str(error)
    else:
        raise ImportError(
            f"libforrest is not to be found ({said}); install it (crates/forrest/install.sh) "
            "or name its file in PAGEFOLD_FORREST"
        )
    for name, arguments in _DECLARATIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise ImportError(f"{library._name} has no {name}: it is of another version than this package") from None
        function.argtypes = arguments
        function.restype = c_int
    for name, arguments in (("forrest_error_text", [c_int]), ("forrest_version", [])):
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_char_p
    return library
