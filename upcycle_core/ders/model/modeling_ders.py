"""DeRS (Huang et al., arXiv 2503.01359, CVPR 2025): experts as one shared FFN and light deltas.

Expert i is E_i = base + delta_i. Matrices are linear in their input, so the base's products are
computed once a token, and what depends on the expert is its delta's product alone.

The dense model of any family is kept as it is; in the MoE layers its ``mlp`` is replaced.

This file needs torch and transformers alone: it is copied beside the weights, so that
``from_pretrained(..., trust_remote_code=True)`` works without the package it comes from.

B batch, S positions, T = B S tokens, H hidden size, I intermediate size, N experts, D deltas,
k experts a token.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .configuration_ders import DersConfig, verify_checksums, write_checksums
from .deltas_ders import Delta, Rows, make_delta, sort_rows

_MATRICES = (("gate_proj", "up_proj", "down_proj"), ("fc1", "fc2"))


class DersRouter(nn.Module):
    """The k experts of each token: softmax of W x, W [N, H]; ``weight`` is W.

    It is no linear layer: readers replace those by their own, whose output is the logits alone.
    """

    parameter_group = "router"

    def __init__(self, config: DersConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.top_k = config.num_experts_per_tok
        self.divide = config.combine == "normalised" and config.universal == "none"

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, N], weights [T, k] fp32 and experts [T, k] int64.

        Weights R are the k largest probabilities; divided by their sum where ``combine`` is
        ``normalised`` and there is no universal FFN.
        """
        logits_TN = functional.linear(x_TH, self.weight)
        probabilities_TN = logits_TN.softmax(dim=-1, dtype=torch.float32)
        weights_Tk, experts_Tk = probabilities_TN.topk(self.top_k, dim=-1)
        if self.divide:
            weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
        return logits_TN, weights_Tk, experts_Tk


class DersBase(nn.ModuleDict):
    """The matrices of the shared FFN, by their names.

    They are no FFN of the dense family's class, which readers would replace by one of their own.
    """

    parameter_group = "base"


class DersExperts(nn.ModuleDict):
    """The deltas of every matrix of the FFN, by the matrix's name."""

    parameter_group = "experts"


class DersMoE(nn.Module):
    """y = sum_i R_i E_i(x), and a universal FFN U beside it if there is one.

    ``sum`` is U(x) + sum_i R_i E_i(x) (the paper's Eq. 1), ``normalised`` is
    (1 - sum_i R_i) U(x) + sum_i R_i E_i(x).

    Args:
        config: The model's.
        layer: Number of the layer.
        mlp: The dense model's FFN, which becomes the base.
    """

    def __init__(self, config: DersConfig, layer: int, mlp: Any) -> None:
        super().__init__()
        children = dict(mlp.named_children())
        known = [names for names in _MATRICES if set(names) <= set(children)]
        if not known:
            have = ", ".join(children)
            raise ValueError(f"dense.model_type: no FFN of a known form in layer {layer}: {have}")
        *self.inner, self.outer = known[0]
        self.activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
        self.num_experts, self.deltas, self.combine = (
            config.num_experts,
            config.deltas,
            config.combine,
        )
        self.base: Any = DersBase({name: children[name] for name in known[0]})
        self.gate = DersRouter(config)
        deltas: dict[str, Delta] = {}
        for name in known[0]:
            linear: Any = children[name]
            deltas[name] = make_delta(
                config.deltas,
                linear.out_features,
                linear.in_features,
                bias=linear.bias is not None,
                **config.delta_of(layer, name),
            )
        self.experts: Any = DersExperts(deltas)
        self.sorts = any(delta.wants_sorted for delta in deltas.values())
        self.universal: Any = copy.deepcopy(mlp) if config.universal == "own" else None
        self.universal_delta = config.universal == "delta"
        for linear in self.base.values():
            linear.register_parameter("bias", None)  # experts have their own

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return y [B, S, H] of x [B, S, H]."""
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        _, weights_Tk, experts_Tk = self.gate(x_TH)
        left_T1 = torch.ones_like(weights_Tk[:, :1])
        if self.combine == "normalised":
            left_T1 = left_T1 - weights_Tk.sum(dim=-1, keepdim=True)
        if self.universal_delta:
            last_T1 = torch.full_like(experts_Tk[:, :1], self.num_experts)
            weights_Tk = torch.cat((weights_Tk, left_T1), dim=1)
            experts_Tk = torch.cat((experts_Tk, last_T1), dim=1)
        y_TH = self._mixed(x_TH, weights_Tk, experts_Tk)
        if self.universal is not None:
            y_TH = y_TH + self.universal(x_TH) * left_T1.to(y_TH.dtype)
        return y_TH.view(x_BSH.shape)

    def _mixed(self, x_TH: Tensor, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
        """sum_j w_j E_ej(x). R = T k rows: a token and one of its experts, sorted by expert if
        deltas want that."""
        tokens, slots = experts_Tk.shape
        order_R, rows = None, Rows(experts_Tk.reshape(-1))
        if self.sorts:
            order_R, rows = sort_rows(rows.experts_R, self.deltas)
        weights_R1 = weights_Tk.reshape(-1, 1)
        weights_R1 = weights_R1 if order_R is None else weights_R1[order_R]
        if slots == 1:  # a row is a token
            x_RH = x_TH if order_R is None else x_TH[order_R]
            h_RI = self._hidden(x_RH, [self._base(name, x_RH) for name in self.inner], rows)
            y_RH = self._base(self.outer, h_RI)
            y_RH = self._biased(self.outer, self.experts[self.outer].onto(y_RH, h_RI, rows), rows)
            y_RH = y_RH * weights_R1.to(y_RH.dtype)
            return y_RH if order_R is None else torch.empty_like(y_RH).index_copy(0, order_R, y_RH)
        token_R = torch.arange(tokens * slots, device=x_TH.device) if order_R is None else order_R
        token_R = token_R // slots
        bases = [self._base(name, x_TH)[token_R] for name in self.inner]
        h_RI = self._hidden(x_TH[token_R], bases, rows)
        h_RI = h_RI * weights_R1.to(h_RI.dtype)
        mixed_TI = h_RI.new_zeros(tokens, h_RI.shape[1]).index_add(0, token_R, h_RI)
        own_RH = self._biased(
            self.outer, self.experts[self.outer].product(h_RI, rows), rows, weights_R1
        )
        y_TH = self._base(self.outer, mixed_TI)
        return y_TH.index_add(0, token_R, own_RH.to(y_TH.dtype))

    def _hidden(self, x_RH: Tensor, bases: list[Tensor], rows: Rows) -> Tensor:
        """What one expert a row hands to its last matrix, [R, I]; ``bases`` are given away."""
        products = [
            self._biased(name, self.experts[name].onto(base_RI, x_RH, rows), rows)
            for name, base_RI in zip(self.inner, bases, strict=True)
        ]
        h_RI = self.activation(products[0])
        if len(products) == 1:
            return h_RI
        return h_RI * products[1] if torch.is_grad_enabled() else h_RI.mul_(products[1])

    def _base(self, name: str, x: Tensor) -> Tensor:
        """The base's product without its bias: experts have their own."""
        return self.base[name](x)

    def _biased(
        self, name: str, y_RO: Tensor, rows: Rows, weights_R1: Tensor | None = None
    ) -> Tensor:
        """y plus the bias of each row's expert, times its weight."""
        bias_DO = self.experts[name].bias
        if bias_DO is None:
            return y_RO
        bias_RO = bias_DO[rows.experts_R]
        return y_RO + (bias_RO if weights_R1 is None else bias_RO * weights_R1).to(y_RO.dtype)


