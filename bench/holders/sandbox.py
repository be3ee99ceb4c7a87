"""A sandbox of `pagefold bench sandboxes`: works for a while, waits, and replies; see README.md.

usage: sandbox.py SEED MIB
Reads one command a line. `work`: a scripted day; `round`: a part of such a day once more; `reply`: answers a request; `compare`:
compares everything that it holds.
Says `ready` at its start, and `right` after each command.
"""
import ast
import glob
import hashlib
import json
import os
import random
import sys

seed, mib = int(sys.argv[1]), int(sys.argv[2])
held = {}


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def work():
    own = random.Random(seed)
    # A package is unpacked and read: the same in every sandbox.
    paths = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))
    sources = {}
    for path in paths:
        if sum(map(len, sources.values())) >= mib << 20 >> 2:
            break
        with open(path, "rb") as file:
            sources[path] = file.read()
    # A part of it is compiled.
    trees = [ast.parse(source) for source in list(sources.values())[: mib // 8]]
    # Notes of its own, as text, which is what most programs hold.
    words = sorted({word for source in list(sources.values())[:20] for word in source.decode(errors="replace").split()})
    notes = [
        {"id": number, "text": " ".join(own.choices(words, k=40)), "values": [own.random() for _ in range(8)]}
        for number in range(mib * 400)
    ]
    # Some are edited, and some of what came and went leaves holes.
    scratch = [bytes(own.randrange(1000, 5000)) for _ in range(mib * 50)]
    for number in own.sample(range(len(notes)), len(notes) // 10):
        notes[number]["text"] += " edited by %d" % seed
    del scratch[::2]
    picked = own.sample(range(len(notes)), 200)
    held.update(sources=sources, trees=trees, notes=notes, scratch=scratch, picked=picked)
    held["reply"] = digest([notes[number] for number in picked])
    held["all"] = everything()


def everything():
    parts = [digest(held["notes"])]
    parts += [hashlib.sha256(source).hexdigest() for source in held["sources"].values()]
    parts += [str(sum(map(len, held["scratch"]))), str(sum(len(tree.body) for tree in held["trees"]))]
    return digest(parts)


def one_round():
    # Modules are compiled, and notes are edited and written down. What is held stays.
    for path, source in list(held["sources"].items())[: mib // 4]:
        compile(source, path, "exec")
    edited = [dict(note, text=note["text"] + " edited again") for note in held["notes"]]
    return digest(edited) != held["all"]


def reply():
    return digest([held["notes"][number] for number in held["picked"]]) == held["reply"]


print("ready", flush=True)
for line in sys.stdin:
    command, right = line.strip(), True
    if command == "work":
        work()
    elif command == "round":
        right = one_round()
    elif command == "reply":
        right = reply()
    elif command == "compare":
        right = everything() == held["all"]
    else:
        sys.exit("no such command: " + command)
    print("right" if right else "wrong", flush=True)
