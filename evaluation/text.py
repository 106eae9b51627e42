"""Text to token ids and back, with the corrections that harnesses get wrong.

* The beginning-of-sequence token is there exactly once where the model's family uses one: most
  tokenizers add it themselves, a bare Gemma tokenizer does not.
* A completion is decoded behind the last tokens of its prompt, since SentencePiece tokenizers
  drop a leading space when a continuation is decoded alone.
* A context and its continuation are split as lm-eval splits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evaluation.benchmarks.contract import Score

BOS_FAMILIES = ("gemma",)  # trained with BOS in front of everything
CONTEXT_TOKENS = 8  # decoded in front of a completion; enough to settle spaces and byte pieces


def encode(tokenizer: Any, text: str, model_type: str = "") -> list[int]:
    """The ids of a prompt, with BOS once where the tokenizer or the model's family asks for it."""
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
    tokenizer: Any, request: Score, model_type: str = ""
) -> tuple[list[int], list[int]]:
    """The ids of a context and of its continuation; the context holds at least one token."""
    context, continuation = request.context, request.continuation
    if not request.separate:
        stripped = context.rstrip()  # white space belongs to the word that follows it
        context, continuation = stripped, context[len(stripped) :] + continuation
    first = encode(tokenizer, context, model_type)
    if request.separate or not context:
        second = [
            int(token) for token in tokenizer(continuation, add_special_tokens=False)["input_ids"]
        ]
    else:
        second = encode(tokenizer, context + continuation, model_type)[len(first) :]
    if not first:  # something must predict the first token: what a document begins with
        start = tokenizer.bos_token_id
        first = [tokenizer.eos_token_id if start is None else start]
    return first, second[: request.max_tokens]


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
