"""lm-eval's `LM` over our engine: any of its tasks on a saved composition or any causal LM.

    mergescope lm-eval run --model mergescope --model_args composed=DIR --tasks gsm8k_cot

lm-eval 0.4.13 knows the models in its own list and those that were registered before it looks; no
entry point, option or environment variable of it names others. `mergescope lm-eval` registers ours
and hands over to lm-eval's own command, with all its subcommands and options. In Python:

    from evaluation.lm_eval_model import MergescopeLM, register
    lm_eval.simple_evaluate(model=MergescopeLM(composed="DIR"), tasks=[...])

In float32 the answers are those of lm-eval's `HFLM`. Where they differ, they are meant to:

* a prompt that does not fit is refused; HFLM cuts it from the left and loses BOS and shots
* a text ends at every EOS id of tokenizer and models; HFLM knows the generation config's, and the
  tokenizer's as a string, which its decoding then hides
* BOS is there once where the family needs it, for every prompt of a batch; HFLM looks at the first
  prompt of a batch only, and gives a bare Gemma tokenizer's prompts none
* a completion keeps the space that SentencePiece drops at the beginning of a text, and is not
  "cleaned up" where a tokenizer's config asks for it
* a context of white space alone counts as none; HFLM fails on it
* in a narrower type the logits of a composition, and of scored tokens, are computed otherwise
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import (
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)

from composition import ComposedForCausalLM
from evaluation.benchmarks.contract import Generate, Output
from evaluation.engine import Answers, Pair, answer, score_tokens
from evaluation.errors import InputError
from evaluation.progress import bar
from evaluation.saved import open_composed, open_pretrained
from evaluation.text import encode

NAME = "mergescope"
OPTIONS = ("composed", "pretrained", "dtype", "batch_size", "max_gen_toks", "device")
UNSAID = "cuda:0"  # what lm-eval's command says of the device if its user says nothing
MOST_POSITIONS = 2048  # where neither config nor tokenizer tells, as HFLM has it
GREEDY = ("until", "do_sample", "temperature", "top_p", "top_k", "num_beams", "max_gen_toks")
"""Settings of a generation that greedy decoding knows or can do without."""


class MergescopeLM(TemplateLM):  # type: ignore[misc]
    """A saved composition or a causal LM, as lm-eval asks it.

    Args:
        composed: folder that `ComposedForCausalLM.save_pretrained` wrote.
        pretrained: any causal LM instead: a folder, a hub id, a GGUF file or `package:NAME`.
        dtype: float32, bfloat16 or float16.
        batch_size: rows at a time; `auto` for as many as fit.
        max_gen_toks: most new tokens where a task does not say.
        device: auto, cpu, cuda, cuda:N or mps.

    Raises:
        InputError: not one model is named, or an option is unknown.
    """

    def __init__(
        self,
        composed: str | None = None,
        pretrained: str | None = None,
        dtype: str = "float32",
        batch_size: int | str | None = None,
        max_gen_toks: int = 256,
        device: str = "auto",
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise InputError([_unknown(name) for name in unknown])
        if (composed is None) == (pretrained is None):
            raise InputError(
                "--model_args must name one model, as composed=DIR (what "
                "ComposedForCausalLM.save_pretrained wrote) or pretrained=DIR_OR_ID"
            )
        self._batch_size = _rows(batch_size)
        self._max_gen_toks = int(max_gen_toks)
        opened = open_composed if composed is not None else open_pretrained
        self.runtime = opened(str(composed or pretrained), str(dtype), str(device))
        self.tokenizer = self.runtime.tokenizer

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Self:
        """What `--model_args` says stands above the command's own options.

        The command says cuda:0 where the user says nothing: without CUDA, HFLM goes on elsewhere
        then, and so do we.
        """
        given = {k: v for k, v in (additional_config or {}).items() if v is not None}
        if given.get("device") == UNSAID and not torch.cuda.is_available():
            del given["device"]
        return cls(**{**given, **arg_dict})

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> Self:
        """The same from `key=value,key=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # --- answers ---------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy completions, in the order of the requests.

        Raises:
            InputError: a request asks for sampling, beams or a setting that changes the
                distribution, or a prompt does not fit.
        """
        asked = [self._asked(*request.args) for request in requests]
        batches = answer(self.runtime, asked, self._batch_size)
        found = _collected("generate_until", len(asked), batches, disable_tqdm)
        return [output.text for output in found]

    def _asked(self, context: str, settings: Mapping[str, Any]) -> Generate:
        asked = normalize_gen_kwargs(dict(settings), self._max_gen_toks)
        if asked["do_sample"] or int(asked.get("num_beams") or 1) > 1:
            raise InputError(
                f"the generation settings {dict(settings)} ask for sampling or beams; only greedy "
                "decoding is supported: use do_sample=False, num_beams=1 (--gen_kwargs changes a "
                "task's own settings)"
            )
        if others := sorted(set(asked) - set(GREEDY)):
            raise InputError(
                f"the generation settings {', '.join(others)} are not supported; expected "
                f"{', '.join(GREEDY)}"
            )
        # As HFLM, the text ends at EOS also where it is spelt out.
        stops = handle_stop_sequences(asked["until"], eos=self.tokenizer.eos_token)
        return Generate(context, tuple(stop for stop in stops if stop), asked["max_gen_toks"])

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether it is the greedy continuation) of tokenised pairs."""
        pairs = [
            Pair(place, context or [self.prefix_token_id], rest)
            for place, (_, context, rest) in enumerate(requests)
        ]
        batches = score_tokens(self.runtime, pairs, self._batch_size)
        found = _collected("loglikelihood", len(pairs), batches, disable_tqdm)
        return [(output.logprob, output.is_greedy) for output in found]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts; what is longer than the model takes goes in windows."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            found = get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in found]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    # --- what lm-eval's own code asks of a model -------------------------------------------------

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids; BOS in front, once, where the tokenizer or the model's family asks for it."""
        if add_special_tokens is False:
            return list(self.tokenizer(string, add_special_tokens=False)["input_ids"])
        return encode(self.tokenizer, string, self.runtime.model_type)

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What predicts the first token of a text."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    @property
    def max_length(self) -> int:
        """Tokens that the model takes."""
        return self.runtime.max_positions or MOST_POSITIONS

    @property
    def max_gen_toks(self) -> int:
        """Most new tokens where a task does not say."""
        return self._max_gen_toks

    @property
    def batch_size(self) -> int | str:
        """Rows at a time, or `auto`."""
        return self._batch_size or "auto"

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self.runtime.device

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keeps requests by."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as one prompt, by the tokenizer's own template."""
        prompt = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(prompt)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside the results: a composition's rule, weights and components."""
        model = self.runtime.model
        info: dict[str, Any] = {"model_dtype": str(model.dtype)}
        if isinstance(model, ComposedForCausalLM):
            info["composition"] = model.combination.model_dump(mode="json")
            info["components"] = [list(origin) for origin in model.origins]
        return info


def register() -> None:
    """Makes `--model mergescope` known to lm-eval in this process; again does nothing."""
    import lm_eval.models  # noqa: F401  its own, which it would not add where there is one
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=MergescopeLM)


def command(arguments: Sequence[str]) -> None:
    """lm-eval's own command line with our model among its own."""
    from lm_eval.__main__ import cli_evaluate

    register()
    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()


def _collected(what: str, count: int, batches: Iterable[Answers], quiet: bool) -> list[Output]:
    """The outputs in the order of the requests."""
    found: dict[int, Output] = {}
    with nullcontext() if quiet else bar(f"{NAME} {what}", count) as shown:
        for batch in batches:
            found.update(batch)
            if shown is not None:
                shown.advance(len(batch))
    return [found[place] for place in range(count)]


def _rows(batch_size: int | str | None) -> int | None:
    text = str(batch_size)
    if batch_size is None or text.partition(":")[0] == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"batch_size is {batch_size!r}; expected a positive number or auto")
    return int(text)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, OPTIONS, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    return f"{NAME} has no option {name!r}; expected {', '.join(OPTIONS)}{guess}"
