"""What prompts have in common is taken from the router's states."""

import pytest
import torch

from tests.upcycle_core.simoe.grown import grow, save_dense, upcycled
from tests.upcycle_core.training.runs import AnswerRows
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent
from upcycle_core.simoe import standardise
from upcycle_core.simoe.prune import prune
from upcycle_core.simoe.standardise import common_states


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("dense"))


def slow_states(dense, rows, routing):
    """The dense model's last states of each prompt alone: its last token, or all tokens."""
    model, found = load_causal_lm(dense), []
    for row in map(rows.__getitem__, range(len(rows))):
        held = row["attention_mask"].bool()
        ids = row["input_ids"][held]
        if routing == "instance":
            answered = (row["labels"][held] != -100).nonzero()
            ids = ids[: int(answered[0]) if len(answered) else len(ids)]
        with torch.no_grad():
            states = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
        found.append(states[-1:] if routing == "instance" else states)
    return torch.cat(found).double()


@pytest.mark.parametrize("routing", ["instance", "token"])
def test_mean_and_deviation_are_those_of_the_prompts(dense, routing):
    rows = AnswerRows(21)
    model = upcycled(dense, experts=3, standardise=True, routing=routing)
    common = common_states(model, rows)
    states = slow_states(dense, rows, routing)
    mean, deviation = states.mean(0), states.std(0, correction=0)
    torch.testing.assert_close(model.router.state_mean.double(), mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        model.router.state_deviation.double(), deviation, atol=1e-5, rtol=1e-4
    )
    wanted = mean.square().sum() / states.square().sum(1).mean()
    assert common == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_without_standardising_the_share_is_told_alone(dense, batch_size):
    rows = AnswerRows(21)
    model = upcycled(dense, experts=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told = Told()
    common = common_states(model, rows, batch_size=batch_size, progress=told)
    states = slow_states(dense, rows, "instance")
    wanted = states.mean(0).square().sum() / states.square().sum(1).mean()
    assert common == pytest.approx(wanted.item(), rel=1e-4)
    assert (told.prompts, told.shown) == (21, {"common": common})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(("batch_size", "at_once"), [(1, 2), (3, 3), (64, 16)])
def test_no_more_is_read_at_once_than_the_training_holds(dense, monkeypatch, batch_size, at_once):
    """But few tokens: there two rows of them."""
    rows = AnswerRows(21)
    monkeypatch.setattr(standardise, "_TOKENS", 2 * len(rows[0]["input_ids"]) + 1)
    sizes, model = [], upcycled(dense, experts=3)
    monkeypatch.setattr(
        type(model),
        "coefficients",
        lambda self, input_ids, **_: sizes.append(len(input_ids)) or self.router(torch.ones(1, 32)),
    )
    common_states(model, rows, batch_size=batch_size)
    assert set(sizes[:-1]) == {at_once}
    assert sum(sizes) == 21


class Told(Silent):
    """What progress was told."""

    prompts, shown = 0, {}

    def advance(self, amount=1, **shown):
        self.prompts += amount
        self.shown = shown


def test_the_router_reads_what_is_left(dense):
    rows = AnswerRows(21)
    model = grow(upcycled(dense, experts=3, standardise=True))
    common_states(model, rows)
    state = torch.randn(5, 32)
    inner = (state - model.router.state_mean) / model.router.state_deviation
    plain = grow(upcycled(dense, experts=3))
    torch.testing.assert_close(model.router(state), plain.router(inner), atol=1e-6, rtol=1e-5)


def test_it_is_saved_with_the_pruned_model(dense, tmp_path):
    model = grow(upcycled(dense, experts=3, standardise=True))
    common_states(model, AnswerRows(21))
    prune(model).save_pretrained(tmp_path / "out")
    loaded = load_causal_lm(tmp_path / "out")
    batch = torch.randint(2, 90, (3, 8))
    assert torch.equal(loaded.coefficients(batch), model.coefficients(batch))
    half = load_causal_lm(tmp_path / "out", dtype=torch.bfloat16)
    assert half.router.state_deviation.dtype == torch.float32


class SamePrompts(AnswerRows):
    """Answers differ; what the router reads does not."""

    def __getitem__(self, index):
        row, first = super().__getitem__(index), super().__getitem__(0)
        prompt = int((first["labels"] != -100).nonzero()[0])
        ids = torch.cat([first["input_ids"][:prompt], row["input_ids"][prompt:]])
        labels = torch.where(torch.arange(len(ids)) < prompt, -100, ids)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def test_a_state_that_is_the_same_for_every_prompt_is_refused(dense):
    model = upcycled(dense, experts=3, standardise=True)
    with pytest.raises(InputError, match=r"simoe\.standardise = True: .*same state for every"):
        common_states(model, SamePrompts(9))
