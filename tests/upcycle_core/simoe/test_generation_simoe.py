import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from transformers import set_seed

from tests.upcycle_core.simoe.grown import (
    all_masks,
    batch_of,
    grown,
    merged,
    save_dense,
    slow_alpha,
    some_ids,
)
from upcycle_core.checkpoints.load import load_causal_lm

GREEDY = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
WAYS = {
    "greedy": GREEDY,
    "beams": GREEDY | {"num_beams": 3},
    "three answers": GREEDY | {"num_beams": 4, "num_return_sequences": 3},
    "static cache": GREEDY | {"cache_implementation": "static", "disable_compile": True},
    "no cache": GREEDY | {"use_cache": False},
    "in chunks": GREEDY | {"prefill_chunk_size": 2},
    "sampled": GREEDY | {"do_sample": True, "temperature": 0.7, "top_k": 20},
}


def generated(model, batch, **settings):
    set_seed(11)
    length = batch["input_ids"].shape[1]
    return model.generate(**batch, **settings)[:, length:]


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def model(dense_path):
    return grown(dense_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_prompt_gives_what_its_merged_weights_give(tmp_path, way, family):
    dense = load_causal_lm(save_dense(tmp_path, family))
    model = grown(tmp_path)
    (prompt,) = some_ids(6)
    alone = merged(model, copy.deepcopy(dense), slow_alpha(model, dense, prompt), all_masks(model))
    batch = batch_of([prompt], "left")
    found, expected = (generated(m, batch, **WAYS[way]) for m in (model, alone))
    assert torch.equal(found, expected)
    assert not torch.equal(found, generated(dense, batch, **WAYS[way]))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "sampled"])
def test_prompts_together_give_what_each_gives_alone(model, way):
    rows = some_ids(6, 3, 9, 1)
    answers = WAYS[way].get("num_return_sequences", 1)
    together = generated(model, batch_of(rows, "left"), **WAYS[way]).split(answers)
    for row, found in zip(rows, together, strict=True):
        assert torch.equal(found, generated(model, batch_of([row], "left"), **WAYS[way]))
    assert len({tuple(t[0].tolist()) for t in together}) > 1


def test_threads_that_generate_at_once_have_mixtures_of_their_own(dense_path):
    """As a server of the model does: each pass of a layer waits for that of the other thread."""
    model = grown(dense_path)
    batches = [batch_of([row], "left") for row in some_ids(6, 9)]
    expected = [generated(model, batch, **GREEDY) for batch in batches]
    together = Barrier(2, timeout=60)

    def wait(*_):
        together.wait()

    hook = model.get_submodule("model.model.layers.1").register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda batch: generated(model, batch, **GREEDY), batches))
    hook.remove()
    assert all(map(torch.equal, found, expected))
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="has no expert coefficients"):
            one.model(**batches[0])


@pytest.mark.faults
def test_a_thread_s_first_pass_may_be_compiled(dense_path):
    model = grown(dense_path)
    batch = batch_of(some_ids(6), "left")

    def logits(run):
        with torch.no_grad():
            return run(**batch, use_cache=False).logits

    torch.compiler.reset()
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(logits, torch.compile(model, backend="eager")).result()
    torch.testing.assert_close(found, logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("routing", ["instance", "task"])
@pytest.mark.parametrize("drafter", ["seed", "itself"])
def test_another_model_may_draft_what_it_says(dense_path, routing, drafter):
    tasks = {"tasks": ("add", "sort")} if routing == "task" else {}
    model = grown(dense_path, routing=routing, **tasks)
    batch = batch_of(some_ids(6), "left")
    if tasks:
        batch["task_ids"] = torch.tensor([1])
    other = load_causal_lm(dense_path) if drafter == "seed" else copy.deepcopy(model)
    found = generated(model, batch, **GREEDY, assistant_model=other)
    assert torch.equal(found, generated(model, batch, **GREEDY))


def count_calls(model, monkeypatch) -> list:
    calls, own = [], type(model).coefficients

    def counted(self, *args, **kwargs):
        found = own(self, *args, **kwargs)
        calls.append(tuple(found.shape))
        return found

    monkeypatch.setattr(type(model), "coefficients", counted)
    return calls


@pytest.mark.parametrize("way", WAYS)
def test_coefficients_are_found_once_a_prompt(model, monkeypatch, way):
    calls = count_calls(model, monkeypatch)
    generated(model, batch_of(some_ids(6, 3), "left"), **WAYS[way])
    assert calls == [(2, 8)]


@pytest.mark.parametrize("way", WAYS)
def test_no_row_has_the_head_copied(model, way):
    """As torch does for the product of a weight without gradients with a view of states."""
    given = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _head, states: given.append(states[0])
    )
    generated(model, batch_of(some_ids(6, 3), "left"), **WAYS[way])
    hook.remove()
    assert given
    assert all(states.is_contiguous() for states in given)


