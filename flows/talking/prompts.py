"""What to ask first: a prompt of each domain, for people to click on."""

from collections.abc import Sequence
from pathlib import Path

from upcycle_core.corpora.reader import read_documents
from upcycle_core.errors import InputError

KNOWN = {
    "python": "def read_lines(path):",
    "code": "def read_lines(path):",
    "cpp": "#include <stdio.h>",
    "javascript": "function readLines(path) {",
    "sql": "SELECT name, count(*)",
    "mathematics": "The derivative of a function",
    "math": "The derivative of a function",
    "documentation": "Usage:",
    "law": "The court held that",
    "legal": "The court held that",
    "medicine": "The patient was admitted with",
    "biology": "The cell membrane",
    "chemistry": "The reaction of an acid with",
    "finance": "The interest rate",
    "news": "The government announced on Monday",
    "history": "At the end of the war",
    "stories": "Once upon a time",
}
"""A beginning that any text of the domain may have."""
WORDS, CHARACTERS = 8, 80
"""Of a document at most."""


def example_prompts(domains: Sequence[str], documents: Path) -> list[tuple[str, str]]:
    """A short prompt for each domain that one is known for, or whose text lies here.

    Args:
        domains: Their names.
        documents: The workspace's folder of documents, which need not be there.

    Returns:
        (domain, prompt).
    """
    found = [(domain, KNOWN.get(domain) or _beginning(documents / domain)) for domain in domains]
    return [(domain, prompt) for domain, prompt in found if prompt]


def _beginning(folder: Path) -> str:
    """The first words of the first held-out document; nothing where there is none."""
    file = folder / "heldout.parquet"
    try:
        document = next(iter(read_documents(file)), "") if file.is_file() else ""
    except (OSError, InputError):
        return ""
    return " ".join(document.split()[:WORDS])[:CHARACTERS]
