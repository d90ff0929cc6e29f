"""DRY, XTC and top-n-sigma, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl

SUMMARIES = {
    "dry:Dry": "DRY: penalizes tokens that would continue a repetition",
    "top_n_sigma:TopNSigma": "Keeps tokens within n standard deviations of the largest logit",
    "xtc:Xtc": "XTC: sometimes removes the most probable tokens",
}


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    for target, summary in SUMMARIES.items():
        yield ComponentSpec(
            kind="logits_processor",
            name=target.partition(":")[0],
            target=f"dovetail_samplers_extra.{target}",
            api="1.0",
            summary=summary,
            requires=("torch>=2.11",),
        )
