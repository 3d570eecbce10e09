"""Policy files: the weights of a learned policy, the model they are for, and how they came about.

A folder holds `policy.safetensors`, which is everything, and `policy.json`, a copy of what it says in words for people
to read. There is no pickle anywhere, and every field has a default, so that files of older versions keep loading.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import hub, saving
from ..names import nearest

VERSION = 1

_FILES = ["policy.safetensors", "policy.json"]
_SHIPPED = Path(__file__).parents[1] / "weights"


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyFile:
    """A learned policy as stored.

    Attributes:
        method: which policy it is, such as "kvp".
        fingerprint: of the model it was trained for (`kvkeep.fingerprint`).
        layers: the model's layers it has weights for, in the order of its stacks.
        architecture: what the network looks like.
        training: manifest: command, commit, versions, data, what was reached.
        tensors: weights by name.
    """

    method: str
    tensors: Mapping[str, Tensor]
    fingerprint: dict[str, Any] = field(default_factory=dict)
    layers: list[int] = field(default_factory=list)
    architecture: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON."""
        words = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "tensors"}
        return json.loads(json.dumps(words))

    @property
    def digest(self) -> str:
        """Checksum of all of it."""
        return saving.digest(self.state, dict(self.tensors))


def write_policy(folder: str | Path, policy: PolicyFile) -> None:
    """Write `policy` into `folder`; a killed process leaves the old weights or none."""
    folder = Path(folder)
    saving.write(folder / _FILES[0], "policy", VERSION, policy.state, dict(policy.tensors))
    with saving.whole_file(folder / _FILES[1]) as file:
        words = {"version": VERSION, **policy.state, "digest": policy.digest}
        file.write(json.dumps(words, indent=1).encode() + b"\n")


def read_policy(weights: str | Path, method: str) -> PolicyFile:
    """The policy `weights`: a shipped name, a folder, or a hub id.

    Raises:
        FileNotFoundError: for a folder without weights.
        ValueError: for an unknown name, another method, and files that are truncated, changed or too new.
    """
    path = find_weights(weights, method) / _FILES[0]
    if not path.is_file():
        raise FileNotFoundError(f"no policy in {path.parent}: it has no {path.name}")
    stamp = path.stat()
    policy = _read(path, stamp.st_mtime_ns, stamp.st_size)
    if policy.method != method:
        raise ValueError(f"{path} is a policy for {policy.method!r}, not for {method!r}")
    return policy


def find_weights(weights: str | Path, method: str) -> Path:
    """The folder that `weights` means."""
    shipped = {folder.name: folder for folder in sorted((_SHIPPED / method).glob("*/"))}
    if weights in shipped:
        return shipped[str(weights)]
    if Path(weights).is_dir():
        return Path(weights)
    if isinstance(weights, str) and hub.is_hub_id(weights):
        return hub.fetch(weights, _FILES)
    raise ValueError(
        f"{str(weights)!r} is no folder, no hub id (owner/name) and not shipped: {nearest(str(weights), shipped)}"
    )


def push_policy(policy: PolicyFile, repository: str, *, private: bool = False) -> str:
    """Upload `policy` to the hub; returns the address of the commit."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        write_policy(folder, policy)
        message = f"{policy.method} for {policy.fingerprint.get('type', 'a model')}"
        return hub.push(Path(folder), repository, _FILES, private=private, message=message)


# the same weights serve many caches; a file that was replaced is read again
@lru_cache(maxsize=8)
def _read(path: Path, modified: int, size: int) -> PolicyFile:
    state, tensors = saving.read(path, "policy", VERSION)
    known = {entry.name for entry in fields(PolicyFile)}
    return PolicyFile(tensors=tensors, **{name: value for name, value in state.items() if name in known})
