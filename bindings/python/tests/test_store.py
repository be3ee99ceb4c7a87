"""The store, as a program meets it."""

import os
import subprocess
import sys
import threading
import unittest
from typing import Callable, List, MutableMapping
from unittest import mock

import pagefold
from pagefold import Store


class Private(unittest.TestCase):
    def setUp(self) -> None:
        self.store = Store()
        self.addCleanup(self.store.close)

    def test_reads_what_was_written(self) -> None:
        store = self.store
        self.assertIsNone(store.get(b"a"))
        self.assertEqual(store.get(b"a", b"other"), b"other")
        store.set(b"a", b"1")
        store[b"b"] = bytearray(b"2\0")
        store.set(memoryview(b"c"), b"")
        self.assertEqual((store.get(b"a"), store[b"b"], store[b"c"]), (b"1", b"2\0", b""))
        self.assertEqual(len(store), 3)
        self.assertEqual(sorted(store), [b"a", b"b", b"c"])
        self.assertEqual(dict(store.items()), {b"a": b"1", b"b": b"2\0", b"c": b""})
        self.assertEqual(sorted(store.values()), [b"", b"1", b"2\0"])
        text: object = "a"
        self.assertTrue(b"a" in store and b"c" in store and b"d" not in store and text not in store)
        self.assertTrue(store.delete(b"a"))
        self.assertFalse(store.delete(b"a"))
        del store[b"b"]
        with self.assertRaises(KeyError):
            del store[b"b"]
        with self.assertRaises(KeyError):
            store[b"b"]
        store.reserve(1000)
        self.assertEqual(len(store), 1)
        store.clear()
        self.assertEqual(len(store), 0)
        self.assertTrue(store, "an empty store is no false value")

    def test_is_a_mapping(self) -> None:
        store = self.store
        self.assertIsInstance(store, MutableMapping)
        store.update({b"a": b"1", b"b": b"2"})
        self.assertEqual(store, {b"a": b"1", b"b": b"2"})
        self.assertEqual(store.keys() & {b"a", b"x"}, {b"a"})
        self.assertIn((b"b", b"2"), store.items())
        self.assertEqual(store.setdefault(b"a", b"other"), b"1")
        self.assertEqual(store.setdefault(b"c", bytearray(b"3")), b"3")
        self.assertEqual((store.pop(b"c"), store.pop(b"c", None)), (b"3", None))
        with self.assertRaises(KeyError):
            store.pop(b"c")
        taken = dict([store.popitem(), store.popitem()])
        self.assertEqual(taken, {b"a": b"1", b"b": b"2"})
        with self.assertRaises(KeyError):
            store.popitem()

    def test_threads_that_pop_get_each_entry_once(self) -> None:
        self.store.set_many((number.to_bytes(4, "big"), b"") for number in range(2000))
        popped: List[bytes] = []

        def pop() -> None:
            try:
                while True:
                    popped.append(self.store.popitem()[0])
            except KeyError:
                pass

        threads = [threading.Thread(target=pop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((len(popped), len(set(popped)), len(self.store)), (2000, 2000, 0))

    def test_bytes_of_all_sizes(self) -> None:
        for size in (0, 1, 4095, 4096, 4097, 5000, 3_000_000):
            value = os.urandom(size)
            self.store.set(b"key\0with zero", value)
            self.assertEqual(self.store.get(b"key\0with zero"), value)
        self.store.set(b"", b"the empty key")
        self.assertEqual(self.store.get(b""), b"the empty key")

    def test_what_is_raised_while_entries_are_taken_is_raised(self) -> None:
        ordered = Store(ordered=True)
        self.addCleanup(ordered.close)
        for store in (self.store, ordered):
            store.set_many([(b"a", b"1"), (b"b", b"2")])
            takes: List[Callable[[], object]] = [lambda: list(store.items()), lambda: store.get_many([b"a", b"b"])]
            for take in takes:
                # As Ctrl-C does.
                with mock.patch("pagefold.store.string_at", side_effect=[b"a", KeyboardInterrupt]):
                    with self.assertRaises(KeyboardInterrupt):
                        take()

    def test_only_bytes(self) -> None:
        for wrong in ("text", 5, None):
            with self.assertRaises(TypeError):
                self.store.set(wrong, b"")  # type: ignore[arg-type]
            with self.assertRaises(TypeError):
                self.store.set(b"", wrong)  # type: ignore[arg-type]

    def test_numbers(self) -> None:
        self.assertEqual(self.store.incr(b"n"), 1)
        self.assertEqual(self.store.incr(b"n", 41), 42)
        self.assertEqual(self.store.decr(b"n", 50), -8)
        self.assertEqual(int.from_bytes(self.store[b"n"], "little", signed=True), -8)
        self.store.set(b"text", b"no number")
        with self.assertRaises(pagefold.NotANumber) as caught:
            self.store.incr(b"text")
        self.assertEqual(caught.exception.code, 12)
        with self.assertRaises(OverflowError):
            self.store.incr(b"n", 2**63)

    def test_compare_and_swap(self) -> None:
        store = self.store
        self.assertFalse(store.cas(b"k", b"1", b"2"))
        self.assertTrue(store.cas(b"k", None, b"1"))
        self.assertFalse(store.cas(b"k", None, b"9"))
        self.assertTrue(store.cas(b"k", b"1", bytearray(b"2")))
        self.assertEqual(store[b"k"], b"2")
        self.assertTrue(store.cas(b"k", b"2", None))
        self.assertNotIn(b"k", store)
        self.assertTrue(store.insert(b"k", b"1"))
        self.assertFalse(store.insert(b"k", b"2"))

    def test_many_at_once(self) -> None:
        entries = {str(number).encode(): bytes([number % 256]) * (number % 7) for number in range(1000)}
        self.store.set_many(entries)
        self.store.set_many([(b"one", b"more")])
        wanted = [*entries, b"missing", b"one"]
        self.assertEqual(self.store.get_many(wanted), [*entries.values(), None, b"more"])
        self.assertEqual(self.store.get_many([]), [])

    def test_limits_are_errors_of_their_own(self) -> None:
        with self.assertRaises(pagefold.TooLong):
            self.store.set(b"k" * 70_000, b"")
        with self.assertRaises(pagefold.NotOrdered):
            list(self.store.scan())
        with Store(limit_bytes=16 << 20) as small, self.assertRaises(pagefold.Full) as caught:
            for number in range(100_000):
                small.set(str(number).encode(), bytes(4096))
        self.assertIsInstance(caught.exception, MemoryError)

    def test_a_closed_store_says_so(self) -> None:
        with Store() as store:
            store.set(b"a", b"b")
        store.close()
        uses: List[Callable[[], object]] = [
            lambda: store.get(b"a"),
            lambda: len(store),
            lambda: store.incr(b"a"),
            lambda: list(store),
        ]
        for use in uses:
            with self.assertRaises(pagefold.Closed):
                use()
        self.assertIn("closed", repr(store))

    def test_threads(self) -> None:
        def work() -> None:
            for _ in range(2000):
                self.store.incr(b"together")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.store.incr(b"together", 0), 8000)

    def test_a_child_must_open_its_own(self) -> None:
        child = os.fork()
        if child == 0:
            try:
                self.store.get(b"a")
            except pagefold.Forked:
                os._exit(0)
            finally:
                os._exit(1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_stats(self) -> None:
        self.store.set(b"a", bytes(10_000))
        stats = self.store.stats()
        self.assertEqual(stats.entry_count, 1)
        self.assertGreaterEqual(stats.held_bytes, 10_000)
        self.store.trim()
        self.store.recover()
        self.assertRegex(pagefold.library_version(), r"^\d+\.\d+\.\d+$")


class Ordered(unittest.TestCase):
    def test_scans_as_a_sorted_dictionary_would(self) -> None:
        with Store(ordered=True) as store:
            entries = {f"{number:05}".encode(): str(number * number).encode() for number in range(1500)}
            entries[b"00007\0"] = b"the very next key"
            store.set_many(entries)
            expected = sorted(entries.items())
            self.assertEqual(list(store.scan()), expected)
            self.assertEqual(list(store.items()), expected)
            self.assertEqual(list(store.scan(reverse=True)), expected[::-1])
            inside = [(key, value) for key, value in expected if b"00007" <= key < b"01100"]
            self.assertEqual(list(store.scan(b"00007", b"01100")), inside)
            self.assertEqual(list(store.scan(b"00007", b"01100", reverse=True)), inside[::-1])
            self.assertEqual(list(store.scan(b"9")), [])
            first = store.scan()
            self.assertEqual(next(first), expected[0])


class Shared(unittest.TestCase):
    def setUp(self) -> None:
        self.name = f"python-test-{os.getpid()}"
        self.addCleanup(lambda: Store.remove(self.name) if self.exists() else None)

    def exists(self) -> bool:
        try:
            Store(self.name, existing=True).close()
        except pagefold.NotFound:
            return False
        return True

    def test_two_processes_see_one_store(self) -> None:
        self.assertFalse(self.exists())
        with Store.open(self.name, create=True) as store:
            with self.assertRaises(pagefold.Exists):
                Store(self.name, create=True)
            store.set(b"from", b"parent")
            program = (
                "import sys, pagefold\n"
                "with pagefold.Store(sys.argv[1], existing=True) as store:\n"
                "    assert store[b'from'] == b'parent'\n"
                "    store[b'back'] = b'child'\n"
                "    store.incr(b'count', 5)\n"
            )
            subprocess.run([sys.executable, "-c", program, self.name], check=True)
            self.assertEqual((store[b"back"], store.incr(b"count")), (b"child", 6))
        Store.remove(self.name)
        with self.assertRaises(pagefold.NotFound) as caught:
            Store(self.name, existing=True)
        self.assertEqual(str(caught.exception), caught.exception.message)

    def test_names_that_are_none(self) -> None:
        for name in ("a/b", "", "x" * 300):
            with self.assertRaises(pagefold.BadName):
                Store(name)


if __name__ == "__main__":
    unittest.main()
