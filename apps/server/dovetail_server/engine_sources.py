"""`EngineSource`: an engine on the command line. `sources_of` names several engines, and divides
the memory among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dovetail import EngineConfig
from dovetail.errors import ConfigError, shown
from dovetail.serving import Registry, weights_bytes
from dovetail_server.settings import ServerSettings

GPU_SHARE = "gpu_memory_utilization"
CPU_SHARE = "cpu_memory_utilization"
# memory of an engine besides weights, K and V: the device's context, and the largest step
BESIDE_WEIGHTS_BYTES = 2 << 30


@dataclass(frozen=True)
class EngineSource:
    """The config of an engine (a file or a model, and `--set`s), and the server's additions."""

    source: str
    overrides: Sequence[str]
    names: tuple[str, ...] = ()  # of its model; if empty, the name in `engine.yaml`
    adapters: tuple[str, ...] = ()  # NAME=PATH of those to load
    # keys of `engine.yaml` that divide the memory; empty for a single engine
    shares: Mapping[str, float] = field(default_factory=dict)

    def overrides_beside(self, others: Sequence[EngineSource]) -> list[str]:
        """Return its `--set`s if it starts while the engines `others` run. An executor counts all
        memory in use on its GPU, so its limit includes the shares of the others."""
        shares = dict(self.shares)
        if GPU_SHARE in shares:
            shares[GPU_SHARE] += sum(other.shares[GPU_SHARE] for other in others)
        return [*self.overrides, *(f"{key}={share:.4f}" for key, share in shares.items())]


def sources_of(
    sources: Sequence[str], overrides: Sequence[str], settings: ServerSettings
) -> list[EngineSource]:
    """Return the engines of a server, one for each config or model. `overrides`: `--set`s for all.
    Raises `ConfigError` if they can't be served together, and `ModelLoadError` if one of several
    models can't be found."""
    names = settings.served_model_name
    adapters = settings.lora_modules
    if len(sources) == 1:
        return [EngineSource(sources[0], overrides, names, adapters)]
    given = EngineConfig.read_settings(overrides)
    configs = [EngineConfig.load_with(source, given, origin="--set") for source in sources]
    names = _names_of(configs, names)
    takers = [place for place, config in enumerate(configs) if config.adapters is not None]
    if adapters and not takers:
        raise ConfigError("--lora-module: none of the models takes adapters: set `adapters`")
    files = [EngineConfig.load_with(source, {}) for source in sources]
    sizes = [_size(config) for config in configs]
    shares = {key: _shares_of(key, files, sizes, given) for key in (GPU_SHARE, CPU_SHARE)}
    return [
        EngineSource(
            source,
            overrides,
            (names[place],),
            adapters if takers[:1] == [place] else (),
            {key: of_all[place] for key, of_all in shares.items()},
        )
        for place, source in enumerate(sources)
    ]


def _names_of(configs: Sequence[EngineConfig], given: tuple[str, ...]) -> tuple[str, ...]:
    """Return a name for each model. Raises `ConfigError` for a wrong number of names and for
    duplicates."""
    if given and len(given) != len(configs):
        raise ConfigError(
            f"--served-model-name: {len(configs)} models need one name each, in their order; got "
            f"{len(given)}"
        )
    names = given or tuple(config.model.path for config in configs)
    [(name, count)] = Counter(names).most_common(1)
    if count > 1:
        raise ConfigError(
            f"{count} models are named {shown(name)}, and requests choose by name: give each one "
            "its own with --served-model-name, in their order"
        )
    return names


def _shares_of(
    key: str, files: Sequence[EngineConfig], sizes: Sequence[int], given: Mapping[str, object]
) -> list[float]:
    """Return each engine's share of a kind of memory: the value in its file; the others divide the
    rest of the command line's value, or of the default, in proportion to their sizes in bytes.
    Raises `ConfigError` if too little is left."""
    own = [getattr(file, key) if key in file.model_fields_set else None for file in files]
    told = sum(share for share in own if share is not None)
    total = EngineConfig.load_with({}, {key: given[key]} if key in given else {})
    left = getattr(total, key) - told
    rest = sum(size for size, share in zip(sizes, own, strict=True) if share is None)
    if told > 1 or (rest and left <= 0):
        raise ConfigError(
            f"{key}: the models' configs take {told:g} of the memory together, which leaves too "
            "little: lower it, or set it in each config"
        )
    return [
        left * size / rest if share is None else share
        for size, share in zip(sizes, own, strict=True)
    ]


def _size(config: EngineConfig) -> int:
    """Estimate the bytes that a model needs without K and V, by the sizes of its files."""
    registry = Registry.discover(config.plugins, enforce_require=False)
    return weights_bytes(config.model.path, registry) + BESIDE_WEIGHTS_BYTES
