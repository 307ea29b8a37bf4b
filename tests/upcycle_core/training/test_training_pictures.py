import csv

import pytest
from matplotlib import image as images

from upcycle_core.errors import InputError
from upcycle_core.training.pictures import write_load

SHARES = {(0, 0): (0.5, 0.9), (0, 1): (0.5, 0.1), (1, 0): (0.25, 0.0), (1, 1): (0.75, 1.0)}
CURVES = [
    {"step": 1, "loss": 3.0},
    *(
        {"step": step, "loss": 2.0}
        | {f"load/layer_{layer}/expert_{e}": s[place] for (layer, e), s in SHARES.items()}
        for place, step in enumerate((50, 100))
    ),
]


def test_the_csv_holds_every_share(tmp_path):
    write_load(CURVES, tmp_path / "new")
    with (tmp_path / "new" / "load.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {"step": "50", "layer": "0", "expert": "0", "share": "0.5"}
    found = {
        (int(row["layer"]), int(row["expert"]), int(row["step"])): float(row["share"])
        for row in rows
    }
    assert found == {
        (layer, expert, step): shares[place]
        for (layer, expert), shares in SHARES.items()
        for place, step in enumerate((50, 100))
    }


def test_the_map_is_dark_where_the_load_is(tmp_path):
    write_load(CURVES, tmp_path)
    pixels = images.imread(tmp_path / "load.png")[..., :3].sum(-1)
    write_load(CURVES, tmp_path / "again")
    assert (tmp_path / "again" / "load.png").read_bytes() == (tmp_path / "load.png").read_bytes()
    turned = [
        point | {k: 1 - v for k, v in point.items() if k.startswith("load")} for point in CURVES
    ]
    write_load(turned, tmp_path / "turned")
    other = images.imread(tmp_path / "turned" / "load.png")[..., :3].sum(-1)
    assert (pixels != other).any()


def test_many_steps_and_layers_still_make_a_picture(tmp_path):
    curves = [
        {"step": step}
        | {f"load/layer_{layer}/expert_{e}": 0.25 for layer in range(24) for e in range(4)}
        for step in range(1, 200)
    ]
    write_load(curves, tmp_path)
    height, width, _ = images.imread(tmp_path / "load.png").shape
    assert width < 2500
    assert height < 5000


def test_a_dense_training_has_no_load_to_draw(tmp_path):
    with pytest.raises(InputError, match="no expert load"):
        write_load(CURVES[:1], tmp_path / "new")
    assert not (tmp_path / "new").exists()
