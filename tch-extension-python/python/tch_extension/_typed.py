"""Wrong types as torch's own functions report them."""

import functools
from typing import Callable, TypeVar

_Function = TypeVar("_Function", bound=Callable)


def typed(function: _Function) -> _Function:
    """The function with a TypeError for an argument of another type, where torch.ops has a RuntimeError."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            if "Expected a value of type" not in text:
                raise
            raise TypeError(text.split("\n")[0].replace("tch_extension::", "")) from None

    return call  # type: ignore[return-value]
