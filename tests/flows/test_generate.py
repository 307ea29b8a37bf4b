"""`python -m flows.generate`: what cannot be continued is said in a line."""

import pytest
from serving import environment
from talking import CONTEXT, register, save_talkative

from flows import generate
from flows.generate import main
from flows.running.registered import registered
from infra.settings import read
from infra.tracking import copies
from infra.tracking.registry import Registry

NAME = "upcycle-pico@champion"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    register(home, "upcycle-pico", save_talkative(tmp_path_factory.mktemp("model")))
    return home


@pytest.fixture
def at_home(home, monkeypatch):
    for name, value in environment(home).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["", "--device", "cpu"], "prompt = '': is empty; write something"),
        (["a " * CONTEXT, "--device", "cpu"], f"tokens long, the model's context {CONTEXT}"),
        (["a", "--device", "nowhere"], "--device = 'nowhere': cannot be used here"),
    ],
)
def test_bad_input_is_named(at_home, capsys, arguments, said):
    assert main([NAME, *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/models/pico", "is a path, and no registered model; name a version that is, "),
        ("pico@champion", "not in the registry; name a version that is, upcycle-pico@champion or "),
        ("upcycle-pico", "names no version; of upcycle-pico there is @champion, /1"),
    ],
)
def test_what_is_no_version_is_said_as_it_was_typed(at_home, capsys, model, said):
    assert main([model, "a"]) == 2
    assert capsys.readouterr().err.startswith(f"model = '{model}': {said}")


def test_no_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        main([NAME, "a", "--tokens", "0"])
    assert "argument --tokens: 0 is less than 1" in capsys.readouterr().err


@pytest.mark.parametrize("is_here", [True, False])
def test_one_version_answers_where_the_alias_moves_meanwhile(tmp_path, monkeypatch, is_here):
    model = save_talkative(tmp_path / "model")
    register(tmp_path, "moving", model)
    settings, place = read({"UPCYCLE_HOME": str(tmp_path)}), Registry.place

    def moving(registry, reference):
        found = place(registry, reference)
        register(tmp_path, "moving", model)
        return found if is_here else None

    monkeypatch.setattr(Registry, "place", moving)
    found = registered("moving@champion", settings)
    assert Registry(settings).pointed("moving", "champion") > 1
    assert found.version.number == 1
    if is_here:
        assert found.directory == place(Registry(settings), "models:/moving/1")
    else:
        assert found.directory.name.startswith("moving-1-")
        assert found.directory in copies._held  # nobody removes it while this process lives


@pytest.fixture
def asked(at_home, monkeypatch):
    """What the model is asked to generate; ``end`` is how its chats' responses end."""
    asked = {}
    load = generate.load

    def watched(directory, chosen):
        model, tokenizer = load(directory, chosen)
        asked["end"] = tokenizer.convert_tokens_to_ids("<|im_end|>")
        monkeypatch.setattr(model, "generate", lambda **options: asked.update(options))
        return model, tokenizer

    monkeypatch.setattr(generate, "load", watched)
    return asked


def test_an_answer_ends_with_the_context(asked):
    prompt = "a " * (CONTEXT // 2 - 20)
    assert main([NAME, prompt, "--tokens", str(CONTEXT), "--device", "cpu"]) == 0
    assert asked["input_ids"].shape[1] + asked["max_new_tokens"] == CONTEXT
    assert "eos_token_id" not in asked


def test_an_answer_to_a_chat_ends_where_the_template_ends_it(asked):
    assert main([NAME, "a", "--chat", "--device", "cpu"]) == 0
    assert asked["end"] in asked["eos_token_id"]


def test_a_later_prompt_is_refused_before_the_first_is_answered(asked, capsys):
    assert main([NAME, "a", "a " * CONTEXT, "--device", "cpu"]) == 2
    assert "prompt" in capsys.readouterr().err
    assert "input_ids" not in asked
