"""Recipes: the library's frozen dataclasses put together; ``infra.recipe.reading`` reads them."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import TypeAdapter

from infra.recipe.resources import ComputeConfig
from infra.recipe.strict_yaml import Dumper
from upcycle_core.backbone.config import BackboneConfig
from upcycle_core.baselines.config import Baseline, ComparisonConfig
from upcycle_core.checkpoints.known import Verify
from upcycle_core.config import SEEDS, config
from upcycle_core.corpora.config import CorpusConfig, Domain, Source, TokenizerConfig
from upcycle_core.corpora.tuning.config import InstructionsConfig
from upcycle_core.ders.config import CompressionConfig
from upcycle_core.dume.config import MoEConfig, RouterConfig, StatisticsConfig
from upcycle_core.evaluation.similarity.config import SimilarityConfig
from upcycle_core.evaluation.tasks.config import EvaluationTask, TaskEvaluationConfig
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.symphony.config import PostTrainingConfig, SymphonyConfig
from upcycle_core.training.config import ExpertsConfig, SeedConfig, TrainingConfig


@config
class GateConfig:
    """When a new version becomes champion.

    Figures are points, higher is better: `normalised_average` and `normalised_worst` of the
    perplexity on held-out text; `perplexity.DOMAIN`, negated; `task_average`, normalised over the
    tasks that have a domain; and `task.NAME`, a task's own metric (rates in percent, metrics where
    less is better negated). After instruction tuning: `exact_match_unseen`, `rouge_l_unseen`,
    `exact_match_seen`, `rouge_l_seen`, in percent, means over categories.
    """

    metric: str = "normalised_average"
    """The figure that decides."""
    margin: float = 0.0
    """Points by which the challenger must beat the champion; negative values tolerate a loss."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """Further figures, each with the points that the challenger may lose in it."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every figure that the gate looks at."""
        return (self.metric, *self.tolerances)


@config
class RegistryConfig:
    """Where the assembled model is registered."""

    model: str | None = None
    """Name of the registered MLflow model; `upcycle-NAME` by default."""
    gate: GateConfig = field(default_factory=GateConfig)
    """Who becomes champion."""
    certificate: Literal["at-hand", "required", "none"] = "at-hand"
    """Whether readers that are installed (`make readers`) are asked if a new version arrives.
    `required`: one that fails in any of them does not become champion; `none`: nobody is asked."""
    readers: tuple[Literal["transformers", "mlflow", "vllm", "llama.cpp"], ...] | None = None
    """Those that are asked, if they are installed; all by default."""
    accept_licences: tuple[str, ...] = ()
    """Licences of given models that forbid derivatives or passing on, and are accepted all the
    same: there is a leave of your own."""


@config
class VersionsConfig:
    """Where DVC keeps what was published."""

    remote: str | None = "remote"
    """DVC remote to push to at the end of a run: a directory, seen from UPCYCLE_HOME, or a URL
    (`s3://...` with the extra `s3`); null for none."""
    given_weights: Literal["copy", "link"] = "copy"
    """How weights of given models come into the workspace. `link`: as hard links to your files, on
    the disk once, where it is the same disk; DVC takes the leave to write to them away, for a
    version's weights must not change. `copy`: your files are left alone."""


@config
class TuningConfig:
    """Instruction tuning of the recipe's model, and how all models answer."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Training on the instructions, with loss on the responses alone."""
    max_new_tokens: int = field(default=128, metadata={"ge": 1})
    """Longest answer, in tokens; Super-NaturalInstructions' 128 by default."""
    batch_size: int = field(default=32, metadata={"ge": 1, "le": 1_000_000})
    """Prompts that are answered together."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Arithmetic that models answer in, and the type of their weights: in fp32 what a prompt is
    answered together with decides nothing; bf16 needs half the memory, and is faster where the
    machine multiplies it so (`auto`)."""
    least_exact_match: float | None = field(default=None, metadata={"ge": 0, "le": 1})
    """Exact match on the seen categories that `full-finetune` rows must reach, or the instructions
    are too hard for the model and no table is made; not asked by default."""


