import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.chat import save_chat_tokenizer
from tests.pico import save_pico
from tests.upcycle_core.ders import grown as ders
from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.simoe import grown as simoe
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig
from upcycle_core.errors import InputError
from upcycle_core.moe.inspect import routers_of
from upcycle_core.moe.trace import Pieces, Routing, trace

FAMILIES = ["llama", "qwen2", "qwen3", "olmo2", "ernie4_5"]
PROMPT = [5, 17, 42, 3, 80, 11]
NEW = 12


class NoText:
    """A tokenizer of tokens whose text does not matter."""

    pad_token_id = 1

    def decode(self, ids, **_):
        return "".join(f"<{token}>" for token in ids)


@pytest.fixture(scope="module", params=FAMILIES)
def joined(request, tmp_path_factory):
    return join(tmp_path_factory.mktemp(request.param), request.param, top_k=2)


@pytest.fixture(scope="module")
def model(joined):
    return load_causal_lm(joined.model)


def traced(model, *, tokenizer=None, prompt=PROMPT, **options):
    """All tokens, and why it ended."""
    seen = []
    options = {"tokens": NEW, "temperature": 0.0} | options
    ending = trace(model, tokenizer or NoText(), prompt, take=seen.append, **options)
    return seen, ending


def answer_of(seen):
    return [token.id for token in seen if not token.is_given]


