"""The flow killed by SIGKILL at its heavy stages, then the same command again."""

import pytest
from project import Project
from texts import pico_recipe, save_recipe, write_texts

DOMAINS = ("letters", "numbers")

pytestmark = pytest.mark.faults


def values_of(texts):
    values = pico_recipe(texts, domains=DOMAINS)
    values["experts"]["training"]["steps"] = 30
    values["statistics"]["shards"] = 3
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    return values


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Texts, and what a run that nothing disturbed made and called."""
    folder = tmp_path_factory.mktemp("undisturbed")
    texts = write_texts(folder / "texts", domains=DOMAINS)
    project = Project(folder, save_recipe(folder / "recipe.yaml", values_of(texts)))
    project.flow()
    return texts, project.digests(), project.calls()


@pytest.mark.parametrize(
    ("pause", "not_repeated"),
    [
        # The seed has 20 steps, so only experts come to step 23; their last checkpoint is step 20.
        ("training:23", {"write_documents", "train_tokenizer", "write_corpus"}),
        ("statistics:100", {"write_corpus", "train", "write_backbone"}),
        ("assembly:10", {"write_corpus", "train", "domain_statistics", "solve_routers"}),
    ],
    ids=["experts", "statistics", "assembly"],
)
def test_killed_flow_ends_with_the_same_bytes(undisturbed, tmp_path, pause, not_repeated):
    texts, digests, calls = undisturbed
    project = Project(tmp_path, save_recipe(tmp_path / "recipe.yaml", values_of(texts)))
    project.kill_flow(pause)
    assert not (project.workspace / "report").exists()
    before = project.calls()
    project.flow()
    after = project.calls()
    assert project.digests() == digests
    assert not not_repeated & set(after), "what was published was made again"
    repeated = {name: before[name] + after[name] - count for name, count in calls.items()}
    # At most the pieces that ran when the flow was killed: one on each of the two CPUs.
    assert all(0 <= extra <= 2 for extra in repeated.values()), repeated


def test_killed_expert_leaves_a_whole_checkpoint_to_continue_from(undisturbed, tmp_path):
    """That a training continues there bit for bit is tested beside the trainer."""
    texts, _, _ = undisturbed
    project = Project(tmp_path, save_recipe(tmp_path / "recipe.yaml", values_of(texts)))
    project.kill_flow("training:23")
    [*checkpoints] = (project.workspace / ".pieces").glob("*/whole.checkpoints/checkpoint-20")
    assert checkpoints
    assert all((checkpoint / "complete.json").exists() for checkpoint in checkpoints)


def symphony_of(texts):
    values = values_of(texts)
    values["domains"]["letters"]["origin"] = {"mixture": {"letters": 3, "numbers": 1}}
    values["domains"]["numbers"]["origin"] = {"initialisation": 5, "vocabulary_size": 300}
    values["symphony"] = {
        "segmentation": "letters",
        "alignment": {"residual": "procrustes"},
        "calibration": {"tokens": 400, "sequence_length": 32, "batch_size": 4},
    }
    values["moe"] = {"top_k": 2}
    return values


@pytest.mark.parametrize("pause", ["activations:100", "merging:5"], ids=["pairs", "starts"])
def test_killed_symphony_ends_with_the_same_bytes(tmp_path, pause):
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    projects = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        recipe = save_recipe(folder / "recipe.yaml", symphony_of(texts))
        projects[name] = Project(folder, recipe, module="flows.symphony")
    projects["killed"].kill_flow(pause)
    assert not (projects["killed"].workspace / "model").exists()
    trained = projects["killed"].calls()["train"]
    projects["killed"].flow()
    projects["whole"].flow()
    assert projects["killed"].digests() == projects["whole"].digests()
    assert (trained, projects["killed"].calls()["train"]) == (2, 0)