@config
class KeepConfig:
    """What stays when `flows.tidy` clears up.

    Of each registered model the versions `champion` and `challenger` always stay, with the data,
    experts and statistics that they were made from and the runs that made them.
    """

    versions: int = field(default=3, metadata={"ge": 1})
    """Newest registered versions that stay beside champion and challenger."""
    runs: int = field(default=20, metadata={"ge": 1})
    """Newest MLflow runs of flows that stay, with the runs of their stages, beside those that made
    a version."""
    flow_runs: int = field(default=50, metadata={"ge": 1})
    """Newest Prefect flow runs of this workspace that stay."""


@config
class Lineage:
    """What later models of a workspace are built upon as it is. Flows write it; people read it.

    An artifact is named by the sha256 of its ``provenance.json``: of what made it, and its files.
    """

    pinned: Mapping[str, str] = field(default_factory=dict)
    """Artifacts that are not made again, each with its sha256: tokenizer, seed, backbone; the
    vocabulary of models that share no seed."""
    backbone: tuple[str, ...] = ()
    """Domains whose experts the pinned backbone averages; some may have left the recipe."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """The expert that a domain's expert is continued from, by its sha256."""
    anchor: str | None = None
    """Domain whose model the others are brought to, of models that share no seed."""


@config
class Recipe:
    """Everything that decides what a run makes."""

    __pydantic_core_schema__: ClassVar[Any]
    name: str
    """Name of the workspace: lower-case letters, digits, - and _."""
    method: str = ""
    """How the model is made; by default the method whose section is given, else `dume`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What a method is told that has no section of its own here."""
    seed: int = field(default=0, metadata={"ge": 0, "lt": SEEDS})
    """Seed of every random choice."""
    folder: str | None = None
    """What `{folder}` stands for in the paths below."""
    domains: Mapping[str, Domain] = field(default_factory=dict)
    """The domains, by name; at least two."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """How text is split."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer, where none is given."""
    seed_model: SeedConfig = field(default_factory=SeedConfig)
    """The model that experts start from."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Training of the experts."""
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    """Merging of what is not an MLP."""
    statistics: StatisticsConfig = field(default_factory=StatisticsConfig)
    """The pass over calibration text."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """The ridge regression."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """The assembled model."""
    symphony: SymphonyConfig | None = None
    """Join models that share no seed, with Symphony-MoE; without it, experts of one seed, with
    DUME."""
    post_training: PostTrainingConfig | None = None
    """Training of what Symphony-MoE has joined; none by default."""
    similarity: SimilarityConfig | None = None
    """Compare the experts of joined models with each other, layer by layer; not by default."""
    outside: Mapping[str, Source] = field(default_factory=dict)
    """Texts of domains that no model, alignment or training sees, to judge models on."""
    simoe: SimoeUpcyclingConfig | None = None
    """Find sparse experts in the seed by instruction tuning, with SIMoE; the domains then are what
    the seed is trained on."""
    instructions: InstructionsConfig = field(default_factory=InstructionsConfig)
    """What is tuned on and judged by, with `simoe`."""
    tuning: TuningConfig = field(default_factory=TuningConfig)
    """How it is tuned, with `simoe`."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Perplexity on held-out text."""
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    """Published ways of upcycling to compare with, by name (`flows.compare`)."""
    comparison: ComparisonConfig = field(default_factory=ComparisonConfig)
    """What every row of a comparison is given."""
    compression: CompressionConfig | None = None
    """Store experts as a shared base and light deltas, with DeRS; not by default."""
    tasks: Mapping[str, EvaluationTask] = field(default_factory=dict)
    """Tasks that models are scored on, by name; none by default (`flows.evaluate`)."""
    task_evaluation: TaskEvaluationConfig = field(default_factory=TaskEvaluationConfig)
    """How models are scored on tasks."""
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    """The MLflow registry."""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """Resources."""
    versions: VersionsConfig = field(default_factory=VersionsConfig)
    """DVC."""
    verify: Verify = "changed"
    """Which files are read and held against their hashes: those that are not as they were when they
    were read last, by device, inode, size and times; or `always` all, each time, where storage lies
    about times, or to find bits that a disk has flipped."""
    keep: KeepConfig = field(default_factory=KeepConfig)
    """What `flows.tidy` leaves."""
    lineage: Lineage | None = None
    """What is built upon as it is, after a domain came, left or learnt; flows write it."""

    @property
    def text_folder(self) -> Path | None:
        """What ``{folder}`` stands for."""
        return None if self.folder is None else Path(self.folder)

    @property
    def registered_name(self) -> str:
        """Name of the registered model."""
        return self.registry.model or f"upcycle-{self.name}"

    @property
    def trains_seed(self) -> bool:
        """Whether the seed model is made here."""
        return self.trains_experts and self.seed_model.model is None

    @property
    def seed_text(self) -> Source | None:
        """Text of the seed's own, where it is not trained on the domains'."""
        return self.seed_model.text if self.trains_seed else None

    @property
    def trains_experts(self) -> bool:
        """Whether any expert is made here."""
        return any(domain.expert is None for domain in self.domains.values())

    @property
    def has_seed(self) -> bool:
        """Whether there is a seed model, made here or given, where the method begins with one."""
        return self.trains_experts or self.seed_model.model is not None

    @property
    def expert_tokens(self) -> int:
        """Tokens that all experts were trained on here; unknown, and not counted, if given."""
        trained = sum(domain.expert is None for domain in self.domains.values())
        return trained * self.experts.training.tokens

    @property
    def delta_ranks(self) -> Mapping[str, int]:
        """Ranks that deltas of experts are asked to have, each by its key."""
        rows = {f"baselines.{name}.ders": row.ders for name, row in self.baselines.items()}
        codecs = self.compression.codecs if self.compression else {}
        asked = {**rows, **{f"compression.codecs.{name}": own for name, own in codecs.items()}}
        return {f"{key}.rank": own.rank for key, own in asked.items() if own and own.rank}

    @property
    def pinned(self) -> Mapping[str, str]:
        """Artifacts that are not made again, each with its sha256."""
        return {} if self.lineage is None else self.lineage.pinned

    @property
    def parents(self) -> Mapping[str, str]:
        """Domains whose expert is continued from an earlier one, with that one's sha256."""
        return {} if self.lineage is None else self.lineage.parents


ADAPTER: TypeAdapter[Recipe] = TypeAdapter(Recipe)
# Where pydantic looks for what is made already: each flow makes a recipe's form while it is
# imported, and a command imports several.
Recipe.__pydantic_core_schema__ = ADAPTER.core_schema


def resolve(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default written out, as plain values."""
    return ADAPTER.dump_python(recipe, mode="json")


def recipe_yaml(recipe: Recipe, keys: Sequence[str] | None = None) -> str:
    """The resolved recipe as YAML text; all of it, or what stands at some dotted ``keys``."""
    values = resolve(recipe)
    if keys is not None:
        values = _chosen(values, {tuple(key.split(".")) for key in keys})
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _chosen(values: Mapping[str, Any], keys: Collection[tuple[str, ...]]) -> dict[str, Any]:
    """What stands at ``keys`` in nested ``values``, in the order of ``values``."""
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        below = {key[1:] for key in keys if key[0] == name}
        if () in below:
            chosen[name] = value
        elif below:
            chosen[name] = _chosen(value, below)
    return chosen


def recipe_digest(recipe: Recipe) -> str:
    """sha256 of the resolved recipe."""
    return hashlib.sha256(json.dumps(resolve(recipe), sort_keys=True).encode()).hexdigest()
