"""Answers and coefficients of batches against one prompt at a time: no padding, no cache."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import upcycle_core.simoe.model  # noqa: F401  (registers the architecture)
from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join
from upcycle_core.errors import InputError
from upcycle_core.evaluation.instructions.activations import Activation, Use, expert_activations
from upcycle_core.evaluation.instructions.answers import answer, task_ids
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import gated_modules
from upcycle_core.simoe.upcycle import upcycle_in_memory

LENGTHS = (3, 17, 9, 1, 9)
NEW = 8


def save_simoe(directory: Path, dense: Path, tasks: tuple[str, ...] = (), **options) -> Path:
    """A SIMoE model whose prompts use different experts, which all do something."""
    config = SimoeUpcyclingConfig(experts=4, initial_spread=2.0, **options)
    model = upcycle_in_memory(dense, config, seed=0, tasks=tasks)
    torch.manual_seed(1)
    with torch.no_grad():
        for module in gated_modules(model).values():
            module.delta.normal_(std=0.2)
        for parameter in model.router.parameters():
            parameter.normal_()
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(dense).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    dense = save_pico(folder / "dense", seed=4)
    return {
        "dense": dense,
        "moe": join(folder / "moe").model,
        "simoe": save_simoe(folder / "simoe", dense),
        "token": save_simoe(folder / "token", dense, routing="token"),
        "task": save_simoe(folder / "task", dense, tasks=("t0", "t1"), routing="task"),
    }


def rows() -> list[dict]:
    """Prompts of other lengths and letters; task t2 is not among the trained ones."""
    return [
        {
            "prompt": "".join(chr(65 + (7 * n + 3 * i) % 50) for i in range(length)),
            "task": f"t{n % 3}",
            "category": "even" if n % 2 == 0 else "odd",
            "domain": "d",
        }
        for n, length in enumerate(LENGTHS)
    ]


def prompt_ids(tokenizer, prompt: str) -> torch.Tensor:
    """[1, S]: one token a character, then the blank line; newlines are no characters of pico's."""
    unknown = tokenizer.convert_tokens_to_ids("<|pad|>")
    ids = [ord(letter) - 30 for letter in prompt] + [unknown] * 2
    return torch.tensor([ids])


def task_of(model, row: dict) -> dict:
    if getattr(model.config, "routing", None) != "task":
        return {}
    return {"task_ids": torch.tensor([{"t0": 0, "t1": 1}.get(row["task"], -1)])}


@torch.no_grad()
def slow_answer(model, tokenizer, row: dict, ends: set[int], cut: int = 1000) -> str:
    """The likeliest token, one after the other, the whole text read anew each time.

    Prompts route: a model with coefficients is given those of the prompt alone.
    """
    ids = prompt_ids(tokenizer, row["prompt"])[:, -cut:]
    more = task_of(model, row)
    if getattr(model.config, "routing", None) == "instance":
        more["coefficients"] = model.coefficients(ids)
    said: list[int] = []
    while len(said) < NEW:
        logits = model(ids, use_cache=False, **more).logits[0, -1]
        token = int(logits.argmax())
        if token in ends:
            break
        said.append(token)
        ids = torch.cat((ids, torch.tensor([[token]])), dim=1)
    return tokenizer.decode(said, skip_special_tokens=True).strip()


