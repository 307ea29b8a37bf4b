"""Architectures of our own, which transformers has to be told of before it loads one."""


def register_architectures() -> None:
    """Make transformers know them in this process: importing each package does it."""
    import upcycle_core.baselines.bam
    import upcycle_core.ders.model
    import upcycle_core.simoe.model  # noqa: F401  likewise
