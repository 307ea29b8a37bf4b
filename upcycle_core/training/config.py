"""What a recipe says about training."""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from upcycle_core.config import Counted, config
from upcycle_core.corpora.config import Source

Sharding = Literal["none", "full"]
Group = Literal["router", "experts", "expert_gates", "shared_base", "backbone", "all"]
SAME_WEIGHTS = ("log_steps", "checkpoint_steps", "gradient_checkpointing")
"""Settings of a training that do not change its result."""


@config
class TrainingConfig:
    """Language-model training with AdamW."""

    steps: int = field(default=1000, metadata={"ge": 1})
    """Optimizer steps."""
    batch_size: int = field(default=16, metadata={"ge": 1, "le": 1_000_000})
    """Sequences in one forward pass."""
    sequence_length: int = field(default=1024, metadata={"ge": 8})
    """Tokens a sequence."""
    loss: Counted = "all"
    """Tokens that are learnt: all, or of chats the responses (always, where instructions are)."""
    gradient_accumulation: int = field(default=1, metadata={"ge": 1})
    """Forward passes an optimizer step."""
    learning_rate: float = field(default=6e-5, metadata={"gt": 0})
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """What the learning rate does after warm-up."""
    warmup_steps: int = field(default=50, metadata={"ge": 0})
    """Optimizer steps until the peak learning rate."""
    weight_decay: float = field(default=0.1, metadata={"ge": 0})
    """AdamW's decoupled weight decay."""
    adam_beta1: float = field(default=0.9, metadata={"ge": 0, "lt": 1})
    """AdamW's decay of the first moment."""
    adam_beta2: float = field(default=0.95, metadata={"ge": 0, "lt": 1})
    """AdamW's decay of the second moment."""
    max_gradient_norm: float = field(default=1.0, metadata={"gt": 0})
    """Gradients are clipped to this global norm."""
    precision: Literal["auto", "fp32", "bf16"] = "bf16"
    """Arithmetic of forward and backward pass; trained weights stay fp32. `auto`: bf16 where
    the device multiplies it faster."""
    optimizer_state: Literal["fp32", "bf16"] = "fp32"
    """Type of AdamW's two moments between steps. bf16: 4 bytes a trained parameter instead of 8,
    rounded at every step."""
    checkpoint_steps: int = field(default=200, metadata={"ge": 1})
    """Optimizer steps between checkpoints; a killed training continues from the last whole one."""
    log_steps: int = field(default=10, metadata={"ge": 1})
    """Optimizer steps between points of the loss curve."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time, the same result."""
    evaluation_steps: int | None = field(default=None, metadata={"ge": 1})
    """Optimizer steps between losses on validation text; a multiple of `checkpoint_steps`."""
    keep: Literal["last", "best"] = "last"
    """Weights to end with: the last, or those of the lowest validation loss."""

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.gradient_accumulation * self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the whole training."""
        return self.steps * self.step_tokens


@config
class MoEObjective:
    """What is trained of a Mixture-of-Experts, on what, and with which losses beside the text's."""

    trainable: tuple[Group, ...] = ("all",)
    """Exact modules: `router`, `experts`, `shared_base` (what the experts of DeRS are deltas of),
    `backbone` (the rest), `all`, or `expert_gates` (the gate matrices of the experts alone, which
    DUME's published code trains with its routers)."""
    balance_coefficient: float = field(default=0.0, metadata={"ge": 0})
    """Factor of the Switch load-balancing loss, a mean over layers."""
    z_coefficient: float = field(default=0.0, metadata={"ge": 0})
    """Factor of the router z-loss, a mean over layers."""
    domain_weights: Mapping[str, float] = field(default_factory=dict)
    """Share of a domain's text in the mixture, relative to the others; 1 where none is given."""
    watch_steps: int = field(default=50, metadata={"ge": 1})
    """Optimizer steps between points of load, router entropy and gradient norms, layer by layer."""


@config
class LlamaShape:
    """A model that is trained from random weights, where the recipe names none to start from."""

    family: Literal["llama", "qwen2"] = "llama"
    """Architecture. Qwen2 has biases of q, k and v, which start at zero; no sliding window."""

    hidden_size: int = field(default=128, metadata={"ge": 8})
    """H."""
    intermediate_size: int = field(default=352, metadata={"ge": 8})
    """I."""
    layers: int = field(default=4, metadata={"ge": 1})
    """L."""
    attention_heads: int = field(default=4, metadata={"ge": 1})
    """Query heads."""
    key_value_heads: int = field(default=4, metadata={"ge": 1})
    """Key and value heads; a divisor of `attention_heads`."""
    max_positions: int = field(default=1024, metadata={"ge": 16})
    """Longest sequence the model is made for, in tokens."""
    rope_theta: float = field(default=10000.0, metadata={"gt": 0})
    """Base of the rotary position embedding."""
    tie_embeddings: bool = True
    """Share the input embedding with the output head."""


@config
class SeedConfig:
    """The model that all experts start from: trained here, or an existing one."""

    model: str | None = None
    """Directory or hub id of a seed model with its tokenizer. Without it one is trained."""
    shape: LlamaShape = field(default_factory=LlamaShape)
    """Shape of the model that is trained."""
    text: Source | None = None
    """What it is trained on; by default the training text of all domains. What domains calibrate
    or are judged on is left out of it."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Training of the seed."""


ExpertMethod = Literal["full", "layers", "ffn", "lora"]
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
LINEARS = (*PROJECTIONS, "lm_head")
"""Last names of the linear layers of models that are shaped here."""


@config
class LoraSettings:
    """A low-rank adapter (arXiv 2106.09685): W + (alpha / rank) B A; A and B are trained."""

    rank: int = field(default=16, metadata={"ge": 1})
    """Rows of A and columns of B."""
    alpha: float = field(default=32.0, metadata={"gt": 0})
    """What is added is scaled by alpha / rank."""
    modules: tuple[str, ...] = PROJECTIONS
    """Last names of the linear layers that get one."""


@config
class ExpertTrainingConfig(TrainingConfig):
    """Training of a dense model that becomes an expert."""

    method: ExpertMethod = "full"
    """What is trained: all weights; all `layers`, without the embeddings and the head; the FFNs,
    which are all that experts do not share; or a LoRA adapter, which is published merged, with the
    adapter beside it."""
    lora: LoraSettings | None = None
    """The adapter, with `method: lora`; its defaults where nothing is said."""


Repair = Literal["none", "down", "down+head_target"]


@config
class ExpertsConfig:
    """Training of one expert a domain, from the seed."""

    training: ExpertTrainingConfig = field(default_factory=ExpertTrainingConfig)
    """The same for every domain."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type that the weights of given models get; by default the narrowest that holds all of theirs
    (fp32 where others are trained beside ready ones, which is what training leaves)."""
    continued: ExpertTrainingConfig | None = None
    """Of an expert that learns new text, from the expert that it was; as `training` by default."""
    repair: Repair = "none"
    """What the merged backbone took from an expert is given back to its MLPs in closed form, on the
    calibration text: nothing (the paper), `down`: ridge regression of what the residual stream
    lacks, added to every layer's down projection; `down+head_target`: in the last layer of what the
    logits lack."""
    repair_tokens: Literal["own", "routed"] = "own"
    """What each expert is repaired on: its own domain's tokens; or, `routed`, then once more on
    what the solved routers send it, of all domains, towards the experts of the tokens' domains."""

    @property
    def continuing(self) -> ExpertTrainingConfig:
        """How an expert that learns new text is trained."""
        return self.continued or self.training
