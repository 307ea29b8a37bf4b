"""The text that ``make demo`` lays out: read by the nightly recipe, all but tonight's."""

from pathlib import Path

from flows.first_night import main
from infra.recipe.reading import load_recipe
from tasks.data.texts import missing_faults, named_texts
from upcycle_core.corpora.sources import source_files

ROOT = Path(__file__).resolve().parents[2]


def read(folder):
    """Names of the files that the nightly recipe reads, and whether they hold documents."""
    recipe = load_recipe(ROOT / "recipes" / "nightly.yaml", [f"folder={folder}"])
    assert missing_faults(recipe) == []
    sources = [s for s in named_texts(recipe).values() if s.files]
    return {f for s in sources for f in source_files(s, folder).values()}


def test_tonights_text_is_read_once_it_has_been_moved(tmp_path, capsys):
    folder = tmp_path / "texts"
    assert main([str(folder)]) == 0
    first = read(folder)
    assert {str(file.relative_to(folder)) for file in first} == {
        "heldout/library.txt",
        "python/library.txt",
    }
    texts = [set(file.read_text().split("\n<|doc|>\n")) for file in first]
    assert min(map(len, texts)) > 5
    assert not texts[0] & texts[1]
    move = capsys.readouterr().out.splitlines()[2].split()
    assert move[0] == "mv"
    Path(move[1]).rename(Path(move[2]) / Path(move[1]).name)
    (new,) = read(folder) - first
    assert "async def" in new.read_text()
    main([str(folder)])  # what is there stays as it is
    assert len(read(folder)) == 3
