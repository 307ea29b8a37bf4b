"""Recipes: YAML in, the library's frozen dataclasses out, with every fault in one message."""

import copy
import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from upcycle_core.corpora.config import CorpusConfig, Domain, Source, TokenizerConfig
from upcycle_core.dume.config import BackboneConfig, MoEConfig, RouterConfig, StatisticsConfig
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.config import EvaluationConfig
from upcycle_core.training.config import ExpertsConfig, SeedConfig

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What Ray reserves for one piece. A piece computes with as many threads as it has CPUs."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    cpus: int = field(default=1, metadata={"ge": 1})
    """CPU cores, and threads."""
    gpus: float = field(default=0.0, metadata={"ge": 0})
    """GPUs; with none the piece computes on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Resources of the heavy pieces, by kind. Results depend on threads, not on the workers."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    cpus: int | None = field(default=None, metadata={"ge": 1})
    """CPUs of a local Ray; all of the machine by default. A cluster brings its own."""
    corpora: Resources = field(default_factory=Resources)
    """Reading, splitting and tokenising one domain."""
    seed: Resources = field(default_factory=Resources)
    """Training the seed model."""
    experts: Resources = field(default_factory=Resources)
    """Training one expert."""
    statistics: Resources = field(default_factory=Resources)
    """One shard of one domain's statistics."""
    assembly: Resources = field(default_factory=Resources)
    """Averaging, router solving and assembly."""
    evaluation: Resources = field(default_factory=Resources)
    """Evaluating one model."""


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """When a new version becomes champion."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    metric: Literal["normalised_average", "normalised_worst"] = "normalised_average"
    """Normalised perplexity score, averaged over domains or that of the worst domain."""
    margin: float = 0.0
    """Points by which the challenger must beat the champion; negative values tolerate a loss."""


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """Where the assembled model is registered."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    model: str | None = None
    """Name of the registered MLflow model; `upcycle-NAME` by default."""
    gate: GateConfig = field(default_factory=GateConfig)
    """Who becomes champion."""


@dataclass(frozen=True, kw_only=True)
class VersionsConfig:
    """Where DVC keeps what was published."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    remote: str | None = None
    """DVC remote to push to at the end of a run, a directory or URL; none by default."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what a run makes."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    name: str
    """Name of the workspace: lower-case letters, digits, - and _."""
    seed: int = field(default=0, metadata={"ge": 0})
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
    """Averaging of what is not an MLP."""
    statistics: StatisticsConfig = field(default_factory=StatisticsConfig)
    """The pass over calibration text."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """The ridge regression."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """The assembled model."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Perplexity on held-out text."""
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    """The MLflow registry."""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """Resources."""
    versions: VersionsConfig = field(default_factory=VersionsConfig)
    """DVC."""

    @property
    def registered_name(self) -> str:
        """Name of the registered model."""
        return self.registry.model or f"upcycle-{self.name}"

    @property
    def trains_seed(self) -> bool:
        """Whether the seed model is made here."""
        return self.seed_model.model is None and self.trains_experts

    @property
    def trains_experts(self) -> bool:
        """Whether any expert is made here."""
        return any(domain.expert is None for domain in self.domains.values())

    @property
    def has_seed(self) -> bool:
        """Whether there is a seed model, made here or given."""
        return self.trains_experts or self.seed_model.model is not None

    @property
    def averaged(self) -> tuple[str, ...]:
        """Domains whose experts' backbones are averaged."""
        return self.backbone.experts or tuple(self.domains)

    @property
    def has_elsewhere(self) -> bool:
        """Whether a second router is solved from calibration text of another origin."""
        return any(domain.elsewhere is not None for domain in self.domains.values())


ADAPTER: TypeAdapter[Recipe] = TypeAdapter(Recipe)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: YAML file.
        overrides: ``dotted.key=value`` settings, values in YAML.

    Raises:
        InputError: With all faults: unknown keys (and the nearest known), values out of bounds,
            and what ``faults`` finds.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise_faults([Fault("recipe", str(path), "no such file; name a YAML recipe")])
    except yaml.YAMLError as error:
        raise_faults([Fault("recipe", str(path), f"not YAML ({error}); correct it")])
    for override in overrides:
        _override(values, override)
    return validate(values)


def validate(values: object) -> Recipe:
    """Turn plain values into a recipe; see ``load_recipe``."""
    try:
        recipe = ADAPTER.validate_python(values)
    except ValidationError as error:
        found = [_fault_of(problem) for problem in error.errors()]
        raise_faults([*found, *_faults_beside(values, error)])
    raise_faults(faults(recipe))
    # One order everywhere: of sums, of the router's columns, of the experts in the model.
    return replace(recipe, domains=dict(sorted(recipe.domains.items())))


