"""A long prompt under a budget in bytes: read in chunks, the cache never holds more than budget + chunk."""

import kvkeep

model, tokenizer = kvkeep.load("smollm2", dtype="fast")
log = " ".join(f"On day {day} the keeper of the lighthouse counted {day * 7 % 30} ships." for day in range(1, 121))
chat = [{"role": "user", "content": f"{log}\n\nHow many ships were there on the last day?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

cache = kvkeep.KVCache(model, policy="snapkv", budget="8MiB")
kvkeep.generate(model, inputs["input_ids"], cache=cache, chunk=256, max_new_tokens=24, do_sample=False)

report = cache.report()
print(f"read {report.seen} tokens, kept {report.kept:.0f}, which take {report.bytes / 2**20:.2f} MiB")
assert report.bytes <= 8 * 2**20
