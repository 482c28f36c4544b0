"""One error on all ranks, where one of them raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.mailbox import PipelineError, described


@contextmanager
def failing_together(
    transport: Transport, abandon: Callable[[], None], where: Callable[[BaseException], tuple[str, str]]
) -> Iterator[None]:
    """What raises inside is a PipelineError on all ranks; Ctrl-C and sys.exit stay what they are on this one.

    abandon: called first. where: what comes before and after the error's own text in the message.
    """
    try:
        yield
    except BaseException as error:
        is_known = isinstance(error, PipelineError)
        before, after = ("", "") if is_known else where(error)
        reason = str(error) if is_known else f"rank {transport.rank}, {before}: {described(error)}{after}"
        abandon()
        transport.fail(reason)  # no-op where the transport raised it
        if is_known or not isinstance(error, Exception):
            raise
        # a StopIteration as its cause would be taken for the end of this generator
        raise PipelineError(reason) from (None if isinstance(error, StopIteration) else error)