def slow_shares(model, ids):
    """[S, L, D]: the two best experts of each layer, from its router's input without a cache."""
    inputs = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _module, given: inputs.append(given[0][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    shares = torch.zeros(len(ids), len(inputs), 3)
    for layer, x_SH in enumerate(inputs):
        probabilities = (x_SH @ routers_of(model)[layer].weight.T).softmax(-1)
        for position, row in enumerate(probabilities.tolist()):
            best = sorted(range(3), key=lambda expert: -row[expert])[:2]
            for expert in best:
                shares[position, layer, expert] = row[expert] / sum(row[e] for e in best)
    return shares


def test_an_answer_is_that_of_generate_and_its_shares_those_of_a_pass_without_cache(model):
    seen, ending = traced(model)
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    assert [token.id for token in seen] == expected[0].tolist()
    assert [token.is_given for token in seen[: len(PROMPT) + 1]] == [True] * len(PROMPT) + [False]
    assert ending == ("end" if seen[-1].id == 0 else "length")

    slow = slow_shares(model, [token.id for token in seen[:-1]])
    given = torch.stack([token.shares for token in seen if token.is_given])
    made = torch.stack([token.shares for token in seen if not token.is_given])
    # fp32, in another order than with the cache.
    torch.testing.assert_close(given, slow[: len(PROMPT)], atol=1e-5, rtol=0)
    torch.testing.assert_close(made, slow[len(PROMPT) - 1 :], atol=1e-5, rtol=0)


def test_who_asks_may_name_what_ends_an_answer(model):
    first = answer_of(traced(model)[0])[0]
    seen, ending = traced(model, ends={first, 3})
    assert (answer_of(seen), ending) == ([first], "end")


def test_sampling_is_that_of_generate(model):
    seen, _ = traced(model, temperature=0.9, seed=5)
    torch.manual_seed(5)
    sampling = {"do_sample": True, "temperature": 0.9}
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, **sampling)
    assert [token.id for token in seen] == expected[0].tolist()
    assert answer_of(traced(model, temperature=0.9, seed=6)[0]) != answer_of(seen)
    whole, same = (traced(model, temperature=warm, seed=5)[0] for warm in (2, 2.0))
    assert answer_of(whole) == answer_of(same)


def test_one_expert_answers_as_its_dense_model_with_the_shared_backbone(joined, model, tmp_path):
    """The average: the mean of the experts' FFNs in the same backbone."""
    dense = load_causal_lm(joined.experts["domain1"])
    tensors = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    mean = {
        name: torch.stack(
            [CheckpointReader(path).tensor(name) for path in joined.experts.values()]
        ).mean(0)
        for name in tensors
        if ".mlp." in name
    }
    backbone = CheckpointReader(joined.backbone)
    shared = {name: backbone.tensor(name) for name in tensors if ".mlp." not in name}
    for through, own in ((1, {}), ("average", mean)):
        dense.load_state_dict({**tensors, **shared, **own})
        expected = dense.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
        seen, _ = traced(model, through=through)
        assert [token.id for token in seen] == expected[0].tolist()
        row = [0.0, 1.0, 0.0] if through == 1 else [1 / 3] * 3
        assert all(torch.equal(token.shares, torch.tensor([row, row])) for token in seen)
    before = answer_of(traced(model)[0])
    assert answer_of(traced(load_causal_lm(joined.model))[0]) == before


def test_it_stops_inside_a_pass(joined):
    model = load_causal_lm(joined.model)
    asked = []

    def is_stopped():
        asked.append(None)
        return len(asked) > 8 + len(PROMPT)

    model.generation_config.eos_token_id = None
    seen, ending = traced(model, is_stopped=is_stopped)
    # Asked for the prompt and each of its tokens, and of each pass in both layers and after: the
    # third is left half-way.
    assert (len(answer_of(seen)), ending) == (2, "stopped")
    assert len(asked) == 9 + len(PROMPT)
    assert answer_of(traced(model)[0])[:2] == answer_of(seen)


def test_it_stops_while_it_tells_of_the_prompt(model):
    told = []
    asked = {"tokens": NEW, "temperature": 0.0, "is_stopped": lambda: len(told) == 4}
    assert trace(model, NoText(), PROMPT, take=told.append, **asked) == "stopped"
    assert [token.id for token in told] == PROMPT[:4]


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """A MoE whose tokens are bytes and pieces of words."""
    folder = tmp_path_factory.mktemp("bytewise")
    path = join(folder, vocab_size=512, eos_token_id=None, pad_token_id=None).model
    save_chat_tokenizer(path, "chatml")
    return load_causal_lm(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_of_an_answer_are_the_decoded_answer(bytewise, seed):
    model, tokenizer = bytewise
    prompt = tokenizer("né 東京")["input_ids"]
    options = {"prompt": prompt, "tokens": 60, "temperature": 3.0, "seed": seed}
    seen, _ = traced(model, tokenizer=tokenizer, **options)
    text = "".join(token.text for token in seen if not token.is_given)
    assert text == tokenizer.decode(answer_of(seen), skip_special_tokens=True)
    assert "".join(token.text for token in seen if token.is_given) == "né 東京"


def test_a_character_of_several_tokens_comes_whole(bytewise):
    _, tokenizer = bytewise
    text = "a🎉é<|im_end|>"
    ids = tokenizer(text, split_special_tokens=False)["input_ids"]
    for special, end in ((False, ""), (True, "<|im_end|>")):
        pieces = Pieces(tokenizer, special=special)
        assert [pieces.add(token) for token in ids] == ["a", "", "", "", "🎉", "", "é", end]
    # The bytes of a character that never ends are shown as what they are, with the last one.
    pieces = Pieces(tokenizer)
    said = [pieces.add(token, is_last=number == 2) for number, token in enumerate(ids[:3])]
    assert said == ["a", "", "\ufffd"]


def spaced():
    """A tokenizer as Llama 2's: a space is a part of a word, and bytes are tokens."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁the", "."]
    core = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


def slow_pieces(tokenizer, ids, *, special):
    """All is decoded with every token; what may still become a character waits."""
    said, text = [], ""
    for end in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:end], skip_special_tokens=not special)
        certain = whole if end == len(ids) else whole.rstrip("\ufffd")
        said.append(certain[len(text) :])
        text = max(text, certain, key=len)
    return said


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", ["bytewise", "spaced"])
def test_a_long_text_is_told_as_it_is_decoded_and_a_few_tokens_at_a_time(request, kind, special):
    draw = torch.Generator().manual_seed(3)
    if kind == "bytewise":
        tokenizer = request.getfixturevalue("bytewise")[1]
        ids = torch.randint(0, len(tokenizer), (1500,), generator=draw).tolist()
    else:
        tokenizer, words = spaced(), [[0], [257], [258], [259], [260], [261]]
        words += [[1 + byte for byte in character.encode()] for character in "é東🎉"]
        drawn = torch.randint(0, len(words), (700,), generator=draw).tolist()
        ids = [id for word in drawn for id in words[word]]
    decoded = []

    class Counting:
        def decode(self, ids, **options):
            decoded.append(len(ids))
            return tokenizer.decode(ids, **options)

    pieces = Pieces(Counting(), special=special)
    said = [pieces.add(id, is_last=number == len(ids) - 1) for number, id in enumerate(ids)]
    assert said == slow_pieces(tokenizer, ids, special=special)
    assert "".join(said) == tokenizer.decode(ids, skip_special_tokens=not special)
    assert sum(decoded) < 40 * len(ids)


def test_a_dense_model_has_no_shares_and_no_experts(tmp_path):
    dense = load_causal_lm(save_pico(tmp_path))
    assert Routing.of(dense) == Routing("none", 0, 0)
    seen, _ = traced(dense)
    assert {token.shares.shape for token in seen} == {(0, 0)}
    for through in (0, "average"):
        with pytest.raises(InputError, match="no routers"):
            traced(dense, through=through)


def test_a_ders_model_answers_and_shows_what_the_moe_it_stores_does(tmp_path):
    grown = ders.grow(tmp_path)
    exact = CodecConfig(codec="sparse", drop_rate=0.0)
    compress(grown.model, tmp_path / "ders", config=exact, base=grown.seed, max_shard_bytes=10**9)
    stock, model = load_causal_lm(grown.model), load_causal_lm(tmp_path / "ders")
    for through in ("routers", 1):
        seen, expected = traced(model, through=through)[0], traced(stock, through=through)[0]
        assert [token.id for token in seen] == [token.id for token in expected]
        shares, wanted = (torch.stack([t.shares for t in s]) for s in (seen, expected))
        # fp32: base and delta are added up in another order.
        torch.testing.assert_close(shares, wanted, atol=1e-4, rtol=0)
    with pytest.raises(InputError, match="not stored as weights that can be averaged"):
        traced(model, through="average")


@pytest.mark.parametrize("routing", ["instance", "token"])
def test_coefficients_of_simoe_are_shares_of_all_layers(tmp_path, routing):
    model = simoe.grown(simoe.save_dense(tmp_path / "dense"), routing=routing).eval()
    by = {"instance": "prompt", "token": "token"}[routing]
    experts, masks = model.config.num_simoe_experts, simoe.all_masks(model)
    assert Routing.of(model) == Routing(by, 1, experts)
    seen, _ = traced(model)
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    assert [token.id for token in seen] == expected[0].tolist()
    with torch.no_grad():
        found = model.coefficients(torch.tensor([[token.id for token in seen[:-1]]]))
        if routing == "instance":
            found = model.coefficients(torch.tensor([PROMPT])).expand(len(seen) - 1, -1)[None]
    made = torch.stack([token.shares[0] for token in seen if not token.is_given])
    torch.testing.assert_close(made, found[0, len(PROMPT) - 1 :], atol=1e-5, rtol=0)
    for through, alpha in (
        (1, torch.eye(experts)[1]),
        ("average", torch.full((experts,), 1 / experts)),
    ):
        dense = simoe.merged(model, load_causal_lm(tmp_path / "dense"), alpha, masks)
        expected = dense.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
        seen, _ = traced(model, through=through)
        assert [token.id for token in seen] == expected[0].tolist()
        assert all(torch.equal(token.shares, alpha[None]) for token in seen)
