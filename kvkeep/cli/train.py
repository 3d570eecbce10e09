"""`kvkeep train`: learned policies from traces."""
# ruff: noqa: B006

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .console import fractions, names, note, out, print_json, quiet_transformers, steps_bar
from .options import Device, Json, Sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.distill import Distillation, Text
    from kvkeep.trace import TraceIndex
    from kvkeep.train import Progress, Recipe, Validation

# what every training takes
Steps = Annotated[int, typer.Option(help="Optimiser steps.")]
Batch = Annotated[int, typer.Option(help="Prompts a step, over all processes.")]
LastRate = Annotated[float, typer.Option(help="Learning rate of the last step.")]
Warmup = Annotated[int, typer.Option(help="Steps until the greatest learning rate.")]
WeightDecay = Annotated[float, typer.Option(help="Of AdamW.")]
Ema = Annotated[float, typer.Option(help="Decay of the average of weights that is kept.")]
Every = Annotated[int, typer.Option(help="Steps between two validations.")]
Patience = Annotated[int, typer.Option(help="Stop after so many validations without a gain; 0 never does.")]
Seed = Annotated[int, typer.Option(help="Of first weights, prompts and draws.")]
ValidationShare = Annotated[float, typer.Option(help="Share to validate on, if no prompts were recorded for it.")]
TurnBack = Annotated[bool, typer.Option(help="Turn keys back from the model's rotation; else read them as cached.")]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a policy on traces that `kvkeep trace` has recorded, such as `kvkeep train kvp --traces traces`.",
)


@app.callback()
def root() -> None:
    """Train a policy on traces. `kvkeep train kvp --help` says how."""


