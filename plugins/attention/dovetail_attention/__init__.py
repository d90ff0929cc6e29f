"""Built-in attention backends."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="attention",
            api="1.1",
            suite="1.1",
            name="torch",
            target="dovetail_attention.sdpa:TorchAttention",
            summary="PyTorch's scaled dot product over gathered K and V: any device, dtype, head "
            "size and block size",
            requires=("torch>=2.11",),
        ),
        ComponentSpec(
            kind="attention",
            api="1.1",
            suite="1.1",
            name="triton",
            target="dovetail_attention.triton_backend:TritonAttention",
            summary="Dovetail's paged Triton kernels for NVIDIA GPUs: split decode, ragged "
            "prefill, shared prefixes, any block size",
            requires=("triton>=3.5", "torch>=2.11"),
        ),
        ComponentSpec(
            kind="attention",
            api="1.0",
            name="flash_attn",
            target="dovetail_attention.flash:FlashAttention",
            summary="FlashAttention 2 or 3, whichever is installed: NVIDIA GPUs, float16 and "
            "bfloat16, blocks of 256",
            requires=(
                "torch>=2.11",
            ),  # the package has several names: the backend finds it, or names what to install
        ),
        ComponentSpec(
            kind="attention",
            api="1.0",
            name="packed",
            target="dovetail_attention.packed:PackedAttention",
            summary="For encoders: whole prompts, tokens attend to later ones too; no KV cache, no "
            "padding",
            requires=("torch>=2.11",),
        ),
    ]
