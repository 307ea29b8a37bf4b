from unicodedata import normalize

from upcycle_core.corpora.distinct import Document
from upcycle_core.corpora.splits import Selection


def selection_of(documents):
    selection = Selection()
    selection.add("train", documents, max_bytes=None, min_characters=1)
    return selection


def files_of(selection, split):
    return {document.file for document in selection.splits[split].values()}


def test_documents_of_one_file_are_set_aside_together():
    documents = [Document(f"text {n} of file {n % 10}", f"file {n % 10}") for n in range(100)]
    size = sum(len(document.text) for document in documents)
    for seed in range(5):
        selection = selection_of(documents)
        selection.set_aside("heldout", 0.35 * size, by_file=True, seed=seed)
        held, trained = files_of(selection, "heldout"), files_of(selection, "train")
        assert (len(held), len(trained)) == (3, 7)
        assert not held & trained


def test_a_file_that_is_larger_than_the_share_stays_in_training():
    documents = [Document(f"text {n}", "large" if n < 80 else f"small {n}") for n in range(100)]
    for seed in range(5):
        selection = selection_of(documents)
        selection.set_aside("heldout", 70, by_file=True, seed=seed)
        assert "large" not in files_of(selection, "heldout")
        assert len(selection.splits["heldout"]) == 10


def test_what_is_set_aside_is_drawn_by_seed_from_everything_read():
    documents = [Document(f"text number {n}", "file") for n in range(1000)]
    size = sum(len(document.text) for document in documents)
    held = []
    for seed in (0, 0, 1):
        selection = selection_of(documents)
        selection.set_aside("heldout", 0.1 * size, by_file=False, seed=seed)
        held.append([int(d.text.split()[-1]) for d in selection.splits["heldout"].values()])
    assert held[0] == held[1]
    assert set(held[0]) != set(held[2])
    assert 400 < sum(held[0]) / len(held[0]) < 600  # not the first ones that were read


def test_what_nothing_fits_into_takes_the_smallest_document():
    documents = [Document("a longer text", "a"), Document("text", "b"), Document("some text", "c")]
    selection = selection_of(documents)
    selection.set_aside("heldout", 1.0, by_file=False, seed=0)
    assert [document.text for document in selection.splits["heldout"].values()] == ["text"]
    assert len(selection.splits["train"]) == 2


def test_what_is_set_aside_for_good_is_never_taken_from_training_when_text_is_added():
    documents = [Document(f"text number {n}", "file") for n in range(2100)]
    before, after, other = (selection_of(documents[:n]) for n in (2000, 2100, 2000))
    for selection, seed in ((before, 0), (after, 0), (other, 1)):
        selection.set_aside_for_good("heldout", 0.05, seed=seed)
    assert not before.splits["train"].keys() & after.splits["heldout"].keys()
    assert before.splits["heldout"].keys() <= after.splits["heldout"].keys()
    assert before.splits["heldout"].keys() != other.splits["heldout"].keys()
    for selection, count in ((before, 2000), (after, 2100)):
        splits = selection.splits
        assert not splits["train"].keys() & splits["heldout"].keys()
        assert len(splits["train"]) + len(splits["heldout"]) == count
        assert 0.03 * count < len(splits["heldout"]) < 0.07 * count


def test_chats_with_the_same_words_and_other_thoughts_are_set_aside_together():
    """Told apart as documents, but a model that has seen one knows the other."""
    chats = [
        Document(f"question {n}", "file", [said(f"question {n}", f"thought {thought}")])
        for n in range(300)
        for thought in range(2)
    ]
    selection = selection_of(chats)
    assert len(selection.splits["train"]) == 600
    selection.set_aside_for_good("heldout", 0.1, seed=0)
    held, trained = (
        {d.text for d in selection.splits[split].values()} for split in ("heldout", "train")
    )
    assert 15 < len(held) < 50
    assert not held & trained


def test_the_one_that_is_set_aside_of_few_takes_its_likes_along():
    for seed in range(20):
        chats = [
            Document(f"question {n}", "file", [said(f"question {n}", f"thought {thought}")])
            for n in range(6)
            for thought in range(2)
        ]
        selection = selection_of(chats)
        selection.set_aside_for_good("heldout", 0.05, seed=seed)
        held = [document.text for document in selection.splits["heldout"].values()]
        assert len(held) == 2
        assert held[0] == held[1]


def said(text, thought):
    return {"role": "assistant", "content": text, "thinking": thought}


def test_a_document_that_is_larger_than_the_share_is_not_set_aside_for_good():
    for seed in range(40):
        small = [Document(f"text number {n}", "file") for n in range(100)]
        selection = selection_of([*small, Document("a large text " * 100, "large")])
        selection.set_aside_for_good("heldout", 0.3, seed=seed)
        assert "large" not in files_of(selection, "heldout")
        selection = selection_of([Document("text " * n, str(n)) for n in (9, 7, 8)])
        selection.set_aside_for_good("heldout", 0.05, seed=seed)
        assert files_of(selection, "heldout") == {"7"}


def test_one_document_at_least_is_set_aside_for_good():
    selection = selection_of([Document(f"text number {n}", "file") for n in range(3)])
    selection.set_aside_for_good("heldout", 1e-9, seed=0)
    assert len(selection.splits["heldout"]) == 1
    assert len(selection.splits["train"]) == 2


def test_held_out_text_in_another_normal_form_is_not_trained_on():
    texts = ["Tiếng Việt là ngôn ngữ", "한국어는 대한민국의 공용어", "something else"]
    selection = selection_of([Document(normalize("NFD", text), "train") for text in texts])
    held = [Document(normalize("NFC", text), "heldout") for text in texts[:2]]
    selection.add("heldout", held, max_bytes=None, min_characters=1)
    selection.separate("domains.law")
    assert [document.text for document in selection.splits["train"].values()] == texts[2:]
