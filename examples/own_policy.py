"""A policy of your own: one class that says what every slot is worth. The budget and the cache do the rest."""

from dataclasses import dataclass
from math import ceil

from jaxtyping import Float
from torch import Tensor

import kvkeep
from kvkeep.chat import prompt_ids


@dataclass(frozen=True, kw_only=True)
class LargeValues(kvkeep.Policy):
    """Keep the tokens with the largest values, which move the output most when they are attended to."""

    def score(self, seen: kvkeep.Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.values.float().norm(dim=-1)


model, tokenizer = kvkeep.load("smollm2", dtype="fast")
log = " ".join(f"On day {day} the keeper of the lighthouse counted {day * 7 % 30} ships." for day in range(1, 61))
prompt = prompt_ids(tokenizer, log, "What did the keeper count?")

for policy in (LargeValues(), "knorm"):
    cache = kvkeep.KVCache(model, policy=policy, budget="50%")
    output = kvkeep.generate(model, prompt, cache=cache, max_new_tokens=24, do_sample=False)
    print(f"{policy}: {tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)}")
    assert cache.report().kept == ceil(cache.report().seen / 2)
