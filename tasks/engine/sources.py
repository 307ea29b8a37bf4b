"""The modules of ours that decide what a stage makes: its own, and all that these import.

They are read from the sources, so nobody keeps a list: an import inside a function counts, one that
is for type checkers alone does not. Left out is one named list, ``LEFT_OUT``.
"""

import ast
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

from upcycle_core.checkpoints.hashing import sha256_file

CODE = Path(__file__).resolve().parents[2]
"""The checkout."""
OURS = ("infra", "tasks", "upcycle_core")
PACKAGES = (
    *("accelerate", "datasets", "gguf", "lm_eval", "numpy"),
    *("peft", "scipy", "tokenizers", "torch", "transformers"),
)
"""Packages of others whose versions decide bytes."""
LEFT_OUT = (
    # What runs, moves and records pieces, whatever they compute; a recipe's values count by key.
    "infra/",
    "tasks/engine/",
    # Readers of what other stages published: what they read has a hash of its own.
    "upcycle_core/checkpoints/hashing.py",
    "upcycle_core/checkpoints/known.py",
    "upcycle_core/checkpoints/reader.py",
    "upcycle_core/checkpoints/tensor_file.py",
    "upcycle_core/corpora/reader.py",
    "upcycle_core/dume/router_reader.py",
    "upcycle_core/given/resolve.py",
    # What is said to people.
    "upcycle_core/errors.py",
    "upcycle_core/progress.py",
)
"""What decides no bytes: files, or whole folders, of the checkout."""
PARSED_AGAIN = 20
"""Times that a source is parsed again where the interpreter miscounted."""


def deciding_modules(module: str, *, code: Path = CODE) -> tuple[str, ...]:
    """Files, relative to the checkout, that decide what a function of ``module`` makes.

    Args:
        module: Dotted name (``tasks.dume.router``).
        code: The checkout.
    """
    seen: set[str] = set()
    waiting = set(_files(module, code))
    while waiting:
        name = waiting.pop()
        if name in seen or name.startswith(LEFT_OUT):
            continue
        seen.add(name)
        for imported in _imports((code / name).read_text(), name):
            waiting |= _files(imported, code) - seen
    return tuple(sorted(seen))


@lru_cache(maxsize=1024)
def module_digests(module: str, *, code: Path = CODE) -> dict[str, str]:
    """{file: sha256} of ``deciding_modules``, as this process found them first."""
    return {name: sha256_file(code / name) for name in deciding_modules(module, code=code)}


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """{package: installed version} of ``PACKAGES``."""
    return {package: version(package) for package in PACKAGES}


@cache
def _files(module: str, code: Path) -> frozenset[str]:
    """The file of a dotted name, which may be one of a module, and those of its packages."""
    parts = module.split(".")
    if parts[0] not in OURS:
        return frozenset()
    packages = ("/".join([*parts[:depth], "__init__.py"]) for depth in range(1, len(parts) + 1))
    candidates = ("/".join(parts) + ".py", "/".join(parts[:-1]) + ".py", *packages)
    return frozenset(name for name in candidates if (code / name).is_file())


@cache
def _imports(source: str, name: str) -> frozenset[str]:
    """Dotted names that a module's text imports, with what it takes from each."""
    return frozenset(_imported(_tree(source), name))


def _tree(source: str) -> ast.AST:
    """The syntax tree. Python before 3.11.8 sometimes fails where two threads parse (gh-106905)."""
    for _ in range(PARSED_AGAIN):
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def _imported(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = name.split("/")[: -node.level] if node.level else []
            module = ".".join([*here, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        yield from _imported(node, name)
