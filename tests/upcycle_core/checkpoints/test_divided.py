"""A model that several GPUs have no room for; ``test_on_a_gpu`` divides what they have."""

import pytest

from tests.pico import save_pico
from upcycle_core.checkpoints.divided import divide
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError


@pytest.mark.parametrize("share", [0.2, 0.45])
def test_what_has_no_room_is_refused_before_it_is_moved(tmp_path, share):
    model = load_causal_lm(save_pico(tmp_path))
    size = sum(weight.nbytes for weight in model.parameters())
    rooms = dict.fromkeys(["cuda:0", "cuda:1"], int(share * size))
    with pytest.raises(
        InputError, match=r"'LlamaForCausalLM': 2 GPUs have room for .* reserve more"
    ):
        divide(model, rooms)
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
