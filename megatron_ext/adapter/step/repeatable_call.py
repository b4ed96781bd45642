"""Call of the model by a forward_step_func, recorded so that the call can be repeated.

A forward_step_func takes a batch from its data iterator, and its loss function counts tokens and
reports losses. So it is called once per microbatch, even if the model runs several times.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

_FORWARD = inspect.signature(GPTModel.forward)


@dataclass(frozen=True)
class Autocast:
    """State of torch's autocast, which a forward_step_func may enable around its call of the model.

    Attributes:
        types: by kind of device, the type in which autocast computes; None if it is disabled.
    """

    types: dict[str, torch.dtype | None]

    @staticmethod
    def now() -> Autocast:
        """Return the present state of autocast."""
        return Autocast(
            {
                device: torch.get_autocast_dtype(device)
                if torch.is_autocast_enabled(device)
                else None
                for device in ("cuda", "cpu")
            }
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which autocast has the recorded state."""
        present = Autocast.now().types
        with ExitStack() as changed:
            for device, dtype in self.types.items():
                if dtype != present[device]:
                    is_on = dtype is not None
                    changed.enter_context(torch.autocast(device, dtype, enabled=is_on))
            yield


@dataclass(frozen=True)
class ModelCall:
    """Call of the model by a forward_step_func: its arguments, and the loss function returned.

    A repetition runs under the ``autocast`` of the first call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_func: Callable[..., Any]
    autocast: Autocast = field(default_factory=Autocast.now)

    @property
    def named(self) -> dict[str, Any]:
        """Arguments of the recorded model call, by their names in GPTModel.forward."""
        return _FORWARD.bind(None, *self.args, **self.kwargs).arguments

    def repeat(self, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        """Call ``model`` with the recorded arguments, as a forward_step_func does."""
        with self.autocast.restored():
            return model(*self.args, **self.kwargs), self.loss_func


class RepeatableCall:
    """Wrapper of a forward_step_func that records its model call, so that it can be repeated.

    ``flag`` is the option that needs the wrapper, named in errors.
    """

    def __init__(self, forward_step_func: Callable[..., Any], flag: str) -> None:
        self._forward_step_func = forward_step_func
        self._flag = flag
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any], Autocast]] = []
        self._outputs: list[Any] = []
        self._loss_func: Any = None

    def __call__(self, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        """Call the wrapped forward_step_func, and record its call of the model.

        Raises ValueError unless the function calls the model exactly once and returns the model's
        output: otherwise a repeated call of the model alone would give another result.
        """
        with ExitStack() as hooks, ExitStack() as within:

            def begin(model: torch.nn.Module, args: Any, kwargs: Any) -> None:
                self._refuse_gradients((*args, *kwargs.values()))
                self._calls.append((args, kwargs, Autocast.now()))
                within.enter_context(self._around())

            def end(model: torch.nn.Module, args: Any, output: Any) -> None:
                within.close()
                self._outputs.append(output)

            # The hook that records a call runs before the caller's own hooks, so that a repetition
            # of the call runs those hooks on the same arguments.
            begins = model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            hooks.callback(begins.remove)
            hooks.callback(model.register_forward_hook(end).remove)
            output, self._loss_func = self._forward_step_func(data_iterator, model)
        if len(self._outputs) != 1 or output is not self._outputs[0]:
            raise ValueError(
                f"{self._flag} needs a forward_step_func that calls the model once and returns its "
                "output unchanged; this forward_step_func has called the model "
                f"{len(self._outputs)} times and returned {type(output).__name__}: change the "
                f"output in the loss function, or drop {self._flag}"
            )
        return output, self._loss_func

    @property
    def call(self) -> ModelCall:
        """Recorded call of the model, available after the forward_step_func has run."""
        ((args, kwargs, autocast),) = self._calls
        return ModelCall(args, kwargs, self._loss_func, autocast)

    def _around(self) -> AbstractContextManager[None]:
        """Return the context in which the model is called; subclasses override it."""
        return contextlib.nullcontext()

    def _refuse_gradients(self, given: tuple[Any, ...]) -> None:
        if any(isinstance(value, Tensor) and value.requires_grad for value in given):
            raise ValueError(
                f"{self._flag} needs a forward_step_func that gives the model no tensor that "
                "requires a gradient, since the code that made such a tensor would get no "
                f"gradient: make the tensor within the model, or drop {self._flag}"
            )
