"""The user's functions `loss.function` and `advantage.function`.

They have the arguments and results of `asyncrl.losses.loss` and `asyncrl.losses.advantages`. The
loss sees a whole optimizer step, before any micro-batch, and is replaced by its gradient: how the
step is split does not matter to it.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import import_function
from asyncrl.contract.printable import describe_exception, format_last_frame


def call(key: str, path: str, *required: Tensor, **offered: Any) -> Any:
    """Call a function with `required`, and with what its parameters name of `offered`.

    Raises ConfigError if it raises.
    """
    function = import_function(path, key)
    try:
        parameters = inspect.signature(function).parameters
        takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
        names = offered.keys() if takes_all else offered.keys() & parameters
        named = {name: offered[name] for name in names if offered[name] is not None}
        return function(*required, **named)
    except Exception as error:
        reason = f"{describe_exception(error)}{format_last_frame(error)}"
        raise ConfigError(f"{key} = {path}: the call {reason}") from error


def describe(value: Any) -> str:
    """Describe a returned value: `a tensor of [2, 3]`, `a list`."""
    if isinstance(value, Tensor):
        return f"a tensor of {[*value.shape]}"
    return f"a {type(value).__name__}"
