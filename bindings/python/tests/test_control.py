"""A real daemon and its clients, and the dry run. ``PAGEFOLD_TOOL`` names the program; without it they are skipped."""

import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import pagefold

TOOL = os.environ.get("PAGEFOLD_TOOL", "")
CLIENT = """
import mmap, time
memory = mmap.mmap(-1, 4096 * 800, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = bytes([7]) * len(memory)
print("ready", flush=True)
time.sleep(600)
"""


class NoDaemon(unittest.TestCase):
    def test_nobody_listens(self) -> None:
        with self.assertRaisesRegex(pagefold.DaemonError, "no daemon listens at /nowhere/s; start"):
            pagefold.Daemon("/nowhere/s").status()

    def test_a_move_takes_one_selector(self) -> None:
        no: Tuple[Dict[str, Any], ...] = ({}, {"pid": 1, "all": True}, {"pid": 1, "cgroup": "x"})
        for wrong in no:
            with self.assertRaises(TypeError):
                pagefold.Daemon("/nowhere/s").park(**wrong)

    def test_no_tool(self) -> None:
        with self.assertRaises((pagefold.DaemonError, OSError)):
            pagefold.scan(1, tool="/nowhere/pagefold")


@unittest.skipUnless(TOOL, "PAGEFOLD_TOOL does not name the pagefold program")
class WithTool(unittest.TestCase):
    def test_scan(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            # A name that is a number, and still a file.
            dump = Path(directory, "1")
            dump.write_bytes(os.urandom(4096) * 8 + bytes(4096 * 4))
            found = pagefold.scan(dump)
            self.assertEqual((found["totals"]["examined"], found["totals"]["zero"]), (12, 4))
            self.assertEqual(found["totals"]["duplicate_inside"], 7)
            with self.assertRaisesRegex(pagefold.DaemonError, "missing"):
                pagefold.scan(Path(directory, "missing"))
        self.assertGreater(pagefold.scan(os.getpid(), sample="1/4")["totals"]["examined"], 0)


@unittest.skipUnless(TOOL, "PAGEFOLD_TOOL does not name the pagefold program")
class WithDaemon(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.socket = Path(directory.name, "s")
        options = ["--priority=normal", "--no-keeper", "--scan-interval", "200ms"]
        process = subprocess.Popen([TOOL, "daemon", *options, "--socket", str(self.socket)])
        self.addCleanup(self.end, process)
        self.daemon = pagefold.Daemon(self.socket)
        self.wait("the daemon", lambda: self.listens() or process.poll() is not None)
        if process.poll() is not None:
            self.skipTest("no daemon here: see pagefold doctor")

    @staticmethod
    def end(process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        process.wait()

    def listens(self) -> bool:
        """The socket has its name a moment before the daemon listens there."""
        try:
            self.daemon.status()
        except pagefold.DaemonError:
            return False
        return True

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not done():
            self.assertLess(time.monotonic() - began, 180, f"waited in vain for {what}")
            time.sleep(0.05)

    def client(self, *options: str) -> int:
        command = [TOOL, "run", *options, "--socket", str(self.socket), "--", sys.executable, "-c", CLIENT]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        self.addCleanup(process.stdout.close)
        self.addCleanup(self.end, process)
        self.assertEqual(process.stdout.readline(), b"ready\n")
        return process.pid

    def test_status_pause_unmerge_verify_stop(self) -> None:
        daemon = self.daemon
        self.assertEqual(daemon.status().pids, [])
        pid = self.client("--manage=all")
        self.wait("merging", lambda: daemon.status().totals.pages_sharing >= 800)
        status = daemon.status()
        self.assertEqual(status.pids, [pid])
        self.assertEqual(status.clients[0]["pid"], pid)
        self.assertEqual(status.raw["totals"]["pages_sharing"], status.totals.pages_sharing)
        found = daemon.verify()
        self.assertGreaterEqual(found.pages, 800)
        self.assertEqual((found.wrong, found.wrong_pages), ((), 0))
        self.assertEqual(found.unseen, 0)
        self.assertEqual((daemon.pause(pid), daemon.resume(all=True), daemon.pause(all=True), daemon.resume(pid)), (1, 1, 1, 1))
        done = daemon.unmerge(pid)
        self.assertGreaterEqual(done.count, 800)
        self.assertEqual(done.left, 0)
        with self.assertRaisesRegex(pagefold.DaemonError, "is no client that is merged live; pagefold status lists them"):
            daemon.unmerge(1)
        with self.assertRaisesRegex(pagefold.DaemonError, "no request of this version"):
            daemon.ask({"ask": "nonsense"})
        daemon.stop()
        self.wait("the end", lambda: not self.socket.exists())

    def test_park_and_unpark(self) -> None:
        daemon = self.daemon
        with self.assertRaisesRegex(pagefold.DaemonError, "there is no client"):
            daemon.park(all=True)
        pid = self.client("--cold")

        def parked() -> bool:
            try:
                return daemon.park(pid).pages > 0
            except pagefold.DaemonError:
                return False  # Its agent has not greeted yet.

        self.wait("pages to park", parked)
        cold = daemon.status().cold["clients"][0]
        self.assertEqual((cold["pid"], cold["parked"]), (pid, True))
        moved = daemon.unpark(all=True)
        self.assertEqual(moved.clients, 1)
        self.assertGreater(moved.pages, 0)


if __name__ == "__main__":
    unittest.main()
