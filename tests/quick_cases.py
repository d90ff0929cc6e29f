"""Tests whose cases are alike and dear: those that the quick profile tries, and those that the slow
one does (`tests/slow_checks.py`)."""

from __future__ import annotations

from collections.abc import Mapping

# By file and test: beginnings of ids. The slow profile tries the other cases.
QUICK_CASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "attention/test_flash_backend.py": {
        "test_any_mix_of_prefills_chunks_and_decodes_is_attended_as_defined_while_unused_slots_are_nan": (
            "flash_attn_interface",
        ),
    },
    "attention/test_other_gpus.py": {
        "test_every_kernel_is_launched_for_every_sort_of_architecture": ("86",),
    },
    "attention/test_triton_tuning.py": {
        "test_tilings_follow_the_shared_memory_of_the_gpu": (
            "Shape(group=2, head_size=64, itemsize=2",
            "Shape(group=2, head_size=16, itemsize=4",
            "Shape(group=2, head_size=512",
            "Shape(group=1,",
            "Shape(group=32",
        ),
    },
    "batch/test_run.py": {
        "test_a_job_that_is_interrupted_anywhere_resumes": ("1]",),
    },
    "bench/test_serve.py": {
        "test_a_good_answer_is_completed_however_it_is_cut": (
            "well-True",
            "split-False",
            "bundle-False",
        ),
    },
    "cli/test_config_command.py": {
        "test_show_and_check_tell_what_is_wrong": (
            "scheduler: {name: fcfs",
            "executor",
            "sched:",
            "model",
        ),
        "test_what_a_misspelt_group_hides_is_looked_for_by_the_doctor": ("dovetail_pl",),
    },
    "cli/test_plugins_new.py": {
        "test_its_config_names_it_and_an_engine_runs_with_it": (
            "scheduler",
            "kv_cache",
            "model",
            "executor",
            "observer",
            "parser",
            "sampler",
        ),
    },
    "cli/test_streams.py": {
        "test_a_full_disk_is_one_message_and_exit_code_1": ("1]",),
    },
    "conformance/test_extensions.py": {
        "test_a_right_one_passes": ("command",),
    },
    "e2e/test_async_engine.py": {
        "test_a_reader_who_comes_late_gets_all_of_it_as_one_output": ("delta",),
        "test_an_invalid_id_is_rejected_in_the_caller_without_affecting_others": (
            "None",
            "b'a'",
            "['a', None]",
        ),
        "test_errors_of_a_request_reach_its_caller_alone": ("[]-", "text-", "[1]-{'priority'"),
        "test_several_requests_are_aborted_at_once": ("list",),
        "test_whoever_comes_as_it_closes_gets_tokens_or_an_error": ("0", "3"),
    },
    "e2e/test_bad_input.py": {
        "test_extreme_but_allowed_values_do_not_affect_others": (
            "temperature0",
            "top_p",
            "seed0",
            "min_p",
            "repetition_penalty,presence_penalty,frequency_penalty0",
            "logit_bias",
            "allowed_token_ids,stop_token_ids,min_tokens",
            "bad_words",
            "logprobs",
            "stop",
        ),
    },
    "e2e/test_beam_search.py": {
        "test_beams_end_at_any_eos_as_in_transformers": ("1-1.0",),
    },
    "e2e/test_coming_from_vllm.py": {
        "test_a_method_does_what_its_row_says": (
            "generates",
            "ids",
            "chats",
            "beams",
            "pools",
            "scores",
            "tokenizers",
            "metrics",
            "same_engine",
            "subscript",
            "streams",
            "takes_and_steps",
            "configs",
            "logs",
            "encodes",
            "aborts",
            "tells",
            "shuts_down",
        ),
    },
    "e2e/test_compat_nanovllm.py": {
        "test_steps_count_prompt_tokens_above_zero_and_generated_ones_below": ("16",),
    },
    "e2e/test_compat_vllm.py": {
        "test_a_program_runs_once_its_imports_are_changed": (
            "basic/generate",
            "automatic_prefix",
            "llm_engine",
            "async_llm",
            "reproducibility",
            "basic/embed",
            "basic/score",
            "metrics",
            "run_one_batch",
            "basic/classify",
            "basic/reward",
            "sequence_reward",
            "token_reward",
            "embed_matryoshka",
            "speculative",
        ),
    },
    "e2e/test_component_tokenizer.py": {
        "test_what_cannot_be_is_refused_before_the_weights_are_read": (
            "name1",
            "name3",
            "name4",
            "refuses",
            "has-no",
            "hasno",
        ),
    },
    "e2e/test_draft_heads.py": {
        "test_an_eagle3_head_that_reads_the_right_state_is_always_right": ("1",),
        "test_an_mtp_head_that_reads_the_token_after_the_state_is_always_right": (
            "glm4_moe-limits2",
        ),
    },
    "e2e/test_equal_to_transformers.py": {
        "test_checkpoints_unlike_those_that_transformers_writes_are_served_as_it_serves_them": (
            "Falcon3",
            "a Llama whose window",
            "a bare model]",
        ),
    },
    "e2e/test_kv_fp8.py": {
        "test_what_lies_far_back_is_found_as_often_as_in_bfloat16": ("lookup0-calibrate",),
    },
    "e2e/test_llm_api.py": {
        "test_a_penalty_makes_repetition_rarer": ("{'presence",),
    },
    "e2e/test_logits_processors.py": {
        "test_a_processor_that_fails_ends_the_request_and_no_other": ("overlap-update",),
        "test_tokens_are_the_same_together_cut_preempted_or_drafted": ("overlap", "preempted"),
    },
    "e2e/test_same_tokens.py": {
        "test_tokens_are_the_same_whatever_is_around_them": ("lpm",),
    },
    "e2e/test_speculation.py": {
        "test_answers_are_those_without_drafts": ("alternating", "moody", "suffix"),
        "test_answers_of_other_models_are_those_without_drafts": ("granite", "moe"),
    },
    "e2e/test_speculation_refused.py": {
        "test_a_request_lowers_its_drafts_and_has_the_same_tokens": ("0", "1]"),
    },
    "e2e/test_threads.py": {
        "test_what_a_list_brings_of_others_waits_for_their_next_step": ("cumulative",),
    },
    "engine/test_adapters.py": {
        "test_a_thousand_adapters_starve_nobody": ("FCFS",),
        "test_an_adapter_that_waits_too_long_gets_the_next_slot": (
            "fcfs",
            "vtc",
            "lpm",
            "sarathi",
            "Backwards",
        ),
    },
    "engine/test_media.py": {
        "test_each_placeholder_reads_its_own_row": ("Backwards", "FCFS"),
        "test_runs_that_are_computed_whole_are_never_divided": ("FCFS", "Chaos", "Cautious"),
    },
    "engine/test_prefill_limit.py": {
        "test_a_policy_that_declares_not_to_be_limited_is_left_alone": ("capabilities1",),
        "test_no_step_with_a_streamed_answer_is_longer_than_the_limit_lets_it": ("4.0",),
        "test_the_limit_is_no_difference_between_policies": ("fcfs", "srpt"),
    },
    "engine/test_slow_devices.py": {
        "test_a_long_prompt_is_computed_in_steps_of_some_seconds": ("0.5-0.04", "4.0-0.04"),
    },
    "engine/test_speculation.py": {
        "test_a_bad_drafter_costs_little": ("0.0005-1", "0.005-1-adversary"),
        "test_a_drafter_that_fails_is_named_once_and_changes_no_token": (
            "raises]",
            "id beyond",
            "too few",
            "endless drafts",
            "None]",
        ),
        "test_no_block_or_checkpoint_that_a_lookup_finds_holds_a_rejected_draft": (
            "oracle-0",
            "alternating",
            "moody-0",
            "model",
        ),
        "test_preempted_requests_go_on_with_the_same_tokens": (
            "oracle",
            "alternating-0",
            "model-0",
        ),
        "test_tokens_are_those_without_drafts": (
            "oracle",
            "alternating-True",
            "moody-False",
            "model-False",
        ),
    },
    "examples/test_samplers_extra.py": {
        "test_processors_pass_their_suite": (
            "xtc-logits_processor.a",
            "xtc-logits_processor.b",
            "xtc-logits_processor.e",
            "xtc-logits_processor.lines",
            "xtc-logits_processor.m",
            "xtc-logits_processor.o",
            "xtc-logits_processor.p",
            "xtc-logits_processor.r",
            "xtc-logits_processor.s",
            "xtc-hygiene",
            "dry-logits_processor.ex",
            "dry-logits_processor.ba",
            "dry-logits_processor.row",
            "dry-logits_processor.re",
            "dry-hygiene.o",
            "top_n_sigma-logits_processor.ex",
            "top_n_sigma-logits_processor.ba",
            "top_n_sigma-hygiene.options",
        ),
    },
    "examples/test_xgrammar.py": {
        "test_the_backend_passes_its_suite": (
            "grammar.mask",
            "grammar.never",
            "grammar.words",
            "grammar.fill",
            "grammar.accept",
            "grammar.end",
            "grammar.complete",
            "grammar.roll",
            "grammar.forced",
            "grammar.separate",
            "grammar.begin",
            "grammar.failed",
            "grammar.threads",
            "grammar.shared",
            "grammar.start",
            "grammar.no",
            "grammar.ref",
            "grammar.gr",
            "grammar.regexes",
            "grammar.json",
            "hygiene",
        ),
    },
    "executors/test_same_tokens_over_ranks.py": {
        "test_ranks_agree_on_how_many_drafts_are_right_without_being_told": ("2",),
    },
    "features/steering/test_tokens.py": {
        "test_tokens_are_those_of_a_hook": ("two slots", "chunks"),
        "test_tokens_over_two_ranks_are_those_of_a_hook": ("plain",),
    },
    "front/media/test_processors.py": {
        "test_tokens_and_tensors_are_those_of_the_whole_processor": (
            "pixtral",
            "internvl",
            "idefics3",
            "qwen2_vl",
            "qwen3_5]",
            "glm4v]",
            "gemma3",
        ),
    },
    "front/test_chat_limits.py": {
        "test_a_template_that_fills_the_memory_is_refused": (
            "{{ 'x' * 10",
            "{{ [1]",
            "{{ '%10000000000d' %",
            "{{ 'x'.ljust",
            "{{ {'a'",
            "{% set ns",
        ),
        "test_a_template_that_never_ends_is_refused": ("{% for", "{{ 9"),
    },
    "front/test_generation_config.py": {
        "test_answers_are_those_of_transformers_generate": (
            "{}",
            "{'max_new",
            "{'eos_token_id': 'third'}",
            "{'bad_words",
        ),
    },
    "hostile/test_work_per_byte.py": {
        "test_endpoints_take_little_time_per_byte": (
            "/v1/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/v1/score",
            "/score",
            "/v1/rerank",
            "/rerank",
            "/v2",
            "/classify",
            "/v1/classify",
            "/pooling",
            "/v1/messages/count",
            "/v1/batches",
            "/tokenize",
            "/detok",
            "/v1/load",
            "/v1/unload",
        ),
        "test_readers_take_little_memory_per_byte": (
            "a model",
            "a line",
            "a batch",
            "an upl",
            "an adapter",
            "a schema",
            "a regular",
            "a compiled",
            "the variables",
            "a text",
            "a pair",
            "tokenizer",
        ),
        "test_readers_take_little_time_per_byte": (
            "a line",
            "a batch",
            "an uploaded",
            "an adapter's config",
            "an adapter's header",
            "a schema",
            "a regular",
            "a compiled grammar",
            "a compiled schema",
            "the variables",
            "a text",
            "a pair",
            "tokenizer",
            "answers in the format llama3_json",
        ),
    },
    "kv_cache/test_prefix_scripts.py": {
        "test_no_claim_of_the_kind_is_ever_broken": ("True-draw_shape",),
    },
    "lab/test_cache_of_a_trace.py": {
        "test_hits_are_those_of_a_list_of_hash_ids": ("12", "40"),
    },
    "lab/test_compare.py": {
        "test_a_verdict_names_the_mean_and_the_p99_of_every_latency_once": ("1-",),
    },
    "lab/test_leaderboard.py": {
        "test_a_leaderboard_adds_seeds_until_neighbours_are_apart_or_the_time_is_up": ("0.2",),
        "test_wrong_options_are_named": (
            "options0",
            "options2",
            "options5",
            "options6",
            "options7",
        ),
    },
    "lab/test_replicas.py": {
        "test_each_request_goes_to_one_replica_and_one_replica_is_the_engine_alone": (
            "RoundRobin",
            "Sticky",
            "CacheAware",
        ),
    },
    "lab/test_report.py": {
        "test_a_run_in_which_little_happened_has_a_report_too": ("no request",),
    },
    "lab/test_sessions.py": {
        "test_closed_loops_over_replicas_are_the_same_in_every_run": ("sticky",),
    },
    "lab/test_simulated.py": {
        "test_speculation_costs_little_where_it_does_not_pay": ("0.0-1", "0.3-1"),
    },
    "lab/test_statistics.py": {
        "test_differences_of_mere_luck_are_found_about_as_often_as_stated": ("1-0.8",),
    },
    "lab/test_sweep.py": {
        "test_a_wrong_grid_is_refused_before_anything_runs": (
            "options0",
            "options1-",
            "options2",
            "options3",
            "options5",
            "options9",
            "options10",
            "options11",
        ),
    },
    "media/test_bytes.py": {
        "test_bytes_stand_for_the_numbers_of_the_image_processor": (
            "mistral3",
            "llava]",
            "qwen2_vl",
            "gemma3]",
            "internvl",
            "smolvlm",
        ),
    },
    "media/test_oracle.py": {
        "test_logits_are_those_of_the_whole_model_and_of_spans_alone": (
            "mistral3",
            "llava]",
            "qwen2_vl",
            "gemma3]",
            "internvl",
            "qwen3_5]",
        ),
    },
    "media/test_towers.py": {
        "test_each_vision_tensor_is_loaded_and_missing_and_unknown_ones_are_named": (
            "mistral3",
            "llava]",
            "qwen2_vl",
            "gemma3]",
            "internvl",
            "glm4v]",
            "pixtral",
        ),
        "test_random_weights_need_no_file_and_follow_the_seed": (
            "mistral3",
            "llava]",
            "qwen2_vl",
            "gemma3]",
            "internvl",
        ),
    },
    "models/test_draft_heads.py": {
        "test_mtp_heads_equal_transformers": ("glm4_moe]", "deepseek_v3]", "qwen3_5]"),
    },
    "models/test_encoders.py": {
        "test_a_classifier_scores_as_transformers_does": (
            "1-Bert",
            "1-ModernBert",
            "3-Roberta",
            "3-XLM",
            "1-Distil",
            "1-MPNet",
            "1-Deberta",
            "3-Jina",
        ),
        "test_an_encoder_embeds_by_the_mean_of_its_states": (
            "Bert",
            "ModernBert",
            "Nomic",
            "EuroBert",
        ),
    },
    "models/test_gguf.py": {
        "test_a_family_computes_what_transformers_does": (
            "llama-F32",
            "llama-Q4_0",
            "qwen2-F32",
            "qwen3-Q6_K",
            "gemma2-F32",
            "gemma3-F32",
        ),
        "test_rows_of_each_type_have_the_values_of_transformers": (
            "Q4_0",
            "Q5_1",
            "Q8_0",
            "Q2_K",
            "Q3_K",
            "Q4_K",
            "Q6_K",
            "IQ4_NL",
            "IQ2_XXS",
            "IQ1_M",
            "TQ1_0",
            "MXFP4",
        ),
    },
    "models/test_gguf_tokenizers.py": {
        "test_pieces_of_sentencepiece_are_merged_by_their_scores": ("gemma2",),
    },
    "models/test_hybrids.py": {
        "TestFormats::test_plain_weights_are_quantized_as_they_load": (
            "qwen3_5]",
            "nemotron_h",
            "lfm2]",
        ),
        "TestLoading::test_every_tensor_is_used_and_further_layers_are_skipped": (
            "qwen3_5]",
            "nemotron_h",
            "lfm2_biased",
            "granite_dense",
        ),
        "TestLogitsAreThoseOfTransformers::test_after_a_hit_on_a_checkpoint": (
            "qwen3_5]",
            "nemotron_h",
            "lfm2]",
        ),
        "TestLogitsAreThoseOfTransformers::test_of_a_prompt_in_chunks": (
            "qwen3_next-()",
            "qwen3_5-(1",
            "qwen3_5_moe-()",
            "nemotron_h-(1",
            "granite-()",
            "granite_dense-()",
            "bamba-()",
            "lfm2-",
            "lfm2_biased-(1",
            "lfm2_moe-()",
        ),
        "TestLogitsAreThoseOfTransformers::test_of_three_prompts_in_steps_that_share_their_order_never": (
            "qwen3_5]",
            "nemotron_h",
            "lfm2]",
        ),
        "TestLogitsAreThoseOfTransformers::test_on_two_ranks": ("qwen3_5]", "nemotron_h", "lfm2]"),
    },
    "models/test_late_interaction.py": {
        "test_a_damaged_layer_is_refused": ("not a file", "it can't be read0", "at most 48"),
        "test_files_that_can_t_be_honoured_are_refused": ("config0", "config2", "config5"),
    },
    "models/test_pooling.py": {
        "test_a_classifier_scores_by_its_head": ("Qwen3ForSequenceClassification", "Llama"),
        "test_a_decoder_embeds_by_its_last_token": ("Qwen3Model", "Gemma3"),
    },
    "models/test_quantized_checkpoints.py": {
        "test_a_quantized_checkpoint_writes_what_its_dequantized_weights_do": (
            "awq",
            "bnb-nf4",
            "ct-fp8-static",
            "ct-w4a16-asym",
            "ct-w8a8",
            "ct-nvfp4",
            "gptq",
            "qwen3-fp8",
        ),
    },
    "models/test_text_of_vision_models.py": {
        "test_the_tokens_are_those_of_the_whole_model": ("mistral3", "qwen3_vl]", "glm_ocr"),
    },
    "models/test_transformers.py": {
        "test_a_length_that_no_check_crosses_is_refused": ("fields1",),
        "test_a_rope_whose_frequencies_depend_on_other_requests_is_refused_beyond_its_switch": (
            "smollm3",
        ),
        "test_a_tensor_that_the_model_does_not_know_is_refused_unless_a_text_model_leaves_it_out": (
            "extra",
        ),
        "test_requests_below_the_switch_of_a_rope_are_exact_beside_each_other": ("smollm3",),
    },
    "models/test_transformers_layers.py": {
        "test_a_class_that_has_changed_since_is_noticed_at_load": ("Qwen3RMSNorm",),
        "test_quantized_checkpoints_write_what_their_dequantized_weights_do": (
            "ct-w4a16-asym",
            "awq",
        ),
        "test_tokens_are_those_of_the_native_model": ("keys1",),
    },
    "nn/test_experts.py": {
        "test_experts_in_a_format_compute_what_their_dequantized_weights_do": (
            "1-Float8(scales='computed'",
            "3-Float8(scales='block', block=(32",
            "1-PackedInt4(group=32",
            "3-PackedInt4(group=64",
            "1-Mxfp4",
        ),
    },
    "runtime/test_draft_head.py": {
        "test_drafts_are_those_of_the_head_alone": ("False",),
    },
    "runtime/test_draft_model.py": {
        "test_drafts_are_those_of_the_draft_model_alone": ("False",),
    },
    "runtime/test_drafts.py": {
        "test_masks_are_of_lines": ("False",),
        "test_rows_with_drafts_share_a_step_with_prompts_and_their_chunks": ("False",),
    },
    "runtime/test_logits.py": {
        "test_steps_in_which_nobody_asks_replay_what_they_do_without_processors": ("True",),
        "test_tokens_in_graphs_are_those_without": ("0-",),
    },
    "runtime/test_mixed_graphs.py": {
        "test_rows_pool_from_recordings_what_they_pool_without": ("last-Rec", "mean-Mixed"),
    },
    "schedulers/test_every_policy.py": {
        "test_requests_that_fit_to_their_end_once_windows_release_pages_all_run_to_it": (
            "fcfs",
            "vtc",
            "mlfq",
            "lpm",
            "sarathi",
            "andes",
        ),
    },
    "schedulers/test_forgetting.py": {
        "test_turns_are_the_same_whether_the_idle_are_forgotten_or_not": ("False",),
    },
    "server/test_agents.py": {
        "test_a_template_that_knows_an_effort_gets_it": (
            "minimal-low-/v1/messages",
            "low-low-/v1/chat",
            "medium-medium-/v1/responses",
            "xhigh",
            "max-high-/v1/messages",
        ),
        "test_calls_of_codexs_tools_come_in_their_own_form_and_can_be_sent_back": (
            "a function of",
            "a custom tool]",
            "a local shell",
        ),
        "test_effort_limits_the_tokens_of_reasoning": (
            "minimal",
            "low-/v1/messages",
            "medium-/v1/responses",
            "high-/v1/chat",
            "xhigh-/v1/messages",
            "max-/v1/responses",
        ),
        "test_reasoning_is_turned_off_by_what_the_template_has": (
            "template0",
            "template1-</think>-/v1/responses",
            "template2-none\\nassistant:-/v1/chat",
            "template2-none\\\\nassistant:-/v1/chat",
            "template3-assistant:-/v1/messages-fields0",
        ),
    },
    "server/test_batches.py": {
        "test_a_damaged_batch_fails_and_no_other": ("\\\\xff", "[[["),
        "test_metadata_has_the_bounds_of_openai": ("metadata0",),
    },
    "server/test_bodies.py": {
        "test_a_body_of_too_many_or_too_deep_parts_is_refused_before_it_is_parsed": (
            "/v1/completions",
            "/v1/chat",
            "/v1/responses",
            "/v1/embeddings",
            "/v1/messages",
            "/v1/batches",
            "/tokenize",
        ),
    },
    "server/test_browsers.py": {
        "test_on_loopback_a_name_that_points_here_is_not_served": (
            "evil.example-",
            "evil.example:8000-/]",
            "127.0.0.1.evil.example-/health",
            "localhost.evil.example-/v1",
            "evil.example:127-/metrics",
            "[x-/]",
            "@-/page",
        ),
        "test_pages_of_other_sites_may_not_send": (
            "True-/v1/completions-",
            "False-/v1/messages-headers0",
            "True-/v1/files-headers1",
            "True-/v1/batches/batch_1/cancel-headers2",
            "False-/v1/completions-headers3",
            "True-/v1/messages-headers6",
            "False-/v1/files-headers4",
            "False-/v1/batches/batch_1/cancel-headers5",
        ),
    },
    "server/test_call_rules.py": {
        "test_the_parser_reads_what_the_rule_allows": ("hermes", "mistral-[", "deepseek_v3-]"),
    },
    "server/test_chat.py": {
        "test_a_stream_adds_up_to_the_whole_answer": (
            "{}",
            "{'stop'",
            "{'logprobs': True, 'top",
            "{'tools'",
        ),
    },
    "server/test_completions.py": {
        "test_a_stream_adds_up_to_the_whole_answer": (
            "{}",
            "{'n': 3}",
            "{'stop': [",
            "{'logit_bias'",
            "{'echo'",
            "{'logprobs': 2, 'echo'",
            "{'return_token_ids'",
            "{'min_p'",
        ),
        "test_tokens_are_the_texts_and_offsets_their_running_lengths": (
            "'\\\\xe9'-options0",
            "'na",
            "[65, 221, 128, 103, 221, 163, 121, 96]-options2",
        ),
    },
    "server/test_decisions.py": {
        "test_decisions_of_the_last_steps_are_only_numbers": ("zmq",),
    },
    "server/test_error_paths.py": {
        "test_whatever_is_raised_is_told_without_paths": ("/v1/completions", "/v1/messages"),
    },
    "server/test_errors.py": {
        "test_no_body_is_a_fault_of_the_server": ("completions",),
    },
    "server/test_flags.py": {
        "test_a_flag_does_what_the_argument_does": (
            "['--max-model-len', '128']",
            "['--max_model_len=128']",
            "['--max-model-len', '0.128k']",
            "['-tp', '2']",
            "['--no-enable-prefix",
            "['--swap-space'",
            "['--scheduler'",
        ),
        "test_a_flag_that_cannot_be_honoured_is_refused_with_its_name": (
            "['--max-model-len', 'many']",
            "['--max-model-len=']",
            "['--max-model-len']",
            "['--tensor-parallel-size', 'two']",
            "['--enforce-eager', '--no",
            "['--enforce-eager', 'true']",
            "['--max-model-len', '64', '--max",
            "['--set', 'executor=local'",
            "['--model', 'demo']",
            "['--enable-auto",
            "['--allowed",
        ),
        "test_each_row_of_the_table_is_a_flag": (
            "dtype",
            "max_",
            "kv_",
            "tensor_",
            "enable_p",
            "enable_e",
            "enable_a",
            "num_",
            "seed",
            "quantization",
            "tokenizer",
            "load_",
            "trust",
            "sp",
            "lo",
        ),
    },
    "server/test_missing_packages.py": {
        "test_a_package_that_is_missing_is_named_with_its_remedy_before_anything_starts": (
            "orjson",
            "uvicorn",
            "prometheus",
        ),
        "test_what_needs_no_server_works_without_its_packages": ("plugins",),
    },
    "server/test_native_formats.py": {
        "test_calls_are_read_as_they_were_written": ("kimi_k2", "gemma4", "harmony"),
    },
    "server/test_openapi.py": {
        "test_advisory_fields_have_no_effect_and_the_answer_names_them": (
            "/v1/completions-user",
            "/v1/completions-stream_options",
            "/v1/chat/completions-store",
            "/v1/chat/completions-verbosity",
            "/v1/responses-text.verbosity",
            "/v1/responses-tools[].defer",
            "/v1/responses-input[].output[].file_data",
            "/v1/messages-metadata",
            "/v1/messages-messages[].content[].cache",
            "/v1/messages/count_tokens-speed",
            "/v1/messages/count_tokens-messages[].content[].cache",
        ),
    },
    "server/test_parsers.py": {
        "test_any_answer_cut_anywhere_parses_as_the_oracle_reads_it": ("hermes", "qwen3_coder"),
    },
    "server/test_plugin_parsers.py": {
        "test_the_answer_of_a_parser_that_fails_is_content_from_there_and_the_log_names_it_once": (
            "raises-Ah",
            "twins",
            "exits",
        ),
    },
    "server/test_plugin_routes.py": {
        "test_serve_names_what_the_config_does_not_admit_before_a_process_starts": ("--route",),
    },
    "server/test_remote.py": {
        "test_requests_at_once_give_what_they_give_offline": ("zmq",),
        "test_steps_that_yield_several_tokens_give_the_same_in_fewer_outputs": ("False",),
    },
    "server/test_structured.py": {
        "test_a_call_can_be_required_where_a_line_break_ends_the_answer": ("end0",),
        "test_a_call_that_a_stop_string_cuts_off_is_no_finished_call": ("mistral",),
        "test_a_call_that_is_required_comes_with_arguments_that_follow_its_schema": (
            "llama3_json",
            "mistral-1",
        ),
        "test_a_named_function_is_called_once": ("mistral",),
        "test_a_required_answer_ends_after_its_first_call_unless_several_are_asked_for": (
            "mistral",
        ),
        "test_a_required_answer_is_calls_and_nothing_else": ("mistral",),
        "test_a_streamed_call_that_a_stop_string_cuts_off_is_no_finished_call": ("mistral",),
        "test_messages_call_what_is_demanded": ("choice2",),
        "test_messages_say_that_a_call_was_cut_off": ("True",),
        "test_responses_call_what_is_demanded": ("choice1",),
        "test_responses_say_that_a_call_was_cut_off": ("True",),
        "test_the_rule_begins_behind_thoughts_where_the_model_has_some": ("template1", "template4"),
    },
    "structured/test_answers.py": {
        "test_answers_that_end_follow_their_schemas": ("byte-level",),
    },
    "structured/test_same_tokens.py": {
        "test_tokens_under_a_rule_are_the_same_whatever_is_around_them": ("overlap",),
    },
    "structured/test_together.py": {
        "test_tokens_are_those_of_each_answer_by_itself": (
            "0-overlap-records",
            "0-preemption-no",
            "0-drafts-records",
        ),
    },
    "tiers/test_random_worlds.py": {
        "test_no_traffic_reads_what_was_not_restored": ("4",),
    },
}

