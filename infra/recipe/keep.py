"""What a workspace keeps of its past; ``flows.tidy`` takes away the rest."""

from dataclasses import field

from upcycle_core.config import config


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
