"""Write ``docs/models.md``: ``python -m tests.configs``."""

from pathlib import Path

from tests.configs.published import PUBLISHED, REFUSED, published
from upcycle_core.architectures.families import FAMILIES, family_of
from upcycle_core.errors import InputError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = """# Which models can be joined

`python -m tests.configs` writes this page; a test holds it to what the code does. The fields of
{count} published `config.json` files are test data (`tests/configs/`); for each that is accepted
a test makes two experts with exactly those fields, joins them, and holds the forced experts to the
dense models, bit for bit.

A family is an entry of `upcycle_core/architectures/families.py`. An attribute of `config.json` that
the stock class of transformers neither declares nor reads changes nothing: it is left out, with a
line in the log. One that has changed a computation in any model (`partial_rotary_factor`,
`is_causal`, `rope_interleaved`, ...) is refused unless it has the value with which it does not.
Code in a checkpoint (`auto_map`) is never run.
"""


def page() -> str:
    """The whole text."""
    accepted = [
        "| model | family | becomes | left out of its config.json | methods |",
        "| --- " * 5 + "|",
    ]
    refused = ["| model | why |", "| --- | --- |"]
    for name in PUBLISHED:
        config = published(name)
        try:
            family = family_of(config)
        except InputError as error:
            why = error.faults[0].remedy.removeprefix("is not supported").split("; choose")[0]
            refused.append(f"| {name} | {why.removeprefix(': ')} |")
            continue
        assert name not in REFUSED
        left = ", ".join(f"`{key}`" for key in family.unread(config)) or "–"
        methods = "all" if family.norms_first else "all but Symphony-MoE"
        stock = family.target.architecture
        accepted.append(f"| {name} | {family.model_type} | {stock} | {left} | {methods} |")
    families = ", ".join(f"`{name}`" for name in FAMILIES)
    return "\n".join(
        [
            _HEAD.format(count=len(PUBLISHED)),
            f"Families: {families}.\n",
            "## Accepted\n",
            *accepted,
            "\n## Refused\n",
            *refused,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
