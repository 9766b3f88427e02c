"""Sessions: each start of the processes gets a part of the store that no earlier start wrote to.

torchrun's agent keeps one store through all restarts of its workers. It still has the addresses of
processes that are gone, which a new process that comes before its peers would take for theirs.
"""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize

import torch.distributed as dist

_POLL_S = 0.02
_LAST_ANSWER_S = 2.0  # to wait for an answer in flight; a silent store delays no process longer


def join_session(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the part of ``store`` that rank 0 chooses for this start; other ranks wait for it.

    Raises:
        RuntimeError: rank 0 did not answer within ``timeout``.
    """
    if rank == 0:
        session = uuid.uuid4().hex
        # hazard: the main thread may wait in the session for ranks that have yet to ask for it, so
        # a thread of its own answers them
        end = threading.Event()
        deadline = time.monotonic() + timeout.total_seconds()
        # torch's stub of `Store` is not complete
        arguments = (store.clone(), session, world_size, deadline, end)  # type: ignore[attr-defined]
        thread = threading.Thread(
            target=_answer, args=arguments, name="lightning_zero3.session", daemon=True
        )
        thread.start()
        # hazard: a thread that is in the store's code when the interpreter ends aborts the process
        Finalize(None, _end_thread, (thread, end), exitpriority=0)
    else:
        # Each process asks under a new number, so that the answer is for this process and not for
        # one of an earlier start.
        answer = f"session for {store.add('sessions asked for', 1)}"
        store.wait([answer], timeout)
        session = store.get(answer).decode()
        store.add(f"in session {session}", 1)
    return dist.PrefixStore(session, store)


def _answer(
    store: dist.Store, session: str, world_size: int, deadline: float, end: threading.Event
) -> None:
    """Answer all requests, also those of processes that are gone, until all ranks have joined."""
    answered = 0
    with suppress(RuntimeError):  # the store is gone
        while (
            store.add(f"in session {session}", 0) < world_size - 1 and time.monotonic() < deadline
        ):
            asked = store.add("sessions asked for", 0)
            for number in range(answered + 1, asked + 1):
                store.set(f"session for {number}", session)
            answered = asked
            if end.wait(_POLL_S):
                return


def _end_thread(thread: threading.Thread, end: threading.Event) -> None:
    end.set()
    thread.join(_LAST_ANSWER_S)
