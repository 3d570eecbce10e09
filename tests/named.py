"""Policies by name, for whatever model a test has: the weights that ship fit one model only."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from kvkeep import KVCache
from kvkeep.fingerprint import fingerprint
from kvkeep.policies import POLICIES, Policy, make_policy
from kvkeep.policies.learned import LearnedPolicy

# gone when the run ends
_WEIGHTS = TemporaryDirectory(prefix="kvkeep-tests-")


def policy_named(name: str, model: PreTrainedModel, **options) -> Policy:
    """The policy `name`; a learned one with untrained weights for `model`, which lie in a folder as trained ones do."""
    if not issubclass(POLICIES[name], LearnedPolicy):
        return make_policy(name, **options)
    layers = [layer.index for layer in KVCache(model).managed]
    shape = json.dumps(fingerprint(model.config.get_text_config(decoder=True)))
    return make_policy(name, weights=_untrained(name, shape, tuple(layers)), **options)


@cache
def _untrained(name: str, shape: str, layers: tuple[int, ...]) -> str:
    folder = Path(_WEIGHTS.name) / str(_untrained.cache_info().misses)
    POLICIES[name].untrained(json.loads(shape), layers=layers).save_pretrained(folder)
    return str(folder)
