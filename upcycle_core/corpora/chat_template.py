"""A tokenizer's chat template, as it writes conversations: token ids, and which are responses."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.calls import function_name, tools_of, with_objects
from upcycle_core.corpora.conversations import (
    EXTRAS,
    LISTS,
    OPENING,
    Conversation,
    Message,
    is_learnt,
    thoughts_of,
    whole_text,
)
from upcycle_core.errors import Fault, InputError

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What a chat template marks the assistant's text with, if it does."""
DAY = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"
"""Before a template that writes today's date, as Llama 3's do; the day that they name themselves
where they are told none."""
REFUSALS = (TypeError, ValueError, LookupError, AttributeError)
"""What a template's own expressions raise."""
SAID = "x{number}x"
"""Stands for a message when a template is asked whether it writes all of them."""


class Encoded(NamedTuple):
    """A document.

    Args:
        ids: Token ids.
        size: UTF-8 bytes of its text; of a chat, of what is said in it.
        responses: Which tokens are responses, their end tokens included; None of a text, and of a
            chat whose template does not tell.
        prefix: Ids before its text that stand for none of its bytes: a beginning-of-sequence token.
        is_open: Whether it is a chat that ends in a response, and that with no end token.
    """

    ids: Sequence[int]
    size: int
    responses: Sequence[bool] | None = None
    prefix: int = 0
    is_open: bool = False


