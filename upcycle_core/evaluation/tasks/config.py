"""What a recipe says about tasks: which ones models are scored on, and how."""

from dataclasses import field, replace
from typing import Literal

from upcycle_core.config import config

HeldoutKind = Literal["continuation", "last_word", "text"]
Routing = Literal["oracle", "random_routing", "dume_ood"]
KINDS = ("harness", "definition", "heldout", "superni")
"""A task is exactly one of these."""


@config
class SuperNI:
    """Super-NaturalInstructions from two local files, as published (Wang et al. 2022)."""

    instances: str
    """JSON lines with `id`, `task`, `category`, `split`, `prompt`, `answer`."""
    tasks: str
    """JSON lines with `id`, `category`, `definition`, `positive_examples`."""
    categories: tuple[str, ...] = ()
    """Categories to evaluate, those held out of training; all by default."""
    split: str = "test"
    """Rows of the instances to take."""
    per_task: int = field(default=100, metadata={"ge": 1})
    """Rows of each task, the first ones; 100 as published."""


@config
class EvaluationTask:
    """One task: exactly one of `harness`, `definition`, `heldout` and `superni` says which."""

    harness: str | None = None
    """A task or a group of the lm-evaluation-harness, by its name; its data come from a hub."""
    definition: str | None = None
    """A task definition of the harness, YAML; `{folder}` in its data files is filled in."""
    heldout: HeldoutKind | None = None
    """Made from a domain's held-out text: choose the passage's true continuation out of four,
    say its last word, or the likelihood of the text."""
    superni: SuperNI | None = None
    """Super-NaturalInstructions, scored by ROUGE-L."""
    domain: str | None = None
    """The domain whose expert normalises the score, and whose text `heldout` reads."""
    shots: int | None = field(default=None, metadata={"ge": 0})
    """Examples in the prompt; the task's own number by default."""
    metric: str | None = None
    """`NAME` or `NAME,FILTER` as the harness calls it; the task's first by default."""
    limit: int | None = field(default=None, metadata={"ge": 1})
    """Score the first so many items only, of each part of a group."""
    items: int = field(default=100, metadata={"ge": 1})
    """Items that `heldout` makes."""
    stop: tuple[str, ...] | None = None
    """Strings that end an answer; the task's own by default."""
    max_new_tokens: int | None = field(default=None, metadata={"ge": 1})
    """Longest answer; the task's own by default."""


@config
class CodeConfig:
    """Programs that models write (HumanEval, MBPP): they run in a confined process, if at all."""

    allow: bool = False
    """Whether such programs may run on the machines that evaluate."""
    seconds: float = field(default=10.0, metadata={"gt": 0})
    """Longest run of one program."""
    memory_bytes: int = field(default=2**30, metadata={"ge": 2**26})
    """Most memory of one program."""


@config
class TaskEvaluationConfig:
    """How models are scored on tasks."""

    models: tuple[str, ...] | None = None
    """Rows: `expert_DOMAIN`, `seed`, `model_averaging`, `dume`, or a baseline that is trained; all
    of them by default."""
    routing: tuple[Routing, ...] = ()
    """Rows beside DUME's MoE, as in the paper's Table 3: `oracle` (all tokens of a task go to the
    expert of its domain), `random_routing` (routers of `evaluation.random_routing_seeds`) and
    `dume_ood` (the router of the domains' text from elsewhere)."""
    sweep_top_k: tuple[int, ...] = ()
    """Values of k to score on tasks (Figure 2b)."""
    sweep_ridge_lambda: tuple[float, ...] = ()
    """Values of lambda (Figure 2c)."""
    sweep_window: tuple[int, ...] = ()
    """Token windows (Figure 2a); each must be one of `statistics.position_buckets`."""
    folder: str | None = None
    """What `{folder}` stands for in tasks; the recipe's `folder` by default."""
    seeds: tuple[int, ...] = (0,)
    """One run each: they draw the examples in prompts, and samples where a task is not greedy."""
    batch_size: int | None = field(default=None, metadata={"ge": 1})
    """Sequences a forward pass; found from the free memory by default."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Type of the weights."""
    chat_template: bool = False
    """Whether prompts are wrapped in the tokenizer's chat template, examples as turns."""
    code: CodeConfig = field(default_factory=CodeConfig)
    """Generated programs."""

    @property
    def measuring(self) -> "TaskEvaluationConfig":
        """How a model is scored, without which ones are."""
        none: tuple = ()
        return replace(
            self,
            models=None,
            routing=none,
            sweep_top_k=none,
            sweep_ridge_lambda=none,
            sweep_window=none,
        )
