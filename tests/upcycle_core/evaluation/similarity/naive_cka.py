"""How alike two streams of features are, from every row kept in fp64: a slow, obvious oracle."""

import numpy as np
import torch


def cka(x_TI: torch.Tensor, y_TI: torch.Tensor) -> float:
    """Linear CKA by its definition over T x T kernel matrices (Cortes et al. 2012)."""
    kernels = []
    for z_TI in (x_TI.double(), y_TI.double()):
        z_TI = z_TI - z_TI.mean(0)
        kernels.append(z_TI @ z_TI.T)
    k, m = kernels
    return float((k * m).sum() / ((k * k).sum() * (m * m).sum()).sqrt())


def matched(x_TI: torch.Tensor, y_TI: torch.Tensor) -> float:
    """Mean correlation of features of the same number."""
    pairs = zip(x_TI.double().T.numpy(), y_TI.double().T.numpy(), strict=True)
    return float(np.mean([np.corrcoef(x, y)[0, 1] for x, y in pairs]))
