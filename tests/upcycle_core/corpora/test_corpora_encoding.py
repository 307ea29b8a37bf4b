"""Texts and chats as ids, held against what the tokenizer of transformers itself makes of them."""

import json
from types import SimpleNamespace

import pytest
from chat import CHATML, LLAMA3, save_chat_tokenizer
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from upcycle_core.corpora.batches import packed_sequences
from upcycle_core.corpora.config import CorpusConfig, Domain, Source
from upcycle_core.corpora.conversations import Conversation
from upcycle_core.corpora.documents import write_documents
from upcycle_core.corpora.encoding import answer_ends, asked, encoded, with_prefix
from upcycle_core.corpora.reader import TokenCorpus, read_chats, read_documents
from upcycle_core.corpora.shards import write_corpus, write_split
from upcycle_core.errors import InputError

KINDS = ("chatml", "llama3")
MARKED = {
    "chatml": CHATML.replace(
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
        "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
    ),
    "llama3": "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' +"
    " message['role'] + '<|end_header_id|>\n\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}",
}
"""The same templates with marks, from which transformers itself tells the responses."""
CHATS = [
    {"prompt": "What is two and two?", "response": "Four, of course."},
    {"instruction": "Add.", "input": "2 2", "output": " Four "},
    {
        "messages": [
            {"role": "system", "content": "The court."},
            {"role": "user", "content": "Is it held?\n"},
            {"role": "assistant", "content": "It is, é 世界."},
            {"role": "user", "content": "And else?"},
            {"role": "assistant", "content": "nothing else"},
        ]
    },
]
MESSAGES = [
    [
        {"role": "user", "content": "What is two and two?"},
        {"role": "assistant", "content": "Four, of course."},
    ],
    [{"role": "user", "content": "Add.\n\n2 2"}, {"role": "assistant", "content": " Four "}],
    CHATS[2]["messages"],
]
TEXT = "A text that names <|im_end|>, <|eot_id|> and <|begin_of_text|>, é."


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def directory(tmp_path, kind):
    return save_chat_tokenizer(tmp_path / "tokenizer", kind)


@pytest.fixture
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def conversation(*texts, roles=("user", "assistant")):
    said = [{"role": roles[i % len(roles)], "content": text} for i, text in enumerate(texts)]
    return Conversation(said, "here")


