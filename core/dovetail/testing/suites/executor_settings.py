"""`ExecutorSettings`: a check that no setting of an executor is ignored."""

from __future__ import annotations

from typing import Any

from dovetail.errors import DovetailError, describe
from dovetail.testing.checks import check, fail
from dovetail.testing.suites.executor_subject import ExecutorSubject

# values that nothing can serve
IMPOSSIBLE: tuple[dict[str, Any], ...] = (
    {"kv_cache_dtype": "float7"},
    {"quantization": "no-such-format"},
)


class ExecutorSettings(ExecutorSubject):
    """Checks that an executor refuses settings that it can't serve."""

    @check("executor.settings", since="1.0", capability="samples")
    def test_settings_that_can_not_be_served_are_refused(self) -> None:
        """`start` accepted an unknown `kv_cache_dtype` or `quantization`, which it ignores
        then; or raised something other than `DovetailError`. Use each setting of
        `ExecutorConfig`, or refuse values other than its default by name."""
        for settings in IMPOSSIBLE:
            try:
                with self._bench(**settings):
                    pass
            except DovetailError:
                continue
            except Exception as error:
                fail(f"with {settings}, it raised {describe(error)}", error)
            fail(f"with {settings}, it started")
