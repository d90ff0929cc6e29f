"""The checks that hold the clauses of `dovetail.api.model`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, unchecked

HEADS = (
    "the suite's models generate; what checkpoints of other kinds pool, the engine's own tests "
    "compare with transformers"
)

CLAUSES: Marks = {
    "module": {"no global context": held("side_by_side"), "*": TOLD},
    "ParallelGroup": TOLD,
    "ModelCapabilities": {
        "`taps`": held("taps"),
        "`types`": held("types"),
        "*": held("hygiene.capabilities", "shards"),
    },
    "ModelInputs": {
        "Tokens of one step": held("inputs", "ragged"),
        "only read": held("owns_nothing", "types"),
        "*": TOLD,
    },
    "ModelInputs.positions": held("positions", "prefix", "ragged"),
    "ModelInputs.wanted": held("wanted"),
    "ModelInputs.types": held("types"),
    "ModelContext": TOLD,
    "BuildContext": {
        "longest sequence": held("max_len", but="a length beyond the model's own isn't tested"),
        "*": TOLD,
    },
    "CausalLM": held("checkpoint"),
    "CausalLM.forward": {
        "Return the hidden states": held(
            "inputs", "transformers", "chunks", "decode", "ragged", "prefix", "dtype", "wanted"
        ),
        "belongs to the caller": held("owns_nothing"),
        "K and V of all tokens": held("wanted"),
        "recurrent layer replaces": held("states", "drafts"),
        "*": TOLD,
    },
    "CausalLM.logits": {
        "same on every rank": held("transformers", "shards"),
        "may overwrite": held("owns_nothing"),
    },
    "CausalLM.weights": held("weight_names", "weight_use"),
    "Tapped": TOLD,
    "Tapped.embed": held("taps"),
    "Tapped.forward_tapped": {
        "the same on every rank": unchecked(
            "no draft head runs in the suite; `shards` compares logits"
        ),
        "*": held("taps"),
    },
    "LoadsItself": unchecked(
        "only the built-in model `transformers` does, which has its own tests"
    ),
    "TrialRun": TOLD,
    "VerifiesItself": unchecked(
        "only the built-in model `transformers` does, which has its own tests"
    ),
    "WeightRule": {
        "loads the checkpoint's tensor": held("checkpoint"),
        "part of a fused": held("weight_use", "shards"),
        "`transform` converts": held("transformers"),
        "It gets this rank's part": held("shards"),
        "Two rules may name": held("tied"),
        "Several rules may name one tensor": held("weight_names", "weight_use"),
        "may be missing": held("weight_names", "tied"),
        "with .load": held("weight_names"),
    },
    "HeadLayer": unchecked(HEADS),
    "ModelPooling": unchecked(HEADS),
    "ModelArch": TOLD,
    "ModelArch.pooling": unchecked(HEADS),
    "ModelArch.reasons_against": held(
        "config_fields",
        "unknown_fields",
        "rope_types",
        but="seven unknown fields, three unknown rope types, and one to three values of each known "
        "field are tested",
    ),
    "ModelArch.layer_specs": held("layer_specs"),
    "ModelArch.state_specs": held("state_specs"),
    "ModelArch.build": {"uninitialized": held("weight_complete", "dtype"), "*": TOLD},
}
