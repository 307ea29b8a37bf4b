"""How long the sequences are that a recipe has models read, and what models have positions for."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infra.recipe.schema import Recipe
from tasks.engine.params import value_at
from upcycle_core.architectures.resolve import stretched
from upcycle_core.errors import Fault, InputError
from upcycle_core.symphony.config import SymphonyConfig


def read_lengths(recipe: Recipe, sections: Iterable[str]) -> dict[str, int]:
    """{section: tokens of its sequences}

    Args:
        recipe: Its baselines, and what experts are continued by, come to the sections.
        sections: Those of its method.
    """
    lengths = {where: value_at(recipe, f"{where}.sequence_length") for where in sections}
    rows = {f"baselines.{name}.training": row for name, row in recipe.baselines.items()}
    lengths |= {w: row.training.sequence_length for w, row in rows.items() if row.trains}
    for name, row in recipe.baselines.items():
        own = row.symphony or SymphonyConfig()
        if row.method == "symphony" and own.alignment.uses_activations:
            where = f"baselines.{name}.symphony.calibration"
            lengths[where] = own.calibration.sequence_length
    if "experts.training" in lengths and recipe.trains_experts and recipe.experts.continued:
        lengths["experts.continued"] = recipe.experts.continued.sequence_length
    return lengths


def position_faults(
    recipe: Recipe, sections: Iterable[str], configs: Mapping[str, Mapping[str, Any]]
) -> Iterator[Fault]:
    """Sequences that are longer than what a given model was made for, prompts and answers included.

    What is built upon was made with its lengths, and goes on with them.

    Args:
        recipe: What to make.
        sections: As for ``read_lengths``.
        configs: What is in given models' config.json, by the recipe's fields. One that says nothing
            of it has no limit.
    """
    if recipe.lineage is not None:
        return
    known = {field: positions(config) for field, config in configs.items()}
    limits = {field: limit for field, limit in known.items() if limit is not None}
    if not limits:
        return
    field = min(limits, key=lambda field: limits[field])
    unread = set() if recipe.trains_seed else {"seed_model.training"}
    if recipe.domains and not recipe.trains_experts:
        unread.add("experts.training")
    for where, length in read_lengths(recipe, sections).items():
        if length > limits[field] and where not in unread:
            remedy = f"longer than the {limits[field]} positions of {field}; shorten it"
            yield Fault(f"{where}.sequence_length", length, remedy)
    for field, longest in limits.items() if recipe.instructions.sources else ():
        limit = f"the {longest} positions of {field}; shorten one"
        yield from answer_faults(recipe, longest, limit)


def answer_faults(recipe: Recipe, longest: int, limit: str) -> Iterator[Fault]:
    """Instructions that may not fit what a model reads, together with their answers.

    Args:
        recipe: Of instruction tuning.
        longest: Tokens that the model was made for.
        limit: Names them, and says what helps.
    """
    needed = recipe.tuning.training.sequence_length + recipe.tuning.max_new_tokens
    if needed > longest:
        remedy = f"a prompt of sequence_length tokens and an answer are {needed}, more than "
        yield Fault("tuning.max_new_tokens", recipe.tuning.max_new_tokens, f"{remedy}{limit}")


def positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model was made for, as ``stretched`` counts them; None where its config.json
    does not say it."""
    from upcycle_core.architectures.families import family_of

    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int):
        return None
    try:
        rope = family_of(config).resolve(config)["rope_parameters"]
    except InputError:  # said already
        return None
    return stretched(longest, rope)
