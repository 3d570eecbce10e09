"""`kvkeep eval`: tasks x policies x budgets on one model, saved sample by sample and summed up in rows."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from .. import __version__
from ..budget import Budget
from ..cache import KVCache
from ..model import end_tokens as model_ends
from ..names import nearest
from ..policies import POLICIES, make_policy, parse, spelled
from .answers import answer_together
from .prompts import QUESTION_PLACES, Exam, encode
from .rows import Row, SampleLog, manifest, read_rows, summarise, write_rows
from .tasks import SPLITS, TASKS, Sample, score

FULL = "full"
# called with prompts done, prompts in all, and the task that comes next
Progress = Callable[[int, int, str], None]


class Arm(NamedTuple):
    """One policy at one budget, as rows name them."""

    policy: str
    budget: str

    def fresh_cache(self, model: PreTrainedModel, seed: int) -> KVCache:
        """An empty cache; `seed` is for policies that draw at random."""
        if self.policy == FULL:
            return KVCache(model)
        name, options = parse(self.policy)
        draws = "seed" in {field.name for field in fields(POLICIES[name])} - set(options)
        policy = make_policy(self.policy, **({"seed": seed} if draws else {}))
        return KVCache(model, policy=policy, budget=self.budget)


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    model_name: str,
    tasks: Sequence[str],
    policies: Sequence[str],
    budgets: Sequence[int | float | str],
    length: int,
    question: str = "after",
    split: str = "test",
    num_samples: int = 25,
    out: Path,
    seed: int = 0,
    haystack: Path | None = None,
    templates: Path | None = None,
    data: Path | None = None,
    max_new_tokens: int | None = None,
    chunk: int | None = None,
    progress: Progress = lambda done, total, task: None,
    command: str | None = None,
) -> list[Row]:
    """Ask every task under every policy at every budget, and under the full cache, which is always measured too.

    A prompt runs once for all policies and budgets, which then decode as one batch. Finished samples are on disk, in
    `out`/samples.jsonl, before the next begins: the same call goes on after them, also after kill -9, and a larger
    `num_samples` adds to them. In the end `out`/rows.jsonl gets this model's rows; rows of other models stay in it.

    Args:
        model_name: what rows and samples call the model.
        tasks: keys of `TASKS`.
        policies: keys of `POLICIES`, with options as in "snapkv(window=16)"; "full" may be among them.
        budgets: as for `KVCache`.
        length: tokens of a prompt, without the chat template's.
        question: "inside" the compressed prompt or "after" it (see `encode`).
        split: "train", "validation" or "test".
        num_samples: prompts per task.
        seed: for policies that draw at random; prompts depend on split and number alone.
        haystack, templates, data: other text, words and questions than the package's own (see `tasks.generate`).
        max_new_tokens: longest answer; None takes each task's own.
        chunk: tokens of a prompt read at once, as when a text streams through a bounded cache; every budget holds after
            each. 1 is what decoding does. None reads a prompt in one piece. Rows tell it in `extra`.
        progress: called before each prompt and at the end.
        command: how to run this again, for the rows; None takes this process's command line.

    Returns:
        This model's rows, one for each task, policy and budget; the full cache's comes first in each task.

    Raises:
        ValueError: before any work, for unknown names, impossible budgets and lengths, more samples than there are, and
            an `out` that holds samples of this model under other settings.
        OSError: when a sample cannot be saved; those before it are.
    """
    _known("split", [split], SPLITS)
    _known("place of the question", [question], QUESTION_PLACES)
    exam = Exam(
        tokenizer=tokenizer,
        tasks=_known("task", tasks, TASKS),
        num_tokens=length,
        split=split,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        haystack=haystack,
        templates=templates,
        data=data,
    )
    session = _Session(
        model=model, exam=exam, arms=arms_of(policies, budgets), question=question, seed=seed, chunk=chunk
    )
    session.check()
    naming = {"model": model_name, "length": length, "question": question, "split": split, "seed": seed}
    with SampleLog(output_folder(out) / "samples.jsonl") as log:
        refuse_other_settings(log, model_name, session.settings)
        for place, (task, index) in enumerate(exam.places):
            progress(place, len(exam.places), task)
            session.finish(log, {**naming, "task": task, "index": index})
        progress(len(exam.places), len(exam.places), "")
        stamp = manifest(model_name, dtype=str(model.dtype), device=str(model.device), command=command)
        return _write_rows(out / "rows.jsonl", log.records, stamp)


@dataclass(frozen=True, kw_only=True)
class _Session:
    """One model before one exam, with every arm."""

    model: PreTrainedModel
    exam: Exam
    arms: Sequence[Arm]
    question: str
    seed: int
    chunk: int | None

    def check(self) -> None:
        """Refuse what cannot be, before any work."""
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")
        for arm in self.arms:
            arm.fresh_cache(self.model, self.seed)
        self.exam.check()
        _warn_if_too_long(self.model, self.exam.num_tokens)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that a score depends on and rows do not name."""
        weights = weights_digest(self.model, self.exam.tokenizer)
        return {**self.exam.settings, **self._reading, "seed": self.seed, "weights": weights, "kvkeep": __version__}

    @property
    def _reading(self) -> dict[str, int]:
        return {} if self.chunk is None else {"chunk": self.chunk}

    def finish(self, log: SampleLog, naming: Mapping[str, Any]) -> None:
        """Ask one prompt under the arms that the log does not have yet, and save each answer."""
        named = {arm: {**naming, **arm._asdict()} for arm in self.arms}
        keys = {arm: _key(names, self.settings) for arm, names in named.items()}
        missing = [arm for arm in self.arms if not log.done(keys[arm])]
        if not missing:
            return
        sample = self.exam.sample(naming["task"], naming["index"])
        for arm, record in zip(missing, self._ask(sample, missing), strict=True):
            log.append({"key": keys[arm], **named[arm], **record, "settings": self.settings})

    def _ask(self, sample: Sample, arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
        """What each arm answers and held: the measured part of a record."""
        tokenizer, device = self.exam.tokenizer, self.model.device
        prompt = encode(tokenizer, sample, self.question)
        answers = answer_together(
            self.model,
            [arm.fresh_cache(self.model, self.seed) for arm in arms],
            prompt.compressed.to(device),
            prompt.follow_up.to(device),
            future=prompt.future.to(device),
            chunk=self.chunk,
            max_new_tokens=sample.max_new_tokens,
            ends=end_tokens(self.model, tokenizer),
        )
        for answer in answers:
            output = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            yield {
                "score": score(sample, output),
                "output": output,
                "answers": list(sample.answers),
                "prompt": sample.question.strip() + sample.answer_prefix,
                "prompt_tokens": prompt.compressed.shape[1],
                "kept": answer.kept,
                "cache_bytes": answer.cache_bytes,
                "full_bytes": answer.full_bytes,
                "extra": self._reading,
            }


def _write_rows(path: Path, records: Iterable[Mapping[str, Any]], stamp: Mapping[str, Any]) -> list[Row]:
    rows = summarise([record for record in records if record["model"] == stamp["model"]], stamp=stamp)
    others = [row for row in read_rows(path) if row.model != stamp["model"]] if path.exists() else []
    write_rows(path, [*others, *rows])
    return rows


def policies_for(model: PreTrainedModel) -> list[str]:
    """Names of the policies that anyone could run on this model: no oracle, and none trained for another model."""
    return [name for name in POLICIES if name != "oracle" and serves(name, model)]


def serves(policy: str, model: PreTrainedModel) -> bool:
    """Whether the policy, as users write it, runs on this model, for which it may not be trained."""
    try:
        KVCache(model, policy=policy)
    except ValueError:
        return False
    return True


def arms_of(policies: Sequence[str], budgets: Sequence[int | float | str]) -> list[Arm]:
    """The full cache first, then every policy at every budget."""
    _known("policy", [parse(policy)[0] for policy in policies], [*POLICIES, FULL])
    names = [spelled(policy) for policy in policies if policy != FULL]
    limits = [_text(budget) for budget in budgets if not Budget.parse(budget).unlimited]
    if names and not limits:
        raise ValueError(f"no budget given for {', '.join(names)}; give some, such as 25%, or the policy full alone")
    return [Arm(FULL, FULL), *dict.fromkeys(Arm(name, limit) for name in names for limit in limits)]


def _text(budget: int | float | str) -> str:
    """One spelling for equal budgets; bytes stay as they were given."""
    parsed = Budget.parse(budget)
    return str(parsed) if parsed.bytes is None else str(budget)


def _known(kind: str, names: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """The names without repeats, refused with near ones where there is no such thing."""
    allowed = list(known)
    if not names:
        raise ValueError(f"no {kind} given; choose from {', '.join(allowed)}")
    for name in names:
        if name not in allowed:
            raise ValueError(f"unknown {kind} {name!r}; {nearest(name, allowed)}")
    return tuple(dict.fromkeys(names))


def _warn_if_too_long(model: PreTrainedModel, length: int) -> None:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and length > most:
        warnings.warn(f"prompts of {length} tokens are longer than the model's maximum of {most}", stacklevel=3)


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: the model's own and the tokenizer's."""
    return (model_ends(model) | {tokenizer.eos_token_id}) - {None}


def _key(named: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Names one sample: what it is, and a digest of everything else that its score depends on."""
    names = ("model", "task", "length", "question", "split", "index", "policy", "budget")
    return "/".join([*(str(named[name]) for name in names), digest_of(settings)])


def digest_of(settings: Mapping[str, Any]) -> str:
    """A few characters that differ where the settings do."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def refuse_other_settings(log: SampleLog, model_name: str, settings: Mapping[str, Any]) -> None:
    """Rows average over samples, so those of one model must be alike in all that rows do not name."""
    for record in log.records:
        theirs = record.get("settings") or {}
        if record.get("model") == model_name and theirs != settings:
            differs = [
                f"{name} {theirs.get(name)!r} there, {settings.get(name)!r} now"
                for name in dict.fromkeys([*settings, *theirs])
                if theirs.get(name) != settings.get(name)
            ]
            raise ValueError(
                f"{log.path} holds samples of {model_name} under other settings ({'; '.join(differs)}); give another "
                "out folder, or the settings of before"
            )


def output_folder(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is {out}, which is a file; give a folder for samples.jsonl and rows.jsonl")
    return out


def weights_digest(model: PreTrainedModel, tokenizer: Any) -> str:
    """Of the weights, by 64 numbers of each tensor, and of what else turns text into tokens and back."""
    whole = hashlib.sha256(
        repr((tokenizer.chat_template, len(tokenizer), sorted(end_tokens(model, tokenizer)))).encode()
    )
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        few = flat[:: max(1, flat.numel() // 64)][:64].double().cpu()
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + few.numpy().tobytes())
    return whole.hexdigest()[:16]
