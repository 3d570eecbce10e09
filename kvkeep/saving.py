"""Files that hold tensors and a JSON state, written whole or not at all, and checked when read."""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, uint8


def write(path: Path, kind: str, version: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file with `state` in its header; a killed process leaves the old file or none.

    Args:
        kind: what the file is, such as "cache".
        version: version of that kind's format.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(state, sort_keys=True)
    header = {"kvkeep": kind, "version": str(version), "state": text, "digest": _digest(text, tensors)}
    with whole_file(path) as file:
        file.write(save(tensors, metadata=header))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once the block has ended; after an error the old one is untouched."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # not by tempfile, whose files nobody else may read
    name = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
    try:
        with name.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def read(path: Path, kind: str, version: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """State and tensors of a file made by `write`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is truncated, of another kind, changed since it was written, or too new.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no saved {kind} at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, struct.error, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); save the {kind} again") from error
    if header.get("kvkeep") != kind:
        raise ValueError(
            f"{path} is no saved kvkeep {kind}, but {header.get('kvkeep') or 'some other safetensors file'}"
        )
    refuse_newer(path, header["version"], version)
    if header.get("digest") != _digest(header["state"], tensors):
        raise ValueError(f"{path} was changed after it was written: its checksum does not match; save the {kind} again")
    return json.loads(header["state"]), tensors


def refuse_newer(what: Path | str, version: int | str, known: int) -> None:
    """ValueError for a format that is newer than the known one."""
    if int(version) > known:
        raise ValueError(f"{what} has format version {version} and this kvkeep reads up to {known}; upgrade kvkeep")


def digest(state: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Checksum of a state and its tensors: the one that `write` puts into a file."""
    return _digest(json.dumps(state, sort_keys=True), tensors)


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(uint8).numpy().tobytes())
    return digest.hexdigest()
