"""What peers send and files keep, in its shortest form: each line of tests/data/kept_forms.jsonl.

A line: a kind, the form with the required fields alone, the form that is read from it, whether its
fields cannot be set, and whether the collector of garbage visits it."""

import dataclasses
import gc
import importlib
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from asyncrl.contract import messages as m
from buffer.journal import StoreRecord

FILE = Path(__file__).parents[1] / "data" / "kept_forms.jsonl"
FORMS = [json.loads(line) for line in FILE.read_text().splitlines()]
for form in FORMS:
    module, _, name = form[0].rpartition(".")
    form[0] = getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("kind", "least", "read", "frozen", "tracked"), FORMS)
def test_a_kept_form_is_read(kind: Any, least: Any, read: Any, frozen: bool, tracked: bool) -> None:
    """A changed tag, order or default reads what others wrote as something else."""
    found = form = msgspec.json.decode(json.dumps(least), type=kind)
    if dataclasses.is_dataclass(found):
        form = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    assert json.loads(msgspec.json.encode(form)) == read and gc.is_tracked(found) == tracked
    if frozen:
        with pytest.raises(AttributeError, match=r"immutable|cannot assign"):
            setattr(found, (*getattr(found, "__struct_fields__", form),)[0], None)


def test_every_message_has_a_kept_form() -> None:
    sent = (m.FromPeer, m.FromBuffer, m.FromGenerator, m.FromGateway, StoreRecord)
    assert {kind for union in sent for kind in get_args(union)} <= {kind for kind, *_ in FORMS}
