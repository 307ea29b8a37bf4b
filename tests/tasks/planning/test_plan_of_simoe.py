"""What a plan says of SIMoE's training."""

import pytest
from pico import pico_config

from tasks.planning.joined import mixture_row
from tasks.recipes import validate
from upcycle_core.baselines.config import Baseline
from upcycle_core.planning.shape import Shape
from upcycle_core.planning.trained import gate_parameters, gated_parameters
from upcycle_core.simoe.config import SimoeUpcyclingConfig


@pytest.mark.parametrize(("masks", "together"), [("real", 3), ("neurons", 4)])
def test_a_simoe_ends_with_an_older_checkpoint_that_is_sparse_enough(masks, together):
    shape = Shape.of_config(pico_config().to_dict(), 4)
    row = Baseline(method="simoe", simoe=SimoeUpcyclingConfig(masks=masks))
    recipe = validate({"name": "x", "domains": {d: {"train": {"files": ["x"]}} for d in "ab"}})
    planned = mixture_row("model", recipe, {"x": row}, {"x": shape}, kind="post_training")
    grown = gated_parameters(shape, row.simoe) + gate_parameters(shape, row.simoe)
    assert planned.each == together * 4 * (shape.whole + 3 * grown)
