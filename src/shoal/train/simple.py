"""Any training pipeline in three functions; everything about ranks is inside.

``collate(examples)`` makes a batch, ``loss(model, batch, train)`` says how good the model is on
it, and ``pred(model, batch)`` what it says. The same script runs in one process, and on many
under ``torchrun``: examples are split, gradients summed, predictions gathered, and a model that
is too large for a rank is split by tensor parallelism, from its trace alone.

Source: Tan et al., Redco: A Lightweight Tool to Automate Distributed Training of LLMs on Any
GPU/TPUs, 2023.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shoal.core.errors import CheckpointError, ConfigError, require
from shoal.core.files import write_atomic
from shoal.core.meter import Meter
from shoal.core.random import Permutation, seed64

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shoal.parallel.protocols import Comm

_TAG = "trainer"
# Parameters, gradients and two moments.
_COPIES = 4
_MEMORY_SHARE = 0.6

Loss = Callable[[Any, Any, bool], "Tensor"]


class _CalledError(Exception):
    """The model was called; its inputs are what was wanted."""


class Trainer:
    """Trains a model from three functions, on as many ranks as there are.

    Args:
        model: any module; every rank builds the same one.
        collate: examples -> a batch in the form that the other functions expect.
        loss: (model, batch, train) -> the mean loss of the batch's examples, a scalar.
        pred: (model, batch) -> a tensor with a row for each example, or None if only losses
            are of interest.
        metrics: (predictions of all examples, examples) -> name -> number.
        parallel: ``auto``, or the degrees ``{"dp": 2, "tp": 2}``. ``auto`` replicates the model on
            every rank, and uses tensor parallelism if it does not fit on one rank.
        optimizer: parameters -> an optimizer; AdamW with ``lr`` if not given.
        lr: learning rate of AdamW.
        batch: examples of a step, over all ranks.
        seed: of the order of examples and of everything that the model draws.
        comm: the ranks; those that torchrun has started, if not given.

    Raises:
        ConfigError: degrees that are not those of the ranks, or another number that cannot be.
        PlanError: a model that these ranks cannot share.
    """

    def __init__(
        self,
        model: nn.Module,
        collate: Callable[[Sequence[Any]], Any],
        loss: Loss,
        pred: Callable[[Any, Any], Tensor] | None = None,
        *,
        metrics: Callable[[Tensor, Sequence[Any]], Mapping[str, float]] | None = None,
        parallel: Literal["auto"] | Mapping[str, int] = "auto",
        optimizer: Callable[[Any], Optimizer] | None = None,
        lr: float = 1e-3,
        batch: int = 32,
        seed: int = 0,
        comm: Comm | None = None,
    ) -> None:
        require(batch >= 1, "batch", batch, expected="at least 1")
        require(lr > 0, "lr", lr, expected="above 0")
        if comm is None:
            from shoal.parallel.comm.collectives import TorchComm

            comm = TorchComm.from_environment(Meter([]))
        self.comm = comm
        self.dp, self.tp = _degrees(parallel, model, comm.world)
        self.batch, self.seed, self.step = batch, seed, 0
        self._collate, self._loss, self._pred, self._metrics = collate, loss, pred, metrics
        self._optimizer, self._lr = optimizer, lr
        tp, dp, world = self.tp, self.dp, comm.world
        self._tp = comm.split([[d * tp + t for t in range(tp)] for d in range(dp)])
        self._dp = comm.split([list(range(t, world, tp)) for t in range(tp)])
        self.model = model
        for parameter in model.parameters():
            if world > 1:
                comm.broadcast(parameter.data, 0, tag=_TAG).wait()
        self.optimizer: Optimizer | None = None
        # A file that is loaded before the model is split, and batches that it has seen.
        self._pending: tuple[Mapping[str, Tensor], str] | None = None
        self._skip = 0
        if tp == 1:
            self._ready()

    # ------------------------------------------------------------------ what users call

    def fit(
        self,
        examples: Sequence[Any],
        *,
        epochs: int = 1,
        steps: int | None = None,
        evaluate: Sequence[Any] | None = None,
        said: Callable[[dict[str, float]], None] = lambda row: None,
    ) -> list[dict[str, float]]:
        """Train, and return what was seen at the end of each epoch.

        Args:
            examples: anything with a length and items; the same on every rank.
            epochs: passes over them, each in an order of its own.
            steps: stop after so many.
            evaluate: examples to evaluate on after each epoch.
            said: called with each row as it comes.

        Raises:
            ConfigError: no examples, or a loss that is no scalar.
        """
        require(len(examples) > 0, "examples", len(examples), expected="at least one")
        rows = []
        for epoch in range(epochs):
            order = Permutation(len(examples), self.seed, epoch)(np.arange(len(examples)))
            losses = []
            for begin in range(0, len(order), self.batch):
                if steps is not None and self.step >= steps:
                    break
                if self._skip > 0:
                    self._skip -= 1
                    continue
                chosen = order[begin : begin + self.batch]
                losses.append(self._train([examples[int(i)] for i in chosen]))
            if not losses:
                continue
            row = {"epoch": float(epoch), "step": float(self.step), "loss": float(np.mean(losses))}
            if evaluate is not None:
                result = self.evaluate(evaluate)
                row |= {f"eval_{name}": value for name, value in result.items()}
            rows.append(row)
            said(row)
        return rows

    def evaluate(self, examples: Sequence[Any]) -> dict[str, float]:
        """The mean loss, and the metrics of all predictions; the same on every rank."""
        import torch

        total = torch.zeros(1, dtype=torch.float64)
        with torch.no_grad(), self._drawing("evaluate", 0):
            for own, batch in self._batches(examples):
                if own:
                    loss = self._loss(self._module(batch).eval(), self._collate(own), False)
                    total += float(_scalar(loss)) * len(own)
        if self.dp > 1:
            self._dp.all_reduce(total, tag=_TAG).wait()
        out = {"loss": float(total) / len(examples)}
        if self._metrics is not None:
            out |= {k: float(v) for k, v in self._metrics(self.predict(examples), examples).items()}
        return out

    def predict(self, examples: Sequence[Any]) -> Tensor:
        """Predictions of all examples, in their order, on every rank [N, ...].

        Raises:
            ConfigError: the trainer has no ``pred``, or it gives no row for each example.
        """
        import torch

        if self._pred is None:
            raise ConfigError("pred = None: predictions were asked for; give a function")
        rows = []
        with torch.no_grad(), self._drawing("predict", 0):
            for own, batch in self._batches(examples):
                sizes = [len(part) for part in _assigned(batch, self.dp)]
                given = own or batch[:1]  # a rank without examples learns the shape
                result = self._pred(self._module(batch).eval(), self._collate(given))
                require(
                    result.ndim >= 1 and len(result) == len(given),
                    "pred",
                    tuple(result.shape),
                    expected=f"a tensor with {len(given)} rows, one for each example",
                )
                rows.append(self._gathered(result, sizes))
        return torch.cat(rows)

    def save(self, path: Path | str) -> None:
        """Write whole parameters and the optimizer's state, for any number of ranks."""
        from safetensors.torch import save as pack

        state = {f"model.{k}": v for k, v in self._whole().items()}
        if self.optimizer is not None:
            for name, moments in self._moments().items():
                state |= {f"optimizer.{key}.{name}": value for key, value in moments.items()}
        if self.comm.rank == 0:
            tensors = {k: v.detach().clone().contiguous() for k, v in state.items()}
            data = pack(tensors, metadata={"step": str(self.step), "seed": str(self.seed)})
            write_atomic(Path(path), data, error=CheckpointError)
        self.comm.barrier()

    def load(self, path: Path | str) -> None:
        """Go on from a file that :meth:`save` has written, on any number of ranks.

        The next :meth:`fit` passes over the batches that were seen already.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load as unpack

        try:
            data = Path(path).read_bytes()
            tensors = unpack(data)
        except (OSError, SafetensorError) as cause:
            raise CheckpointError(f"{path}: cannot be read ({cause})") from cause
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        self.step = self._skip = int(metadata.get("step", 0))
        if self.optimizer is None:
            self._pending = tensors, str(path)
        else:
            self._put(tensors, str(path))

    # ------------------------------------------------------------------ steps

    def _train(self, batch: list[Any]) -> float:
        import torch

        own = _assigned(batch, self.dp)[self._dp.rank]
        module = self._module(batch).train()
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        value = 0.0
        with self._drawing("train", self._dp.rank):
            if own:
                # The mean over all examples is the weighted mean of the ranks' means.
                loss = _scalar(self._loss(module, self._collate(own), True))
                share = loss * (len(own) / len(batch))
                torch.autograd.backward(share)
                value = float(share.detach())
        if self.dp > 1:
            tensor = torch.tensor([value], dtype=torch.float64)
            self._dp.all_reduce(tensor, tag=_TAG).wait()
            value = float(tensor)
            self._sum_gradients(module)
        self.optimizer.step()
        self.step += 1
        return value

    def _sum_gradients(self, module: nn.Module) -> None:
        """One sum of all gradients, in the order of parameters."""
        import torch

        learned = [p for p in module.parameters() if p.requires_grad]
        flat = torch.cat(
            [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in learned]
        )
        self._dp.all_reduce(flat, tag=_TAG).wait()
        parts = torch.split(flat, [p.numel() for p in learned])
        for parameter, part in zip(learned, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def _drawing(self, purpose: str, rank: int) -> Any:
        """Random numbers by step and rank of the data, and the caller's own left alone."""
        import contextlib

        import torch

        @contextlib.contextmanager
        def keyed() -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(
                    seed64(self.seed, purpose=f"trainer {purpose}", step=self.step, index=rank)
                )
                yield

        return keyed()

    def _batches(self, examples: Sequence[Any]) -> Any:
        for begin in range(0, len(examples), self.batch):
            end = min(begin + self.batch, len(examples))
            batch = [examples[i] for i in range(begin, end)]
            yield _assigned(batch, self.dp)[self._dp.rank], batch

    def _gathered(self, x: Tensor, sizes: list[int]) -> Tensor:
        import torch

        if self.dp == 1:
            return x
        most = max(sizes)
        mine = x.new_zeros(most, *x.shape[1:])
        mine[: sizes[self._dp.rank]] = x[: sizes[self._dp.rank]]
        every = x.new_empty(self.dp * most, *x.shape[1:])
        self._dp.all_gather(every, mine, tag=_TAG).wait()
        parts = torch.split(every, most)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    # ------------------------------------------------------------------ the split model

    def _module(self, batch: list[Any]) -> nn.Module:
        """The model as ranks hold it; split when its inputs are first seen."""
        if self.tp > 1 and self.optimizer is None:
            from shoal.parallel.autotp.shapes import AutoSplit

            args, kwargs = self._inputs(batch)
            self.model = AutoSplit(self.model, args, kwargs, self._tp)
            self._ready()
            if self._pending is not None:
                self._put(*self._pending)
                self._pending = None
        return self.model

    def _inputs(self, batch: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``loss`` calls the model with."""
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def saw(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append((args, kwargs))
            raise _CalledError

        hook = self.model.register_forward_pre_hook(saw, with_kwargs=True)
        own = _assigned(batch, self.dp)[self._dp.rank] or batch
        try:
            self._loss(self.model, self._collate(own), True)
        except _CalledError:
            return seen[0]
        finally:
            hook.remove()
        raise ConfigError(
            "loss: it did not call the model as model(...), so tensor parallelism cannot see its "
            "inputs; call it, or give parallel={'dp': ..., 'tp': 1}"
        )

    def _ready(self) -> None:
        import torch

        learned = [p for p in self.model.parameters() if p.requires_grad]
        make = self._optimizer or (lambda params: torch.optim.AdamW(params, lr=self._lr))
        self.optimizer = make(learned)

    def _places(self) -> dict[str, tuple[nn.Parameter, tuple[int, tuple[int, ...]] | None]]:
        """Name in the model -> this rank's part, and where it is split."""
        if self.tp == 1 or self.optimizer is None:
            return {name: (p, None) for name, p in self.model.named_parameters()}
        from shoal.parallel.autotp.shapes import AutoSplit
        from shoal.parallel.autotp.split import SplitModel

        assert isinstance(self.model, AutoSplit)
        out: dict[str, Any] = {}
        inside: set[int] = set()
        split = self.model.first
        for part in self.model.planned.parts:
            module = split.get_submodule(part.path) if part.path else split
            assert isinstance(module, SplitModel)
            for value, target in part.traced.params.items():
                own = module.parameter_of(target)
                inside.add(id(own))
                out[f"{part.path}.{target}".lstrip(".")] = (own, part.flow.params.get(value))
        rest = {n: (p, None) for n, p in split.named_parameters() if id(p) not in inside}
        return out | rest

    def _joined(self, x: Tensor, place: tuple[int, tuple[int, ...]] | None) -> Tensor:
        if place is None:
            return x
        from shoal.parallel.autotp.split import whole_of

        every = x.new_empty(self.tp * x.shape[0], *x.shape[1:])
        self._tp.all_gather(every, x.contiguous(), tag=_TAG).wait()
        return whole_of(list(every.chunk(self.tp)), *place)

    def _whole(self) -> dict[str, Tensor]:
        return {n: self._joined(p.detach(), place) for n, (p, place) in self._places().items()}

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """What the optimizer keeps of each parameter, whole."""
        import torch

        assert self.optimizer is not None
        out: dict[str, dict[str, Tensor]] = {}
        for name, (parameter, place) in self._places().items():
            kept = self.optimizer.state.get(parameter, {})
            out[name] = {
                key: self._joined(x, place if x.shape == parameter.shape else None)
                for key, x in kept.items()
                if isinstance(x, torch.Tensor)
            }
        return out

    def _put(self, tensors: Mapping[str, Tensor], where: str) -> None:
        import torch

        from shoal.parallel.autotp.split import part_of

        places = self._places()
        saved = {key.removeprefix("model.") for key in tensors if key.startswith("model.")}
        if saved != set(places):
            odd = sorted(saved ^ set(places))[0]
            raise CheckpointError(
                f"{where}: its parameters are not the model's ({odd}); load it into the model "
                "that was saved"
            )

        def mine(x: Tensor, place: tuple[int, tuple[int, ...]] | None) -> Tensor:
            return x if place is None else part_of(x, *place, self._tp.rank, self.tp)

        for name, (parameter, place) in places.items():
            given = tensors[f"model.{name}"]
            own = mine(given, place)
            require(
                own.shape == parameter.shape,
                f"{where}: {name}",
                tuple(given.shape),
                expected=f"the model's {tuple(parameter.shape)}",
                error=CheckpointError,
            )
            with torch.no_grad():
                parameter.copy_(own)
            if self.optimizer is None:
                continue
            for key, x in tensors.items():
                head, _, rest = key.partition(".")
                moment, _, of = rest.partition(".")
                if head == "optimizer" and of == name:
                    value = mine(x, place) if x.shape == given.shape else x
                    self.optimizer.state[parameter][moment] = value.clone()


def _degrees(
    parallel: Literal["auto"] | Mapping[str, int], model: nn.Module, world: int
) -> tuple[int, int]:
    """The degrees dp and tp."""
    if isinstance(parallel, str):
        require(parallel == "auto", "parallel", parallel, expected="auto, or degrees dp and tp")
        import psutil

        need = _COPIES * sum(p.numel() * p.itemsize for p in model.parameters())
        have = _MEMORY_SHARE * psutil.virtual_memory().available / world
        tp = next((t for t in range(1, world + 1) if world % t == 0 and need / t <= have), world)
        return world // tp, tp
    unknown = sorted(set(parallel) - {"dp", "tp"})
    require(not unknown, "parallel", unknown, expected="the keys dp and tp")
    tp = int(parallel.get("tp", 1))
    require(tp >= 1 and world % tp == 0, "parallel.tp", tp, expected=f"a divisor of {world} ranks")
    dp = int(parallel.get("dp", world // tp))
    require(
        dp * tp == world,
        "parallel",
        dict(parallel),
        expected=f"dp x tp = {world}, the number of ranks",
    )
    return dp, tp


def _assigned(batch: Sequence[Any], ranks: int) -> list[list[Any]]:
    """Consecutive parts of a batch, as equal as they can be."""
    cuts = [len(batch) * r // ranks for r in range(ranks + 1)]
    return [list(batch[cuts[r] : cuts[r + 1]]) for r in range(ranks)]


def _scalar(loss: Any) -> Tensor:
    import torch

    require(
        isinstance(loss, torch.Tensor) and loss.numel() == 1,
        "loss",
        tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__,
        expected="a scalar tensor, the mean over the batch's examples",
    )
    tensor: Tensor = loss.reshape(())
    return tensor
