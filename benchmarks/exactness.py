"""Rows for "exact or refused": full budget against DynamicCache, and every policy against the dense model.

    python benchmarks/exactness.py --out results/exactness [--models random smollm2 FOLDER] [--dtypes float32]

Runs random models of six families and the embedded model in bf16 and fp32, or the models and dtypes named.
"""

import argparse
from pathlib import Path

import torch
import transformers

import kvkeep
from kvkeep.evaluate.rows import write_rows
from kvkeep.evaluate.tasks import demo_document
from kvkeep.evaluate.verify import dense_differences, same_tokens

FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Phi3": {"pad_token_id": 0},
    "Gemma3Text": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
}


def random_model(family: str):
    """A small random fp32 model of a family."""
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "initializer_range": 0.2,
            **FAMILIES[family],
        }
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def texts(tokenizer, num_prompts: int, num_tokens: int):
    """Prompts of at least `num_tokens` tokens from the bundled novels."""
    for seed in range(num_prompts):
        text, _ = demo_document(num_tokens + 100, lambda part: len(tokenizer(part).input_ids), seed)
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert ids.shape[1] >= num_tokens
        yield ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["random", "smollm2"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in FAMILIES if "random" in options.models else ():
        model = random_model(family)
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(3, 512, (1, options.tokens), generator=generator) for _ in range(options.prompts)]
        rows.append(same_tokens(model, prompts, model_name=f"random {family}", progress=print))
        if family != "Gemma3Text":
            rows += dense_differences(model, prompts[:2], model_name=f"random {family}", progress=print)
        write_rows(options.out / "rows.jsonl", rows)
    for name in (name for name in options.models if name != "random"):
        for dtype in (getattr(torch, dtype) for dtype in options.dtypes):
            model, tokenizer = kvkeep.load(name, dtype=dtype)
            prompts = list(texts(tokenizer, options.prompts, options.tokens))
            shown = Path(name).name
            rows.append(same_tokens(model, prompts, model_name=shown, progress=print))
            write_rows(options.out / "rows.jsonl", rows)
            if dtype == torch.float32 and name == "smollm2":
                rows += dense_differences(model, prompts[:2], model_name=shown, progress=print)
                write_rows(options.out / "rows.jsonl", rows)


if __name__ == "__main__":
    main()
