"""Architectures of our own, which transformers has to be told of before it loads one."""

import importlib

MODEL_OF_BAM = ("upcycle_core/baselines/bam/modeling_bam.py",)
"""What decides how a BAM computes."""
MODEL_OF_DERS = (
    "upcycle_core/ders/files.py",
    "upcycle_core/ders/model/configuration_ders.py",
    "upcycle_core/ders/model/deltas_ders.py",
    "upcycle_core/ders/model/modeling_ders.py",
    "upcycle_core/ders/source.py",
)
"""What decides how a model of one base and light deltas computes."""
MODEL_OF_SIMOE = tuple(
    f"upcycle_core/simoe/model/{name}_simoe.py"
    for name in ("base", "configuration", "gates", "layers", "modeling", "routing", "seq2seq")
)
"""What decides how a model of sparse interpolated experts computes."""
OWN_MODELS = (*MODEL_OF_BAM, *MODEL_OF_DERS, *MODEL_OF_SIMOE)


def register_architectures() -> None:
    """Make transformers know them in this process."""
    for package in (
        "upcycle_core.baselines.bam",
        "upcycle_core.ders.model",
        "upcycle_core.simoe.model",
    ):
        importlib.import_module(package)
