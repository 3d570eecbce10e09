"""Policies that read the model's queries, such as TOVA and SnapKV, need the model attached."""

import kvkeep

model, tokenizer = kvkeep.load("smollm2", dtype="fast")
log = " ".join(f"On day {day} the keeper of the lighthouse counted {day * 7 % 30} ships." for day in range(1, 61))
chat = [{"role": "user", "content": f"{log}\n\nWho counted the ships?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

cache = kvkeep.KVCache(model, policy="tova", budget="25%")
with kvkeep.attach(model):
    output = model.generate(**inputs, **{kvkeep.cache_argument(model): cache}, max_new_tokens=24, do_sample=False)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"kept {cache.report().kept:.0f} of {cache.report().seen} tokens")

# kvkeep.generate attaches for the call and says the same
again = kvkeep.generate(model, inputs["input_ids"], policy="tova", budget="25%", max_new_tokens=24, do_sample=False)
assert again.tolist() == output.tolist()
