"""Prints docs/python.md: what the package has, in its own words. `python3 bindings/python/api_page.py > docs/python.md`."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any, List

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

import pagefold  # noqa: E402


def words(of: Any) -> str:
    """The docstring, with code as Markdown has it."""
    text = inspect.getdoc(of) or ""
    for role in (":class:", ":meth:", ":func:"):
        text = text.replace(role, "")
    return text.replace("``", "`").replace(":raises ", "Raises ")


def signature(of: Any) -> str:
    """Its parameters as the source has them, without the instance."""
    text = re.sub(r"(: |-> )'\"?([^'\"]*)\"?'", r"\1\2", str(inspect.signature(of)))
    return re.sub(r"<object object at \w+>", "…", text.replace("(self, ", "(").replace("(self)", "()").replace("(cls, ", "("))


def line(of: Any) -> str:
    """The docstring as one line."""
    return " ".join(words(of).split())


def methods(of: type) -> List[str]:
    rows = []
    for name, member in vars(of).items():
        plain = getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(plain):
            continue
        rows.append(f"| `{name}{signature(plain)}` | {line(plain)} |")
    return rows


def fields(of: type) -> str:
    return ", ".join(f"`{name}`" for name in getattr(of, "__dataclass_fields__", {}))


def page() -> str:
    parts = [
        "# The Python package\n\nHow to install it, with an example: [its README](../bindings/python/README.md). "
        "`bindings/python/api_page.py` writes this page from the package.\n"
    ]
    known = [getattr(pagefold, name) for name in pagefold.__all__]
    classes = [one for one in known if inspect.isclass(one) and not issubclass(one, Exception)]
    for one in sorted(classes, key=lambda one: (not methods(one), one.__name__)):
        parts.append(f"## {one.__name__}\n\n{words(one)}\n")
        if fields(one):
            parts.append(f"Fields: {fields(one)}.\n")
        elif one.__init__.__doc__:
            parts.append(f"`{one.__name__}{signature(one).replace(' -> None', '')}`\n\n{words(one.__init__)}\n")
        if methods(one):
            parts.append("| method | what |\n|---|---|\n" + "\n".join(methods(one)) + "\n")
    functions = [one for one in known if inspect.isfunction(inspect.unwrap(one))]
    rows = [f"| `{one.__name__}{signature(one)}` | {line(one)} |" for one in functions]
    parts.append("## Functions\n\n| function | what |\n|---|---|\n" + "\n".join(rows) + "\n")
    errors = [one for one in known if inspect.isclass(one) and issubclass(one, Exception)]
    rows = [f"| `{one.__name__}` | {', '.join(f'`{base.__name__}`' for base in one.__bases__)} | {line(one)} |" for one in errors]
    parts.append("## Errors\n\n| error | is a | when |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
