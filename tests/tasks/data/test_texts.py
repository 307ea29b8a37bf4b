"""What texts a recipe may name, found before anything is computed; and the seed's own."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from chat import CHATML, save_chat_tokenizer
from pico import save_pico
from texts import pico_recipe, write_texts
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.recipe.schema import Lineage
from tasks.data.corpora import corpora
from tasks.data.documents import documents
from tasks.data.outside import outside, text_piece
from tasks.data.seed import seed
from tasks.data.seed_text import seed_text
from tasks.living.lineage import life_of
from tasks.recipes import check, validate
from tasks.training import Texts, train_piece
from upcycle_core.corpora.batches import packed_sequences
from upcycle_core.corpora.config import CorpusConfig, Source
from upcycle_core.corpora.reader import TokenCorpus, read_documents
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent
from upcycle_core.training.config import TrainingConfig

DOMAINS = ("letters", "numbers")
PARTS = ("calibration", "heldout")
IN_CHATS = "task_evaluation.chat_template"


def chats(path, *, system=False, tag=""):
    first = [{"role": "system", "content": "be kind"}] if system else []
    rows = [
        {
            "messages": [
                *first,
                {"role": "user", "content": f"{tag} what is {i}?"},
                {"role": "assistant", "content": f"it is {i}"},
            ]
        }
        for i in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"files": [str(path)], "form": "chat"}


@pytest.fixture
def values(tmp_path):
    """Two given experts of one seed whose tokenizer has ChatML; chats of each domain."""
    domains = {}
    for number, name in enumerate(DOMAINS):
        expert = save_pico(tmp_path / name, seed=number, vocab_size=400)
        save_chat_tokenizer(expert, "chatml")
        domains[name] = {
            "expert": str(expert),
            "calibration": chats(tmp_path / f"{name}.jsonl", tag=name),
            "heldout": chats(tmp_path / f"{name}-heldout.jsonl", tag=f"{name} heldout"),
        }
    return {
        "name": "pico",
        "domains": domains,
        "statistics": {"count": "responses", "sequence_length": 64},
        "evaluation": {"sequence_length": 64},
    }


def said(values, tmp_path):
    with pytest.raises(InputError) as error:
        check(validate(values), tmp_path)
    return {fault.field: fault.remedy for fault in error.value.faults}


def with_template(values, template):
    for domain in values["domains"].values():
        tokenizer = AutoTokenizer.from_pretrained(domain["expert"])
        tokenizer.chat_template = template
        shutil.rmtree(domain["expert"] + "/chat_template.jinja", ignore_errors=True)
        tokenizer.save_pretrained(domain["expert"])


def test_chats_that_the_experts_tokenizer_writes_pass(values, tmp_path):
    check(validate(values), tmp_path)


def test_chats_need_a_template_that_writes_all_roles(values, tmp_path):
    values["domains"]["letters"]["heldout"] = chats(tmp_path / "system.jsonl", system=True)
    check(validate(values), tmp_path)
    dropping = CHATML.replace("in messages %", "in messages if message['role'] != 'system' %")
    with_template(values, dropping)
    (found,) = said(values, tmp_path).items()
    assert found[0] == "domains.letters.heldout: chat_template"
    assert "leaves out what the role 'system' says" in found[1]


def test_chats_need_a_template_at_all(values, tmp_path):
    for number, domain in enumerate(values["domains"].values()):
        shutil.rmtree(domain["expert"])
        save_pico(tmp_path / domain["expert"], seed=number)
    found = said(values, tmp_path)
    assert set(found) == {
        f"domains.{name}.{part}: chat_template"
        for name in DOMAINS
        for part in ("calibration", "heldout")
    }
    assert all("the tokenizer has none; give it one" in remedy for remedy in found.values())


def test_responses_are_asked_of_templates_that_tell_them(values, tmp_path):
    with_template(values, "{{ messages | length }}" + CHATML)
    found = said(values, tmp_path)
    assert set(found) == {f"domains.{name}.calibration: chat_template" for name in DOMAINS}
    assert all("mark the assistant's text" in remedy for remedy in found.values())
    values["statistics"]["count"] = "all"
    check(validate(values), tmp_path)


def test_a_tokenizer_that_is_trained_here_writes_no_chats(tmp_path):
    values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    values["domains"]["letters"]["train"] = chats(tmp_path / "a.jsonl")
    found = said(values, tmp_path)
    assert "that is trained here has no chat template" in found["domains.letters.train.form"]


@pytest.mark.parametrize("trained", [True, False])
def test_tasks_in_chats_need_a_template_before_anything_is_trained(values, tmp_path, trained):
    values["tasks"] = {"own": {"heldout": "text", "domain": "letters"}}
    values["task_evaluation"] = {"chat_template": True}
    check(validate(values), tmp_path)
    if trained:
        more = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
        values = more | {name: values[name] for name in ("tasks", "task_evaluation")}
    else:
        for number, domain in enumerate(values["domains"].values()):
            shutil.rmtree(domain["expert"])
            save_pico(tmp_path / domain["expert"], seed=number)
    found = said(values, tmp_path)
    assert "has no chat template; set it to false" in found[IN_CHATS]


def test_a_given_expert_that_no_task_asks_needs_no_template(values, tmp_path):
    values["tasks"] = {"own": {"heldout": "text", "domain": "letters"}}
    values["task_evaluation"] = {"chat_template": True, "models": ["dume"]}
    del values["statistics"]["count"]
    for name, domain in values["domains"].items():
        domain |= {part: {"files": [str(tmp_path / f"{name}-{part}.txt")]} for part in PARTS}
        for part in PARTS:
            (tmp_path / f"{name}-{part}.txt").write_text(f"{name} {part} says more\n" * 30)
    (tmp_path / "numbers" / "chat_template.jinja").unlink()
    assert AutoTokenizer.from_pretrained(tmp_path / "numbers").chat_template is None
    check(validate(values), tmp_path)
    values["task_evaluation"]["models"] = None
    assert f"{tmp_path / 'numbers'} has no" in said(values, tmp_path)[IN_CHATS]


def test_the_same_text_in_two_domains_is_refused(tmp_path):
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    check(validate(values), tmp_path)
    shutil.copy(texts / "letters" / "heldout.txt", texts / "numbers" / "heldout.txt")
    found = said(values, tmp_path)
    assert set(found) == {"domains.numbers.heldout"}
    assert "is the same text as domains.letters.heldout" in found["domains.numbers.heldout"]
    text = (texts / "numbers" / "heldout.txt").read_text()
    (texts / "numbers" / "heldout.txt").write_text(text.replace("1", "2"))  # as large, no more
    check(validate(values), tmp_path)


def test_held_out_text_that_is_all_of_the_training_text_is_refused(tmp_path):
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    letters = values["domains"]["letters"]
    (texts / "letters" / "link.txt").symlink_to(texts / "letters" / "train.txt")
    for held in ("{folder}/letters/train.txt", str(texts / "letters" / "link.txt")):
        letters["heldout"] = {"files": [held]}
        (found,) = said(values, tmp_path).items()
        assert found[0] == "domains.letters.heldout"
        assert "all of domains.letters.train, too" in found[1]
        assert "leave heldout out" in found[1]
    letters["heldout"]["max_bytes"] = 1000  # training text yields, and some is left
    check(validate(values), tmp_path)
    letters["heldout"] = {"files": ["{folder}/letters/heldout.txt"]}
    letters["train"] = {"files": ["{folder}/letters/*.txt"]}
    check(validate(values), tmp_path)


def test_a_file_that_two_domains_hold_out_is_refused(tmp_path):
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values["domains"]["numbers"]["heldout"] = {"files": ["{folder}/*/heldout.txt"]}
    (found,) = said(values, tmp_path).items()
    assert found[0] == "domains.numbers.heldout"
    file = texts / "letters" / "heldout.txt"
    assert found[1] == f"{file} is held out for domains.letters, too; name it in one"
    values["domains"]["numbers"]["heldout"] = values["domains"]["letters"]["heldout"]
    (found,) = said(values, tmp_path).items()
    assert "is the same text as domains.letters.heldout" in found[1]


def test_a_file_that_trains_another_domain_is_not_held_out(tmp_path):
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values["domains"]["numbers"]["heldout"] = {"files": ["{folder}/letters/train.txt"]}
    (found,) = said(values, tmp_path).items()
    assert found[0] == "domains.numbers.heldout"
    file = texts / "letters" / "train.txt"
    assert found[1] == f"{file} trains domains.letters; hold out other text"


def test_responses_are_asked_of_chats_alone(tmp_path):
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values["statistics"]["count"] = "responses"
    values["experts"]["training"]["loss"] = "responses"
    values["domains"]["letters"]["train"] = chats(tmp_path / "a.jsonl")
    values["domains"]["letters"]["calibration"] = {"files": [str(texts / "letters" / "train.txt")]}
    with pytest.raises(InputError) as error:
        validate(values)
    found = sorted((fault.field, fault.remedy.split()[0]) for fault in error.value.faults)
    assert found == [
        ("experts.training.loss", "domains.numbers.train"),
        ("statistics.count", "domains.letters.calibration"),
        ("statistics.count", "domains.numbers.train"),
    ]


@pytest.fixture
def own_text(tmp_path):
    """A recipe whose seed has text of its own."""
    texts = write_texts(tmp_path / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values["seed_model"]["text"] = {"files": ["{folder}/letters/*.txt"]}
    return values


def test_a_seed_with_text_of_its_own_is_trained_on_that_alone(own_text, tmp_path):
    recipe = validate(own_text)
    check(recipe, tmp_path)
    assert seed_text.items(recipe) == [""]
    assert list(seed.inputs(recipe, "")) == ["seed_text/tokens/train", "tokenizer"]
    assert "seed_model.text" in seed_text.keys(recipe, "")
    assert "seed_model.text" not in seed.keys(recipe, "")
    del own_text["seed_model"]["text"]
    plain = validate(own_text)
    assert seed_text.items(plain) == []
    assert "corpora/letters/train" in seed.inputs(plain, "")


def test_a_text_for_a_seed_that_is_given_is_refused(own_text, tmp_path):
    own_text["seed_model"]["model"] = "/models/seed"
    with pytest.raises(InputError, match=r"seed_model\.text = None: no seed is trained here"):
        validate(own_text)


def test_the_seeds_text_is_looked_at_with_the_others(own_text, tmp_path):
    own_text["seed_model"]["text"] = {"files": ["{folder}/none.txt"]}
    assert "no such file" in said(own_text, tmp_path)["seed_model.text.files"]


def test_the_seeds_text_is_built_upon_while_domains_come(own_text):
    recipe = validate(own_text)
    assert "seed_text" in life_of(recipe).pinned(recipe)
    pinned = replace(recipe, lineage=Lineage(pinned={"seed_text": "1"}))
    assert seed_text.artifact("") in pinned.pinned


def test_bos_decides_tokens_and_no_documents(tmp_path):
    values = pico_recipe(tmp_path, domains=DOMAINS)
    before = validate(values)
    after = validate({**values, "corpus": {"bos": "never"}})
    assert documents.values(before, "letters") == documents.values(after, "letters")
    assert corpora.values(before, "letters") != corpora.values(after, "letters")


def test_the_piece_writes_the_seeds_tokens_without_what_domains_hold_out(tmp_path):
    texts = write_texts(tmp_path / "texts", domains=("letters",)) / "letters"
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", "llama3")
    config = CorpusConfig(bos="always", min_characters=1)
    common = {
        "progress": Silent(),
        "config": config,
        "seed": 0,
        "folder": None,
        "tokenizer": tokenizer,
    }
    held = Source(files=(str(texts / "heldout.txt"),))
    text_piece(out=tmp_path / "law", split="heldout", name="outside.law", source=held, **common)
    apart = [tmp_path / "law" / "documents" / "heldout.parquet"]
    every = Source(files=(str(texts / "train.txt"), str(texts / "heldout.txt")))
    text_piece(
        out=tmp_path / "seed",
        split="train",
        name="seed_model.text",
        source=every,
        apart_from=apart,
        **common,
    )
    found = list(read_documents(tmp_path / "seed" / "documents" / "train.parquet"))
    assert len(found) == 60
    assert not set(found) & set(read_documents(apart[0]))
    recipe = validate(pico_recipe(texts, domains=DOMAINS))
    assert {f"documents/{name}" for name in DOMAINS} <= set(outside.inputs(recipe, "law"))
    corpus = TokenCorpus(tmp_path / "seed" / "tokens" / "train")
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    assert [corpus.document(i).tolist() for i in range(60)] == [
        loaded(t)["input_ids"] for t in found
    ]


def test_responses_that_are_not_to_be_learnt_are_in_no_text_that_is_learnt_whole(values, tmp_path):
    rows = [json.loads(line) for line in (tmp_path / "letters.jsonl").read_text().splitlines()]
    for row in rows:
        unlearnt = {"role": "assistant", "content": "no", "weight": 0}
        row["messages"] = [row["messages"][0], unlearnt, *row["messages"]]
    path = tmp_path / "letters.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(validate(values), tmp_path)  # statistics train nothing
    letters = values["domains"]["letters"]
    values["seed_model"] = {"model": letters.pop("expert")}
    letters["train"] = letters.pop("calibration")
    training = {"sequence_length": 64, "steps": 2, "warmup_steps": 0}
    values["experts"] = {"training": training}
    (found,) = said(values, tmp_path).items()
    assert found[0] == "domains.letters.train: experts.training.loss"
    assert found[1].startswith("learns all that is said, and ")
    assert "weight 0" in found[1]
    training["loss"] = "responses"
    check(validate(values), tmp_path)


def test_training_with_loss_on_responses_starts_at_their_loss(values, tmp_path):
    """One step; its loss is that of the weights that it starts from."""
    expert = tmp_path / "letters"
    source = Source(**values["domains"]["letters"]["calibration"])
    text_piece(
        out=tmp_path / "text",
        split="train",
        name="chats",
        source=source,
        progress=Silent(),
        config=CorpusConfig(min_characters=1),
        seed=0,
        folder=None,
        tokenizer=expert,
    )
    tokens = tmp_path / "text" / "tokens" / "train"
    settings = {"steps": 1, "batch_size": 3, "sequence_length": 64, "warmup_steps": 0}
    config = TrainingConfig(loss="responses", precision="fp32", log_steps=1, **settings)
    found = train_piece(
        out=tmp_path / "trained",
        progress=Silent(),
        start=expert,
        data=Texts(train=[tokens]),
        config=config,
        seed=0,
        device="cpu",
    )
    rows = packed_sequences(
        [TokenCorpus(tokens)], sequence_length=64, count=3, seed=0, loss="responses"
    )
    model = AutoModelForCausalLM.from_pretrained(expert)
    losses = []
    for row in rows:
        with torch.no_grad():
            log_p = model(row["input_ids"][None]).logits[0].log_softmax(-1)
        losses += [
            -log_p[t - 1, label] for t, label in enumerate(row["labels"]) if t and label >= 0
        ]
    assert 0 < len(losses) < 3 * 64 / 2
    # fp32: sums in another order
    assert found["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
