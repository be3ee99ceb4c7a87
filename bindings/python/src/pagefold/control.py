"""A running daemon, asked through its control socket; and ``pagefold scan``.

The socket takes one JSON request per connection and gives one JSON answer. What needs no daemon, the dry run, is asked
of the ``pagefold`` program with ``--json``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Sequence, Tuple, Union

_PACKET_BYTES = 64 << 10
PathLike = Union[str, "os.PathLike[str]"]


class DaemonError(Exception):
    """The daemon does not answer, or refuses; the text says what to do."""


@dataclass(frozen=True)
class Totals:
    """Sums over all domains. Counts are pages of 4 KiB."""

    pages: int
    pages_shared: int
    pages_sharing: int
    pages_zero: int
    pages_unshared: int
    pages_volatile: int
    pages_merged: int
    pages_zeroed: int
    cow_breaks: int
    full_scans: int
    deduplicated_bytes: int
    pool_bytes: int
    pool_orphaned_bytes: int
    metadata_bytes: int
    mapping_bytes: int
    general_profit: int
    process_bytes: int
    saved_bytes: int
    cpu_ns: int


@dataclass(frozen=True)
class Status:
    """What the daemon tells about itself: the common figures, and all of it in ``raw``."""

    version: str
    pid: int
    uptime_s: float
    resident_bytes: int
    totals: Totals
    clients: List[Dict[str, Any]]
    domains: List[Dict[str, Any]]
    cold: Dict[str, Any]
    unmanaged_processes: List[Dict[str, Any]]
    raw: Dict[str, Any]

    @property
    def pids(self) -> List[int]:
        """Process ids of all clients, of live memory and of the cold tier."""
        return sorted({int(client["pid"]) for client in self.clients + list(self.cold["clients"])})


@dataclass(frozen=True)
class Moved:
    """What ``park`` and ``unpark`` did."""

    clients: int
    pages: int


@dataclass(frozen=True)
class Unmerged:
    """What ``unmerge`` did: pages that are private again, and those that stay shared, into which a device may be reading."""

    count: int
    left: int


@dataclass(frozen=True)
class Verified:
    """Every shared page compared with its slot. ``wrong`` is empty and ``unseen`` 0 if all is well."""

    pages: int
    same_frame: int
    same_bytes: int
    broken: int
    absent: int
    unseen: int
    wrong_pages: int
    wrong: Tuple[str, ...]


def default_socket() -> Path:
    """Where this user's daemon listens unless told otherwise."""
    named = os.environ.get("PAGEFOLD_SOCKET")
    if named:
        return Path(named)
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = os.environ.get("PAGEFOLD_RUNTIME_DIR")
    if own:
        directory = Path(own)
    elif uid == 0:
        directory = Path("/run/pagefold")
    elif runtime:
        directory = Path(runtime, "pagefold")
    else:
        directory = Path(tempfile.gettempdir(), f"pagefold-{uid}")
    return directory / "daemon.sock"


def _unexpected(answer: object) -> NoReturn:
    raise DaemonError(f"the daemon gives other answers than this version expects: {str(answer)[:200]}")


