import torch
from transformers import AutoTokenizer

from tests.vocabularies import CODE, NATURE, TEXTS, byte_level, core_of, edited, pieces
from upcycle_core.backbone.vocabulary import merge_rows, unite_vocabularies, write_union_tokenizer


def test_a_byte_and_the_letter_that_it_is_are_two_tokens_of_one_model(tmp_path):
    one = pieces(tmp_path / "one", NATURE, merges=10)
    two = byte_level(tmp_path / "two", NATURE, merges=10)
    union = unite_vocabularies([two, one], ruling=0)
    ids = core_of(one).get_vocab()
    places = [i for i, text in enumerate(union.tokens) if text == b"a"]
    assert [union.rows[:, i].tolist() for i in places] == [
        [core_of(two).get_vocab()["a"], ids["a"]],
        [-1, ids["<0x61>"]],
    ]
    high = union.tokens.index(b"\xe2")
    assert union.rows[:, high].tolist() == [core_of(two).get_vocab()["â"], ids["<0xE2>"]]


def test_control_tokens_are_matched_by_content_and_never_with_text(tmp_path):
    one = byte_level(tmp_path / "one", NATURE, merges=10, specials=["<|end|>", "turn"])
    two = byte_level(tmp_path / "two", NATURE, merges=10, specials=["turn", "<|tool|>", "cat"])
    # In the third, the content of a control token is a piece of ordinary text.
    three = byte_level(tmp_path / "three", "turn cat " * 9, merges=10)
    assert "turn" in core_of(three).get_vocab()
    union = unite_vocabularies([one, two, three], ruling=0)
    ids = [core_of(directory).get_vocab() for directory in (one, two, three)]
    assert union.rows[:, ids[0]["turn"]].tolist() == [ids[0]["turn"], ids[1]["turn"], -1]
    text = [i for i, name in enumerate(union.tokens) if name == b"turn"][1]
    assert union.rows[:, text].tolist() == [-1, -1, ids[2]["turn"]]
    write_union_tokenizer(union, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    tool = union.tokens.index(b"<|tool|>")
    assert loaded("<|tool|>")["input_ids"] == [tool]
    assert loaded.decode([tool], skip_special_tokens=True) == ""
    assert loaded("turn")["input_ids"] == [ids[0]["turn"]]
    # A control token that is ordinary text to another model stays out of the text.
    assert loaded("the cat")["input_ids"] == core_of(one).encode("the cat").ids
    assert loaded.decode([union.tokens.index(b"cat")]) == "cat"
    assert loaded.eos_token == "<|end|>"


def test_added_tokens_beyond_the_vocabulary_keep_their_ids_and_gaps_their_rows(tmp_path):
    one = byte_level(tmp_path / "one", NATURE, merges=10)
    size = core_of(one).get_vocab_size()

    def add(core):
        extra = {"id": size + 3, "content": "  ", "special": False, "normalized": False}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        core["added_tokens"].append(extra | flags)
        core["model"]["vocab"] |= {"  ": size + 3}

    gapped = edited(one, tmp_path / "gapped", add)
    spaces = byte_level(tmp_path / "spaces", "    x    x\n" + CODE, merges=40)
    union = unite_vocabularies([spaces, gapped], ruling=1)
    matrix, other = torch.randn(size + 16, 4), torch.randn(core_of(spaces).get_vocab_size() + 5, 4)
    rows = merge_rows(union, [other, matrix])
    assert union.tokens[size : size + 3] == (None,) * 3
    assert torch.equal(rows[size : size + 3], matrix[size : size + 3])
    both = [core_of(spaces).get_vocab()["ĠĠ"], size + 3]  # the same bytes
    assert union.rows[:, size + 3].tolist() == both
    assert torch.equal(rows[size + 3], (other[both[0]] + matrix[both[1]]) / 2)
    write_union_tokenizer(union, tmp_path / "out")
    for text in TEXTS:
        assert core_of(tmp_path / "out").encode(text).ids == core_of(gapped).encode(text).ids
    assert max(core_of(tmp_path / "out").get_vocab().values()) == len(union.tokens) - 1


def test_added_tokens_outside_the_vocabulary_are_not_numbered_anew(tmp_path):
    one = byte_level(tmp_path / "one", NATURE, merges=10)
    size = core_of(one).get_vocab_size()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    extra = {"id": size, "content": "<tool>", **flags}
    added = edited(one, tmp_path / "added", lambda core: core["added_tokens"].append(extra))
    union = unite_vocabularies([added, byte_level(tmp_path / "code", CODE, merges=40)], ruling=0)
    write_union_tokenizer(union, tmp_path / "out")
    for text in ("a <tool> b", *TEXTS):
        assert core_of(tmp_path / "out").encode(text).ids == core_of(added).encode(text).ids
    assert union.tokens[size] == b"<tool>"
    assert core_of(tmp_path / "out").token_to_id("<tool>") == size