# By file and test: beginnings of ids of the slow cases that the slow profile tries. The full one
# tries the others, which make the same claim of another component.
SLOW_CASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "e2e/test_deterministic.py": {
        # with windows, selecting from latents, with sinks and experts
        "test_a_request_has_the_same_bits_in_any_engine": (
            "gemma3_text-float32",
            "deepseek_v32-bfloat16",
            "gpt_oss-bfloat16",
        ),
        "test_so_it_has_where_slabs_and_lines_are_computed_together": ("qwen3_moe-float32",),
    },
    "e2e/test_draft_model.py": {
        "test_answers_are_those_without_drafts": ("small memory",),
    },
    "examples/test_samplers_extra.py": {
        "test_processors_pass_their_suite": ("dry-",),
    },
    "grammars/test_mask_processes.py": {
        "test_the_suite_passes_where_processes_follow_all_answers": (
            "mask",
            "end",
            "rollback",
            "failed",
            "start_fill",
        ),
    },
    "media/test_in_engine.py": {
        "test_a_placeholder_that_is_typed_is_text": ("gemma4", "llava]", "pixtral", "qwen3_5]"),
        "test_greedy_tokens_are_those_of_transformers": (
            "aya_vision",
            "exaone4_5",
            "gemma4",
            "glm4v-",
            "idefics3",
            "internvl",
            "llava_next",
            "pixtral",
            "qwen2_5_vl",
            "qwen3_vl-",
        ),
        "test_two_ranks_write_the_same_tokens": ("qwen3_5",),  # with positions on three axes
    },
    "media/test_towers.py": {
        "test_random_weights_need_no_file_and_follow_the_seed": ("gemma4", "pixtral", "qwen3_vl]"),
    },
    "models/test_hybrids_in_engine.py": {
        "test_greedy_tokens_are_those_of_transformers": ("qwen3_next", "nemotron_h", "mamba2"),
    },
    "models/test_quantized_mixtures.py": {
        "test_experts_in_a_format_compute_what_their_values_do": (
            "compressed-tensors NVFP4",
            "FP8, a scale per block",
            "AWQ",
        ),
        "test_mixtures_whose_names_transformers_changes_are_read": ("ernie4_5_moe",),
    },
    "models/test_transformers_layers.py": {
        # each sort of norm, block, attention, experts and state
        "test_a_type_is_served_with_its_layers": (
            "bailing_hybrid",
            "bitnet",
            "cohere2_moe",
            "deepseek_v3",
            "gemma3n",
            "gemma4_text",
            "gpt_oss",
            "jamba",
            "kimi_linear",
            "minimax]",
            "mixtral",
            "olmo2",
            "qwen3]",
            "stablelm",
            "starcoder2",
            "zaya",
        ),
    },
    "models/test_windows.py": {
        "test_greedy_tokens_are_those_of_transformers": ("gemma4", "gpt_oss"),
        "test_preempted_requests_write_the_same_tokens": ("gemma4", "gpt_oss"),
    },
    "schedulers/test_forgetting.py": {
        "test_clients_that_never_come_again_take_no_memory": ("lightllm by vtc", "rpm, deferring"),
    },
}
