"""A conversation on one cache: the second turn reads its new tokens only, and the budget holds throughout."""

import torch

import kvkeep

model, tokenizer = kvkeep.load("smollm2", dtype="fast")
cache = kvkeep.KVCache(model, policy="tova", budget=256)
log = " ".join(f"On day {day} the keeper of the lighthouse counted {day * 7 % 30} ships." for day in range(1, 41))

said = torch.empty(1, 0, dtype=torch.long)
for question in (f"{log}\n\nWho counted the ships?", "What else may such a person do all day?"):
    turn = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")[
        "input_ids"
    ]
    # the whole conversation goes in; what the cache has read is skipped
    conversation = torch.cat([said, turn], dim=1)
    said = kvkeep.generate(model, conversation, cache=cache, max_new_tokens=32, do_sample=False)
    print(tokenizer.decode(said[0, conversation.shape[1] :], skip_special_tokens=True))
    print(f"    {cache.report().seen} tokens seen, {cache.report().kept:.0f} kept")
    assert cache.report().kept == 256
