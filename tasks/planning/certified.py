"""What asking readers for a version that is new will need: its arrival certificate."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from infra.readers.reader import READERS, Reader, at_hand
from infra.recipe.schema import Recipe
from tasks.planning.machine import Machine
from tasks.planning.parts import Subjects, joined
from tasks.planning.row import FP32, Planned
from tasks.release.certify import FORMS, READ_EXPANDED
from tasks.release.source import NEW_TOKENS, PROMPT_TOKENS, ROOM, WEIGHT_BYTES

CERTIFICATE = "certificate"
VARIANTS = 3
"""The model as it is, with experts exchanged, and with routers of zeros."""
LEAST_PROMPTS = 2
"""Of a model whose experts cannot be asked one by one."""
OPENED = 3
"""Times that we read the model beside our own answers: for prompts, for texts, and to say what
tensors to look for."""


@dataclass(frozen=True)
class _Asked:
    """Readers that are asked for one model.

    Args:
        readers: Who.
        weights: How many numbers it has.
        active: How many of them a token meets.
        stored: Bytes of its files.
        variants: How many copies of it there are, itself among them.
        prompts: What each is asked.
    """

    readers: Sequence[Reader]
    weights: int
    active: int
    stored: int
    variants: int
    prompts: int

    def row(self, stage: str, memory: int) -> Planned | None:
        """What asking needs; None where ``memory`` bytes have room for no form."""
        form = next((f for f in ("fp32", "bf16") if self._held(f) <= memory), None)
        forms = [
            form if reader.takes == "checkpoint" else gguf
            for reader in self.readers
            for gguf in (FORMS["gguf"] if reader.takes == "gguf" else ("",))
        ]
        taken = [f for f in forms if f is not None and self._held(f) <= memory]
        if form is None or not taken:
            return None
        converted = [int(self.weights * WEIGHT_BYTES[f]) for f in taken if f in FORMS["gguf"]]
        steps = self.prompts * (PROMPT_TOKENS + (self.variants + 1) * NEW_TOKENS)
        asked = self.prompts * self.variants * NEW_TOKENS
        weighed = steps * WEIGHT_BYTES[form] + sum(asked * WEIGHT_BYTES[f] for f in taken)
        altered = (self.variants - 1) * self.stored
        opened = OPENED + self.variants * (1 + len(taken))
        return Planned(
            stage,
            1,
            len(taken),
            rounds=len(taken),
            passing=altered + max(converted, default=0),
            read=altered + opened * self.stored + self.variants * sum(converted),
            written=altered + self.variants * sum(converted),
            memory=max(self._held(f) for f in (form, *taken)),
            decoded=int(weighed * self.active),
        )

    def _held(self, form: str) -> int:
        return int(ROOM * self.weights * WEIGHT_BYTES[form])


def certificate_rows(
    recipe: Recipe, subjects: Subjects, made: Collection[Planned], machine: Machine
) -> Iterator[Planned]:
    """A row of each model that is registered, and of the stock one that a DeRS model expands to.

    Copies and GGUF files lie in the temporary folder, and a reader without room is not asked: none
    of it is refused, and what memory has no room for has no row.

    Args:
        recipe: The recipe.
        subjects: What it is about.
        made: Stages whose models are registered.
        machine: Where it runs, with the readers of this one.
    """
    named = recipe.registry.readers
    readers = [READERS[name] for name in at_hand() if named is None or name in named]
    if recipe.registry.certificate == "none":
        return
    shape, domains = joined(recipe, subjects.shape), subjects.domains
    active = shape.whole + (recipe.moe.top_k - 1) * shape.ffns
    for row in made:
        end = "" if row.stage == "model" else f": {row.stage}"
        weights = row.registered // (FP32 if row.own_code == "simoe" else shape.itemsize)
        taking = [r for r in readers if not row.own_code or row.own_code in r.runs]
        of = (row.registered, 1 if row.own_code else VARIANTS)
        prompts = LEAST_PROMPTS if row.own_code == "simoe" else domains
        asked = [_Asked(taking, weights, min(active, weights), *of, prompts)]
        if row.own_code == "ders":
            taking = [r for r in readers if r.name in READ_EXPANDED]
            stock = shape.mixture(domains)
            size = shape.itemsize * stock
            asked.append(_Asked(taking, stock, active, size, VARIANTS, domains))
        for model, expanded in zip(asked, ("", " (expanded)"), strict=False):
            found = model.row(f"{CERTIFICATE}{end}{expanded}", machine.memory)
            if found is not None:
                yield replace(found, made=int(row.is_done))
