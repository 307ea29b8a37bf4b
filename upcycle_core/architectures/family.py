"""What a model family is: the names and shapes of its tensors, its configuration, its MoE target.

Shapes are words over these letters: V vocabulary, H hidden size, I intermediate size, N head size,
Q query heads x N, K key-value heads x N, S width of an unused shared expert, D experts, 1.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from upcycle_core.architectures.judged import decides, is_neutral
from upcycle_core.architectures.resolve import FIRST_LENGTH, resolve_config
from upcycle_core.architectures.values import value_faults
from upcycle_core.errors import Fault, raise_faults

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Where a target insists on a shared expert, one of this width, all zero, adds exactly nothing. With
# width 0 transformers misses its empty tensors, or vLLM stumbles over them if they are there.
UNUSED_WIDTH = 16
# Rotary frequencies follow from the configuration; checkpoints of 2023 carry them all the same.
RECOMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Ffn:
    """Names of the three matrices of one SwiGLU feed-forward network.

    Args:
        gate: [I, H], goes through the activation.
        up: [I, H].
        down: [H, I].
    """

    gate: str
    up: str
    down: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.gate, self.up, self.down))


@dataclass(frozen=True)
class Target:
    """The stock MoE architecture that holds experts of a family exactly.

    Args:
        model_type: Its name in config.json.
        architecture: Its class in transformers.
        router: Name of a layer's router weight [D, H], with ``{layer}``.
        expert: Names of an expert's matrices, with ``{layer}`` and ``{expert}``.
        count_fields: Attributes that hold D.
        width_fields: Attributes that hold I.
        constants: Attributes that exactness or older readers ask for.
        top_k_fields: Attributes that hold k.
        zeros: Name, with ``{layer}``, to shape of tensors that must be there and stay zero.
    """

    model_type: str
    architecture: str
    router: str
    expert: Ffn
    count_fields: tuple[str, ...]
    width_fields: tuple[str, ...]
    constants: Mapping[str, object]
    top_k_fields: tuple[str, ...] = ("num_experts_per_tok",)
    zeros: Mapping[str, str] = field(default_factory=dict)

    @property
    def always_normalises(self) -> bool:
        """Whether the weights of a token's experts sum to one, whatever its configuration says."""
        return "norm_topk_prob" not in self.constants

    def router_name(self, layer: int) -> str:
        """Name of the router weight [D, H] of ``layer``."""
        return self.router.format(layer=layer)

    def expert_ffn(self, layer: int, expert: int) -> Ffn:
        """Names of one expert's matrices."""
        return Ffn(*(name.format(layer=layer, expert=expert) for name in self.expert))


