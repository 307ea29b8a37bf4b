"""What a recipe says of compression."""

from infra.recipe.schema import Recipe
from upcycle_core.ders.config import CompressionConfig


def section(recipe: Recipe) -> CompressionConfig:
    """How the experts of finished models are stored."""
    return recipe.compression or CompressionConfig()
