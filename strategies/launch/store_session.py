"""A part of a store that no earlier start of the processes has written to.

torchrun's agent keeps one store through all restarts of its workers. In it stand the addresses of
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
_LAST_WORDS_S = 2.0  # for an answer under way; a store that is silent holds no process up


def join_session(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of ``store`` that rank 0 has chosen for this start; the others wait for it to come.

    Raises:
        RuntimeError: rank 0 did not answer within ``timeout``.
    """
    if rank == 0:
        session = uuid.uuid4().hex
        # Beside the main thread: the others may come while it waits for them in the session.
        over = threading.Event()
        arguments = (
            store.clone(),
            session,
            world_size,
            time.monotonic() + timeout.total_seconds(),
            over,
        )
        answering = threading.Thread(
            target=_answer, args=arguments, name="lightning_zero3.session", daemon=True
        )
        answering.start()
        # A thread that is in the store's code when the interpreter goes aborts the process.
        Finalize(None, _end, (answering, over), exitpriority=0)
    else:
        # A number that nobody had before, so that the answer is to this process and not to one that
        # is gone.
        answer = f"session for {store.add('sessions asked for', 1)}"
        store.wait([answer], timeout)
        session = store.get(answer).decode()
        store.add(f"in session {session}", 1)
    return dist.PrefixStore(session, store)


def _answer(
    store: dist.Store, session: str, world_size: int, deadline: float, over: threading.Event
) -> None:
    """Tell everybody who asks, also those who are gone, until all are here."""
    answered = 0
    with suppress(RuntimeError):  # the store's end
        while (
            store.add(f"in session {session}", 0) < world_size - 1 and time.monotonic() < deadline
        ):
            asked = store.add("sessions asked for", 0)
            for number in range(answered + 1, asked + 1):
                store.set(f"session for {number}", session)
            answered = asked
            if over.wait(_POLL_S):
                return


def _end(answering: threading.Thread, over: threading.Event) -> None:
    over.set()
    answering.join(_LAST_WORDS_S)