class Daemon:
    """The daemon at ``path``, or this user's. A connection lasts for one question: nothing needs to be closed."""

    def __init__(self, path: Optional[PathLike] = None, *, timeout: float = 120.0) -> None:
        self.path = Path(path) if path is not None else default_socket()
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"<pagefold.Daemon {str(self.path)!r}>"

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def ask(self, request: Mapping[str, Any]) -> Dict[str, Any]:
        """Sends a request of the control socket and returns its answer.

        :raises DaemonError: if no daemon answers, or the answer is an error.
        """
        # Moving or comparing terabytes takes time; a daemon that dies ends the connection.
        slow = request.get("ask") in ("park", "unpark", "unmerge", "verify")
        text = bytearray()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(max(self.timeout, 3600.0) if slow else self.timeout)
                connection.connect(str(self.path))
                connection.send(json.dumps(request).encode())
                while True:
                    packet = connection.recv(_PACKET_BYTES)
                    if not packet:
                        break
                    text += packet
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise DaemonError(f"no daemon listens at {self.path}; start something with pagefold run") from error
        except OSError as error:
            raise DaemonError(f"the daemon at {self.path} does not answer: {error}") from error
        try:
            answer = json.loads(text)
        except ValueError:
            _unexpected(bytes(text))
        if not isinstance(answer, dict) or len(answer) != 1:
            _unexpected(answer)
        if "error" in answer:
            raise DaemonError(str(answer["error"]["message"]))
        return answer

    def status(self) -> Status:
        """The whole status."""
        raw = self._part({"ask": "status"}, "status")
        try:
            totals = Totals(**{name: raw["totals"][name] for name in Totals.__dataclass_fields__})
            names = [name for name in Status.__dataclass_fields__ if name not in ("totals", "raw")]
            return Status(totals=totals, raw=raw, **{name: raw[name] for name in names})
        except KeyError:
            _unexpected(raw)

    def unmerge(self, pid: int) -> Unmerged:
        """Gives a client its private memory back and leaves it alone."""
        done = self._part({"ask": "unmerge", "pid": pid}, "unmerged")
        return Unmerged(count=int(done["count"]), left=int(done["left"]))

    def pause(self, pid: Optional[int] = None, *, all: bool = False) -> int:
        """Stops merging one client, or all of them; merged pages stay merged. Returns how many clients were paused."""
        return self._one_or_all("pause", pid, all)

    def resume(self, pid: Optional[int] = None, *, all: bool = False) -> int:
        """Merges a paused client again, or all of them. Returns how many clients were resumed."""
        return self._one_or_all("resume", pid, all)

    def park(self, pid: Optional[int] = None, *, cgroup: Optional[str] = None, all: bool = False) -> Moved:
        """Moves idle clients' memory to the cold tier, now: of one process, of a cgroup, or of all."""
        return self._move("park", pid, cgroup, all)

    def unpark(self, pid: Optional[int] = None, *, cgroup: Optional[str] = None, all: bool = False) -> Moved:
        """Brings it back."""
        return self._move("unpark", pid, cgroup, all)

    def verify(self) -> Verified:
        """Compares every shared page with its slot through the kernel's own page tables."""
        found = self._part({"ask": "verify"}, "verified")
        counts = {name: int(found[name]) for name in Verified.__dataclass_fields__ if name != "wrong"}
        return Verified(wrong=tuple(found["wrong"]), **counts)

    def stop(self) -> None:
        """Stops the daemon; clients keep what is merged."""
        self._part({"ask": "stop"}, "done")

    def _part(self, request: Mapping[str, Any], name: str) -> Dict[str, Any]:
        answer = self.ask(request)
        part = answer.get(name)
        if not isinstance(part, dict):
            _unexpected(answer)
        return part

    def _one_or_all(self, what: str, pid: Optional[int], everyone: bool) -> int:
        if (pid is not None) == everyone:
            raise TypeError(f"{what}() takes one of pid and all=True")
        return int(self._part({"ask": what, "pid": pid}, "done")["count"])

    def _move(self, what: str, pid: Optional[int], cgroup: Optional[str], everyone: bool) -> Moved:
        if [pid is not None, cgroup is not None, everyone].count(True) != 1:
            raise TypeError(f"{what}() takes one of pid, cgroup and all=True")
        clients: object = "all"
        if pid is not None:
            clients = {"pid": pid}
        elif cgroup is not None:
            clients = {"cgroup": cgroup}
        moved = self._part({"ask": what, "clients": clients}, "moved")
        return Moved(clients=int(moved["clients"]), pages=int(moved["pages"]))


def scan(
    *sources: Union[int, PathLike],
    all: bool = False,
    sample: Optional[str] = None,
    tool: Optional[PathLike] = None,
) -> Dict[str, Any]:
    """Predicts what merging would save, changing nothing: in processes (numbers) and files (paths), or in all processes
    that may be read. ``sample="1/16"`` takes a sixteenth of the memory. The answer is that of ``pagefold scan --json``.

    :raises DaemonError: if there is no ``pagefold`` program, or something cannot be read.
    """
    program = os.fspath(tool) if tool is not None else os.environ.get("PAGEFOLD_TOOL") or shutil.which("pagefold")
    if program is None:
        raise DaemonError("the program pagefold is not on the PATH; install it, or name it in PAGEFOLD_TOOL")
    command: List[str] = [program, "scan", "--json"]
    command += ["--all"] if all else []
    command += ["--sample", sample] if sample is not None else []
    command += ["--", *_names(sources)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise DaemonError(lines[0] if lines else f"{program} ended with {done.returncode}")
    found = json.loads(done.stdout)
    if not isinstance(found, dict):
        _unexpected(found)
    return found


def _names(sources: Sequence[Union[int, PathLike]]) -> List[str]:
    # A file with a number as its name would be taken for a process.
    return [str(source) if isinstance(source, int) else os.path.abspath(source) for source in sources]
