"""What the card of a compressed model says that it is."""

import pytest

from tasks.ders.compression import card_of, compression
from tasks.recipes import validate
from tests.pico import save_pico
from tests.tasks.ders.test_ders_faults import VALID
from upcycle_core.checkpoints.card import MODEL_CARD, write_model_card

ROWS = {
    "copies": {"method": "sparse-upcycling", "copies": 8},
    "joined": {"method": "btx", "title": "BTX"},
    "more": {"method": "btx", "seed_expert": True},
}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("dume", "of 2 dense models, joined by DUME, DeRS with Upcycle."),
        ("joined", "of 2 dense models, joined by BTX, DeRS with Upcycle."),
        ("more", "of dense models and their seed, by more, DeRS with Upcycle."),
        ("copies", "of copies of one dense model, by copies, DeRS with Upcycle."),
    ],
)
def test_a_compressed_rival_is_not_called_dume(tmp_path, row, said):
    recipe = validate({**VALID, "baselines": {**VALID["baselines"], **ROWS}})
    model = save_pico(tmp_path / "model")
    write_model_card(model, title="small", **card_of(recipe, row))
    card = (model / MODEL_CARD).read_text()
    assert f"A Mixture-of-Experts {said}" in card
    assert ("| 0 | code |" in card) == ("2 dense" in said)
    assert (f"\n  {row}:\n    method: " in card) == (row != "dume")


def test_a_baseline_that_is_not_compressed_decides_nothing():
    def values(**changes):
        rows = {name: {**row, **changes.get(name, {})} for name, row in ROWS.items()}
        chosen = {**VALID["compression"], "models": ["dume", "joined"]}
        recipe = {**VALID, "compression": chosen, "baselines": {**VALID["baselines"], **rows}}
        return compression.values(validate(recipe), "")

    longer = {"training": {"steps": 777}}
    assert values(copies=longer, more={"title": "Another"}) == values()
    assert values(joined=longer) != values()
    assert values(joined={"title": "Another"}) != values()
