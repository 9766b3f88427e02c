"""A device in software: what is given to it is done as late as the waits allow.

Copies and exchanges of its streams, and the work of the host's worker, are queued, and what they
are going to write is nan meanwhile: a wait that is missing shows as nan, each time, on a CPU.
"""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_zero3.strategies.engine.streams import Stream


def poison(tensor):
    tensor.view(torch.uint8).fill_(0xFF)  # nan in every floating dtype


class Queue:
    """Work to be done in order, by those who wait for its end."""

    def __init__(self):
        self.waiting, self.done = [], 0

    def add(self, work):
        self.waiting.append(work)
        return self.done + len(self.waiting)

    def run_until(self, mark):
        while self.done < mark:
            work = self.waiting.pop(0)
            self.done += 1
            work()


class LateStream(Stream):
    """Beside the compute stream, which is the host here."""

    def __init__(self, device):
        self.on_device, self._device, self.queue = True, device, Queue()
        self.hidden = []  # what has come to the host, which has not waited for it

    def run(self, work, device=(), host=()):
        with _disable_current_modes():
            before = [target.clone() for target in host]  # what the work finds there
        for target in (*device, *host):
            poison(target)

        def hide():
            with _disable_current_modes():
                for target, value in zip(host, before, strict=True):
                    target.copy_(value)
            work()
            places = {target.data_ptr() for target in host}
            # what lay there is overwritten
            self.hidden = [each for each in self.hidden if each[1].data_ptr() not in places]
            self.hidden += [(mark, target, target.clone()) for target in host]
            for target in host:
                poison(target)

        mark = self.queue.add(hide)
        return mark

    def wait(self, mark):
        if mark is None:
            return
        self.queue.run_until(mark)
        with _disable_current_modes():  # the device's doing: who counts copies does not see it
            for _, target, value in [each for each in self.hidden if each[0] <= mark]:
                target.copy_(value)
        self.hidden = [each for each in self.hidden if each[0] > mark]

    def join(self, mark):
        if mark is not None:
            self.queue.run_until(mark)


class Ticket:
    def __init__(self, queue, mark):
        self.queue, self.mark = queue, mark
        self.error = self.value = None

    def result(self):
        self.queue.run_until(self.mark)
        if self.error is not None:
            raise self.error
        return self.value


class LateWorker:
    """As the worker of an engine; its work is done as late."""

    def __init__(self, device):
        self.queue = Queue()

    def submit(self, work):
        def noted():
            try:
                ticket.value = work()
            except Exception as error:
                ticket.error = error

        ticket = Ticket(self.queue, 0)
        ticket.mark = self.queue.add(noted)
        return ticket
