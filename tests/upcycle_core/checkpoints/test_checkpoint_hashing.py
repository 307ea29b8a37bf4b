import hashlib

from upcycle_core.checkpoints.hashing import sha256_file, tree_digest


def test_a_tree_is_hashed_file_by_file_in_order(tmp_path):
    content = {"b.txt": b"b", "a/deep/c.bin": b"\x00" * 100, "a.txt": b""}
    for name, data in content.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    expected = {name: hashlib.sha256(content[name]).hexdigest() for name in sorted(content)}
    assert list(tree_digest(tmp_path).items()) == list(expected.items())
    assert sha256_file(tmp_path / "b.txt") == expected["b.txt"]


def test_excluded_files_are_left_out(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    assert list(tree_digest(tmp_path, exclude=["a"])) == ["b"]
