"""What the front makes of requests before an engine hears of them, without one."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from infra.serving.engine import Engine, Launch
from infra.serving.front import Naming, application

CONTEXT = 16
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@pytest.fixture
def ask(tmp_path):
    """Ask a front; returns its reply and the request that the engine has got."""
    tokenizer = Tokenizer(models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = {"folder": tmp_path, "log": tmp_path, "tokenizer": tmp_path / "tokenizer.json"}
    how = {"health": "", "trial": ("", {}), "model": "moe-1", "chats": True, "weights": 1}

    def ask(path, content, *, context=CONTEXT, **headers):
        heard = []

        def answer(request):
            heard.append(request)
            named = [header for header in request.headers.raw if header[0] == b"x-request-id"]
            return httpx.Response(200, headers=named, stream=httpx.ByteStream(b"{}"))

        async def run():
            client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
            engine = Engine(Launch(1, (), {}, **files, **how, port=1, context=context), client)

            async def lease():
                engine.take()
                return engine

            app = application(SimpleNamespace(lease=lease, served=0), Naming("moe", "", "", PATHS))
            asked = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=asked, base_url="http://localhost") as front:
                reply = await front.post(path, json=content, headers=headers)
                return reply, heard[-1] if heard else None

        return asyncio.run(run())

    return ask


@pytest.mark.parametrize(
    ("path", "prompt", "name"),
    [
        (PATHS[0], {"prompt": "word word word"}, "max_tokens"),
        (PATHS[1], {"messages": [{"role": "user", "content": "word word word"}]}, "max_tokens"),
        (PATHS[1], {"messages": [{"content": "word word word"}]}, "max_completion_tokens"),
        (PATHS[2], {"input": "word word word"}, "max_output_tokens"),
    ],
)
@pytest.mark.parametrize(
    ("limit", "sent"), [(10**9, 13), ("1000000000", 13), (14, 13), (13, 13), (2, 2), ("x", "x")]
)
def test_no_more_tokens_are_asked_for_than_the_context_leaves(ask, path, prompt, name, limit, sent):
    reply, heard = ask(path, prompt | {name: limit})
    assert reply.status_code == 200, reply.text
    assert json.loads(heard.content) == prompt | {name: sent, "model": "moe-1"}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ('{"max_new_tokens": 1000000000, "top_k": 5}', {"max_new_tokens": 13, "top_k": 5}),
        ('{"max_new_tokens": Infinity}', {"max_new_tokens": 13}),
        ('{"max_new_tokens": NaN}', {"max_new_tokens": 13}),
        ('{"max_new_tokens": "99"}', {"max_new_tokens": 13}),
        ('{"max_length": 1000000000, "num_beams": 4}', {"max_length": CONTEXT, "num_beams": 4}),
        ('{"max_new_tokens": 13, "max_length": null}', None),
    ],
)
def test_what_transformers_generates_by_has_the_same_limits(ask, given, sent):
    reply, heard = ask(PATHS[0], {"prompt": "word word word", "generation_config": given})
    assert reply.status_code == 200, reply.text
    said = json.loads(heard.content)["generation_config"]
    assert said == given if sent is None else json.loads(said) == sent


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_new_tokens": 5}, "must be JSON text of an object"),
        ("[5]", "must be JSON text of an object"),
        ("{", "must be JSON text of an object"),
        ('{"num_beams": 1000}', "num_beams = 1000; ask for 16 at most"),
        ('{"num_return_sequences": NaN}', "num_return_sequences = nan; ask for 16 at most"),
    ],
)
def test_what_nobody_can_generate_by_is_refused_before_the_engine_hears(ask, given, says):
    reply, heard = ask(PATHS[0], {"prompt": "word", "generation_config": given})
    assert (reply.status_code, heard) == (400, None)
    assert "generation_config" in reply.text
    assert says in reply.json()["error"]["message"]


def test_a_prompt_that_fills_the_context_is_answered_by_a_token(ask):
    _, heard = ask(PATHS[0], {"prompt": "word " * CONTEXT, "max_tokens": 5})
    assert json.loads(heard.content)["max_tokens"] == 1


def test_a_model_whose_context_is_unknown_is_asked_for_what_the_request_says(ask):
    _, heard = ask(PATHS[0], {"prompt": "word", "max_tokens": 10**9}, context=None)
    assert json.loads(heard.content)["max_tokens"] == 10**9


@pytest.mark.parametrize("name", ["request-1", "Anfrage-ü", "Anfrage-ü".encode("latin-1")])
def test_the_name_of_a_request_goes_to_the_engine_and_back_byte_by_byte(ask, name):
    sent = name if isinstance(name, bytes) else name.encode()
    reply, heard = ask(PATHS[0], {"prompt": "word"}, **{"x-request-id": sent})
    for headers in (reply.headers.raw, heard.headers.raw):
        assert [value for key, value in headers if key.lower() == b"x-request-id"] == [sent]