@app.command()
def kvp(
    traces: Annotated[list[Path], typer.Option(help="Folder of traces; repeat for several.")],
    folder: Annotated[Path, typer.Option("--out", "-o", help="For the policy, and to go on from.")],
    sources: Sources = [],
    prompts: Annotated[int | None, typer.Option(min=1, help="Train on so many prompts; else on all.")] = None,
    validation: ValidationShare = 0.1,
    objective: Annotated[str, typer.Option(help="exact, or sampled as in the paper.")] = "exact",
    draws: Annotated[int, typer.Option(help="Rankings drawn of a prompt (sampled).")] = 8,
    against: Annotated[int, typer.Option(help="Tokens each is compared with in a step (exact); 0 is all.")] = 128,
    group: Annotated[
        str, typer.Option(help="Query heads of a KV head: max or mean of them, or the square of the largest.")
    ] = "max",
    squares: Annotated[float, typer.Option(help="Weight of squared attention beside attention.")] = 0.0,
    futures: Annotated[str, typer.Option(help="Several futures of a prompt: mean or max of them.")] = "mean",
    sinks: Annotated[int, typer.Option(help="First tokens that are always kept, so not ranked.")] = 4,
    recent: Annotated[int, typer.Option(help="Last tokens that are always kept, so not ranked.")] = 16,
    architecture: Annotated[str, typer.Option(help="compact, or paper.")] = "compact",
    turn_back: TurnBack = True,
    glance: Annotated[int, typer.Option(help="Newest queries whose attention agents see; the paper's 0.")] = 32,
    hidden: Annotated[int, typer.Option(help="Width of the hidden layers; the paper's is 256.")] = 64,
    steps: Steps = 800,
    batch: Batch = 1,
    lr: Annotated[float, typer.Option(help="Greatest learning rate; the paper's is 5e-5.")] = 1e-2,
    lr_end: LastRate = 1e-6,
    warmup: Warmup = 100,
    weight_decay: WeightDecay = 1e-3,
    ema: Ema = 0.99,
    every: Every = 100,
    patience: Patience = 0,
    seed: Seed = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train the agents of KVP, all layers and heads at once, and keep the best by validation reward.

    The reward of a ranking is minus what it evicts, over all budgets, relative to the best ranking: -1 is the best.
    Killed, the same command goes on where it was. Several processes share each batch.

    **Examples**

    `kvkeep train kvp --traces traces --out policy`

    `kvkeep train kvp --traces traces --sources niah --prompts 50 --out policy-niah`

    `kvkeep train kvp --traces traces --objective sampled --batch 4 --lr 1e-3 --steps 2000 --out policy-rl --json`
    """
    from kvkeep.learners import Ranked, train_kvp
    from kvkeep.train import Recipe
    from kvkeep.training_data import open_data

    settings = Ranked(
        objective=objective,
        draws=draws,
        against=against,
        group=group,
        futures=futures,
        squares=squares,
        sinks=sinks,
        recent=recent,
    )
    recipe = Recipe(
        steps=steps,
        batch=batch,
        lr=lr,
        lr_end=lr_end,
        warmup=warmup,
        weight_decay=weight_decay,
        ema=ema,
        every=every,
        patience=patience,
        seed=seed,
    )
    data = open_data(traces, sources=names(sources), num_prompts=prompts, share=validation, seed=seed)
    shape = {"architecture": architecture, "hidden": hidden, "turn_back": turn_back, "glance": glance}
    options = {"settings": settings, "recipe": recipe, **shape}
    _run(train_kvp, data, folder, device, as_json, data.index, **options)


@app.command()
def kvpop(
    folder: Annotated[Path, typer.Option("--out", "-o", help="For the policy, and to go on from.")],
    traces: Annotated[list[Path], typer.Option(help="Folder of traces made with --delay; repeat for several.")] = [],
    what: Annotated[
        str, typer.Option("--train", help="scorers, on traces; or all: the model too, on texts, from itself.")
    ] = "scorers",
    model: Annotated[str, typer.Option("--model", "-m", help="What to train (all).")] = "smollm2",
    texts: Annotated[list[str], typer.Option("--data", metavar="DATA", help="As for kvkeep trace (all).")] = [],
    length: Annotated[int, typer.Option("--length", "-l", help="Tokens of a text (all).")] = 1024,
    model_lr: Annotated[float, typer.Option(help="Learning rate of the model's own weights (all).")] = 8e-5,
    sources: Sources = [],
    prompts: Annotated[int | None, typer.Option(min=1, help="Train on so many prompts or texts; else on all.")] = None,
    validation: ValidationShare = 0.1,
    least: Annotated[
        int | None, typer.Option("--least-tokens", help="Leave shorter prompts out; else those below 8 windows.")
    ] = None,
    shares: Annotated[
        list[str], typer.Option(metavar="SHARE,...", help="Of a prompt that a cache keeps; each is learned.")
    ] = ["0.25", "0.125"],
    window: Annotated[int, typer.Option(help="Recent tokens that always stay: the traces' --delay.")] = 64,
    sinks: Annotated[int, typer.Option(help="First tokens that always stay.")] = 4,
    group: Annotated[str, typer.Option(help="Query heads of a KV head: max or mean of them.")] = "max",
    pairs: Annotated[int, typer.Option(help="Pairs at the cutoff, a step and share.")] = 512,
    architecture: Annotated[
        str, typer.Option(help="mlp (the token alone), memory (as in the paper) or both.")
    ] = "both",
    late: Annotated[
        bool, typer.Option(help="Read the memory when a token leaves the window, or when it comes.")
    ] = True,
    turn_back: TurnBack = True,
    hidden: Annotated[int, typer.Option(help="Width of the layer that reads the token itself.")] = 64,
    memory: Annotated[int, typer.Option(help="Size of the memory.")] = 32,
    steps: Steps = 400,
    batch: Batch = 1,
    lr: Annotated[float, typer.Option(help="Greatest learning rate; the paper's is 1e-3.")] = 5e-3,
    lr_end: LastRate = 1e-4,
    warmup: Warmup = 20,
    weight_decay: WeightDecay = 1e-4,
    ema: Ema = 0.97,
    every: Every = 50,
    patience: Patience = 0,
    seed: Seed = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train the scorers of KVpop, all layers and heads at once, for a model that stays as it is.

    The reward is the share of what a teacher holds, who knows what later tokens read, that the scorers hold too. With
    --train all the model is trained with them, to say under their masks what it said without; the reward is then minus
    the divergence. Killed, the same command goes on where it was. Several processes share each batch.

    **Examples**

    `kvkeep trace --data text:novels --length 4096 --delay 64 --prompts 40 --out long`

    `kvkeep train kvpop --traces long --out policy`

    `kvkeep train kvpop --traces long --architecture mlp --shares 0.5,0.25 --out policy-mlp`

    `kvkeep train kvpop --train all --data text:novels --length 1024 --prompts 200 --batch 8 --out retrofitted`
    """
    from kvkeep.distill import Distillation
    from kvkeep.pool_learner import Cutoff, train_kvpop
    from kvkeep.train import Recipe
    from kvkeep.training_data import open_data

    settings = Cutoff(shares=fractions("--shares", shares), window=window, sinks=sinks, group=group, num_pairs=pairs)
    recipe = Recipe(
        steps=steps,
        batch=batch,
        lr=lr,
        lr_end=lr_end,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=1.0,
        ema=ema,
        every=every,
        patience=patience,
        seed=seed,
    )
    options = {"architecture": architecture, "hidden": hidden, "memory": memory, "late": late, "turn_back": turn_back}
    if what == "all":
        distillation = Distillation(cutoff=settings, model_lr=model_lr)
        _distil(model, texts, length, prompts, distillation, recipe, folder, device, as_json, **options)
        return
    if what != "scorers" or not traces:
        raise ValueError(f"--train is scorers, which needs --traces, or all; got {what!r} and {len(traces)} folders")
    data = open_data(
        traces,
        sources=names(sources),
        num_prompts=prompts,
        least_tokens=8 * window if least is None else least,
        share=validation,
        seed=seed,
    )
    _run(train_kvpop, data, folder, device, as_json, data.index, settings=settings, recipe=recipe, **options)


def _distil(
    model: str,
    data: list[str],
    length: int,
    num_texts: int | None,
    settings: "Distillation",
    recipe: "Recipe",
    folder: Path,
    device: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train model and scorers on texts."""
    from kvkeep import load
    from kvkeep.corpus import Reading, harvest
    from kvkeep.distill import DistillLearner, Text, distil

    if not data:
        raise ValueError("--train all needs texts: --data text:FILE_OR_FOLDER, as for kvkeep trace")
    with quiet_transformers():
        loaded = load(model, dtype="float32", device=device)
    reading = Reading(tokenizer=loaded.tokenizer, num_tokens=length, num_prompts=num_texts or 100, future_tokens=1)
    parts = [
        [Text(key=item.key, token_ids=item.token_ids) for source in data for item in harvest(source, one).items]
        for one in (reading, replace(reading, split="validation", num_prompts=2))
    ]
    learner = DistillLearner(loaded.model, settings, seed=recipe.seed, **options)

    def train(texts: "list[list[Text]]", out: Path, **how: Any) -> "Progress":
        train_texts, validation = texts
        return distil(learner, train_texts, validation, out, recipe=recipe, **how)

    _run(train, parts, folder, device, as_json, learner.index)


def _run(
    train: "Callable[..., Progress]",
    data: Any,
    folder: Path,
    device: str | None,
    as_json: bool,
    index: "TraceIndex",
    **options: Any,
) -> None:
    """Train, and say where it stands and what was reached."""
    from kvkeep.evaluate.rows import manifest
    from kvkeep.team import assemble

    team = assemble(device)
    first = team.rank == 0
    looks: list[Validation] = []
    with steps_bar() if first else nullcontext(_unseen) as tell:
        progress = train(
            data,
            folder,
            made_by=manifest(index.model, dtype=index.dtype, device=str(team.device)),
            team=team,
            on_step=lambda done, total: tell(done, total, "training"),
            on_validation=lambda seen: _look(seen, looks, index.layers) if first else None,
            **options,
        )
    if first:
        _report(progress, looks, index.layers, folder, as_json)


def _unseen(*step: Any) -> None:
    """Only one process shows where the training stands."""


def _look(seen: "Validation", looks: "list[Validation]", layers: list[int]) -> None:
    """One line about a validation, with the layers that are worst."""
    looks.append(seen)
    by_layer = _by_layer(seen, layers)
    three = ", ".join(f"{layer} {by_layer[layer]:.2f}" for layer in sorted(by_layer, key=by_layer.__getitem__)[:3])
    worst = f"; worst layers {three}" if by_layer else ""
    best = " (best)" if seen.best else ""
    note(f"step {seen.step}: loss {seen.loss:.4f}, reward {seen.reward:.4f}{best}{worst}", style="dim")


def _report(progress: "Progress", looks: "list[Validation]", layers: list[int], folder: Path, as_json: bool) -> None:
    if as_json:
        last = _by_layer(looks[-1], layers) if looks else {}
        result = {"best": progress.best, "step": progress.best_step, "history": progress.history, "layers": last}
        print_json({**result, "policy": str(folder)})
        return
    if looks and _by_layer(looks[0], layers):
        out.print(_layer_table(looks, layers))
    out.print(f"reward {progress.best:.4f} at step {progress.best_step}; the policy is in {folder}", highlight=False)


def _layer_table(looks: "list[Validation]", layers: list[int]) -> Table:
    """Rewards of each layer at the first and at the last look."""
    table = Table("layer", f"reward at step {looks[0].step}", f"at step {looks[-1].step}")
    before, after = _by_layer(looks[0], layers), _by_layer(looks[-1], layers)
    for layer in layers:
        table.add_row(str(layer), f"{before[layer]:.3f}", f"{after[layer]:.3f}")
    return table


def _by_layer(seen: "Validation", layers: list[int]) -> dict[int, float]:
    """Mean reward of the heads of each layer; nothing where all layers are trained as one."""
    if len(seen.rewards) < len(layers):
        return {}
    return dict(zip(layers, seen.rewards.view(len(layers), -1).mean(1).tolist(), strict=True))
