"""Tests above the budget of a quick one that can't be marked where they are defined, by their ids,
with the reason.

Most are checks that a test class inherits from a conformance suite: they are slow with one
component only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.quick_cases import QUICK_CASES, SLOW_CASES

MANY_CASES = "tries many cases"
LARGE = "computes with large inputs"
COMPILES = "compiles a kernel"
WAITS = "waits for servers to end"
PROCESS = "starts a process that imports everything"
RANKS = "starts ranks: processes that import torch"
OF_BUILTINS = "tests/conformance/test_builtins.py::Test_"
OF_FLASH = "tests/attention/test_flash_suite.py::TestFlashAttention"
OF_MUTANTS = "tests/conformance/test_mutants.py::test_mutant_is_caught_by_its_check"
OF_GARBAGE = "tests/e2e/test_garbage.py::test_a_token_more_is_nothing_more_to_look_through"
WHICH_BLOCKS = "test_which_physical_blocks_a_row_has_changes_nothing"

SLOW_OF_BUILTINS = {
    "test_spawn": PROCESS,
    "test_replay": PROCESS,
}  # one process for all of them, which the first waits for


@dataclass(frozen=True, slots=True)
class Dear:
    """Checks of a kind that take most of its suite's time. `quick`: components that are tried in
    the quick profile; the slow one tries the others."""

    reason: str
    checks: frozenset[str]
    quick: frozenset[str] = frozenset()


DEAR_OF_BUILTINS: Mapping[str, Sequence[Dear]] = {
    "scheduler": (
        Dear(
            MANY_CASES,
            frozenset(
                (
                    "test_finishes",
                    "test_long_run",
                    "test_no_stalls",
                    "test_no_starvation",
                    "test_prefill_limit",
                )
            ),
            frozenset(("fcfs", "vtc")),  # in order, and by a count that is kept
        ),
        Dear(
            MANY_CASES,
            frozenset(
                (
                    "test_aborts",
                    "test_adapters",
                    "test_budget",
                    "test_forgets",
                    "test_indivisible",
                    "test_it_does_not_block",
                    "test_no_idling",
                    "test_no_rejection",
                    "test_no_starvation_beside_others",
                    "test_read_only",
                    "test_recompute",
                )
            ),
            # also by levels, and by hits of the prefix cache
            frozenset(("fcfs", "vtc", "mlfq", "lpm")),
        ),
    ),
    "model": (
        Dear(
            MANY_CASES,
            frozenset(
                (
                    "test_checkpoint",
                    "test_chunks",
                    "test_config_fields",
                    "test_decode",
                    "test_inputs_and_results_are_the_callers",
                    "test_layer_specs",
                    "test_max_len",
                    "test_media_axes",
                    "test_media_levels",
                    "test_media_rows",
                    "test_positions",
                    "test_prefix",
                    "test_ragged",
                    "test_shards",
                    "test_side_by_side",
                    "test_state_specs",
                    "test_states",
                    "test_steps_that_are_nearly_alike",
                    "test_taps",
                    "test_tied",
                    "test_wanted",
                    "test_weight_complete",
                )
            ),
            frozenset(("qwen3", "bert")),  # a decoder and an encoder
        ),
        Dear(MANY_CASES, frozenset(("test_dtype",)), frozenset(("bert",))),
        Dear(MANY_CASES, frozenset(("test_weight_use",))),
        Dear(
            MANY_CASES,
            frozenset(("test_transformers", "test_weight_names")),
            # with experts, with windows, with an index, encoders
            frozenset(("qwen3", "gpt_oss", "gemma2", "glm_moe_dsa", "bert", "modernbert")),
        ),
    ),
    "observer": (
        Dear(
            MANY_CASES,
            frozenset(("test_long_run", "test_what_belongs_to_the_whole_process_is_left_alone")),
            frozenset(("log",)),
        ),
    ),
    "parser": (
        Dear(
            MANY_CASES,
            frozenset(("test_the_cuts_between_pieces_change_nothing",)),
            frozenset(("hermes",)),
        ),
        Dear(
            MANY_CASES,
            frozenset(
                (
                    "test_long_answers_are_parsed_like_short_ones",
                    "test_time_is_proportional_to_length",
                    "test_what_is_held_back_has_a_limit",
                )
            ),
            frozenset(("harmony",)),
        ),
        Dear(
            MANY_CASES,
            frozenset(
                (
                    "test_answers_dont_disturb_each_other",
                    "test_events_come_in_order",
                    "test_no_text_and_no_tools_make_it_raise",
                    "test_other_tools_change_nothing",
                    "test_text_after_a_broken_mark_is_not_held_back",
                )
            ),
            frozenset(("mistral", "qwen3_coder", "harmony")),  # JSON, tags, channels
        ),
    ),
    "drafter": (
        Dear(
            MANY_CASES,
            frozenset(
                (
                    "test_nothing_is_learned_from_other_clients",
                    "test_requests_are_only_read",
                    "test_requests_that_ended_are_forgotten",
                )
            ),
            frozenset(("ngram", "mtp")),  # by a request's text, by its states
        ),
    ),
    "executor": (
        Dear(
            MANY_CASES,
            frozenset(
                (
                    "test_a_model_that_drafts_for_itself_is_right",
                    "test_a_row_that_begins_again_pools_anew",
                    "test_deterministic_rows_have_the_same_bits",
                    "test_drafts_change_no_token",
                    "test_rows_with_different_adapters_share_steps",
                    "test_rows_with_drafts_do_not_depend_on_others_nor_others_on_them",
                )
            ),
            frozenset(("simulated",)),
        ),
    ),
}
# Built-ins that run the code of another, which the slow profile tries: it leaves their dear checks
# to the full one. By kind: names, and those of the others.
LIKE_ANOTHER: Mapping[str, Mapping[str, str]] = {
    "model": {
        "glm_moe_dsa": "deepseek_v32",
        "glm4": "gemma2",
        "jina_embeddings_v3": "bert",
        "nomic_bert": "modernbert",
        "qwen3_moe": "deepseek_v32",
        "xlm_roberta": "bert",
    },
    "parser": {
        "functiongemma": "gemma4",
        "glm45": "qwen3_coder",
        "kimi_k2": "deepseek_v3",
        "minimax_m2": "qwen3_coder",
        "nemotron_h": "hermes",
    },
    # orders by another key, quota or target; tests/schedulers has tests of each
    "scheduler": {
        "edf": "priority",
        "lcf": "vtc",
        "prefill_first": "sarathi",
        "sjf": "priority",
        "slo": "andes",
        "srpt": "priority",
    },
}
# Mutants that many cases have to be tried to catch
DEAR_MUTANTS = (
    "drafter-BreaksTiesByHashes",
    "drafter-KeepsAbortedRequests",
    "drafter-SwitchesThreadsMoreOften",
    "executor-AddsToWhatWasThere",
    "executor-AllowsSixtyFourTokens",
    "executor-CountsInTheOrderOfRows",
    "executor-DeclaresTooManyLines",
    "executor-ForgetsTheTokenAfterDrafts",
    "executor-KnowsNoPenalties",
    "executor-LeavesItsWorker",
    "executor-LosesTheProcessorsOfRowsThatReturn",
    "executor-LosesTheRulesOfRowsThatReturn",
    "executor-MasksTheFirstLineOfARow",
    "executor-PenalisesKnownTokensAlone",
    "executor-ProcessesNoRowsWithDrafts",
    "executor-SamplesDeterministicRowsWithOthers",
    "executor-SamplesOtherwiseBesideRowsThatPool",
    "executor-SamplesTheFirstThatIsAllowed",
    "executor-SeedsOf32Bits",
    "grammar-HasWordsInAllScripts",
    "grammar-KeepsByBothEnds",
    "grammar-NeverForces",
    "kv_cache-LookupKeepsFromEviction",
    "kv_cache-PinsTheHitOfARequestThatDoesNotFit",
    "kv_cache-TakesTheirHitsForNothing",
    "kv_cache-TakesTrimmedBlocksForLost",
    "kv_cache-TrimsFullAttentionToo",
    "kv_tier-RemembersDroppedNamespaces",
    "logits_processor-KeepsIdsAsBfloat16",
    "model-ForgetsAcceptedDrafts",
    "model-SquaresInItsDtype",
    "observer-ReportsAtExit",
    "sampler-KeepsTheTopKOfWhatIsGiven",
    "sampler-KeepsTheWrongSideOfMinP",
    "sampler-KnowsEightDrafts",
    "sampler-NoTemperatureAboveFive",
    "sampler-PenalisesWarmRowsAfterwards",
    "sampler-RoundsPToBfloat16",
    "sampler-WrapsKAt32Bits",
    "scheduler-TheSaltedComeLast",
    "tokenizer-CutsOffMegabytes",
    "tokenizer-WritesKeysInTheOrderOfASet",
)
SLOW_CHECKS = {
    **{f"{OF_MUTANTS}[{mutant}]": MANY_CASES for mutant in DEAR_MUTANTS},
    f"{OF_FLASH}2::test_spawn": PROCESS,
    f"{OF_FLASH}2::{WHICH_BLOCKS}": MANY_CASES,
    f"{OF_FLASH}3::test_spawn": PROCESS,
    f"{OF_FLASH}3::{WHICH_BLOCKS}": MANY_CASES,
    f"{OF_BUILTINS}kv_cache_prefix::test_no_request_reads_what_another_wrote": MANY_CASES,
    f"{OF_BUILTINS}model_bert::test_transformers": MANY_CASES,
    f"{OF_BUILTINS}model_gpt_oss::test_weight_use": MANY_CASES,
    f"{OF_BUILTINS}observer_prometheus::test_no_event_makes_it_raise": WAITS,
    f"{OF_BUILTINS}observer_prometheus::test_nothing_is_left_behind": WAITS,
    f"{OF_BUILTINS}sampler_default::test_rules_before_temperature": MANY_CASES,
    f"{OF_BUILTINS}sampler_default::test_large_vocabulary": MANY_CASES,
    f"{OF_BUILTINS}sampler_default::test_rules_before_filters": MANY_CASES,
    f"{OF_BUILTINS}sampler_default::test_top_k": MANY_CASES,
    f"{OF_BUILTINS}sampler_default::test_forgets": MANY_CASES,
    f"{OF_BUILTINS}sampler_default::test_first_use": PROCESS,
    f"{OF_BUILTINS}grammar_llguidance::test_it_accepts_just_what_the_mask_allows": MANY_CASES,
    f"{OF_BUILTINS}grammar_llguidance::test_regular_expressions_are_those_of_python": MANY_CASES,
    f"{OF_BUILTINS}grammar_llguidance::test_each_keyword_is_followed_or_refused_wherever_it_stands": MANY_CASES,
    f"{OF_BUILTINS}grammar_llguidance::test_a_text_of_another_kind_is_another_spec": MANY_CASES,
    f"{OF_BUILTINS}executor_local::test_long_use": MANY_CASES,
    f"{OF_BUILTINS}executor_local::test_an_adapter_computes_what_merged_weights_do": MANY_CASES,
    f"{OF_BUILTINS}executor_local::test_what_is_pooled_depends_on_the_prompt_alone": MANY_CASES,
    f"{OF_BUILTINS}attention_torch::test_slots_are_numbered_beyond_16_bits": LARGE,
    f"{OF_BUILTINS}attention_sdpa::test_slots_are_numbered_beyond_16_bits": LARGE,
    f"{OF_MUTANTS}[attention-KeepsSlotsInSigned16Bits]": LARGE,
    f"{OF_MUTANTS}[parser-SearchesAllOfItAgain]": LARGE,
    f"{OF_BUILTINS}sampler_default::test_many_calls": MANY_CASES,
    f"{OF_GARBAGE}[delta-None]": MANY_CASES,
    f"{OF_GARBAGE}[cumulative-stop1]": MANY_CASES,
    "tests/attention/test_other_gpus.py::test_attention_has_room_on_other_architectures[sm_75, "
    "float16, 2 x 16, block 16]": COMPILES,
    f"{OF_MUTANTS}[scheduler-ReadsAnotherClock]": PROCESS,
    f"{OF_MUTANTS}[sampler-NoiseBeginsAgain]": LARGE,
    "tests/conformance/test_extensions.py::test_a_right_one_passes[route]": MANY_CASES,
    "tests/conformance/test_extensions.py::test_a_right_one_in_an_odd_style_passes[route-code0]": MANY_CASES,
    f"{OF_BUILTINS}parser_hermes::test_events_come_in_order": MANY_CASES,
    f"{OF_BUILTINS}kv_tier_disk_path_frames_size_1GiB::test_a_kill_leaves_whole_frames": PROCESS,
    f"{OF_MUTANTS}[kv_tier-SetsTheUmaskOnce]": PROCESS,
    f"{OF_MUTANTS}[kv_tier-WritesWhenItIsClosed]": PROCESS,
    f"{OF_MUTANTS}[kv_cache-CopiesACheckpointAgain]": MANY_CASES,
    f"{OF_MUTANTS}[scheduler-ExpectsATokenOfEverybody]": MANY_CASES,
    f"{OF_MUTANTS}[kv_cache-HitsInTheWrongOrder]": MANY_CASES,
    f"{OF_MUTANTS}[drafter-ProposesTheFirstOfASet]": PROCESS,
    f"{OF_MUTANTS}[executor-DraftsTheFirstToken]": MANY_CASES,
    f"{OF_MUTANTS}[kv_cache-PinsTheHitTooLate]": MANY_CASES,
    f"{OF_MUTANTS}[executor-AdaptsSomeModulesOnly]": MANY_CASES,
    f"{OF_MUTANTS}[scheduler-GoesByTheHashOfClients]": PROCESS,
    f"{OF_MUTANTS}[scheduler-CountsLengthsOfEachRequest]": MANY_CASES,
    f"{OF_MUTANTS}[logits_processor-LowersThePrecisionOfAllProducts]": PROCESS,
    f"{OF_MUTANTS}[sampler-LowersThePrecisionOfAllProducts]": PROCESS,
    **{
        "tests/examples/test_samplers_extra.py::test_processors_pass_their_suite"
        f"[{name}-logits_processor.first_use]": PROCESS
        for name in ("dry", "top_n_sigma", "xtc")
    },
    f"{OF_MUTANTS}[kv_cache-SharesBeforeItLooksForABlock]": MANY_CASES,
    f"{OF_MUTANTS}[kv_cache-KeepsANumberOfEachRequest]": MANY_CASES,
    f"{OF_MUTANTS}[logits_processor-KeepsAllSeeds]": MANY_CASES,
    f"{OF_MUTANTS}[observer-HasRoomForSomeRequests]": MANY_CASES,
    f"{OF_MUTANTS}[parser-ReadsArgumentsAgain]": MANY_CASES,
    f"{OF_MUTANTS}[parser-TriesMarksOfASet]": PROCESS,
    f"{OF_MUTANTS}[sampler-NoiseAgesWithCalls]": MANY_CASES,
    f"{OF_MUTANTS}[sampler-CachesRulesByTheirValues]": MANY_CASES,
    f"{OF_MUTANTS}[tokenizer-ReadsAllMessagesForEach]": MANY_CASES,
    f"{OF_BUILTINS}kv_cache_prefix::test_a_new_block_is_nobodys": MANY_CASES,
    "tests/e2e/test_logits_processors.py::test_tokens_are_the_same_together_cut_preempted_or_drafted[two ranks]": RANKS,
    "tests/grammars/test_bounded_strings.py::test_every_mask_of_an_answer_is_the_library_s_own[one-compact-byte-level]": MANY_CASES,
    "tests/e2e/test_same_tokens.py::test_tokens_are_the_same_whatever_is_around_them[vtc or mlfq]": MANY_CASES,
}


LIKE_OTHERS = "does what another of its cases does, which is quick"


Cases = Mapping[str, Mapping[str, tuple[str, ...]]]


def without_a_case(nodeids: Iterable[str]) -> list[str]:
    """Return those of `QUICK_CASES` and `SLOW_CASES` none of whose tests would be tried in their
    profile, because ids have changed."""
    tried: dict[tuple[str, str], bool] = {}
    for nodeid in nodeids:
        test = nodeid.partition("[")[0]
        for profile, cases in (("quick", QUICK_CASES), ("slow", SLOW_CASES)):
            if _cases(cases, nodeid) is not None:
                known = tried.get((profile, test), False)
                tried[profile, test] = known or not _is_like_others(cases, nodeid)
    return [f"{test} ({profile})" for (profile, test), has_one in tried.items() if not has_one]


def _cases(cases: Cases, nodeid: str) -> tuple[str, ...] | None:
    file, _, test = nodeid.partition("[")[0].partition("::")
    return cases.get(file.removeprefix("tests/"), {}).get(test)


def _is_like_others(cases: Cases, nodeid: str) -> bool:
    tried = _cases(cases, nodeid)
    return tried is not None and not nodeid.partition("[")[2].startswith(tried)


def is_tried_with_another(nodeid: str) -> bool:
    """Whether `SLOW_CASES` leaves a slow test to the full profile, or it is a dear check of a
    built-in that runs the code of another."""
    if _is_like_others(SLOW_CASES, nodeid):
        return True
    kind, _, component = nodeid.removeprefix(OF_BUILTINS).partition("::")[0].partition("_")
    return (
        nodeid.startswith(OF_BUILTINS)
        and component in LIKE_ANOTHER.get(kind, ())
        and nodeid.rpartition("::")[2] != "test_spawn"  # one process for all of them
    )


def reason_for(nodeid: str) -> str | None:
    """Return why a test is slow, if it is listed here."""
    if _is_like_others(QUICK_CASES, nodeid):
        return LIKE_OTHERS
    if nodeid.startswith(OF_BUILTINS):
        suite, _, check = nodeid.removeprefix(OF_BUILTINS).partition("::")
        kind, _, component = suite.partition("_")
        if check in SLOW_OF_BUILTINS:
            return SLOW_OF_BUILTINS[check]
        for dear in DEAR_OF_BUILTINS.get(kind, ()):
            if check in dear.checks and component not in dear.quick:
                return dear.reason
    return SLOW_CHECKS.get(nodeid)