def load(directory: Path, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("kind", ["dense", "moe", "simoe", "token", "task"])
def test_batches_say_what_a_loop_without_cache_and_padding_says(models, kind):
    model, tokenizer = load(models[kind])
    slow = [slow_answer(model, tokenizer, row, {0}) for row in rows()]
    assert len(set(slow)) > 2
    for batch_size in (1, 3):
        found = answer(models[kind], rows(), max_new_tokens=NEW, batch_size=batch_size)
        assert found.texts == slow, batch_size
        assert found.truncated == 0


@pytest.mark.parametrize("kind", ["dense", "moe", "simoe"])
def test_bf16_answers_are_those_of_a_model_in_bf16(models, kind):
    """Prompts are answered one by one: what is answered together is rounded together."""
    model, tokenizer = load(models[kind], torch.bfloat16)
    slow = [slow_answer(model, tokenizer, row, {0}) for row in rows()]
    found = answer(models[kind], rows(), max_new_tokens=NEW, batch_size=1, precision="bf16")
    assert found.texts == slow


def test_the_models_own_end_tokens_end_answers_and_nothing_else_of_its_settings_counts(
    models, tmp_path
):
    model, tokenizer = load(models["dense"])
    long = [slow_answer(model, tokenizer, row, {0}) for row in rows()]
    end = tokenizer.convert_tokens_to_ids(long[0].split()[3])
    config = {"eos_token_id": [0, end], "pad_token_id": 1}
    config |= {"do_sample": True, "temperature": 9.0, "repetition_penalty": 5.0, "max_length": 3}
    config |= {"suppress_tokens": [tokenizer.convert_tokens_to_ids(long[0].split()[0])]}
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    slow = [slow_answer(model, tokenizer, row, {0, end}) for row in rows()]
    found = answer(tmp_path, rows(), max_new_tokens=NEW, batch_size=4)
    assert found.texts == slow
    assert len(found.texts[0].split()) <= 3 < len(long[0].split())
    assert max(len(text.split()) for text in found.texts) > 3  # the others go on without it


def test_the_end_token_of_a_chat_template_ends_answers(models, tmp_path):
    model, tokenizer = load(models["dense"])
    plain = slow_answer(model, tokenizer, rows()[0], {0}).split()
    token, pad = tokenizer.convert_tokens_to_ids([plain[3], "<|pad|>"])
    head = model.lm_head.weight.data  # the pad token is now what is said fourth
    head[[token, pad]] = head[[pad, token]]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{{ '\\n\\n' if m['role'] == 'user' else '<|pad|>' }}{% endfor %}"
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = answer(tmp_path, rows()[:1], max_new_tokens=NEW, batch_size=1)
    assert found.texts == [" ".join(plain[:3])]


def test_long_prompts_lose_tokens_from_the_left_and_are_counted(models):
    model, tokenizer = load(models["simoe"])
    found = answer(models["simoe"], rows(), max_new_tokens=NEW, batch_size=3, max_prompt_tokens=10)
    assert found.truncated == 3  # 17, 9 and 9 letters, each with two newlines
    assert found.texts == [slow_answer(model, tokenizer, row, {0}, cut=10) for row in rows()]
    # 128 positions hold a prompt of 119 tokens and the 9 new ones that are read.
    long = [{"prompt": "a" * 118}, {"prompt": "a" * 117}, {"prompt": "a" * 114}]
    assert answer(models["dense"], long, max_new_tokens=9, batch_size=3).truncated == 1


def test_progress_hears_of_every_row(models):
    heard = []
    progress = SimpleNamespace(
        start=lambda what, total, unit: heard.append((what, total, unit)),
        advance=lambda amount: heard.append(amount),
    )
    answer(models["dense"], rows(), max_new_tokens=1, batch_size=3, progress=progress)
    assert heard == [("answering", 5, "prompts"), 3, 2]


def test_faults_are_told_before_a_model_is_read(models, tmp_path):
    with pytest.raises(InputError) as raised:
        answer(tmp_path, [{"prompt": " "}, {}], max_new_tokens=0, batch_size=0)
    fields = [fault.field for fault in raised.value.faults]
    assert fields == ["max_new_tokens", "batch_size", "rows[0].prompt", "rows[1].prompt"]
    with pytest.raises(InputError, match="nothing to answer"):
        answer(tmp_path, [], max_new_tokens=1, batch_size=1)
    with pytest.raises(InputError, match="leave room for a prompt"):
        answer(models["dense"], rows(), max_new_tokens=128, batch_size=1)
    with pytest.raises(InputError, match="give a SIMoE model"):
        expert_activations(models["dense"], rows())
    with pytest.raises(InputError, match="nothing to route"):
        expert_activations(models["simoe"], [])


@pytest.mark.parametrize("kind", ["dense", "simoe"])
def test_prompts_are_cut_at_the_positions_of_a_stretched_rope(models, tmp_path, kind):
    prompt = [{"prompt": "long " * 30, "task": "t0", "category": "c"}]  # 150 of 128 positions
    assert answer(models[kind], prompt, max_new_tokens=1).truncated == 1
    shutil.copytree(models[kind], tmp_path, dirs_exist_ok=True)
    (tmp_path / "checksums.json").unlink(missing_ok=True)  # of what is altered here
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.get("dense", config)["rope_parameters"]
    rope |= {"rope_type": "linear", "factor": 2.0}
    path.write_text(json.dumps(config))
    assert answer(tmp_path, prompt, max_new_tokens=1).truncated == 0
    with pytest.raises(InputError, match="the model holds 256 tokens"):
        answer(tmp_path, prompt, max_new_tokens=256)


@pytest.mark.parametrize("kind", ["simoe", "token", "task"])
@pytest.mark.parametrize("by", ["task", "category"])
def test_activations_are_means_over_single_prompts(models, kind, by):
    model, tokenizer = load(models[kind])
    groups: dict[str, list[torch.Tensor]] = {}
    for row in rows():
        with torch.no_grad():
            ids = prompt_ids(tokenizer, row["prompt"])
            alpha = model.coefficients(ids, **task_of(model, row))[0].double()
        if kind == "token":
            alpha = alpha.mean(0)
        groups.setdefault(row[by], []).append(alpha)
    found = expert_activations(models[kind], rows(), by=by, batch_size=3)
    assert [(own.domain, own.name) for own in found] == [("d", name) for name in sorted(groups)]
    for own in found:
        slow = sum(groups[own.name]) / len(groups[own.name])
        # fp32 in batches of other shapes
        assert own.coefficients == pytest.approx(slow.tolist(), abs=1e-5)
        assert sum(own.coefficients) == pytest.approx(1, abs=1e-5)
        assert own.count == len(groups[own.name])
        assert own.label == f"d: {own.name}"


def test_only_models_that_route_by_task_are_told_it():
    config = SimpleNamespace(routing="task", tasks=["b", "a"])
    found = task_ids(config, [{"task": "a"}, {"task": "c"}, {}, {"task": "b"}], "cpu")
    assert found["task_ids"].tolist() == [1, -1, -1, 0]
    assert task_ids(SimpleNamespace(routing="instance", tasks=[]), [{"task": "a"}], "cpu") == {}


def activation(name, count, *coefficients):
    return Activation(name=name, domain="", coefficients=coefficients, count=count)


def test_effective_experts_are_counted_over_prompts():
    """Three prompts of one task and one of another: means .75 .25 0 0."""
    found = Use.of([activation("a", 3, 1.0, 0.0, 0.0, 0.0), activation("b", 1, 0.0, 1.0, 0.0, 0.0)])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found.effective == pytest.approx(math.exp(entropy))
    assert found.apart == pytest.approx(entropy)  # a task has an expert of its own
    assert (found.leading, found.unused) == (0.75, (3, 4))
    assert found.warnings() == ["no task uses the experts 3, 4; their parameters stay in the file"]
    assert Use.from_dict(found.to_dict()) == found


def test_one_expert_for_all_is_said_to_be_no_mixture():
    found = Use.of([activation("a", 1, 0.95, 0.05), activation("b", 1, 0.93, 0.07)])
    assert found.apart == pytest.approx(0, abs=2e-3)
    (said,) = found.warnings()
    assert "one expert has 94.0 % of the coefficients: it is no mixture" in said
    assert not Use.of([activation("a", 1, 0.5, 0.5)]).warnings()


def test_a_router_that_gives_every_task_the_same_is_said_to_choose_nothing():
    (said,) = Use.of([activation("a", 1, 0.5, 0.5), activation("b", 2, 0.51, 0.49)]).warnings()
    assert "all 2 tasks use the experts alike, apart by 0.0000 nats" in said
    assert not Use.of([activation("a", 1, 0.5, 0.5), activation("b", 2, 0.7, 0.3)]).warnings()
