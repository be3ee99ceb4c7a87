"""Puts libforrest into the wheel: the file that PAGEFOLD_FORREST names, or what cargo builds in this source tree."""

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

TREE = Path(__file__).resolve().parents[2]


def library() -> Path:
    named = os.environ.get("PAGEFOLD_FORREST")
    if named:
        return Path(named)
    if not (TREE / "Cargo.toml").exists():
        raise SystemExit("libforrest is not here: build in pagefold's source tree, or name libforrest.so in PAGEFOLD_FORREST")
    subprocess.run(["cargo", "build", "--release", "-p", "forrest"], cwd=TREE, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", TREE / "target")) / "release" / "libforrest.so"


class WithLibrary(build_py):
    def run(self) -> None:
        super().run()
        # An editable installation finds the system's library.
        if not getattr(self, "editable_mode", False):
            shutil.copy(library(), Path(self.build_lib) / "pagefold" / "libforrest.so")


class Binary(Distribution):
    def has_ext_modules(self) -> bool:
        # The library is of one machine.
        return True


class ForAnyPython(bdist_wheel):
    def get_tag(self) -> "tuple[str, str, str]":
        # No part of it is compiled for one Python.
        return ("py3", "none", super().get_tag()[2])


setup(distclass=Binary, cmdclass={"build_py": WithLibrary, "bdist_wheel": ForAnyPython})
