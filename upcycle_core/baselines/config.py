"""What a recipe says about a baseline: a published way of upcycling, to compare with."""

from dataclasses import field
from typing import Literal

from upcycle_core.config import config
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.symphony.config import SymphonyConfig
from upcycle_core.training.config import (
    ExpertMethod,
    ExpertTrainingConfig,
    LoraSettings,
    MoEObjective,
    TrainingConfig,
)

Method = Literal[
    "btx",
    "dume",
    "sparse-upcycling",
    "drop-upcycling",
    "bam",
    "branch-train-merge",
    "full-finetune",
    "symphony",
    "ders",
    "simoe",
]
FROM_EXPERTS: frozenset[Method] = frozenset(
    {"btx", "dume", "bam", "branch-train-merge", "symphony"}
)
"""Methods that begin with the trained experts; the others begin with the seed."""
WITHOUT_TRAINING: frozenset[Method] = frozenset({"branch-train-merge"})
MERGED: frozenset[Method] = frozenset(
    {"btx", "dume", "bam", "sparse-upcycling", "drop-upcycling", "symphony", "ders"}
)
"""Methods that make one Mixture-of-Experts."""

COPYING: frozenset[Method] = frozenset({"sparse-upcycling", "drop-upcycling", "ders"})
"""Methods whose experts are made of one FFN."""


@config
class Baseline:
    """One row of a comparison."""

    method: Method
    """`btx`: Branch-Train-MiX; `dume`: routers finetuned from the ridge solution (DUME+);
    `sparse-upcycling`: copies of one FFN; `drop-upcycling`: the same, partly re-initialised; `bam`:
    query and output projections are experts as well; `branch-train-merge`: ensemble of the experts,
    no training; `full-finetune`: the seed on all text; `symphony`: Symphony-MoE with settings of
    its own, for ablations; `ders`: the seed's FFN as the shared base of light experts; `simoe`: the
    same of SIMoE."""
    title: str | None = None
    """Name in tables and plots; the recipe's key by default."""
    top_k: int = field(default=2, metadata={"ge": 1})
    """Experts a token passes through."""
    seed_expert: bool = False
    """The seed is one more expert, and part of the averaged backbone (btx, bam)."""
    copies: int | None = field(default=None, metadata={"ge": 2})
    """Experts made of one FFN (sparse-upcycling, drop-upcycling, ders); one a domain by default."""
    start: Literal["seed", "experts"] = "seed"
    """Whose FFNs drop-upcycling re-initialises: copies of the seed's, or each expert's own
    (Symphony-MoE's variant)."""
    reinitialised: float = field(default=0.5, metadata={"ge": 0, "le": 1})
    """Share of the intermediate neurons that drop-upcycling draws anew."""
    symphony: SymphonyConfig | None = None
    """The settings of a row whose method is `symphony`."""
    ders: DersUpcyclingConfig | None = None
    """The settings of a row whose method is `ders`."""
    simoe: SimoeUpcyclingConfig | None = None
    """The settings of a row whose method is `simoe`."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Training on the training text of all domains; a comparison's token budget sets its steps."""
    objective: MoEObjective = field(default_factory=MoEObjective)
    """What is trained, and with which losses."""
    tuned: ExpertMethod = "full"
    """What a `full-finetune` trains: all weights, or a part, named as by
    `experts.training.method`."""
    lora: LoraSettings | None = None
    """The adapter, with `tuned: lora`; its defaults where nothing is said."""

    @property
    def uses_experts(self) -> bool:
        """Whether it begins with the trained experts, whose tokens then count."""
        return self.method in FROM_EXPERTS or self.start == "experts"

    @property
    def uses_seed(self) -> bool:
        """Whether it begins with the seed model."""
        return not self.uses_experts or self.seed_expert

    @property
    def trains(self) -> bool:
        """Whether there is anything to train."""
        return self.method not in WITHOUT_TRAINING

    @property
    def trained_as(self) -> TrainingConfig:
        """Its training; where a part of a dense model is tuned, that part is said."""
        if self.tuned == "full":
            return self.training
        return ExpertTrainingConfig(**vars(self.training), method=self.tuned, lora=self.lora)

    def experts(self, domains: int) -> int:
        """How many experts its model has, of a recipe with ``domains``; 0 if it is dense."""
        if self.method not in MERGED:
            return 0
        if self.method in COPYING and self.start == "seed":
            return self.copies or domains
        if self.symphony is not None and self.symphony.models is not None:
            return len(self.symphony.models)
        return domains + self.seed_expert


@config
class ComparisonConfig:
    """What every row of a comparison is given."""

    tokens: int | None = field(default=None, metadata={"ge": 1})
    """Training tokens a row may see after the seed, those of the experts it begins with included.
    It sets the steps of each row's training; without it the rows keep their own."""
