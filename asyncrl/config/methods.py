"""Published methods: surrogate, advantage, reduction, correction and all other keys of each.

`method = "gmpo"` in a config, `--set method=gmpo` and an arm of compare choose one by its name.
Keys that are set explicitly take precedence.  docs/methods.md lists which part of each source was
available, and the measurements."""

from __future__ import annotations

import difflib
import re

import msgspec

from asyncrl.algorithms import settings
from asyncrl.config import layers
from asyncrl.config.layers import FlatTable
from asyncrl.contract.toml_writer import read_table

DESCRIPTION = (
    "A published method: it sets all its keys that you do not give. `asyncrl methods` lists them."
)


class Method(msgspec.Struct, frozen=True):
    """A published method, as methods.toml has it.

    evidence: page of measurements; "": none. stale: whether it is for stale samples."""

    summary: str
    source: str
    keys: FlatTable
    evidence: str = ""
    stale: bool = False


METHODS: dict[str, Method] = read_table(__file__, dict[str, Method])


def simplify(name: str) -> str:
    """Return the name without case, separators and doubled letters, a plus as a p.

    >>> simplify("REINFORCE++") == simplify("reinforce_pp")
    True
    """
    letters = re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "p"))
    return re.sub(r"(.)\1+", r"\1", letters)


def suggest_method(name: str) -> str:
    """Return " (did you mean X?)" for a misspelled method, or "".

    A short name with another letter is often another published algorithm (GRPO, GMPO), so that one
    slip counts only in a long name."""
    methods = {simplify(method): method for method in METHODS}
    simple = simplify(name)
    close = difflib.get_close_matches(simple, methods, 1, 0.93 if len(simple) > 7 else 1.0)
    return f" (did you mean {methods[close[0]]}?)" if close else ""


def replace(flat: FlatTable) -> None:
    """Remove the keys that a method of a later layer replaces.

    These are its own keys, the correction, and the keys that only the earlier surrogate and
    advantage read."""
    method = METHODS.get(str(flat.get("method")))
    if method is None:
        return
    chosen = {key.partition(".")[0] for key in method.keys}
    for key in list(flat):
        section, _, name = key.partition(".")
        common = {"loss": settings.Loss, "advantage": settings.Advantage}.get(section)
        if (
            key in method.keys
            or section == "correction"
            or (section in chosen and common and name not in layers.map_fields(common))
        ):
            del flat[key]


# key of a function of the user -> key of what it replaces
FUNCTIONS = {"loss.function": "loss.surrogate", "advantage.function": "advantage.name"}
