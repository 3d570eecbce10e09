"""What three policies miss of a text, beside the best that could be held: less attention missed is better."""

from pathlib import Path
from tempfile import TemporaryDirectory

import kvkeep
from kvkeep.corpus import Reading, harvest
from kvkeep.evaluate.diagnose import Events, diagnose

NOTE = "In {year} the keeper counted {ships} ships, and wrote the name of each into a long book. "

model, tokenizer = kvkeep.load("smollm2", dtype="fast")
with TemporaryDirectory() as folder:
    text = Path(folder) / "note.txt"
    text.write_text("".join(NOTE.format(year=1850 + i, ships=7 * i % 31) for i in range(60)))
    reading = Reading(tokenizer=tokenizer, split="train", num_tokens=200, future_tokens=48, num_prompts=1)
    rows = diagnose(
        model,
        tokenizer,
        harvest(f"text:{text}", reading).items,
        model_name="smollm2",
        policies=["streaming", "knorm", "kvp"],
        budgets=["25%"],
        out=Path(folder) / "diagnosis",
        events=Events(horizon=16),
    )
for row in rows:
    if row.metric == "future_missed_mass":
        print(f"{row.policy:18} {row.budget:5} {row.value:.1%} of the attention missed")
