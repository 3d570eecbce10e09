"""What both libraries are given: a tiny Llama or a real model, prompts, and what tokens share.

B sequences, S tokens.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# a quarter of it is kept, which leaves room for the 20 tokens that kvkeep protects
PROMPT, KEPT = 160, 40
SHARE = KEPT / PROMPT
LENGTHS = (80, 160, 320, 240)
PAD = 5
_END = 1

_SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    # ten times the usual: attention differs from token to token, as in a trained model
    "initializer_range": 0.2,
    "bos_token_id": _END,
    "eos_token_id": _END,
    # None: a padding token of its own would have an embedding of zeros
    "pad_token_id": None,
}


class Inputs:
    """A model in fp32 and prompts for it: random tokens for the tiny Llama, prose for a model from a folder."""

    def __init__(self, folder: Path | None, prose: Path):
        self.name = "tiny-llama" if folder is None else folder.name
        self.folder = folder
        self.model = self.fresh()
        # past the title and the table of contents
        self.text = prose.read_text()[5_000:25_000]
        self._tokens = None if folder is None else _read(folder, self.text)

    def fresh(self) -> Any:
        """The same model, built anew."""
        return _tiny() if self.folder is None else _real(self.folder)

    def prompt(self, length: int, seed: int = 0) -> Tensor:
        """`[1, length]` tokens; another seed is another text."""
        if self._tokens is None:
            return torch.randint(PAD + 1, _SHAPE["vocab_size"], (1, length), generator=_seeded(seed))
        start = 400 * seed
        return self._tokens[None, start : start + length]

    def repetitive(self, length: int) -> Tensor:
        """A prompt that prompt-lookup decoding finds drafts in."""
        return self.prompt(20).repeat(1, length // 20)

    def padded(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Prompts of `LENGTHS`, the same as one batch padded on the left, and its mask."""
        rows = [self.prompt(length, seed) for seed, length in enumerate(LENGTHS)]
        batch = torch.full((len(rows), max(LENGTHS)), self.model.generation_config.pad_token_id)
        mask = torch.zeros_like(batch)
        for number, row in enumerate(rows):
            batch[number, -row.shape[1] :] = row[0]
            mask[number, -row.shape[1] :] = 1
        return rows, batch, mask


def same(one: Tensor, other: Tensor) -> float:
    """Share of places that hold the same token."""
    return float((one == other).float().mean())


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tiny() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**_SHAPE), dtype=torch.float32).eval()
    # a logit of 0 never is the largest of 128, so no answer ends early
    model.lm_head.weight.data[_END] = 0
    model.generation_config.pad_token_id = PAD
    return model


def _real(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.do_sample = False
    return model


def _read(folder: Path, text: str) -> Tensor:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
