"""What a recipe says about instruction tuning: training, answers, and what is expected of them."""

from dataclasses import field

from upcycle_core.config import config
from upcycle_core.training.config import TrainingConfig


@config
class TuningConfig:
    """Instruction tuning of the recipe's model, and how all models answer."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Training on the instructions, with loss on the responses alone."""
    max_new_tokens: int = field(default=128, metadata={"ge": 1})
    """Longest answer, in tokens; Super-NaturalInstructions' 128 by default."""
    batch_size: int = field(default=32, metadata={"ge": 1})
    """Prompts that are answered together."""
    least_exact_match: float | None = field(default=None, metadata={"ge": 0, "le": 1})
    """Exact match on the seen categories that `full-finetune` rows must reach, or the instructions
    are too hard for the model and no table is made; not asked by default."""
