"""`kvkeep generate`: answer a question about a document through an evicting cache."""

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from .console import MIB, note, out, print_json, quiet_transformers, read_text
from .options import Device, Dtype, Json, Model, Policy

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep import KVCache
    from kvkeep.models import Loaded


class Statistics(NamedTuple):
    """What the answer cost: tokens seen and kept (mean over KV heads), bytes measured and of the full cache."""

    seen: int
    kept: float
    cache_bytes: int
    full_bytes: int
    prefill_seconds: float
    tokens_per_s: float | None

    def __str__(self) -> str:
        speed = f", {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else ""
        return (
            f"{self.seen:,} tokens seen, {self.kept:,.0f} kept, "
            f"{self.cache_bytes / MIB:.1f} MiB against {self.full_bytes / MIB:.1f} MiB full, "
            f"prompt {self.prefill_seconds:.1f} s{speed}"
        )


def generate(
    question: Annotated[str, typer.Argument(help='The question, or "-" to read it from stdin.')] = "",
    file: Annotated[str | None, typer.Option("--file", "-f", help='Text to ask about, or "-" for stdin.')] = None,
    model: Model = "smollm2",
    policy: Policy = "snapkv",
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Tokens (512), share (25%), bytes (64MiB), or full.")
    ] = "full",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 128,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Read the prompt in pieces of this many tokens: memory peaks lower.")
    ] = None,
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that always stay.")] = 4,
    recent: Annotated[int, typer.Option(min=0, help="Last tokens that always stay.")] = 16,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    dtype: Dtype = "fast",
    device: Device = None,
    show_report: Annotated[bool, typer.Option("--show-report", help="Show what each layer holds.")] = False,
    as_json: Json = False,
) -> None:
    """Answer a question about a document, keeping only part of the cache.

    The answer streams to stdout; one line about its cost follows on stderr.

    **Examples**

    `kvkeep generate "Name three rivers."`

    `kvkeep generate --policy tova --budget 25% --file book.txt "Who is the narrator?"`

    `cat book.txt | kvkeep generate -f - -b 64MiB --chunk 512 "Summarise this."`
    """
    document, question = _inputs(file, question)
    if as_json and show_report:
        raise ValueError("--show-report prints a table; leave it out with --json")
    import torch

    from kvkeep import Budget, KVCache, load
    from kvkeep.chat import prompt_ids
    from kvkeep.policies import make_policy

    # refused before the model loads
    chosen = make_policy(policy)
    limit = Budget.parse(budget, sinks=sinks, recent=recent, schedule=chosen.schedule)
    torch.manual_seed(seed)
    with quiet_transformers():
        loaded = load(model, dtype=dtype, device=device)
        cache = KVCache(loaded.model, policy=chosen, budget=limit)
        input_ids = prompt_ids(loaded.tokenizer, document, question).to(loaded.model.device)
        _warn_beyond_maximum(loaded.model, input_ids.shape[1] + max_new_tokens)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        answer, statistics = _answer(
            loaded, input_ids, cache, show=not as_json, chunk=chunk, max_new_tokens=max_new_tokens, **sampling
        )
    if as_json:
        print_json({"answer": answer, "model": model, "policy": policy, "budget": budget, **statistics._asdict()})
        return
    note(str(statistics), style="dim")
    if show_report:
        out.print(cache.report())


def _inputs(file: str | None, question: str) -> tuple[str, str]:
    """Document and question; ValueError when both would read stdin, or there is neither."""
    if file == "-" and question == "-":
        raise ValueError("stdin can be the document or the question, not both: give one of them as text or file")
    document = read_text(file) if file is not None else ""
    question = read_text("-") if question == "-" else question
    if not document.strip() and not question.strip():
        raise ValueError('the prompt is empty: give a question, --file, or "-" for stdin')
    return document, question


def _warn_beyond_maximum(model: Any, length: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and length > most:
        note(
            f"warning: prompt and answer may take {length:,} tokens, more than the {most:,} this model knows; "
            "what lies beyond may be nonsense"
        )


def _answer(
    loaded: "Loaded", input_ids: "Tensor", cache: "KVCache", *, show: bool, **options: Any
) -> tuple[str, Statistics]:
    from kvkeep import generate as run
    from kvkeep.cli.streaming import TimedStreamer

    streamer = TimedStreamer(loaded.tokenizer, show=show)
    output = run(loaded.model, input_ids, cache=cache, streamer=streamer, **options)
    answer = str(loaded.tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True))
    report = cache.report()
    return answer, Statistics(
        report.seen,
        report.kept,
        report.bytes + report.unmanaged_bytes,
        _full_bytes(cache),
        streamer.prefill_seconds,
        streamer.tokens_per_s,
    )


def _full_bytes(cache: "KVCache") -> int:
    """Bytes of keys and values of every token seen, in the managed layers and with the others as they are."""
    held = (layer.slots for layer in cache.managed if layer.slots is not None)
    slots = [(s.keys.shape[:2], s.keys.shape[3] + s.values.shape[3], s.keys.element_size()) for s in held]
    seen, others = cache.get_seq_length(), cache.report().unmanaged_bytes
    return sum(B * H * seen * size * element for (B, H), size, element in slots) + others
