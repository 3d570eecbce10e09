"""What to tell someone who gave a name that does not exist."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """ "did you mean ...?" with the near names, then all of them.

    >>> nearest("tovva", ["tova", "h2o"])
    'did you mean tova? Choose one of: tova, h2o'
    """
    names = list(known)
    near = difflib.get_close_matches(name, names)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}Choose one of: {', '.join(names)}".removeprefix(" ")
