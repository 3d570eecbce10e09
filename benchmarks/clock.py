"""Processor time of some functions among all that runs."""

import time
from typing import Any


class Clock:
    """Processor time inside the functions it watches; what one of them does inside another counts once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def watch(self, owner: Any, name: str) -> None:
        watched = getattr(owner, name)

        def noting(*args: Any, **options: Any) -> Any:
            start, self._depth = time.process_time(), self._depth + 1
            try:
                return watched(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - start

        setattr(owner, name, noting)
