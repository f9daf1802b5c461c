"""Compilation of a pure function by torch.compile, with a fallback to eager where no compiler works."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class CompiledCore:
    """Compiled function whose first call, which takes seconds, is logged. Without a compiler: eager, with a warning.

    Each call shape is compiled once. There is no fullgraph: past torch's recompile limit a new shape runs `core` eager.
    Values are allclose to eager, not bit-equal, since fused sums run in another order.

    Args:
        name: Name of the function, for the log.
        core: Pure function of tensors, compiled with ``dynamic=False``.
        eager: Same function, used when the first compilation fails; None for `core` itself.
    """

    def __init__(self, name: str, core: Callable[..., Tensor], eager: Callable[..., Tensor] | None = None) -> None:
        self.name = name
        self.core = core
        self.eager = eager or core
        self.compiled: Callable[..., Tensor] | None = None
        self.failed = False

    def __call__(self, *args: Any) -> Tensor:
        """Result of the function; the first call compiles it."""
        if self.compiled is not None:
            return self.compiled(*args)
        if not self.failed:
            logger.info("compiling the %s (once per process and shape) ...", self.name)
            start = time.perf_counter()
            try:
                compiled = torch.compile(self.core, dynamic=False)
                out = compiled(*args)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, OSError, ImportError) as error:
                # A missing compiler is a RuntimeError of inductor, an unwritable cache an OSError. The eager
                # function is the same; if the arguments were at fault, the call below raises.
                self.failed = True
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                logger.warning("%s: compilation failed, running eager instead (%s)", self.name, reason)
            else:
                self.compiled = compiled
                logger.info("%s compiled in %.1f s", self.name, time.perf_counter() - start)
                return out
        return self.eager(*args)