@dataclass(frozen=True)
class Family:
    """One dense model family.

    Args:
        model_type: Its name in config.json.
        target: Where its experts go.
        base_tensors: Name to shape, outside the layers.
        layer_tensors: Name, with ``{layer}``, to shape of what a layer holds beside its FFN.
        bias_tensors: The same for what ``attention_bias`` adds.
        kept: Attributes that the target takes over as they are.
        demanded: Attributes that the target cannot express: the only value that is accepted.
        ignored: Attributes that change nothing in what the model computes.
        defaults: What its stock class takes where config.json says nothing.
        windows: Sliding windows: none, the model's one, the same for all layers or none, or said
            layer by layer.
        norms_first: Whether attention and FFN read a norm's output; else norms come behind them.
    """

    model_type: str
    target: Target
    base_tensors: Mapping[str, str]
    layer_tensors: Mapping[str, str]
    bias_tensors: Mapping[str, str]
    kept: tuple[str, ...]
    demanded: Mapping[str, object]
    ignored: frozenset[str]
    defaults: Mapping[str, object]
    windows: Literal["none", "model", "all-or-none", "by-layer"]
    norms_first: bool = True

    def ffn(self, layer: int) -> Ffn:
        """Names of the gate, up and down matrices of ``layer``."""
        prefix = f"model.layers.{layer}.mlp"
        return Ffn(*(f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")))

    def is_ffn(self, name: str) -> bool:
        """Whether tensor ``name`` belongs to an FFN: experts keep it, the rest is averaged."""
        return re.match(r"model\.layers\.\d+\.mlp\.", name) is not None

    def router_norm(self, layer: int) -> str:
        """Path of the module whose output the router of ``layer`` reads, where norms come first."""
        return f"model.layers.{layer}.post_attention_layernorm"

    def resolve(self, config: Mapping, *, field: str = "config") -> dict:
        """Return ``config`` with everything said that it leaves to defaults.

        Raises:
            InputError: A size is missing or no positive number; ``field`` is part of its name.
        """
        return resolve_config(config, self.defaults, field=field)

    def zeros(self, config: Mapping, layer: int, *, experts: int) -> dict[str, tuple[int, ...]]:
        """Name to shape of what ``layer`` of a target of D experts holds and must stay zero."""
        sizes = {**_sizes(self.resolve(config)), "D": experts}
        zeros = self.target.zeros.items()
        return {name.format(layer=layer): _shape(letters, sizes) for name, letters in zeros}

    def tensors(self, config: Mapping, *, ffn: bool = True) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of ``config`` must hold, in the order it is written.

        Args:
            config: The content of config.json.
            ffn: Whether the FFNs are among them (a backbone has none).

        Returns:
            Name to shape.
        """
        full = self.resolve(config)
        sizes = _sizes(full)
        layer_tensors = dict(self.layer_tensors)
        if full.get("attention_bias"):
            layer_tensors |= self.bias_tensors
        names = {EMBEDDING: "VH"}
        for layer in range(full["num_hidden_layers"]):
            names |= {name.format(layer=layer): shape for name, shape in layer_tensors.items()}
            if ffn:
                names |= dict(zip(self.ffn(layer), ("IH", "IH", "HI"), strict=True))
        names |= self.base_tensors
        if not full["tie_word_embeddings"]:
            names[LM_HEAD] = "VH"
        return {name: _shape(letters, sizes) for name, letters in names.items()}

    def config_faults(self, config: Mapping, field: str) -> list[Fault]:
        """Everything in ``config`` that could change the computation and the target cannot say."""
        full = self.resolve(config, field=f"{field}.config")
        faults = []
        for name, only in self.demanded.items():
            if full.get(name, only) not in (only, None):
                remedy = f"{self.target.architecture} cannot express it; only {only!r} is supported"
                faults.append(Fault(f"{field}.config.{name}", full[name], remedy))
        judged = self._judged()
        for name in sorted(set(full) - judged - set(self.unread(config))):
            if not is_neutral(name, full):
                remedy = f"{self.target.architecture} cannot express it; delete it if the model "
                if name == "auto_map":
                    remedy = "names code of the checkpoint, which is never run; delete it if the "
                    remedy += f"stock {self.model_type} "
                remedy += "computes the same without it"
                faults.append(Fault(f"{field}.config.{name}", full[name], remedy))
        if "rope_theta" not in full["rope_parameters"]:
            remedy = f"{self.target.architecture} has one rope for all layers"
            faults.append(Fault(f"{field}.config.rope_parameters", full["rope_parameters"], remedy))
        else:
            faults += value_faults(full, field)
        if "sliding_attention" in (full.get("layer_types") or ()) and not full.get(
            "sliding_window"
        ):
            remedy = "has sliding layers, and no sliding window is switched on; mend config.json"
            faults.append(Fault(f"{field}.config.layer_types", full["layer_types"], remedy))
        if self.windows == "model" and full.get("layer_types") and is_neutral("layer_types", full):
            remedy = f"makes transformers read this {self.model_type} as a Ministral; remove it "
            remedy += "(without a window sliding_window is null)"
            faults.append(Fault(f"{field}.config.layer_types", full["layer_types"], remedy))
        if self.windows == "all-or-none" and len(set(full["layer_types"])) > 1:
            remedy = f"{self.target.architecture} has one sliding window for all layers, or none"
            faults.append(Fault(f"{field}.config.layer_types", full["layer_types"], remedy))
        return faults

    def unread(self, config: Mapping) -> list[str]:
        """Attributes of ``config`` that the stock class neither declares nor reads, sorted.

        They change nothing in what transformers computes, so nothing that it computes is lost
        where they are left out.
        """
        names = set(config) - self._judged() - _STANDARDISED
        return sorted(
            name
            for name in names
            if config[name] is not None and not decides(name, self.model_type)
        )

    def _judged(self) -> set[str]:
        windows = WINDOW_ATTRIBUTES[self.windows]
        return {*self.kept, *self.demanded, *self.ignored, *windows, "intermediate_size"}

    def normalising_faults(self) -> list[Fault]:
        """What speaks against weights of a token's experts that do not sum to one."""
        if not self.target.always_normalises:
            return []
        remedy = f"{self.target.architecture}, the stock MoE of {self.model_type}, always divides "
        return [Fault("moe.normalise_top_k", False, f"{remedy}by their sum: remove it")]

    def target_config(
        self,
        config: Mapping,
        *,
        experts: int,
        top_k: int,
        normalise: bool = True,
        dtype: torch.dtype | None = None,
    ) -> dict:
        """The config.json of the MoE, for transformers 5 and for older readers.

        Args:
            config: The content of the dense config.json.
            experts: D, number of experts.
            top_k: Experts a token passes through.
            normalise: Whether their weights sum to one.
            dtype: Type of the weights; what ``config`` says by default.

        Returns:
            Every attribute, explicit.

        Raises:
            InputError: k > D; an attribute, or weights, that the target cannot express.
        """
        faults = self.config_faults(config, "experts")
        if not normalise:
            faults += self.normalising_faults()
        if not 1 <= top_k <= experts:
            remedy = f"choose 1 to {experts}, the number of experts"
            faults.append(Fault("moe.top_k", top_k, remedy))
        raise_faults(faults)
        full = self.resolve(config)
        name = str(dtype).removeprefix("torch.") if dtype else full.get("dtype") or "float32"
        return {
            "architectures": [self.target.architecture],
            "model_type": self.target.model_type,
            **{key: full[key] for key in self.kept if key in full},
            **dict.fromkeys(self.target.width_fields, full["intermediate_size"]),
            **dict.fromkeys(self.target.count_fields, experts),
            **dict.fromkeys(self.target.top_k_fields, top_k),
            **self.target.constants,
            **({} if normalise else {"norm_topk_prob": False}),
            **_window_fields(full, self.windows),
            **rope_fields(full["rope_parameters"]),
            "dtype": name,
            "torch_dtype": name,
            # Tokenizer loading branches on it, and the tokenizer is the experts' own.
            "transformers_version": config.get("transformers_version"),
        }


_STANDARDISED = {"torch_dtype", "rope_theta", "rope_scaling", FIRST_LENGTH}
_LAYERED_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
WINDOW_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "model": ("sliding_window",),
    "all-or-none": _LAYERED_WINDOWS,
    "by-layer": _LAYERED_WINDOWS,
}


def _shape(letters: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[letter] for letter in letters)


def _sizes(full: Mapping) -> dict[str, int]:
    """What each letter of a shape stands for."""
    head = full["head_dim"]
    return {
        "V": full["vocab_size"],
        "H": full["hidden_size"],
        "I": full["intermediate_size"],
        "N": head,
        "Q": head * full["num_attention_heads"],
        "K": head * full["num_key_value_heads"],
        "S": UNUSED_WIDTH,
        "1": 1,
    }


def _window_fields(full: Mapping, windows: str) -> dict:
    """Sliding windows as the target says them; Mixtral's default differs between versions."""
    if windows == "none":  # one that is said, and not used, some targets would obey
        return {"sliding_window": None}
    if windows == "model":
        return {"sliding_window": full["sliding_window"]}
    sliding = "sliding_attention" in full["layer_types"]
    fields = {
        "use_sliding_window": sliding,
        "sliding_window": full["sliding_window"] if sliding else None,
    }
    if windows == "by-layer":
        fields |= {name: full[name] for name in ("layer_types", "max_window_layers")}
    return fields


def rope_fields(rope: Mapping) -> dict:
    """``rope_parameters`` of transformers 5 and the two fields that older readers look for."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }
