#!/usr/bin/env python3
"""Prints what the program is built from, as CycloneDX 1.5 in JSON.

  dist/sbom.py > pagefold.cdx.json
  dist/sbom.py pagefold-snapshotter > pagefold-snapshotter.cdx.json

Each crate that cargo links into the package on this machine is there with version, licence and checksum. Crates that
only tests or builds need are not. SOURCE_DATE_EPOCH is the time in it; without it there is none.
"""

import datetime
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def cargo(*arguments: str) -> str:
    command = ["cargo", *arguments, "--locked", "--manifest-path", str(ROOT / "Cargo.toml")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def linked(package: str) -> set[tuple[str, str]]:
    """Names and versions of what is linked into `package`."""
    tree = cargo("tree", "--package", package, "--edges", "normal", "--prefix", "none", "--format", "{p}")
    words = (line.split() for line in tree.splitlines() if line)
    return {(line[0], line[1].removeprefix("v")) for line in words}


def component(package: dict[str, Any], checksum: str | None) -> dict[str, Any]:
    purl = f"pkg:cargo/{package['name']}@{package['version']}"
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": package["name"],
        "version": package["version"],
        "purl": purl,
        "licenses": [{"expression": package["license"].replace("/", " OR ")}],
    }
    if checksum:
        found["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return found


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "pagefold"
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(entry["name"], entry["version"]): entry.get("checksum") for entry in lock["package"]}
    try:
        names = linked(name)
        packages = json.loads(cargo("metadata", "--format-version", "1"))["packages"]
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"sbom.py: {error.stderr.strip().splitlines()[0]}\n")
        return 1
    of = {(package["name"], package["version"]): package for package in packages}
    components = [component(of[key], checksums.get(key)) for key in sorted(names)]
    [root] = [found for found in components if found["name"] == name]
    components.remove(root)
    root = {**root, "type": "application"}
    metadata: dict[str, Any] = {"component": root}
    if "SOURCE_DATE_EPOCH" in os.environ:
        time = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.timezone.utc)
        metadata["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ")
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": metadata,
        "components": components,
    }
    print(json.dumps(bom, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