def resolve(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default written out, as plain values."""
    return ADAPTER.dump_python(recipe, mode="json")


def recipe_yaml(recipe: Recipe, keys: Sequence[str] | None = None) -> str:
    """The resolved recipe as YAML text; all of it, or some top-level ``keys``."""
    values = {k: v for k, v in resolve(recipe).items() if keys is None or k in keys}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def recipe_digest(recipe: Recipe) -> str:
    """sha256 of the resolved recipe."""
    return hashlib.sha256(json.dumps(resolve(recipe), sort_keys=True).encode()).hexdigest()


def faults(recipe: Recipe) -> list[Fault]:
    """What is wrong across fields, found without reading any file."""
    return [
        *_name_faults(recipe),
        *_domain_faults(recipe),
        *_router_faults(recipe),
        *_evaluation_faults(recipe),
    ]


def _name_faults(recipe: Recipe) -> Iterator[Fault]:
    for where, name in [("name", recipe.name), *((f"domains.{d}", d) for d in recipe.domains)]:
        if not NAME.fullmatch(name):
            yield Fault(
                where,
                name,
                "names a folder in the workspace and nothing outside it; "
                "use lower-case letters, digits, - and _",
            )


def _domain_faults(recipe: Recipe) -> Iterator[Fault]:
    count = len(recipe.domains)
    if count < 2:
        yield Fault("domains", sorted(recipe.domains), f"{count} given; at least two are needed")
    for name, domain in recipe.domains.items():
        where = f"domains.{name}"
        if domain.train is None:
            missing = [
                part
                for part in ("expert", "calibration", "heldout")
                if getattr(domain, part) is None
            ]
            if missing:
                yield Fault(
                    f"{where}.train",
                    None,
                    f"no training text, and no {', '.join(missing)}; give one or the other",
                )
        for part in ("train", "calibration", "heldout", "elsewhere"):
            source = getattr(domain, part)
            if source is not None:
                yield from _source_faults(source, f"{where}.{part}", recipe.folder)
    for name in recipe.backbone.experts or ():
        if name not in recipe.domains:
            yield Fault(
                "backbone.experts", name, f"not a domain; the domains are {list(recipe.domains)}"
            )


def _source_faults(source: Source, where: str, folder: str | None) -> Iterator[Fault]:
    given = [part for part in ("harvest", "files", "dataset") if getattr(source, part)]
    if len(given) != 1:
        yield Fault(where, given, "give exactly one of harvest, files and dataset")
    if folder is None and any("{folder}" in part for part in (*source.files, source.dataset or "")):
        yield Fault("folder", None, f"{where} needs it; add --set folder=PATH")


def _router_faults(recipe: Recipe) -> Iterator[Fault]:
    domains = len(recipe.domains)
    for where, k in [
        ("moe.top_k", recipe.moe.top_k),
        *(("evaluation.sweep_top_k", k) for k in recipe.evaluation.sweep_top_k),
    ]:
        if k > domains >= 2:
            yield Fault(where, k, f"more than the {domains} experts; use 1 to {domains}")
    ridge_lambda = recipe.router.ridge_lambda
    if isinstance(ridge_lambda, float) and ridge_lambda < 0:
        yield Fault("router.ridge_lambda", ridge_lambda, "must not be negative; use e.g. 0.01")
    for name in recipe.router.domain_weights:
        if name not in recipe.domains:
            yield Fault(
                "router.domain_weights",
                name,
                f"not a domain; the domains are {list(recipe.domains)}",
            )


def _evaluation_faults(recipe: Recipe) -> Iterator[Fault]:
    buckets = recipe.statistics.position_buckets
    if list(buckets) != sorted(set(buckets)):
        yield Fault("statistics.position_buckets", list(buckets), "must ascend; sort them")
    for window in recipe.evaluation.sweep_window:
        if window not in buckets:
            yield Fault(
                "evaluation.sweep_window",
                window,
                f"its statistics are not kept; use one of {list(buckets)} or add it to "
                "statistics.position_buckets",
            )


def _faults_beside(values: object, error: ValidationError) -> list[Fault]:
    """Faults across fields that would come up once the values ``error`` names are gone."""
    rest = copy.deepcopy(values)
    for problem in error.errors():
        here: Any = rest
        *path, last = problem["loc"]
        for part in path:
            here = here.get(part, {}) if isinstance(here, dict) else {}
        if isinstance(here, dict):
            here.pop(last, None)
    try:
        return faults(ADAPTER.validate_python(rest))
    except ValidationError:
        return []


def _override(values: Any, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise_faults([Fault("--set", override, "write dotted.key=value")])
    *path, last = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
    values[last] = yaml.safe_load(text)


def _fault_of(problem: Mapping[str, Any]) -> Fault:
    location = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "unexpected_keyword_argument":
        return Fault(location, problem["input"], problem["msg"])
    key = str(problem["loc"][-1])
    known = _keys_at(problem["loc"][:-1])
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    hint = f"did you mean {nearest[0]}?" if nearest else ""
    return Fault(location, problem["input"], f"no such key; {hint}")


def _keys_at(location: Sequence[str | int]) -> list[str]:
    """Field names of the dataclass at ``location`` in a recipe."""
    here: Any = Recipe
    for part in location:
        here = get_type_hints(here).get(str(part)) if is_dataclass(here) else get_args(here)[-1]
        options = [option for option in get_args(here) if is_dataclass(option)]
        if not is_dataclass(here) and options and type(None) in get_args(here):
            here = options[0]
    return [f.name for f in fields(here)] if is_dataclass(here) else []
