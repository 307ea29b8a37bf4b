"""Which GPU holds what of a model; ``test_on_a_gpu`` lets them compute."""

import pytest

from tests.upcycle_core.ders.grown import grow
from upcycle_core.checkpoints.divided import divide, places
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.planning.memory import divided_bytes
from upcycle_core.planning.shape import Shape


@pytest.mark.parametrize(("family", "layers"), [("llama", 12), ("qwen2", 5), ("ernie4_5", 7)])
def test_what_a_plan_says_of_each_gpu_is_enough_and_not_twice_of_what_is(tmp_path, family, layers):
    grown = grow(tmp_path, family, num_hidden_layers=layers)
    model, shape = load_causal_lm(grown.model), Shape.of(grown.seed)
    needed = sum(weight.nbytes for weight in model.parameters())
    for gpus in (1, 2, 3, 4):
        room = divided_bytes(needed, shape, "fp32", "cuda", gpus)
        rooms = {f"cuda:{index}": room for index in range(gpus)}
        if gpus > 1:
            found = places(model, rooms)
            own = [found[f"model.layers.{layer}"] for layer in range(layers)]
            assert own == sorted(own)
            assert len(set(found.values())) > 1
        with pytest.raises(InputError, match=rf"{gpus} GPUs have room for .* reserve more"):
            divide(model, dict.fromkeys(rooms, needed // gpus // 2))
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
