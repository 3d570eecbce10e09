"""Decoding without end: KVpop keeps or drops one token a step, and the cache stays as large as it is."""

import torch

import kvkeep
from kvkeep.chat import prompt_ids

model, tokenizer = kvkeep.load("smollm2", dtype="fast")
prompt = prompt_ids(tokenizer, "The password is Juniper. Now count slowly from one to one hundred, in words.", "")

cache = kvkeep.KVCache(model, policy="kvpop", budget=160)
tokens, sizes = prompt, []
for _ in range(6):
    tokens = kvkeep.generate(model, tokens, cache=cache, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    report = cache.report()
    sizes.append(report.bytes)
    print(f"{cache.get_seq_length()} tokens seen, {report.kept} kept, {report.bytes / 2**20:.2f} MiB")
assert sizes[-1] == sizes[-2]

# which of the oldest tokens are still there? of some layers and heads, as each decides by itself
for layer in (5, 15, 25):
    held = cache.managed[layer].slots.positions[0, 0]
    oldest = held[held >= 4].sort().values[:8]
    print(f"layer {layer}: {tokenizer.decode(tokens[0, oldest])!r}")

# a text after the fact: what each token is worth by the weights, on a scale that never changes
worth = torch.cat([layer.slots.side("kvpop").flatten() for layer in cache.managed])
print(f"static priorities from {worth.min():.1f} to {worth.max():.1f}")