class ChatTemplate:
    """A tokenizer's chat template, as it writes conversations.

    Args:
        tokenizer: Loaded; it may have no template, until one is asked for.
        prefix: Ids that stand before a chat even where the template does not write them.
        template: Another than the tokenizer's.
    """

    def __init__(
        self, tokenizer: Any, *, prefix: Sequence[int] = (), template: str | None = None
    ) -> None:
        self.tokenizer, self.prefix = tokenizer, list(prefix)
        self.template = template
        added = tokenizer.added_tokens_decoder.items()
        self.special = {index for index, token in added if token.special}
        self.special |= {*tokenizer.all_special_ids}
        self._shows: dict[tuple[Any, ...], list[str]] = {}
        self._frames: dict[str, list[str]] = {}

    def document(self, chat: Conversation) -> Encoded:
        """A chat as a document: all that the tokenizer's own ``apply_chat_template`` gives.

        Raises:
            InputError: The tokenizer has no template, or it refuses the chat or leaves out what
                some role says.
        """
        ids = self.ids(chat)
        try:
            responses: list[bool] | None = self.responses(chat, ids)
        except InputError:
            responses = None
        before = self.before(ids)
        is_open = bool(responses and responses[-1]) and self._is_open(chat, ids)
        if responses is not None:
            responses = [*[False] * len(before), *responses]
        whole = [*before, *ids]
        prefix = int(whole[:1] == [self.tokenizer.bos_token_id])
        return Encoded(whole, len(whole_text(chat.messages).encode()), responses, prefix, is_open)

    def before(self, ids: list[int]) -> list[int]:
        """What stands before a chat of these ``ids``: the prefix, where they lack it."""
        return [] if ids[: len(self.prefix)] == self.prefix else self.prefix

    def ids(self, chat: Conversation) -> list[int]:
        """Token ids of the whole chat.

        Raises:
            InputError: As ``document``.
        """
        with _refusals(chat):
            ids = self._written(chat.messages)
            left_out = [f"what the role {role!r} says" for role in self._left_out(chat.messages)]
            left_out += self._unsaid(chat.messages)
        if left_out:
            remedy = f"the tokenizer's chat template leaves out {left_out[0]} here; mend it, or "
            remedy += "remove those messages"
            raise InputError(Fault("chat_template", chat.place, remedy))
        return ids

    def end(self, chat: Conversation) -> int | None:
        """The special token that ends the last response; None where it ends with none.

        Raises:
            InputError: As ``document``.
        """
        ids = self.ids(chat)
        last = ids[self._end_of_response(ids) - 1 :][:1]
        return next((index for index in last if index in self.special), None)

    def asked(self, messages: list[Message]) -> list[int]:
        """Token ids of what the model is asked, up to where its answer begins.

        Raises:
            InputError: The tokenizer has no template.
        """
        # Of who asks all marks are text, as other readers have them.
        ids = self._written(messages, has_marks=False, add_generation_prompt=True)
        return [*self.before(ids), *ids]

    def responses(self, chat: Conversation, ids: list[int]) -> list[bool]:
        """Which of the ``ids`` of a chat are responses: what the template adds to what is asked.

        Those of weight 0 are none.

        Where writing the prompt alone does not give a prefix of the whole, as in templates that
        shorten earlier turns, the template's own marks are used, if it has them.

        Raises:
            InputError: It has none.
        """
        found = [False] * len(ids)
        for i, message in enumerate(chat.messages):
            if not is_learnt(message):
                continue
            with _refusals(chat):
                before = self._written(chat.messages[:i], add_generation_prompt=True)
                is_last = i + 1 == len(chat.messages)
                upto = ids if is_last else self._written(chat.messages[: i + 1])
            start = self._start_of_response(before, upto)
            if start is None or ids[: len(upto)] != upto:
                return self._marked(chat, ids)
            stop = self._end_of_response(upto)
            found[start:stop] = [True] * (stop - start)
        return found

    def _start_of_response(self, before: list[int], upto: list[int]) -> int | None:
        """Where the response begins behind what is asked; None if that is not how it begins.

        White space at its beginning may be one token with the end of what is asked. That token is
        the response's.
        """
        if upto[: len(before)] == before:
            return len(before)
        last = len(before) - 1
        if upto[:last] != before[:last]:
            return None
        grown, asked = (self.tokenizer.decode(ids[last : last + 1]) for ids in (upto, before))
        return last if grown.startswith(asked) and not grown.strip() else None

    def _end_of_response(self, ids: list[int]) -> int:
        """Where the last response ends: with its end token, not with white space behind that."""
        stop = len(ids)
        while stop and ids[stop - 1] not in self.special:
            if self.tokenizer.decode(ids[stop - 1 : stop]).strip():
                return len(ids)
            stop -= 1
        return stop

    def _is_open(self, chat: Conversation, ids: list[int]) -> bool:
        """Whether it ends in text: in no end token, nor what the template has for one."""
        frame = self._frame(self._template(chat.messages))
        ends = self.special.union(self.tokenizer.convert_tokens_to_ids(frame))
        last = (i for i in reversed(ids) if i in ends or self.tokenizer.decode([i]).strip())
        return next(last, None) not in ends

    def _marked(self, chat: Conversation, ids: list[int]) -> list[bool]:
        """Where the template says that the assistant speaks, and the end token behind."""
        template = self._template(chat.messages)
        if any(m["role"] == "assistant" and not is_learnt(m) for m in chat.messages):
            raise self._untold(chat, ids, "leave out responses of weight 0")
        if not GENERATION_BLOCK.search(template):
            more = "mark the assistant's text in the template with {% generation %}"
            raise self._untold(chat, ids, more)
        out = self.tokenizer.apply_chat_template(
            self._given(chat.messages),
            tools=tools_of(chat.messages),
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        # Messages that name a control token are text among the ids, and tokens among these.
        is_same = list(out["input_ids"]) == ids
        marks = out["assistant_masks"] if is_same else self._marks_of_text(chat, ids)
        if marks is None:
            raise self._untold(chat, ids, "take the names of control tokens out of it")
        found = [bool(mark) for mark in marks]
        for i in range(1, len(ids)):
            behind = found[i - 1] and ids[i - 1] not in self.special
            found[i] = found[i] or (behind and ids[i] in self.special)
        return found

    def _untold(self, chat: Conversation, ids: list[int], more: str) -> InputError:
        """That where responses begin is not told, and what to do, with one thing ``more``."""
        before = self._written(chat.messages[:-1], add_generation_prompt=True)
        opens = self.tokenizer.decode(before).rstrip().endswith(OPENING)
        if opens and self._start_of_response(before, ids) is None:
            remedy = (
                f"opens a thought ({OPENING}) where it asks, and writes none here; take that out "
            )
            remedy += "of its generation prompt, give the response a thought if it writes those"
        else:
            remedy = "writes this conversation so that its start is not what the model is asked; "
            remedy += "split it into records of one response each"
        remedy = f"the tokenizer's chat template {remedy}, or {more}"
        return InputError(Fault("chat_template", chat.place, remedy))

    def _marks_of_text(self, chat: Conversation, ids: list[int]) -> list[bool] | None:
        """The same from where the marks stand in the text; None where ids do not give it back."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            [self._given(chat.messages)],
            tools=tools_of(chat.messages),
            chat_template=self._template(chat.messages),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        [text], [spans] = rendered
        if self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
            return None

        def written(count: int) -> int:
            """Letters of so many tokens; one that is not complete is none."""
            said = self.tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False)
            return len(said.rstrip("\ufffd"))

        found = [False] * len(ids)
        for start, stop in spans:
            first, behind = (
                bisect_left(range(len(ids)), letters, key=written) for letters in (start, stop)
            )
            first -= written(first) > start  # a token that begins before the mark is in it
            found[first:behind] = [True] * (behind - first)
        return found

    def _left_out(self, messages: Sequence[Message]) -> list[str]:
        """Roles of which the template does not write what they say, where all speak in turn."""
        shape = tuple(
            (message["role"], bool(message["content"]), *(n for n in EXTRAS if message.get(n)))
            for message in messages
        )
        if shape not in self._shows:
            said = [
                SAID.format(number=number) if m["content"] else ""
                for number, m in enumerate(messages)
            ]
            asked = [
                message | {"content": text} for message, text in zip(messages, said, strict=True)
            ]
            written = self._text(asked)
            self._shows[shape] = [
                message["role"] for message in asked if message["content"] not in written
            ]
        return self._shows[shape]

    def _unsaid(self, messages: Sequence[Message]) -> Iterator[str]:
        """What the template does not write of what is more than said: of the last response what is
        thought, for earlier thoughts are dropped by design; of all which functions are called, and
        which there are.
        """
        thoughts = list(thoughts_of(messages[-1]))
        names = {
            name: [function_name(call) for message in messages for call in message.get(name, ())]
            for name in LISTS
        }
        if not thoughts and not any(names.values()):
            return
        written = "".join(self._text(messages).split())
        for thought in thoughts:
            if "".join(thought.split()) not in written:
                yield "what the last response thinks"
        for name, functions in names.items():
            if any(function and function not in written for function in functions):
                yield f"its {name}"

    def _text(self, messages: Sequence[Message]) -> str:
        """The chat as the template writes it."""
        return self._rendered(self._given(messages))

    def _rendered(self, messages: Sequence[Message], template: str | None = None) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=tools_of(messages),
            chat_template=template or self._template(messages),
            tokenize=False,
        )

    def _given(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template takes them: one that writes arguments as JSON gets objects where
        they are JSON text, which it would encode twice; one that writes such text as it is gets
        that."""
        objects, texts = with_objects(messages)
        try:
            written = self._rendered(messages) if texts else ""
        except (jinja2.TemplateError, *REFUSALS):
            return objects
        encoded = (
            json.dumps(t, ensure_ascii=is_ascii) for t in texts for is_ascii in (True, False)
        )
        return objects if any(twice in written for twice in encoded) else list(messages)

    def _frame(self, template: str) -> list[str]:
        """Added tokens that are not special, and that the template writes around messages.

        Their names in messages stay text, as those of special tokens do. Others that it has,
        <think> and <tool_call> among them, are what assistants write.
        """
        if template not in self._frames:
            asked, said = (SAID.format(number=number) for number in range(2))
            user = {"role": "user", "content": asked}
            try:
                whole = self._rendered([user, {"role": "assistant", "content": said}], template)
                around = self._rendered([user], template) + whole.rpartition(said)[2]
            except (jinja2.TemplateError, *REFUSALS):  # it says so of the chats themselves
                around = ""
            added = self.tokenizer.added_tokens_decoder.values()
            marks = [t.content for t in added if not t.special and t.content in around]
            self._frames[template] = marks
        return self._frames[template]

    def _written(
        self, messages: list[Message], *, has_marks: bool = True, **options: bool
    ) -> list[int]:
        if not (self.template or self.tokenizer.chat_template):
            remedy = "the tokenizer has none; give it one, or read the records with a template "
            remedy += "of the text's own: template: '{prompt} {response}'"
            raise InputError(Fault("chat_template", None, remedy))
        before, template = self.tokenizer.chat_control_tokens, self._template(messages)
        self.tokenizer.chat_control_tokens = self._frame(template) if has_marks else before
        try:
            out = self.tokenizer.apply_chat_template(
                self._given(messages),
                tools=tools_of(messages),
                chat_template=template,
                return_dict=True,
                sanitize_control_tokens=True,
                **options,
            )
        finally:
            self.tokenizer.chat_control_tokens = before
        return list(out["input_ids"])

    def _template(self, messages: Sequence[Message]) -> str:
        """What writes them: of several, that for chats with tools where there are any."""
        tools = tools_of(messages)
        return on_one_day(self.tokenizer.get_chat_template(self.template, tools=tools))


def on_one_day(template: str) -> str:
    """A chat template on one day: what a text's tokens are does not depend on the date."""
    return DAY + template if "strftime_now" in template else template


@contextmanager
def _refusals(chat: Conversation) -> Iterator[None]:
    """What a template refuses of ``chat``, in words."""
    try:
        yield
    except InputError:
        raise
    # A template is a program: what it does with a message may fail as any does.
    except (jinja2.TemplateError, *REFUSALS) as error:
        remedy = f"the tokenizer's chat template refuses it ({error}); change or remove it"
        raise InputError(Fault("chat_template", chat.place, remedy)) from None


def chat_template_of(directory: Path) -> ChatTemplate:
    """The chat template of a model's directory."""
    tokenizer = load_tokenizer(directory)
    return ChatTemplate(tokenizer)
