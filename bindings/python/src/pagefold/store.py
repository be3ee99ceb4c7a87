"""forrest from Python: bytes to bytes."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import byref, c_int64, c_size_t, c_uint64, c_void_p, string_at
from dataclasses import dataclass
from types import TracebackType
from typing import (
    Any,
    ItemsView,
    Iterable,
    Iterator,
    List,
    Mapping,
    MutableMapping,
    Optional,
    Tuple,
    Type,
    TypeVar,
    Union,
    ValuesView,
    overload,
)

from . import _library as lib
from .errors import BY_CODE, CLOSED, EXISTS, MISMATCH, NOT_FOUND, TOO_SMALL, Closed, StoreError

BytesLike = Union[bytes, bytearray, memoryview]
_T = TypeVar("_T")

#: Values up to this size are read by one call.
_FIRST_READ = 4096
#: Entries that a scan takes at a time.
_SCAN_ENTRIES = 256
_own = threading.local()
_RAISE = object()


def _bytes(value: BytesLike, what: str) -> bytes:
    # bytes(5) would be five zeros, and a str has no bytes of its own.
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"{what} must be bytes, not {type(value).__name__}")


def _check(code: int) -> None:
    if code != 0:
        text = lib.load().forrest_error_text(code)
        raise BY_CODE.get(code, StoreError)(code, text.decode("utf-8", "replace"))


def _taker(entries: List[Tuple[bytes, bytes]], raised: List[BaseException], most: Optional[int] = None) -> Any:
    """A callback that collects at most a given number of entries. It stores exceptions raised in it, also by signal handlers:
    ctypes would print and drop them, and the entry would be missing."""

    def visit(_: Optional[int], key: Optional[int], key_size: int, value: Optional[int], value_size: int) -> int:
        try:
            entries.append((string_at(key or 0, key_size), string_at(value or 0, value_size)))
            return int(len(entries) == most)
        except BaseException as error:
            raised.append(error)
            return 1

    return lib.VISIT(visit)


def _raise(raised: List[BaseException]) -> None:
    if raised:
        raise raised[0]


def library_version() -> str:
    """The version of the loaded libforrest."""
    version: bytes = lib.load().forrest_version()
    return version.decode()


@dataclass(frozen=True)
class Stats:
    """Contents and memory of a store."""

    entry_count: int
    allocated_bytes: int
    held_bytes: int
    kept_bytes: int
    fixed_bytes: int
    limit_bytes: int
    thread_count: int
    recovery_count: int


class _Items(ItemsView[bytes, bytes]):
    """All entries. They are taken together, so that none is looked up again, and missed, after it was deleted."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._store = store

    def __iter__(self) -> Iterator[Tuple[bytes, bytes]]:
        return self._store._entries()


