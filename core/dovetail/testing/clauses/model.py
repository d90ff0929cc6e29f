"""The checks that hold the clauses of `dovetail.api.model`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, promised

HEADS = promised(
    "models/test_pooling.py::test_a_classifier_scores_by_its_head",
    "models/test_encoders.py::test_a_classifier_scores_as_transformers_does",
)
POOLING = promised(
    "models/test_pooling.py::test_a_decoder_embeds_by_its_last_token",
    "models/test_encoders.py::test_an_encoder_embeds_by_the_mean_of_its_states",
    "models/test_pooling.py::test_a_classifier_scores_by_its_head",
)

CLAUSES: Marks = {
    "module": {"no global context": held("side_by_side"), "*": TOLD},
    "ParallelGroup": TOLD,
    "ModelCapabilities": {
        "`taps`": held("taps"),
        "`types`": held("types"),
        "`media`": held("media_rows"),
        "`levels`": held("media_levels"),
        "`axes`": held("media_axes"),
        "`hidden_tails`": promised(
            "models/test_late_interaction.py::test_tokens_that_fill_a_query_are_not_seen",
            "models/test_late_interaction.py::"
            "test_attention_of_the_model_s_own_doesn_t_hide_tokens",
        ),
        "*": held("hygiene.capabilities", "shards"),
    },
    "ModelInputs": {
        "Tokens of one step": held("inputs", "ragged"),
        "only read": held("owns_nothing", "types"),
        "*": TOLD,
    },
    "ModelInputs.positions": held("positions", "alike_steps", "prefix", "ragged"),
    "ModelInputs.wanted": held("wanted", "alike_steps"),
    "ModelInputs.types": held("types"),
    "ModelInputs.rows": held("media_rows", "media_levels"),
    "ModelInputs.is_row": held("media_rows", "media_levels"),
    "ModelInputs.axes": held(
        "media_axes", but="no config of the suite has rotary positions on three axes"
    ),
    "ModelContext": TOLD,
    "BuildContext": {
        "longest sequence": promised(
            "runtime/test_worker.py::test_a_model_length_beyond_the_models_own_is_refused",
            by=("max_len",),
        ),
        "*": TOLD,
    },
    "CausalLM": held("checkpoint"),
    "CausalLM.forward": {
        "Return the hidden states": held(
            "inputs",
            "transformers",
            "chunks",
            "decode",
            "ragged",
            "prefix",
            "dtype",
            "wanted",
            "alike_steps",
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
        "the same on every rank": promised(
            "executors/test_draft_model_over_ranks.py::"
            "test_ranks_draft_with_their_shares_of_a_head_as_one_does"
        ),
        "*": held("taps"),
    },
    "LoadsItself": promised(
        "models/test_transformers.py::test_logits_are_those_of_transformers",
        "models/test_transformers.py::test_a_checkpoint_that_lacks_a_tensor_is_refused",
        "models/test_transformers.py::test_random_weights_depend_on_the_seed_alone",
    ),
    "TrialRun": TOLD,
    "VerifiesItself": promised("models/test_transformers.py::test_the_table_of_types_is_true"),
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
    "HeadLayer": HEADS,
    "ModelPooling": POOLING,
    "ModelArch": TOLD,
    "ModelArch.pooling": POOLING,
    "ModelArch.reasons_against": held(
        "config_fields",
        "unknown_fields",
        "rope_types",
        but="of fields that the suite doesn't know, only seven invented ones can be tried",
    ),
    "ModelArch.layer_specs": held("layer_specs"),
    "ModelArch.state_specs": held("state_specs"),
    "ModelArch.build": {"uninitialized": held("weight_complete", "dtype"), "*": TOLD},
}