class DersPreTrainedModel(PreTrainedModel):
    """What both models share."""

    config: DersConfig
    config_class = DersConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DersRouter):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # Deltas run in one way only; whoever sets it for every MoE may set it here.
        return True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, after ``checksums.json`` of a local directory held.

        Raises:
            ValueError: A file that it names is missing or was altered.
        """
        verify_checksums(Path(str(pretrained_model_name_or_path)) / (kwargs.get("subfolder") or ""))
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, with the checksums of what was written."""
        result = super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_checksums(Path(save_directory))
        return result

    def write_beside(self, save_directory: Any) -> None:
        """Write what ``save_pretrained`` does beside weights and configurations: code, checksums.

        For who writes these from parts that several processes hold.
        """
        for module in ("configuration", "deltas", "modeling"):
            name = f"{module}_ders.py"
            shutil.copyfile(Path(__file__).with_name(name), Path(save_directory) / name)
        write_checksums(Path(save_directory))


class DersModel(DersPreTrainedModel):
    """The model without its head: the dense family's own, with experts in its MoE layers."""

    def __init__(self, config: DersConfig) -> None:
        super().__init__(config)
        config.dense._experts_implementation_internal = None  # it has no experts of its own
        self.decoder: Any = AutoModel.from_config(config.dense)
        for layer in config.moe_layers:
            block = self.decoder.layers[layer]
            block.mlp = DersMoE(config, layer, block.mlp)
        self.post_init()

    @property
    def embed_tokens(self) -> nn.Module:
        """The embedding, under the name that models around this one know."""
        return self.decoder.get_input_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.set_input_embeddings(value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the dense family's own forward."""
        return self.decoder(*args, **kwargs)


class DersForCausalLM(DersPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}

    def __init__(self, config: DersConfig) -> None:
        super().__init__(config)
        self.model = DersModel(config)
        self.vocab_size = config.vocab_size
        with torch.device("meta"):
            head: Any = AutoModelForCausalLM.from_config(config.dense).get_output_embeddings()
        bias = head.bias is not None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=bias)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, S, V] of the last ``logits_to_keep`` positions (0: all), and the loss
        of ``labels`` [B, S] if given."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_BSH = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BSV = self.lm_head(hidden_BSH[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_BSV, labels=labels, vocab_size=self.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BSV,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
