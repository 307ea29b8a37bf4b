"""Real text that every machine has: the Python installation itself, read in place.

A domain is a list of files found through the running interpreter. What the files of an installation
hold depends on its version; the manifest therefore keeps the sha256 of each one that was read.
"""

import ast
import importlib.util
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from upcycle_core.corpora.config import Harvest
from upcycle_core.corpora.distinct import Document, mostly_new
from upcycle_core.corpora.seeded import permutation

LARGEST_FILE = 200_000
"""Characters. A larger file is a table, a generated source or an amalgamation, and would be a tenth
of its domain by itself."""
LONGEST_LINE = 1_000
"""Characters. Longer lines hold embedded data (base64, minified code, tables)."""
GENERATED = re.compile(
    r"@generated|auto-?generated|automatically generated|generated (from|by|and used)|do not edit",
    re.IGNORECASE,
)
GENERATED_WITHIN = 1_000
"""Characters at the head of a file in which a generator leaves its name."""
NOT_THE_DOMAIN = {
    "test",
    "tests",
    "testing",
    "idle_test",
    "__pycache__",
    "_vendor",
    "_vendored_packages",
}
"""Folders left out everywhere: test suites are large and repetitive, vendored code comes twice."""

Extract = Callable[[str], Iterable[str]]


class HarvestFile(NamedTuple):
    """A file of the installation and how its documents are taken out of its text."""

    label: str
    path: Path
    extract: Extract


class MissingPackage(LookupError):
    """A package whose files a domain is made of is not installed."""


def harvest_files(name: Harvest) -> list[HarvestFile]:
    """The files that a domain is read from, sorted by label.

    Args:
        name: Which domain; ``-elsewhere`` names the same kind of text from other packages.

    Returns:
        Files that exist now; those that are large or generated are left out when they are read.

    Raises:
        MissingPackage: Names the package that is not installed.
    """
    return sorted(FILES[name](), key=lambda file: file.label)


def has_files(name: Harvest) -> bool:
    """Whether ``harvest_files`` finds any, known at the first one.

    Raises:
        MissingPackage: Names the package that is not installed.
    """
    return any(True for _ in FILES[name]())


def harvest_documents(name: Harvest, *, seed: int) -> Iterator[Document]:
    """The documents of a domain, file by file in seeded order, each in place and read once.

    Raises:
        MissingPackage: Names the package that is not installed.
    """
    files = harvest_files(name)
    order = permutation(len(files), seed, "harvest", name)
    return mostly_new(document for i in order for document in file_documents(files[i]))


def file_documents(file: HarvestFile) -> Iterator[Document]:
    """The documents of one file: none if it is not UTF-8; those with embedded data are left out."""
    try:
        text = file.path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return
    for part in file.extract(text):
        if max(map(len, part.splitlines()), default=0) <= LONGEST_LINE:
            yield Document(part.strip("\n"), file.label)


def handwritten(text: str) -> Iterable[str]:
    """The file is one document, unless it is large or generated."""
    if len(text) > LARGEST_FILE or GENERATED.search(text, 0, GENERATED_WITHIN):
        return []
    return [text]


def docstrings(source: str) -> Iterable[str]:
    """All docstrings of a module in the order of its lines, as one document, without importing."""
    try:
        texts = list(_docstrings(ast.parse(source)))
    except SyntaxError:
        return []
    return ["\n\n".join(texts)] if texts else []


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Those of a module, class or function and of what its body holds; expressions hold none."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
        text := ast.get_docstring(node)
    ):
        yield text
    for statement in getattr(node, "body", ()):
        yield from _docstrings(statement)


def description(metadata: str) -> Iterable[str]:
    """The body of a package's METADATA: its README."""
    _, _, body = metadata.partition("\n\n")
    return [body] if body.strip() else []


def topics(source: str) -> Iterable[str]:
    """The language reference behind ``help()``: the values of the dictionary in pydoc_data."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            yield from (text for _, text in sorted(ast.literal_eval(node.value).items()))


def package(name: str) -> Path:
    """Where a package lies, without importing it.

    Raises:
        MissingPackage: It is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage(name)
    return Path(next(iter(spec.submodule_search_locations)))


def found(
    root: Path,
    prefix: str,
    *endings: str,
    extract: Extract = handwritten,
    without: Iterable[str] = (),
) -> Iterator[HarvestFile]:
    """Files below ``root`` with one of ``endings``, outside folders that are not the domain."""
    left_out = NOT_THE_DOMAIN.union(without)
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        label = Path(prefix, Path(folder).relative_to(root)).as_posix()
        for name in names:
            if name.endswith(endings):
                yield HarvestFile(f"{label}/{name}", Path(folder, name), extract)


def in_packages(names: Iterable[str], *endings: str, extract: Extract) -> Iterator[HarvestFile]:
    """Files of installed packages, labelled ``package/path``."""
    roots = {name: package(name) for name in names}  # all are there, or none is read
    for name, root in roots.items():
        yield from found(root, name, *endings, extract=extract)


def standard_library() -> Iterator[HarvestFile]:
    """Sources of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    apart = ("site-packages", "dist-packages", "ensurepip", "encodings", "pydoc_data", "turtledemo")
    return found(root, "python", ".py", without=apart)


def torch_headers() -> Iterator[HarvestFile]:
    """C++ headers that torch ships; ATen/ops holds one generated header an operator."""
    root = package("torch") / "include"
    return found(root, "torch/include", ".h", ".hpp", ".cuh", without=("ops", "generated"))


def manuals() -> Iterator[HarvestFile]:
    """READMEs of all installed packages, their .md and .rst files, and the language reference."""
    reference = package("pydoc_data") / "topics.py"
    yield HarvestFile("python/pydoc_data/topics.py", reference, topics)
    for root in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for file in found(
            Path(root), "site-packages", ".md", ".rst", "METADATA", without=("licenses",)
        ):
            if "/upcycle-" not in file.label:  # our own README changes while we work
                body = description if file.path.name == "METADATA" else handwritten
                yield file._replace(extract=body)


FILES: dict[Harvest, Callable[[], Iterable[HarvestFile]]] = {
    "python": standard_library,
    "cpp": torch_headers,
    "mathematics": partial(in_packages, ("sympy", "scipy"), ".py", extract=docstrings),
    "documentation": manuals,
    "python-elsewhere": partial(
        in_packages,
        ("prefect", "sqlalchemy", "aiohttp", "rich", "pydantic", "dvc"),
        ".py",
        extract=handwritten,
    ),
    "cpp-elsewhere": lambda: found(
        package("pyarrow") / "include", "pyarrow/include", ".h", ".hpp", without=("vendored",)
    ),
    "mathematics-elsewhere": partial(
        in_packages, ("numpy", "networkx", "mpmath", "sklearn"), ".py", extract=docstrings
    ),
    "documentation-elsewhere": partial(
        in_packages,
        ("mlflow", "transformers", "datasets", "huggingface_hub"),
        ".py",
        extract=docstrings,
    ),
}
"""Where each domain is read from; the ``-elsewhere`` ones read no file that a domain reads."""
