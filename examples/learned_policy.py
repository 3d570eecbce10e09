"""A learned policy: small agents rank the cache. Their weights for the embedded model come with kvkeep."""

from tempfile import TemporaryDirectory

import kvkeep
from kvkeep.chat import prompt_ids
from kvkeep.policies import KVP

model, tokenizer = kvkeep.load("smollm2", dtype="fast")
log = " ".join(f"On day {day} the keeper of the lighthouse counted {day * 7 % 30} ships." for day in range(1, 41))
prompt = prompt_ids(tokenizer, f"{log} The keeper's cat is called Juniper. {log}", "What is the keeper's cat called?")

for policy in ("kvp", "knorm", "streaming"):
    cache = kvkeep.KVCache(model, policy=policy, budget="25%")
    output = kvkeep.generate(model, prompt, cache=cache, max_new_tokens=12, do_sample=False)
    print(f"{policy}: {tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)}")

policy = KVP()
num_agents = policy.file.architecture["num_agents"]
print(f"trained for {policy.file.fingerprint['type']}, {num_agents} agents of one head each")

# weights travel as a folder of safetensors and JSON; `kvkeep train kvp` makes such a folder for another model
with TemporaryDirectory() as folder:
    policy.save_pretrained(folder)
    assert KVP.from_pretrained(folder) == policy

# and they serve no other model
try:
    kvkeep.KVCache(type(model.config)(num_hidden_layers=2), policy=policy, budget=64)
except ValueError as refusal:
    print(refusal)
