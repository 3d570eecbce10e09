"""`kvkeep models`: what is in the cache folder."""

from rich.table import Table

from .console import MIB, out, print_json
from .options import Json


def models(as_json: Json = False) -> None:
    """List the models in kvkeep's cache folder, and the embedded one.

    The folder is the user's cache folder, or `KVKEEP_HOME`. Folders, GGUF files and Hugging Face ids work
    as `--model` without being listed here.

    **Examples**

    `kvkeep models`

    `KVKEEP_HOME=/data/kvkeep kvkeep models --json`
    """
    from kvkeep.models import models as stored

    found = stored()
    if as_json:
        print_json([{**info._asdict(), "path": str(info.path) if info.path else None} for info in found])
        return
    table = Table("model", "parameters", "on disk", "context", "cache per 1,000 tokens", "where")
    for info in found:
        # two bytes a number: bf16
        cache = 1000 * info.layers * info.kv_heads * info.head_size * 2 * 2
        table.add_row(
            info.name,
            f"{info.parameters / 1e6:,.0f} M",
            f"{info.bytes / MIB:,.0f} MiB",
            f"{info.context_length:,}",
            f"{cache / MIB:.1f} MiB",
            str(info.path) if info.path else "not fetched yet",
        )
    out.print(table)
