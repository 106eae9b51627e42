"""Text to token ids and back, with the corrections that harnesses get wrong.

* The beginning-of-sequence token is there exactly once where the model's family uses one: most
  tokenizers add it themselves, a bare Gemma tokenizer does not.
* A completion is decoded behind the last tokens of its prompt, since SentencePiece tokenizers
  drop a leading space when a continuation is decoded alone.
* A context and its continuation are split as lm-eval splits them.
* With a chat template a prompt is one user message, its shots inside, and the model's turn begins
  behind it.

The chat is lm-eval's `apply_chat_template` for a prompt of a single turn (0.4.13,
`fewshot_as_multiturn=False`): the same text, the same ids, BOS where the template writes it or the
tokenizer adds it. Where we differ: a template that refuses a system prompt is an error and no
warning, today's date is a fixed day, and what a task puts in front of its shots (`description`) or
behind its question (`gen_prefix`) stays in the user message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from evaluation.benchmarks.contract import Score
from evaluation.errors import InputError

BOS_FAMILIES = ("gemma",)  # trained with BOS in front of everything
CONTEXT_TOKENS = 8  # decoded in front of a completion; enough to settle spaces and byte pieces


TODAY = "26 Jul 2024"  # what Llama's templates say by themselves; an answer has no date


class Chat(NamedTuple):
    """That prompts go through the tokenizer's chat template, and what stands before them."""

    system_prompt: str | None = None


def encode(tokenizer: Any, text: str, model_type: str = "", chat: Chat | None = None) -> list[int]:
    """The ids of a prompt, with BOS once where the tokenizer or the model's family asks for it.

    Raises:
        InputError: the chat template is missing or refuses the messages.
    """
    if chat is not None:
        return _encode_message(tokenizer, as_message(tokenizer, text, chat), model_type)
    ids = [int(token) for token in tokenizer(text, add_special_tokens=True)["input_ids"]]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if ids and eos is not None and ids[-1] == eos and not text.endswith(tokenizer.eos_token):
        ids.pop()  # a tokenizer that closes its input would end the prompt before the answer
    if bos is None:
        return ids
    if model_type.startswith(BOS_FAMILIES) and ids[:1] != [bos]:
        return [bos, *ids]
    if ids[:2] == [bos, bos]:  # the text already began with it
        return ids[1:]
    return ids


def encode_pair(
    tokenizer: Any, request: Score, model_type: str = "", chat: Chat | None = None
) -> tuple[list[int], list[int]]:
    """The ids of a context and of its continuation; the context holds at least one token.

    In a chat the context is the user message and the continuation the beginning of the answer. An
    empty context, which stands for no condition at all, stays empty.
    """
    if chat is not None and request.context:
        return _encode_answer(tokenizer, request, model_type, chat)
    context, continuation = request.context, request.continuation
    if not request.separate:
        stripped = context.rstrip()  # white space belongs to the word that follows it
        context, continuation = stripped, context[len(stripped) :] + continuation
    first = encode(tokenizer, context, model_type)
    if request.separate or not context:
        second = _bare(tokenizer, continuation)
    else:
        second = encode(tokenizer, context + continuation, model_type)[len(first) :]
    if not first:  # something must predict the first token: what a document begins with
        start = tokenizer.bos_token_id
        first = [tokenizer.eos_token_id if start is None else start]
    return first, second[: request.max_tokens]


def as_message(tokenizer: Any, text: str, chat: Chat) -> str:
    """A prompt as the tokenizer's chat template writes it, up to where the model answers.

    Raises:
        InputError: there is no template, it refuses the messages, or it drops the system prompt.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "generation.chat_template: the base's tokenizer has no chat template; name a base that "
            "was trained on chats, or leave chat_template out"
        )
    system = chat.system_prompt
    messages = [] if system is None else [{"role": "system", "content": system}]
    try:
        written = tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            date_string=TODAY,
        )
    except (TemplateError, ValueError) as error:
        raise InputError(
            "generation.chat_template: the template of the base's tokenizer refuses "
            f"{'a user message' if system is None else 'a system prompt'} ({error})"
            f"{'' if system is None else '; leave system_prompt out'}"
        ) from None
    if system is not None and system.strip() not in written:
        raise InputError(
            "generation.system_prompt: the chat template of the base's tokenizer drops system "
            "prompts; leave system_prompt out"
        )
    return str(written)


def chat_digest(tokenizer: Any, chat: Chat) -> str:
    """SHA-256 of what makes messages of prompts: the template, and a message as it comes out today.

    Raises:
        InputError: as `as_message`.
    """
    written = as_message(tokenizer, "1 + 1?", chat)
    return hashlib.sha256(f"{tokenizer.chat_template}\0{written}".encode()).hexdigest()


def _encode_message(tokenizer: Any, written: str, model_type: str) -> list[int]:
    """The ids of what a template wrote; special tokens stand in the text, most often BOS too."""
    ids = _bare(tokenizer, written)
    bos = tokenizer.bos_token_id
    if bos is None or ids[:1] == [bos]:
        return ids
    adds = list(tokenizer("", add_special_tokens=True)["input_ids"][:1]) == [bos]
    return [bos, *ids] if adds or model_type.startswith(BOS_FAMILIES) else ids


def _encode_answer(
    tokenizer: Any, request: Score, model_type: str, chat: Chat
) -> tuple[list[int], list[int]]:
    """As lm-eval splits it: the white space that ends a template belongs to the answer."""
    written = as_message(tokenizer, request.context, chat)
    if request.separate:
        first = _encode_message(tokenizer, written, model_type)
        return first, _bare(tokenizer, request.continuation)[: request.max_tokens]
    first = _encode_message(tokenizer, written.rstrip(), model_type)
    whole = _encode_message(tokenizer, written + request.continuation, model_type)
    return first, whole[len(first) :][: request.max_tokens]


def _bare(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def decode_completion(tokenizer: Any, prompt: Sequence[int], generated: Sequence[int]) -> str:
    """The text of the generated ids as it stands behind the prompt."""
    context = list(prompt[-CONTEXT_TOKENS:])
    before = decode_ids(tokenizer, context)
    whole = decode_ids(tokenizer, [*context, *generated])
    if whole.startswith(before):
        return whole[len(before) :]
    return decode_ids(
        tokenizer, generated
    )  # the context cut a character; alone is the best there is


def cut_at_stops(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before its earliest stop string, and whether there was one."""
    found = [position for position in (text.find(stop) for stop in stops) if position >= 0]
    return (text[: min(found)], True) if found else (text, False)


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ids, special tokens left out."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)
