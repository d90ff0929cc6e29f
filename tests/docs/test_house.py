"""The drawing of the packages is made from their imports."""

from __future__ import annotations

import pytest
from tools import house


def test_the_drawing_is_current() -> None:
    assert house.DRAWING.read_text(encoding="utf-8") == house.drawing(), (
        "run: python -m tools.house"
    )


def test_every_module_of_the_core_has_a_box() -> None:
    import pkgutil

    import dovetail

    modules = [f"dovetail.{info.name}" for info in pkgutil.iter_modules(dovetail.__path__)]
    assert [module for module in modules if house.box_of(module) is None] == []


def test_every_arrow_is_an_import() -> None:
    imports = house.imports()
    arrows = (*house.ARROWS, *house.UNDRAWN)
    assert [(box, other) for box, other in arrows if other not in imports[box]] == []


def test_an_import_that_follows_from_no_arrow_is_unexplained() -> None:
    arrows = [("a", "b"), ("b", "c")]
    assert house.unexplained({"a": {"b", "c"}, "b": {"c"}, "c": set()}, arrows) == set()
    assert house.unexplained({"a": {"b"}, "c": {"a"}}, arrows) == {("c", "a")}
    with pytest.raises(ValueError, match="circular imports: "):
        house.unexplained({"a": {"b"}}, [("a", "b"), ("b", "a")])