class _Values(ValuesView[bytes]):
    """All values, taken as the entries are."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._store = store

    def __iter__(self) -> Iterator[bytes]:
        return (value for _, value in self._store._entries())


class Store(MutableMapping[bytes, bytes]):
    """A key-value store in memory: a ``MutableMapping``, with all that a ``dict`` has.

    With a name it is shared with every process of this user that opens that name, and outlives them; without one it
    is private. Any number of threads may use it concurrently. After a fork the child opens it anew.

    Each operation on a key takes effect at one instant. ``keys``, ``values``, ``items`` and iteration go by key order in an
    ordered store. In another one they copy all entries first, as of about now, in no order.
    """

    def __init__(
        self,
        name: Optional[str] = None,
        *,
        create: bool = False,
        existing: bool = False,
        ordered: bool = False,
        keyed: bool = False,
        small_pages: bool = False,
        limit_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        """Opens a store.

        ``create``: it must not be there yet. ``existing``: it must be. ``ordered``: keys in order too, for ``scan``
        (private stores only). ``keyed``: hash with a secret, for keys that others choose. ``limit_bytes``: most memory
        it may take.
        """
        self._handle: Optional[int] = None
        self._library = lib.load()
        chosen = (
            (create, lib.CREATE),
            (existing, lib.EXISTING),
            (ordered, lib.ORDERED),
            (keyed, lib.KEYED),
            (small_pages, lib.SMALL_PAGES),
        )
        options = lib.Options(
            limit_bytes=limit_bytes, seed=seed, flags=sum(flag for wanted, flag in chosen if wanted), reserved=0
        )
        handle = c_void_p()
        named = None if name is None else os.fsencode(name)
        _check(self._library.forrest_open(named, byref(options), byref(handle)))
        self._handle = handle.value
        self.name = name
        self.ordered = ordered

    @classmethod
    def open(cls, name: Optional[str] = None, **settings: Any) -> Store:
        """As the constructor."""
        return cls(name, **settings)

    @staticmethod
    def remove(name: str) -> None:
        """Removes the shared store of this name; processes that have it open keep it."""
        _check(lib.load().forrest_remove(os.fsencode(name)))

    def close(self) -> None:
        """Closes this handle; every later use raises :class:`Closed`. A second time does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _check(self._library.forrest_close(handle))

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # The interpreter may be ending, or this is a forked child: no caller can handle an error.
            pass

    def __repr__(self) -> str:
        what = "private" if self.name is None else repr(self.name)
        return f"<pagefold.Store {what}{'' if self._handle is not None else ', closed'}>"

    @property
    def _open(self) -> int:
        if self._handle is None:
            raise Closed(CLOSED, "the store was closed")
        return self._handle

    def _read(self, key: bytes) -> Optional[bytes]:
        # One buffer per thread: allocating a buffer costs more than the lookup.
        try:
            buffer, size, room = _own.buffer, _own.size, _FIRST_READ
        except AttributeError:
            buffer, size, room = ctypes.create_string_buffer(_FIRST_READ), c_size_t(0), _FIRST_READ
            _own.buffer, _own.size = buffer, size
        while True:
            code = self._library.forrest_get(self._open, key, len(key), buffer, room, byref(size))
            if code == 0:
                return string_at(buffer, size.value)
            if code == NOT_FOUND:
                return None
            if code != TOO_SMALL:
                _check(code)
            # Another thread may make the value even longer meanwhile.
            room = size.value
            buffer = ctypes.create_string_buffer(room)

    @overload
    def get(self, key: BytesLike) -> Optional[bytes]: ...

    @overload
    def get(self, key: BytesLike, default: _T) -> Union[bytes, _T]: ...

    def get(self, key: BytesLike, default: Any = None) -> Any:
        """The value of ``key``, or ``default``."""
        value = self._read(_bytes(key, "a key"))
        return default if value is None else value

    def __getitem__(self, key: BytesLike) -> bytes:
        value = self._read(_bytes(key, "a key"))
        if value is None:
            raise KeyError(key)
        return value

    def set(self, key: BytesLike, value: BytesLike) -> None:
        """Sets ``key`` to ``value``."""
        key, value = _bytes(key, "a key"), _bytes(value, "a value")
        _check(self._library.forrest_set(self._open, key, len(key), value, len(value)))

    def __setitem__(self, key: BytesLike, value: BytesLike) -> None:
        self.set(key, value)

    def insert(self, key: BytesLike, value: BytesLike) -> bool:
        """Sets ``key`` if it is not there; true if it was not."""
        key, value = _bytes(key, "a key"), _bytes(value, "a value")
        code = self._library.forrest_insert(self._open, key, len(key), value, len(value))
        if code == EXISTS:
            return False
        _check(code)
        return True

    def delete(self, key: BytesLike) -> bool:
        """Deletes ``key``; true if it was there."""
        key = _bytes(key, "a key")
        code = self._library.forrest_delete(self._open, key, len(key))
        if code == NOT_FOUND:
            return False
        _check(code)
        return True

    def __delitem__(self, key: BytesLike) -> None:
        if not self.delete(key):
            raise KeyError(key)

    def incr(self, key: BytesLike, by: int = 1) -> int:
        """Adds to the number under ``key`` (8 bytes, little-endian; none counts as 0) and returns the sum."""
        key = _bytes(key, "a key")
        if not -(2**63) <= by < 2**63:
            raise OverflowError(f"{by} does not fit 64 bits")
        total = c_int64()
        _check(self._library.forrest_add(self._open, key, len(key), by, byref(total)))
        return total.value

    def decr(self, key: BytesLike, by: int = 1) -> int:
        """Subtracts; see :meth:`incr`."""
        return self.incr(key, -by)

    def cas(self, key: BytesLike, expected: Optional[BytesLike], desired: Optional[BytesLike]) -> bool:
        """Sets ``key`` to ``desired`` if its value is ``expected``, in one step; ``None`` stands for no entry on both
        sides. False if the value is another."""
        key = _bytes(key, "a key")
        sides = [None if side is None else _bytes(side, "a value") for side in (expected, desired)]
        pointers = [None if side is None else byref(lib.Bytes(side, len(side))) for side in sides]
        code = self._library.forrest_compare_swap(self._open, key, len(key), *pointers)
        # No entry where one was expected, or one where none was, is a mismatch like any other.
        if code in (MISMATCH, NOT_FOUND, EXISTS):
            return False
        _check(code)
        return True

    def get_many(self, keys: Iterable[BytesLike]) -> List[Optional[bytes]]:
        """The values of ``keys``, in their order; ``None`` where there is none. Many cache misses are in flight."""
        wanted = [_bytes(key, "a key") for key in keys]
        values: List[Optional[bytes]] = [None] * len(wanted)
        raised: List[BaseException] = []

        def each(_: Optional[int], index: int, value: Optional[int], size: int) -> None:
            try:
                if value is not None:
                    values[index] = string_at(value, size)
            except BaseException as error:
                raised.append(error)

        array = (lib.Bytes * len(wanted))(*(lib.Bytes(key, len(key)) for key in wanted))
        _check(self._library.forrest_get_many(self._open, array, len(wanted), lib.EACH(each), None))
        _raise(raised)
        return values

    def set_many(self, entries: Union[Mapping[bytes, BytesLike], Iterable[Tuple[BytesLike, BytesLike]]]) -> None:
        """Sets many keys. Stops at the first error; those before it are set."""
        pairs = entries.items() if isinstance(entries, Mapping) else entries
        taken = [(_bytes(key, "a key"), _bytes(value, "a value")) for key, value in pairs]
        keys = (lib.Bytes * len(taken))(*(lib.Bytes(key, len(key)) for key, _ in taken))
        values = (lib.Bytes * len(taken))(*(lib.Bytes(value, len(value)) for _, value in taken))
        _check(self._library.forrest_set_many(self._open, keys, values, len(taken)))

    def scan(
        self, start: Optional[BytesLike] = None, stop: Optional[BytesLike] = None, *, reverse: bool = False
    ) -> Iterator[Tuple[bytes, bytes]]:
        """Entries from ``start`` on and below ``stop``, by key order, or backwards. The store must be ``ordered``.

        They are taken a few hundred at a time: what others change meanwhile may be in it or not.
        """
        low = None if start is None else _bytes(start, "a key")
        high = None if stop is None else _bytes(stop, "a key")
        while True:
            part = self._scan_part(low, high, reverse)
            yield from part
            if len(part) < _SCAN_ENTRIES:
                return
            last = part[-1][0]
            # The next key after the last is the last one with a zero byte appended.
            low, high = (low, last) if reverse else (last + b"\0", high)

    def _scan_part(self, low: Optional[bytes], high: Optional[bytes], reverse: bool) -> List[Tuple[bytes, bytes]]:
        part: List[Tuple[bytes, bytes]] = []
        raised: List[BaseException] = []
        bounds = [None if bound is None else byref(lib.Bytes(bound, len(bound))) for bound in (low, high)]
        visit = _taker(part, raised, _SCAN_ENTRIES)
        _check(self._library.forrest_scan(self._open, *bounds, int(reverse), visit, None))
        _raise(raised)
        return part

    def _entries(self) -> Iterator[Tuple[bytes, bytes]]:
        return self.scan() if self.ordered else iter(self._taken())

    def _taken(self, most: Optional[int] = None) -> List[Tuple[bytes, bytes]]:
        entries: List[Tuple[bytes, bytes]] = []
        raised: List[BaseException] = []
        _check(self._library.forrest_for_each(self._open, _taker(entries, raised, most), None))
        _raise(raised)
        return entries

    def items(self) -> ItemsView[bytes, bytes]:
        """All entries."""
        return _Items(self)

    def values(self) -> ValuesView[bytes]:
        """All values."""
        return _Values(self)

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, _ in self._entries())

    @overload
    def pop(self, key: BytesLike) -> bytes: ...

    @overload
    def pop(self, key: BytesLike, default: _T) -> Union[bytes, _T]: ...

    def pop(self, key: BytesLike, default: Any = _RAISE) -> Any:
        """Deletes ``key`` and returns its value, in one step; ``default``, or a ``KeyError``, where there is none."""
        own = _bytes(key, "a key")
        while True:
            value = self._read(own)
            if value is None:
                if default is _RAISE:
                    raise KeyError(key)
                return default
            if self.cas(own, value, None):
                return value

    def popitem(self) -> Tuple[bytes, bytes]:
        """Deletes an entry and returns it, in one step."""
        while True:
            found = self._taken(1)
            if not found:
                raise KeyError("the store is empty")
            if self.cas(*found[0], None):
                return found[0]

    def setdefault(self, key: BytesLike, default: BytesLike = b"") -> bytes:
        """The value of ``key``, which becomes ``default``, in one step, where there is none."""
        while not self.insert(key, default):
            value = self.get(key)
            if value is not None:
                return value
        return _bytes(default, "a value")

    def __len__(self) -> int:
        count = c_uint64()
        _check(self._library.forrest_count(self._open, byref(count)))
        return count.value

    def __bool__(self) -> bool:
        # An empty store is a store: `store or default` must not throw it away.
        return True

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, (bytes, bytearray, memoryview)):
            return False
        own = bytes(key)
        size = c_size_t(0)
        code = self._library.forrest_get(self._open, own, len(own), None, 0, byref(size))
        if code in (NOT_FOUND, TOO_SMALL):
            return bool(code == TOO_SMALL)
        _check(code)
        return True

    def reserve(self, entries: int) -> None:
        """Makes room for so many entries in all, so that sets up to there copy nothing to grow."""
        _check(self._library.forrest_reserve(self._open, entries))

    def clear(self) -> None:
        """Deletes all entries."""
        _check(self._library.forrest_clear(self._open, byref(c_uint64())))

    def stats(self) -> Stats:
        """What the store holds and takes."""
        stats = lib.StatsStruct()
        _check(self._library.forrest_get_stats(self._open, byref(stats)))
        return Stats(**{name: getattr(stats, name) for name in Stats.__dataclass_fields__})

    def trim(self) -> None:
        """Gives free memory back to the system."""
        _check(self._library.forrest_trim(self._open))

    def recover(self) -> None:
        """Cleans up after processes that were killed while they used the store."""
        _check(self._library.forrest_recover(self._open))
