"""Holds a file in bytes objects; see README.md."""
import sys

path, size = sys.argv[1], int(sys.argv[2])


def blocks():
    with open(path, "rb", buffering=0) as file:
        while len(block := file.read(size)) == size:
            yield block


held = list(blocks())
print("ready", flush=True)
if not sys.stdin.readline():
    sys.exit(1)
right = held and all(block == expected for block, expected in zip(held, blocks(), strict=True))
print("right" if right else "wrong", flush=True)
