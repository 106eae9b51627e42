"""Tokenizers of a token a character with the chat templates of three families, built in code."""

from __future__ import annotations

from typing import Any

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]

LLAMA = (  # as Llama 3's: BOS in the template, and added by the tokenizer as well
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}<|end|>\n\n"
    "{{ message['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
GEMMA = (  # as Gemma 2's: BOS in the template only, no system prompt
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
CHATML = (  # as SmolLM2's, whose BOS is what begins every turn
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|start|>system\nHelp<|eot|>\n{% endif %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|eot|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|start|>": 3, "<|end|>": 4, "<|eot|>": 5}


def chat_tokenizer(template: str | None, add_bos: bool = False, bos: str = "<s>") -> Any:
    """`<unk>` 0, `<s>` 1, `</s>` 2, `<|start|>` 3, `<|end|>` 4, `<|eot|>` 5, then characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = SPECIAL | {
        character: index for index, character in enumerate(CHARACTERS, start=len(SPECIAL))
    }
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    if add_bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token=bos,
        eos_token="<|eot|>",
        additional_special_tokens=["<s>", "<|start|>", "<|end|>"],
    )
    made.chat_template = template
    return made


def ids(text: str) -> list[int]:
    """The ids of a text by hand, its special tokens as one token each."""
    found = []
    while text:
        special = next((token for token in SPECIAL if text.startswith(token)), None)
        token = special or text[0]
        found.append(SPECIAL[token] if special else len(SPECIAL) + CHARACTERS.index(token))
        text = text[len(token) :]
    return found