@pytest.mark.parametrize(("kept", "count"), [(0, 6), (1, 1), (4, 4), (9, 6)])
def test_the_last_positions_are_those_of_all(model, kept, count):
    batch = batch_of(some_ids(6, 3), "left")
    with torch.no_grad():
        every = model(**batch).logits
        found = model(**batch, logits_to_keep=kept).logits
    torch.testing.assert_close(found, every[:, 6 - count :])


def test_given_coefficients_are_used(model, monkeypatch):
    batch = batch_of(some_ids(6, 3), "left")
    other = torch.rand(2, 8).softmax(-1)
    calls = count_calls(model, monkeypatch)
    found = generated(model, batch, coefficients=other, **GREEDY)
    assert not calls
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        for _ in range(7):
            logits = model(input_ids=ids, attention_mask=mask, coefficients=other).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    assert torch.equal(found, ids[:, 6:])


def test_embeddings_are_a_prompt_as_well(model):
    batch = batch_of(some_ids(6, 3), "left")
    expected = generated(model, batch, **GREEDY)
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
    mask = batch["attention_mask"]
    assert torch.equal(
        model.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY), expected
    )


def test_tasks_decide_in_generation(dense_path):
    model = grown(dense_path, routing="task", tasks=("add", "sort"))
    batch = batch_of(some_ids(6, 3), "left")
    tasks = torch.tensor([1, 0])
    found = generated(model, batch, task_ids=tasks, num_beams=2, **GREEDY)
    given = model.router(tasks).detach()
    assert torch.equal(found, generated(model, batch, coefficients=given, num_beams=2, **GREEDY))


@pytest.mark.parametrize("way", ["greedy", "beams", "no cache"])
def test_tokens_route_while_generating(dense_path, way):
    model = grown(dense_path, routing="token")
    rows = some_ids(6, 3)
    together = generated(model, batch_of(rows, "left"), **WAYS[way])
    for row, found in zip(rows, together, strict=True):
        alone = generated(model, batch_of([row], "left"), **WAYS[way])[0]
        assert torch.equal(found, alone)
        if way != "beams":
            whole = torch.cat([row, alone])
            with torch.no_grad():  # one pass over the whole sequence
                best = model(input_ids=whole[None]).logits[0].argmax(-1)
            assert torch.equal(alone, best[len(row) - 1 : -1])
    with pytest.raises(ValueError, match="needs the tokens in the cache"):
        generated(model, batch_of(rows, "left"), **WAYS["in chunks"])


@pytest.mark.parametrize("routing", ["instance", "token"])
def test_a_filled_cache_needs_its_coefficients(dense_path, routing):
    model = grown(dense_path, routing=routing)
    (ids,) = some_ids(8)
    with torch.no_grad():
        whole = model(input_ids=ids[None])
        parts = (whole.coefficients,) * 2
        if routing == "token":
            parts = whole.coefficients.split((5, 3), dim=1)
        first = model(input_ids=ids[None, :5], coefficients=parts[0])
        cache = first.past_key_values
        with pytest.raises(ValueError, match="coefficients = None: the cache"):
            model(input_ids=ids[None, 5:], past_key_values=cache)
        if routing == "instance":
            with pytest.raises(ValueError, match="coefficients = None: the cache"):
                model.generate(ids[None], past_key_values=cache, **GREEDY)
        rest = model(
            input_ids=ids[None, 5:],
            past_key_values=cache,
            coefficients=parts[1],
        )
    torch.testing.assert_close(rest.logits, whole.logits[:, 5:], rtol=1e-4, atol=1e-5)
