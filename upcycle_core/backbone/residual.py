"""Residual alignment: turn a stranger's residual stream into the anchor's basis.

A decoder whose norms are RMSNorms without a scale computes the same in every orthogonal basis of
its residual stream. So the scales are folded into the weights behind them, in every model and the
anchor too, which leaves an untied lm_head; then all weights are rotated. Exact up to rounding.

Shapes: V vocabulary, H hidden size. Rows are multiplied from the right: y R is near x, where x is
the anchor's residual and y the stranger's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from upcycle_core.activations.cross import CrossMoments, orthogonal_map
from upcycle_core.architectures.axes import along, axes_of, layer_of
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD, Family
from upcycle_core.backbone.rewrite import Read, Transform

FINAL_NORM = "model.norm.weight"
# Embedding rows that are compared at a time.
ROWS = 4096
# Products are added up in fp32 within a batch: singular values below this share are rounding.
ROUNDING = 1e-6


def fold_norms(family: Family, read: Read) -> Transform:
    """Multiply the scale of each RMSNorm into the weights that read it, and leave ones behind.

    q_norm and k_norm act on heads, not on the residual stream: they stay.

    Args:
        family: Of the model.
        read: Name to tensor, asked for the scales; the unfolded model's.

    Returns:
        A transformation; lm_head must be written though it was tied.
    """

    def fold(name: str, tensor: Tensor) -> Tensor:
        if _is_norm(family, name):
            return torch.ones_like(tensor)
        norm = norm_before(family, name)
        return tensor if norm is None else tensor * read(norm).to(tensor.dtype)

    return fold


def rotate_residual(family: Family, rotation_HH: Tensor) -> Transform:
    """Turn a model with folded norms into another basis of the residual stream.

    Every axis over H is multiplied by R: what reads the stream and what writes to it, biases of
    o_proj and down_proj included; biases of q, k and v lie behind the stream and stay.

    Args:
        family: Of the model.
        rotation_HH: R, orthogonal, fp64.
    """

    def rotate(name: str, tensor: Tensor) -> Tensor:
        if _is_norm(family, name):
            if not bool((tensor == 1).all()):
                raise ValueError(f"{name} is not folded; fold_norms comes before rotate_residual")
            return tensor
        rotation = rotation_HH.to(tensor.dtype)
        return along(
            tensor,
            axes_of(family, name),
            "H",
            lambda t, axis: rotation.T @ t if axis == 0 and t.ndim == 2 else t @ rotation,
        )

    return rotate


def norm_before(family: Family, name: str) -> str | None:
    """The norm scale [H] that matrix ``name`` reads the residual stream through, if it does."""
    letters = axes_of(family, name)
    if name == LM_HEAD:
        return FINAL_NORM
    if name == EMBEDDING or len(letters) != 2 or letters[1] != "H":
        return None
    layer = layer_of(name)
    assert layer is not None
    return _norms(family, layer)[1 if family.is_ffn(name) else 0]


@dataclass(frozen=True, kw_only=True)
class ResidualMap:
    """The rotation of one stranger, and how well it fits.

    Args:
        rotation: R [H, H] fp64.
        before: Mean inner product of paired rows as they were (a cosine, for unit rows).
        after: The same after y became y R.
        rank: Directions of the stream that the rows told apart; the map is arbitrary in the rest.
    """

    rotation: Tensor
    before: float
    after: float
    rank: int


def unit_rows(x: Tensor) -> Tensor:
    """Rows [.., H] at length one in fp32 (or wider), so that every token and layer counts alike."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.nn.functional.normalize(wide, dim=-1)


def residual_map(moments: CrossMoments) -> ResidualMap:
    """The rotation that brings the second stream closest to the first.

    Args:
        moments: Of ``unit_rows`` of both models: residual activations of all layers, rows of
            embeddings, or both.

    Raises:
        ValueError: Nothing was counted, or what was counted is not finite.
    """
    rows = moments.checked_rows()
    rotation = orthogonal_map(moments.products)
    return ResidualMap(
        rotation=rotation,
        before=float(moments.products.trace()) / rows,
        after=float((moments.products * rotation.T).sum()) / rows,
        rank=int(torch.linalg.matrix_rank(moments.products, rtol=ROUNDING)),
    )


def embedding_moments(first: Read, second: Read, tokens: tuple[Tensor, Tensor]) -> CrossMoments:
    """Count the embedding rows of shared tokens, and those of lm_head: no data is needed.

    Args:
        first: Name to tensor of the anchor with folded norms.
        second: The same of the stranger.
        tokens: Ids of the shared tokens in the anchor's and in the stranger's vocabulary [T], [T].
    """
    moments: CrossMoments | None = None
    for name in (EMBEDDING, LM_HEAD):
        ours, theirs = first(name), second(name)
        moments = moments or CrossMoments(ours.shape[1])
        for ids in zip(*(side.split(ROWS) for side in tokens), strict=True):
            moments.update(unit_rows(ours[ids[0]]), unit_rows(theirs[ids[1]]))
    assert moments is not None
    return moments


def _norms(family: Family, layer: int) -> tuple[str, str]:
    before_attention = f"model.layers.{layer}.input_layernorm.weight"
    return before_attention, f"{family.router_norm(layer)}.weight"


def _is_norm(family: Family, name: str) -> bool:
    """Whether ``name`` is a scale on the residual stream; biases are the other vectors over H.

    Raises:
        ValueError: A vector over H that is neither a bias nor a norm whose readers are known.
    """
    if axes_of(family, name) != "H" or name.endswith(".bias"):
        return False
    layer = layer_of(name)
    if name == FINAL_NORM or (layer is not None and name in _norms(family, layer)):
        return True
    raise ValueError(f"{name}: nobody has said what reads this norm of {family.model_type}")
