"""Looking ahead before evicting: what the model is about to read stays, also at a small budget."""

import kvkeep

model, tokenizer = kvkeep.load("smollm2", dtype="fast")
notes = " ".join(f"On day {day} the keeper of the lighthouse counted {day * 7 % 30} ships." for day in range(1, 31))
text = f"The code that opens the gate is 73 91 58 26. {notes} The code that opens the gate is"
prompt = tokenizer(text, return_tensors="pt")["input_ids"]

for policy in ("streaming", "snapkv", "lorekv", "lorekv(kept=True)"):
    cache = kvkeep.KVCache(model, policy=policy, budget=64)
    answer = kvkeep.generate(model, prompt, cache=cache, max_new_tokens=12, do_sample=False)
    written = tokenizer.decode(answer[0, prompt.shape[1] :])
    print(f"{policy}: {written!r}")
    print(f"    {cache.report().seen} tokens seen, {cache.report().kept:.0f} kept")
    assert cache.report().kept == 64
