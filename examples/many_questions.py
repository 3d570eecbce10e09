"""Compress a document once, then ask many questions: every question goes on from its own copy of the cache.

The questions are not known when the document is compressed, which is hard for any policy.
"""

from copy import deepcopy

import kvkeep
from kvkeep.chat import prompt_ids

model, tokenizer = kvkeep.load("smollm2", dtype="fast")
log = " ".join(f"On day {day} the keeper of the lighthouse counted {day * 7 % 30} ships." for day in range(1, 61))
questions = ["What did the keeper count?", "Where does the keeper work?", "How many ships came on day 60?"]
prompts = [prompt_ids(tokenizer, log, question) for question in questions]
# the prompts are the same up to their questions
columns = zip(*(prompt[0].tolist() for prompt in prompts), strict=False)
shared = next(place for place, column in enumerate(columns) if len(set(column)) > 1)

cache = kvkeep.KVCache(model, policy="expected_attention", budget="50%")
kvkeep.prefill(model, prompts[0][:, :shared], cache)
print(f"kept {cache.report().kept:.0f} of {cache.report().seen} tokens")

for question, prompt in zip(questions, prompts, strict=True):
    output = kvkeep.generate(model, prompt, cache=deepcopy(cache), max_new_tokens=24, do_sample=False)
    print(f"{question}  {tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)}")

assert cache.report().seen == shared
