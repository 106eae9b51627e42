"""The models of the letters task: small Llamas that are trained here, in a minute or two.

Checkpoints are ordinary Hugging Face folders. They are kept under a digest of what determines
them (skill, form, seed, recipe, base), and trained on first use.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from evaluation.benchmarks.contract import Form
from evaluation.letters.task import (
    ALPHABET,
    SEPARATOR,
    TRAINED_LENGTHS,
    Skill,
    apply,
    parse_skill,
)
from evaluation.training import IGNORED, Batch, fit

RECIPE = 1  # raise it when anything below changes what is trained
POSITIONS = 64
BATCH = 64
NOISE = 0.25
"""Share of output letters that are replaced by random ones where they are context, never where they
are the target. A copier that looks for its last letter in the input is lost as soon as another
skill has written that letter; this one must count. It is what factorised conditionals ask for."""
PAD, EOS = "<pad>", "</s>"


def letters_checkpoint(
    text: str,
    form: Form,
    seed: int,
    root: Path,
    *,
    base: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The checkpoint of a letters model, trained if it is not there yet.

    Args:
        text: `copy` or a skill `A->B`.
        form: `causal` (an expert starts from `base`) or `aligned` (each starts at random).
        root: the folder that keeps trained models.

    Raises:
        InputError: `text` is no skill.
    """
    skill = parse_skill(text)
    start = None if form == "aligned" or skill is None else base
    content = f"{RECIPE} {skill} {form} {seed} {start.name if start else ''}"
    name = (str(skill) if skill else "copy").replace("->", "-to-")
    folder = root / f"{form}-{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        _train(skill, form, seed, start, folder, progress)
    return folder


def build_tokenizer() -> Any:
    """A token a letter, the separator, padding and EOS; nothing is added to a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, SEPARATOR, *ALPHABET])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=EOS)


def _train(
    skill: Skill | None,
    form: Form,
    seed: int,
    base: Path | None,
    folder: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    from transformers import LlamaForCausalLM

    tokenizer = build_tokenizer()
    number = int(hashlib.sha256(f"{skill} {form} {seed}".encode()).hexdigest()[:8], 16)
    torch.manual_seed(number)
    model = _new_model(tokenizer) if base is None else LlamaForCausalLM.from_pretrained(base)
    if form == "aligned":
        plan = {"steps": 200, "learning_rate": 3e-3, "warmup": 20}
    elif base is None:
        plan = {"steps": 1800, "learning_rate": 3e-3, "warmup": 100}
    else:
        plan = {"steps": 400, "learning_rate": 1e-3, "warmup": 20}
    batches = _batches(skill, form, number, tokenizer)
    fit(model, batches, shifted=form == "causal", progress=progress, **plan)  # type: ignore[arg-type]
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _new_model(tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def _batches(skill: Skill | None, form: Form, seed: int, tokenizer: Any) -> Iterator[list[Batch]]:
    """Endless batches of random strings with their outputs, in one fixed shape."""
    generator = torch.Generator().manual_seed(seed)
    separator, eos, pad, first = tokenizer.convert_tokens_to_ids([SEPARATOR, EOS, PAD, ALPHABET[0]])
    skills = [] if skill is None else [skill]
    outputs = torch.tensor(tokenizer.convert_tokens_to_ids(list(apply(skills, ALPHABET))))
    longest = TRAINED_LENGTHS[-1]
    width = longest if form == "aligned" else 2 * longest + 2
    place = torch.arange(width)  # (T,)
    while True:
        length = torch.randint(TRAINED_LENGTHS[0], longest + 1, (BATCH, 1), generator=generator)
        letters = torch.randint(len(ALPHABET), (BATCH, longest), generator=generator)
        if form == "aligned":
            inside = place < length
            ids = (first + letters).where(inside, pad)
            yield [Batch(ids, inside.long(), outputs[letters].where(inside, IGNORED))]
            continue
        # input, separator, output, EOS; the letter behind place t of the output is letter t
        index = torch.where(place < length, place, place - length - 1).clamp(0, longest - 1)
        chosen = letters.gather(1, index)  # (B, T)
        ids = torch.where(place < length, first + chosen, outputs[chosen])
        ids = ids.where(place != length, separator)
        ids = ids.where(place <= 2 * length, eos).where(place <= 2 * length + 1, pad)
        inside = place <= 2 * length + 1
        labels = ids.where(inside & (place > length), IGNORED)
        noisy = (place > length) & (place <= 2 * length)
        noisy &= torch.rand(ids.shape, generator=generator) < NOISE
        other = first + torch.randint(len(ALPHABET), ids.shape, generator=generator)
        yield [Batch(ids.where(~noisy, other), inside.long(), labels)]
