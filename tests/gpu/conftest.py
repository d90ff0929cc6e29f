from tests.registry.site import site  # noqa: F401
