"""A bounded cache in transformers' own generate: policies that read keys alone need nothing else.

Before transformers 5.24 the argument is called past_key_values; kvkeep.generate knows both names.
"""

import kvkeep

model, tokenizer = kvkeep.load("smollm2", dtype="fast")
log = " ".join(f"On day {day} the keeper of the lighthouse counted {day * 7 % 30} ships." for day in range(1, 61))
chat = [{"role": "user", "content": f"{log}\n\nWhat did the keeper count?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

cache = kvkeep.KVCache(model, policy="keydiff", budget=512)
output = model.generate(**inputs, **{kvkeep.cache_argument(model): cache}, max_new_tokens=24, do_sample=False)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(cache.report())
assert cache.report().kept == 512
