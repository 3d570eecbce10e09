"""Folders on the Hugging Face hub, through huggingface_hub, which is imported only when one is asked for."""

import re
from pathlib import Path


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form "owner/name"."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None


def fetch(repository: str, files: list[str]) -> Path:
    """A folder with these files of a repository, downloaded once.

    Raises:
        ValueError: where there is no such repository or no connection, with the hub's reason.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=files))
    # it fails in many ways, all of them the network's or the name's
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{repository} could not be fetched from the hub: {reason}") from error


def push(folder: Path, repository: str, files: list[str], *, private: bool, message: str) -> str:
    """Upload these files of a folder, making the repository if it is new; returns the address of the commit."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    done = api.upload_folder(repo_id=repository, folder_path=str(folder), allow_patterns=files, commit_message=message)
    return str(done.commit_url)
