"""The drawing of the packages is made from their imports."""

from __future__ import annotations

import pytest
from tools import house


def test_the_drawing_is_current() -> None:
    assert house.DRAWING.read_text(encoding="utf-8") == house.drawing(), (
        "run: python -m tools.house"
    )


def test_every_module_of_the_core_has_a_room() -> None:
    import pkgutil

    import dovetail

    modules = [f"dovetail.{info.name}" for info in pkgutil.iter_modules(dovetail.__path__)]
    assert [module for module in modules if house.room_of(module) is None] == []


def test_arrows_that_follow_from_others_are_left_out() -> None:
    assert house.reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {
        "a": {"b"},
        "b": {"c"},
        "c": set(),
    }
    assert house.floors({room: set() for room in (*house.ROOMS, "plugins")}) == [
        [*house.ROOMS, "plugins"]
    ]
    with pytest.raises(ValueError, match="a circle"):
        house.reduced({"a": {"b"}, "b": {"a"}})
