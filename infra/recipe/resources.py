"""What Ray reserves for the pieces, by kind of work."""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Literal, Self

from upcycle_core.config import config
from upcycle_core.training.config import Sharding

Streamed = Literal["auto", "always", "never"]
Placement = Literal["pack", "spread"]
"""Workers of one training on as few machines as possible, or on as many."""


@config
class Resources:
    """What Ray reserves for one piece. A piece computes with as many threads as it has CPUs."""

    cpus: int = field(default=1, metadata={"ge": 1, "le": 1_000_000})
    """CPU cores, and threads."""
    gpus: float = field(default=0.0, metadata={"ge": 0})
    """GPUs; with none the piece computes on the CPU. Of all kinds `task_evaluation` alone takes
    several: they hold one model's layers among them."""
    memory: int | None = field(default=None, metadata={"gt": 0})
    """Bytes of a machine's memory; by default Ray counts none, and CPUs and GPUs alone say how many
    pieces run at once."""
    accelerator: str | None = None
    """The kind of GPU, by Ray's name (`H100`); any by default."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What machines were started with beside these (`ray start --resources`), name to amount."""

    @property
    def device(self) -> str:
        """Where the piece computes, as torch calls it; ``auto`` is all of several GPUs."""
        if self.gpus > 1:
            return "auto"
        return "cuda" if self.gpus > 0 else "cpu"

    def without_gpus(self) -> Self:
        """The same for work that no GPU does."""
        return replace(self, gpus=0.0, accelerator=None)


@config
class WorkerResources(Resources):
    """What Ray reserves for one worker of a training, and how many workers share its batches."""

    workers: int = field(default=1, metadata={"ge": 1})
    """Data-parallel workers; `gradient_accumulation` is divided among them."""
    sharding: Sharding = "none"
    """Whether each worker holds all weights, gradients and moments, or `full`: a share of them."""
    placement: Placement | None = None
    """Whether workers are on as few machines as possible, `pack`, which is the default, or on as
    many, `spread`. Ray does otherwise where there is no other room."""


@config
class PassResources(Resources):
    """What Ray reserves for one piece that takes text through a model."""

    streamed: Streamed = "auto"
    """Whether it goes layer by layer, one layer's weights in memory at a time, hidden states in
    files: `auto` where the model does not fit the piece's share of the memory. The result is the
    same."""


@config
class ComputeConfig:
    """Resources of the heavy pieces, by kind. Threads and workers decide last bits; what a balance
    loss counts at once is what all workers of a training compute at once."""

    cpus: int | None = field(default=None, metadata={"ge": 1, "le": 1_000_000})
    """CPUs of a local Ray; all of the machine by default. A cluster brings its own."""
    dashboard: bool = False
    """Whether a local Ray has its dashboard, on loopback. A cluster brings its own."""
    wait_minutes: float = field(default=30.0, metadata={"ge": 0})
    """How long a flow waits for another one that is at work in the workspace; 0 for not at all."""
    limit_hours: float | None = field(default=None, metadata={"gt": 0})
    """How long a flow may work before it is ended as failed; as long as it takes by default. What
    is finished is kept, and the next run goes on from there."""
    corpora: Resources = field(default_factory=Resources)
    """Reading, splitting and tokenising one domain, on the CPU."""
    seed: WorkerResources = field(default_factory=WorkerResources)
    """Training the seed model."""
    experts: WorkerResources = field(default_factory=WorkerResources)
    """Training one expert."""
    statistics: PassResources = field(default_factory=PassResources)
    """One shard of one domain's statistics."""
    alignment: Resources = field(default_factory=Resources)
    """Two models over the same text, or one layer's assignment, which takes no GPU."""
    assembly: Resources = field(default_factory=Resources)
    """Averaging, router solving and assembly, on the CPU."""
    post_training: WorkerResources = field(default_factory=WorkerResources)
    """Training an assembled model."""
    evaluation: PassResources = field(default_factory=PassResources)
    """Evaluating one model."""
    task_evaluation: Resources | None = None
    """Evaluating one model on tasks, which holds all of it; as `evaluation` by default."""
    baselines: WorkerResources = field(default_factory=WorkerResources)
    """Making and training one baseline."""

    def named(self, kind: str) -> str:
        """The section that says what pieces of a kind reserve: that of tasks may be left out."""
        return "evaluation" if kind == "task_evaluation" and self.task_evaluation is None else kind

    def of(self, kind: str) -> Resources:
        """What pieces of a kind reserve."""
        resources: Resources = getattr(self, self.named(kind))
        return resources
