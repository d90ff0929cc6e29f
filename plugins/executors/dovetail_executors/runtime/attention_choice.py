"""Chooses the attention backend for a model. A worker does so once, before it reads any weights."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.api.attention import AttentionBackend, AttentionContext, LayerSpec
from dovetail.api.executor import ComponentRef
from dovetail.api.targets import import_target
from dovetail.errors import PluginError, UnsupportedError


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A backend for the model, and its qualified name."""

    name: str
    backend: AttentionBackend


def backend_class(ref: ComponentRef) -> type[AttentionBackend]:
    """Import and return a backend's class. Raises `PluginError` that names it if that fails."""

    def wrong(what: str) -> PluginError:
        return PluginError(f"{ref.kind} {ref.name}: {what}")

    backend: type[AttentionBackend] = import_target(ref.path, wrong)
    return backend


def choose_attention(
    candidates: tuple[ComponentRef, ...],
    specs: list[LayerSpec],
    device: str,
    dtype: str,
    block_size: int | None,
    cache_dtype: str | None = None,
) -> ChosenAttention:
    """Construct the first of `candidates` that can serve these layers on `device` ("cpu", "cuda:0")
    in `dtype` ("bfloat16"). Backends may test their kernels for that. `cache_dtype`: of the KV
    cache, if not `dtype`.

    `block_size` None: each candidate's default. Raises `UnsupportedError` with all reasons of all
    candidates if none fits.
    """
    causal = {spec.causal for spec in specs}
    if len(causal) > 1:
        raise UnsupportedError(
            "no attention backend serves a model in which some layers are causal and others aren't"
        )
    refused = []
    for target in candidates:
        try:
            backend = backend_class(target)
        except PluginError as error:
            refused.append(str(error))
            continue
        context = AttentionContext(
            device, dtype, block_size or backend.capabilities.default_block_size(), cache_dtype
        )
        reasons = backend.reasons_against(context, specs)
        if not reasons:
            return ChosenAttention(target.name, target.make(context))
        refused += [f"{target.name}: {reason}" for reason in reasons]
    asked = f"on {device} in {dtype}" + (
        "" if cache_dtype is None else f" with K and V in {cache_dtype}"
    )
    asked += "" if block_size is None else f" with block_size: {block_size}"
    listed = "".join(f"\n  - {reason}" for reason in refused) or " none was offered"
    remedy = (
        "\nThis model is an encoder, for which there is `packed`: leave out `attention`, or set it "
        "to packed"
        if causal == {False}
        else ""
    )
    raise UnsupportedError(f"no attention backend can serve this model {asked}:{listed}{remedy}")
