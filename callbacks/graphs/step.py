"""`Step`: the training step as graphs, with the work of Lightning between forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...strategies.engine import ReplayedStep
from ...strategies.liveness import Activity
from .compare import States
from .program import (
    Books,
    Captured,
    EagerRun,
    Fit,
    NotCapturable,
    Program,
    Record,
    Run,
    leaves_of,
    signature,
)

_NEVER = 2**31 - 1
_NO_LOSS = (
    "`training_step` returned no loss. Return one that is zero, so that every step is the same."
)


class StaticGradients(Books):
    """Gradients at fixed addresses, which captured backwards add to.

    Its methods are called at the same points of a step as those of `ReplayedStep`, which does the
    same for the engine of `zero3`.
    """

    def __init__(self) -> None:
        self._grads: dict[Tensor, Tensor] = {}  # parameter: its gradient at a fixed address
        self._cleared: list[Tensor] = []  # parameters that had no gradient before this backward
        self._new: list[Tensor] = []  # parameters that this backward is the first to need

    def begin_backward(self, parameters: list[Tensor]) -> None:
        """Make each ``parameter.grad`` the static one, with the value that it had, or zero.

        Between two backwards, users, Lightning's loop and its validation set gradients to None or
        to other tensors.
        """
        self._cleared = [p for p in parameters if p.grad is None]
        self._new = [p for p in parameters if p not in self._grads]
        for parameter in parameters:
            static = self._grads.get(parameter)
            if static is None:
                static = torch.zeros_like(parameter, requires_grad=False)
                self._grads[parameter] = static
            if parameter.grad is not None and parameter.grad is not static:
                static.copy_(parameter.grad)
            parameter.grad = static
        if self._cleared:
            torch._foreach_zero_([self._grads[p] for p in self._cleared])

    @contextmanager
    def capture_backward(self, parameters: list[Tensor]) -> Iterator[None]:
        """Wrap the captured backward; then reduce ``parameters`` to those that get a gradient."""
        before = [(p, self._grads[p], self._grads[p]._version) for p in parameters]
        yield
        parameters[:] = [p for p, grad, version in before if grad._version != version]
        for parameter in set(self._cleared).difference(parameters):
            parameter.grad = None
        # Older gradients stay: graphs of other signatures may add to them.
        for parameter in set(self._new).difference(parameters):
            self._grads.pop(parameter)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(grad.nbytes for grad in self._grads.values())


class CapturedStep(Captured):
    """A training step in two graphs.

    The forward graph ends with the output of ``training_step``. Lightning gets a copy of this
    output, whose loss is the first node of a new small autograd graph. So Lightning divides the
    loss by the accumulation, scales it for 16-bit floats and calls hooks with it as ever. The
    gradient that arrives at the copy is the input of the backward graph.
    """

    def _choose_ends(self, outputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        loss = loss_of(self.output)
        parameters = [p for p in self._tape.module.parameters() if p.requires_grad]
        # The autograd graph does not show leaves inside of re-entrant checkpoints, so all trained
        # parameters are candidates. Capturing the backward removes those without a gradient.
        return [loss], list(dict.fromkeys([*leaves_of(loss), *parameters]))

    def replay_forward(self) -> Any:
        """Replay the forward and its logging; return the output, in memory of its own."""
        self.repeat_forward()
        self.log()
        output = apply_to_collection(self.output, Tensor, Tensor.clone)
        self._loss_copy = loss_of(output).requires_grad_()
        return output

    def replay_backward(self, run: Callable[[], None]) -> None:
        """Replay the backward.

        Args:
            run: runs the eager backward, from what Lightning made of the loss to the loss's copy.
        """
        self.books.open_backward()
        run()
        gradient = self._loss_copy.grad
        del self._loss_copy
        if gradient is not None:  # else the user's `backward` computed no gradient of the loss
            self.repeat_backward([gradient])


class Step(Program):
    """Replaces `Strategy.training_step`, its `backward` and `Precision.backward` during a fit.

    Args:
        fit: the fit.
        agree: returns the given numbers of all ranks, after it has stopped what some rank cannot
            capture; collective.
        reset: frees what else lies in the graphs' memory pool, and renews the pool.

    Attributes:
        steps: number of micro-batches so far; those that are not replayed run eagerly.
        is_replay: whether the current micro-batch is replayed.
        seconds: time that replays took that were compared with eager steps.
        gradients: the gradients that graphs add to, without `zero3`.
    """

    def __init__(
        self,
        fit: Fit,
        agree: Callable[[list[int]], list[tuple[int, ...]]],
        reset: Callable[[], None],
    ) -> None:
        super().__init__("the training step", fit, fit.root, "training_step")
        self._agree, self._reset = agree, reset
        strategy: Any = fit.trainer.strategy
        plugin = strategy.precision_plugin
        self._eager_step, self._eager_backward = strategy.training_step, plugin.backward
        self._strategy_backward = strategy.backward
        vars(strategy).update(
            training_step=self._training_step, backward=self._backward_and_compare
        )
        vars(plugin)["backward"] = self._backward
        self.gradients = StaticGradients()
        # What the forward leaves for the backward that follows.
        self._run_backward: Callable[[Callable[[], None]], None] | None = None
        self._compare: Callable[[], None] | None = None
        self._unverified = 0  # micro-batches that were replayed since the last comparison
        self.steps, self.is_replay, self.seconds = 0, False, 0.0
        self._ddp = None
        if isinstance(strategy, DDPStrategy):
            # `DistributedDataParallel` rebuilds its buckets in its second step; with NCCL, torch's
            # notes on CUDA graphs ask for eleven steps before a capture.
            self.warmup = max(self.warmup, 11 if fit.device.type == "cuda" else 4)
        if isinstance(strategy.model, DistributedDataParallel):
            self._ddp = strategy.model
            # hazard: `DistributedDataParallel` records events in each hundredth forward, and waits
            # for them in the next one: a capture may contain neither.
            self._ddp._set_ddp_runtime_logging_sample_rate(_NEVER)

    def uninstall(self) -> None:
        """Free the graphs and restore the methods of strategy and plugin."""
        strategy = self.fit.trainer.strategy
        for owner, name in (
            (strategy, "training_step"),
            (strategy, "backward"),
            (strategy.precision_plugin, "backward"),
        ):
            vars(owner).pop(name, None)
        self.drop()

    def drop(self) -> None:
        """Free all graphs, and with them the memory pool."""
        super().drop()
        self._run_backward = self._compare = None
        self._reset()

    def stop(self) -> None:
        """Run eagerly from now on."""
        super().stop()
        if self.fit.engine is not None:
            self.fit.engine.expect_graphs(False)

    def problems_of(self, record: Record) -> list[str]:
        """Return the list that gets the problems of an eager run."""
        return record.problems if record.graphs is None else self.problems

    def states(self) -> States:
        """Copy what a step changes in place."""
        return States(self.fit.root, self.fit.device, True, self.fit.engine)

    def _training_step(self, *args: Any) -> Any:
        self._run_backward = self._compare = None
        self.is_replay = False
        self.steps += 1
        run, record = (Run.PLAIN, Record()) if self.is_eager else self._choose(args[0])
        if run is Run.PLAIN:
            return self._eager_step(*args)
        if record.graphs is not None:
            record.graphs.copy_inputs((args, {}))
        if run in (Run.WATCH, Run.VERIFY):
            return self._run_eagerly(record, args)
        if record.graphs is None:
            # The capture is this micro-batch's run in Python, so that what the program counts in
            # Python is what it counts in an eager run.
            engine = self.fit.engine
            books = self.gradients if engine is None else ReplayedStep(engine)
            pair = self.fit.graphs.make_pair(record.offsets)
            program: Any = self._eager_step, (args, {})
            self.add(
                record, CapturedStep(self.name, pair, books, self.fit.root, self.states, *program)
            )
        self.is_replay = True
        self._run_backward = record.graphs.replay_backward
        self.replays += 1
        self._unverified += 1
        if self._ddp is not None:
            # A replay runs no `DistributedDataParallel._post_forward`, which sets this flag.
            self._ddp.require_forward_param_sync = self._ddp.require_backward_grad_sync
        watch = getattr(self.fit.trainer.strategy, "watch", None)
        with nullcontext() if watch is None else watch.doing(Activity.FORWARD):
            return record.graphs.replay_forward()

    def _choose(self, batch: Any) -> tuple[Run, Record]:
        """Return how to run a micro-batch, and its record; collective.

        All ranks know the signatures of all, so they take the same decisions. On all ranks this
        method also does what one of them needs: stop capturing, drop graphs that are out of date,
        or run an optimizer's update eagerly.
        """
        digest, ddp = 0, self._ddp
        try:
            # `DistributedDataParallel` reduces gradients in the last micro-batch of a step only,
            # and broadcasts buffers in the micro-batch that follows it.
            flags = ddp and (ddp.require_backward_grad_sync, ddp.require_forward_param_sync)
            digest = hash((signature(batch), flags)) >> 1  # an int64 above the least
        except NotCapturable as error:
            self.problems.append(str(error))
        changes = self.changes()
        digests, is_stale = self._agree([digest, bool(changes)])
        if self.is_eager:
            return Run.PLAIN, Record()
        if any(is_stale):
            self.recapture(changes)
        run, record = self.choose(digests)
        if run is Run.CAPTURE:
            self.problems += record.problems
            self._agree([])
        return (Run.PLAIN, Record()) if self.is_eager else (run, record)

    def _run_eagerly(self, record: Record, args: Any) -> Any:
        """Run eagerly, and compare a replay, if there is one, when the backward is over."""
        eager, output = self.run_eagerly(record, self._eager_step, args, {})
        self._run_backward, loss = eager.backward, loss_of(output)
        if not isinstance(loss, Tensor):  # and no backward comes
            self.problems_of(record).append(_NO_LOSS)
        elif record.graphs is not None and loss.requires_grad:
            loss.register_hook(lambda grad: setattr(eager, "root_grads", [grad.detach().clone()]))
            self._compare = partial(self._compare_with_replay, record.graphs, eager)
        return output

    def _backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        run = partial(self._eager_backward, tensor, *args, **kwargs)
        run_backward, self._run_backward = self._run_backward, None
        if run_backward is None:
            run()
        else:
            run_backward(run)

    def _backward_and_compare(self, *args: Any, **kwargs: Any) -> Tensor:
        compare, self._compare = self._compare, None
        loss = self._strategy_backward(*args, **kwargs)
        if compare is not None:
            compare()
        return loss

    def _compare_with_replay(self, graphs: CapturedStep, eager: EagerRun) -> None:
        # hazard: all ranks replay, whatever this one has found, as replays exchange something.
        engine, start = self.fit.engine, time.perf_counter()
        around = nullcontext if engine is None else engine.backward
        difference = graphs.compare(eager, around) if eager.root_grads else None
        if difference is not None:
            self.problems.append(
                f"An eager step and its replay are not the same: {difference}\n    Since the last"
                f" comparison {self._unverified} micro-batches were replayed."
            )
        self._unverified = 0
        self.seconds += time.perf_counter() - start


def loss_of(output: Any) -> Any:
    """Return the loss in ``output``, which ``training_step`` returned."""
    return output.get("loss") if isinstance(output, Mapping) else output
