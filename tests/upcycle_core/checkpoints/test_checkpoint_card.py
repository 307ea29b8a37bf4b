from upcycle_core.checkpoints.card import write_model_card


def card(directory, **changes) -> str:
    arguments = {
        "title": "demo",
        "recipe_text": "name: demo\nnote: |\n  ```\n  fenced\n  ```\n",
        "method": "DUME",
        "experts": ["law", "code"],
    }
    (directory / "config.json").write_text(
        '{"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32,'
        ' "num_experts_per_tok": 1, "dtype": "float32"}'
    )
    write_model_card(directory, **(arguments | changes))
    return (directory / "README.md").read_text()


def test_the_card_says_what_it_is_and_how_it_was_made(tmp_path):
    text = card(tmp_path)
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "license:" not in text
    for part in ("# demo", "DUME", "MixtralForCausalLM", "| 0 | law |", "| 1 | code |"):
        assert part in text
    assert "````yaml\nname: demo" in text  # a fence longer than the one inside


def test_a_licence_goes_to_the_front(tmp_path):
    assert "license: apache-2.0\n" in card(tmp_path, licence="apache-2.0")


def test_the_card_is_the_same_every_time(tmp_path):
    assert card(tmp_path) == card(tmp_path)