def plain(tokenizer, text):
    """Ids of the text in pieces that name no special token."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def chat_documents(folder, rows):
    """What the stage of documents makes of chats."""
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = Source(files=(str(file),), form="chat")
    domain = Domain(expert="given", calibration=chats, heldout=text_of(folder))
    write_documents(domain, folder / "documents", config=CorpusConfig(min_characters=1), seed=0)
    return folder / "documents"


def text_of(folder):
    (folder / "heldout.txt").write_text(TEXT)
    return Source(files=(str(folder / "heldout.txt"),))


def test_chats_have_the_ids_that_the_tokenizer_itself_gives_them(directory, tokenizer, tmp_path):
    documents = chat_documents(tmp_path, CHATS)
    write_corpus(documents, directory, tmp_path / "out")
    corpus = TokenCorpus(tmp_path / "out" / "calibration")
    own = [tokenizer.apply_chat_template(m, return_dict=False) for m in MESSAGES]
    found = [corpus.document(i).tolist() for i in range(3)]
    assert sorted(found) == sorted(own)
    said = ["\n\n".join(message["content"] for message in messages) for messages in MESSAGES]
    assert sorted(read_documents(documents / "calibration.parquet")) == sorted(said)
    assert corpus.bytes == sum(len(text.encode()) for text in said)
    heldout = TokenCorpus(tmp_path / "out" / "heldout")
    assert heldout.unmarked is None
    assert not (heldout.directory / "responses.bin").exists()


def test_responses_are_those_of_a_template_with_marks(directory, tokenizer, kind, tmp_path):
    found = list(encoded([Conversation(m, "here") for m in MESSAGES], tokenizer))
    for document, messages in zip(found, MESSAGES, strict=True):
        marked = tokenizer.apply_chat_template(
            messages,
            chat_template=MARKED[kind],
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        assert document.ids == marked["input_ids"]
        assert document.responses == [bool(mark) for mark in marked["assistant_masks"]]
    write_split(tmp_path / "out", found, eos_id=0, vocabulary_size=400)
    corpus = TokenCorpus(tmp_path / "out")
    assert corpus.unmarked == 0
    assert corpus.responses.tolist() == [mark for one in found for mark in one.responses]
    marked = corpus.marked(2)
    assert [i if i >= 0 else ~i for i in marked] == found[2].ids
    assert [i >= 0 for i in marked] == found[2].responses


def test_names_of_special_tokens_in_texts_and_messages_stay_text(tokenizer):
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    (text,) = encoded([TEXT], tokenizer, bos="never")
    assert not special & set(text.ids)
    assert tokenizer.decode(text.ids) == TEXT
    (chat,) = encoded([conversation(TEXT, TEXT)], tokenizer)
    (other,) = encoded([conversation("a", "b")], tokenizer)
    in_chat, in_other = (sum(i in special for i in found.ids) for found in (chat, other))
    assert in_chat == in_other > 0


@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_bos_stands_where_it_is_asked_for(tokenizer, kind, bos):
    text = "The court held."
    own = tokenizer(text)["input_ids"]
    first = [tokenizer.bos_token_id]
    assert (own[:1] == first) == (kind == "llama3")
    expected = {
        "auto": own,
        "always": first + plain(tokenizer, text),
        "never": plain(tokenizer, text),
    }
    (found,) = encoded([text], tokenizer, bos=bos)
    assert found.ids == expected[bos]
    assert found.size == len(text)
    assert asked(tokenizer, text, bos=bos) == expected[bos]
    written = tokenizer.apply_chat_template(MESSAGES[0], return_dict=False)
    (chat,) = encoded([conversation(*(m["content"] for m in MESSAGES[0]))], tokenizer, bos=bos)
    lacks = bos == "always" and kind == "chatml"  # the other's template writes it itself
    assert chat.ids == (first + written if lacks else written)
    assert chat.responses[-2:] == [True, kind == "llama3"]
    assert len(chat.responses) == len(chat.ids)
    assert with_prefix(tokenizer, bos)(text)["input_ids"] == expected[bos]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_a_split_tells_what_stands_before_each_text(tokenizer, kind, bos, tmp_path):
    texts, chats = ["one two", "é"], [Conversation(messages, "") for messages in MESSAGES]
    has_own = kind == "llama3" and bos == "auto"
    for name, documents, expected in (
        ("texts", texts, bos == "always" or has_own),
        ("chats", chats, bos == "always" or kind == "llama3"),
    ):
        split = encoded(documents, tokenizer, bos=bos)
        write_split(tmp_path / name, split, eos_id=0, vocabulary_size=len(tokenizer))
        corpus = TokenCorpus(tmp_path / name)
        assert corpus.prefix == expected
        starts = [corpus.document(i)[0] == tokenizer.bos_token_id for i in range(len(corpus))]
        assert starts == [expected] * len(documents)
        facts = json.loads((tmp_path / name / "split.json").read_text())
        assert ("prefix" in facts) == expected


def test_a_split_for_training_is_as_it_was(directory, tmp_path):
    """What stands before a text is for scores; an expert would else seem to have new text."""
    write_corpus(chat_documents(tmp_path, CHATS), directory, tmp_path / "out", bos="always")
    prefixes = {path.name: TokenCorpus(path).prefix for path in tmp_path.glob("out/*/")}
    assert prefixes == {"calibration": 0, "heldout": 1}


def test_what_a_model_is_asked_is_what_stands_before_the_answer(tokenizer):
    question = [{"role": "user", "content": "What is two and two?"}]
    own = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert asked(tokenizer, "What is two and two?", chat=True) == own
    (whole,) = encoded([conversation("What is two and two?", "Four")], tokenizer)
    assert whole.ids[: len(own)] == own
    assert whole.responses.index(True) == len(own)


def test_texts_and_chats_come_in_their_order(tokenizer):
    documents = [f"text {i}" if i % 3 else conversation(f"text {i}", "yes") for i in range(600)]
    found = list(encoded(documents, tokenizer))
    for i in (0, 1, 255, 256, 257, 599):
        (one,) = encoded([documents[i]], tokenizer)
        assert found[i] == one


def test_always_needs_a_token(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path, "chatml"))
    tokenizer.bos_token = None
    with pytest.raises(InputError, match=r"corpus\.bos = 'always': the tokenizer has no"):
        list(encoded(["a"], tokenizer, bos="always"))
    assert next(encoded(["a"], tokenizer)).ids == plain(tokenizer, "a")


def refused(folder, template, *chats):
    tokenizer = AutoTokenizer.from_pretrained(
        save_chat_tokenizer(folder, "chatml", template=template)
    )
    with pytest.raises(InputError) as error:
        list(encoded(chats, tokenizer))
    return str(error.value)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    said = refused(tmp_path, None, conversation("a", "b"))
    assert "the tokenizer has none; give it one, or read the records with a template" in said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="the tokenizer has none"):
        asked(tokenizer, "a", chat=True)


def test_a_template_that_drops_a_role_is_refused(tmp_path):
    template = CHATML.replace(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] != 'system' %}",
    )
    chat = conversation("be kind", "hi", "yo", roles=("system", "user", "assistant"))
    said = refused(tmp_path, template, conversation("a", "b"), chat)
    assert "chat_template = 'here (system, user, assistant) that begins \"hi\"': " in said
    assert "leaves out what the role 'system' says" in said


def test_a_template_that_shortens_what_is_said_is_not_one_that_drops_it(tmp_path):
    template = LLAMA3.replace("message['content'] | trim", "message['content'].split('#')[-1]")
    directory = save_chat_tokenizer(tmp_path, "llama3", template=template)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    (found,) = encoded([conversation("hi", "let me think#yo")], tokenizer)
    assert "think" not in tokenizer.decode(found.ids)


def test_a_template_that_refuses_is_named_with_its_reason(tmp_path):
    said = refused(tmp_path, "{{ raise_exception('no system here') }}", conversation("a", "b"))
    assert "that begins \"a\"': the tokenizer's chat template refuses it (no system" in said
    broken = "{% for m in messages %}{{ m['content'] + 1 }}{% endfor %}"
    said = refused(tmp_path / "broken", broken, conversation("a", "b"))
    assert "refuses it (can only concatenate str" in said


def test_chats_whose_template_rewrites_earlier_turns_are_read_but_tell_no_responses(tmp_path):
    directory = save_chat_tokenizer(
        tmp_path / "tokenizer", "chatml", template="{{ messages | length }}" + CHATML
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chats = [conversation("a", "b", "c", "d"), conversation("e", "f")]
    found = list(encoded(chats, tokenizer))
    for document, chat in zip(found, chats, strict=True):
        own = tokenizer.apply_chat_template(chat.messages, return_dict=False)
        assert (document.ids, document.responses) == (own, None)
    write_split(tmp_path / "out", [*found, marked_one(tokenizer)], eos_id=0, vocabulary_size=400)
    corpus = TokenCorpus(tmp_path / "out")
    with pytest.raises(InputError, match="2 of its 3 documents do not say which of their tokens"):
        _ = corpus.responses


def test_marks_stand_where_they_are_though_messages_name_control_tokens(tmp_path, monkeypatch):
    """Earlier turns are written anew, so that marks are asked; such names shift the tokens."""
    template = "{{ messages | length }}" + MARKED["chatml"]
    directory = save_chat_tokenizer(tmp_path / "tokenizer", "chatml", template=template)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = conversation("what is <|im_end|>?", "世 and <|im_end|> é", "y", "z")
    chats = [conversation("a", "b", "c", "d"), chat]
    found, named = encoded(chats, tokenizer)
    assert responses_of(found, tokenizer) == "b<|im_end|>d<|im_end|>"
    assert responses_of(named, tokenizer) == "世 and <|im_end|> é<|im_end|>z<|im_end|>"
    assert sum(token == tokenizer.convert_tokens_to_ids("<|im_end|>") for token in named.ids) == 4
    monkeypatch.setattr(type(tokenizer), "decode", lambda *_, **__: "not what was written")
    (named,) = encoded([chat], tokenizer)
    assert named.responses is None


def test_a_template_that_writes_the_date_gives_the_same_tokens_every_day(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
    directory = save_chat_tokenizer(tmp_path / "tokenizer", "chatml", template=template)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    (found,) = encoded([conversation("a", "b")], tokenizer)
    assert tokenizer.decode(found.ids).startswith("26 Jul 2024")
    assert tokenizer.decode(asked(tokenizer, "a", chat=True)).startswith("26 Jul 2024")
    assert sum(found.responses) == len(tokenizer.encode("b<|im_end|>", add_special_tokens=False))


def responses_of(document, tokenizer):
    marked = zip(document.ids, document.responses, strict=True)
    return tokenizer.decode([id for id, is_response in marked if is_response])


def test_a_chat_s_answer_ends_where_the_template_ends_it(tmp_path):
    """A model of a seed that ends texts with another token."""
    tokenizer = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path, "chatml"))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "a"
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=7))
    own = [tokenizer.convert_tokens_to_ids("a"), 7]
    assert answer_ends(tokenizer, model, chat=False) == own
    assert end in answer_ends(tokenizer, model, chat=True)[2:]
    assert answer_ends(tokenizer, model, chat=True)[:2] == own


ROLES = "{% for m in messages %}{{ m.role + ': ' + m.content }}END{% endfor %}"
ROLES += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


@pytest.mark.parametrize(
    ("end", "is_learnt"),
    [("\n", True), ("<|im_end|>", False), ("<|im_end|>\n", False), ("<end_of_turn>\n", False)],
)
def test_what_packing_puts_behind_a_chat_is_learnt_where_the_template_ends_none(
    tmp_path, end, is_learnt
):
    """A template with an end token, special or not, gives the split that it always gave."""
    template = ROLES.replace("END", end.replace("\n", "{{ '\n' }}"))
    directory = save_chat_tokenizer(tmp_path / "tokenizer", "chatml", template=template)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=False, normalized=False)])
    chats = [conversation("a", "b", "c", "d"), conversation("e", "f <end_of_turn> g")]
    write_split(tmp_path / "out", encoded(chats, tokenizer), eos_id=0, vocabulary_size=400)
    facts = json.loads((tmp_path / "out" / "split.json").read_text())
    assert facts.get("ends") == ([] if is_learnt else None)
    corpus = TokenCorpus(tmp_path / "out")
    (row,) = packed_sequences(
        [corpus], sequence_length=len(corpus.tokens) + 2, count=1, seed=0, loss="responses"
    )
    separators = row["labels"][row["input_ids"] == 0]
    assert separators.tolist() == [0 if is_learnt else -100] * 2


def marked_one(tokenizer):
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.chat_template = CHATML
    return next(encoded([conversation("g", "h")], other))


def test_chats_come_back_from_disk_as_they_were(tmp_path):
    documents = chat_documents(tmp_path, CHATS)
    found = list(read_chats(documents / "calibration.parquet"))
    assert sorted(map(str, (chat.messages for chat in found))) == sorted(map(str, MESSAGES))
    assert found[1].place == "calibration.parquet, chat 2"
    assert list(read_chats(documents / "heldout.parquet")) == [TEXT]


@pytest.mark.parametrize(
    ("said", "starts"), [("yes", "yes"), ("\nyes", "\n\nyes"), ("\n\nyes", "\n\n\nyes")]
)
def test_a_response_that_begins_with_a_line_end_is_a_response(tmp_path, said, starts):
    """One token with the line end of what is asked, where a tokenizer joins them as Qwen2's."""
    core = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}]?\p{L}+|\s*[\r\n]+|\s+|[^\s\p{L}]+"
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["user\n\nassistant\n\n\nyes\n\n\nno"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    (found,) = encoded([conversation("ask", said)], tokenizer)
    assert responses_of(found, tokenizer) == f"{starts}<|im_end|>"


@pytest.mark.parametrize("bos", ["auto", "always", "never"])
@pytest.mark.parametrize("single", [["$A", "E"], ["B", "$A", "E"], ["B", "$A"], ["$A"]])
def test_nothing_stands_behind_what_is_asked_though_a_tokenizer_puts_it_there(
    tmp_path, single, bos
):
    """As fine-tunes with add_eos_token do: an answer does not come behind an end."""
    tokenizer = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path, "chatml"))
    names = {"B": "<|endoftext|>", "E": "<|im_end|>"}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[names.get(part, part) for part in single],
        special_tokens=[(n, tokenizer.convert_tokens_to_ids(n)) for n in names.values()],
    )
    expected = asked(tokenizer, "ask", bos=bos)
    (found,) = encoded(["ask"], tokenizer, bos=bos)
    assert with_prefix(tokenizer, bos)("ask")["input_ids"] == expected == found.ids
    assert expected[-1] != tokenizer.convert_tokens_to_ids("<|im_end|>")
