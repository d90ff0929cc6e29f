"""The text architectures in vLLM's registry, as of mid-2026 (vllm/model_executor/models/registry.py,
`_TEXT_GENERATION_MODELS`), and why Dovetail doesn't serve some of them."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = """
    AfmoeForCausalLM ApertusForCausalLM AquilaModel AquilaForCausalLM ArceeForCausalLM
    ArcticForCausalLM AXK1ForCausalLM BaiChuanForCausalLM BaichuanForCausalLM
    BailingMoeForCausalLM BailingMoeV2ForCausalLM BailingMoeV2_5ForCausalLM BambaForCausalLM
    BloomForCausalLM ChatGLMModel ChatGLMForConditionalGeneration CohereForCausalLM
    Cohere2ForCausalLM Cohere2MoeForCausalLM CwmForCausalLM DbrxForCausalLM DeciLMForCausalLM
    DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM
    DeepseekV4ForCausalLM Dots1ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    ExaoneForCausalLM Exaone4ForCausalLM ExaoneMoEForCausalLM Fairseq2LlamaForCausalLM
    FalconForCausalLM FalconMambaForCausalLM FalconH1ForCausalLM FlexOlmoForCausalLM
    GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Rnj1ForCausalLM Gemma3nForCausalLM
    Gemma4ForCausalLM Qwen3NextForCausalLM GlmForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM
    Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM GritLM
    Grok1ModelForCausalLM Grok1ForCausalLM HunYuanMoEV1ForCausalLM HunYuanDenseV1ForCausalLM
    HYV3ForCausalLM HCXVisionForCausalLM HCXVisionV2ForCausalLM HyperCLOVAXForCausalLM
    InternLMForCausalLM InternLM2ForCausalLM InternLM2VEForCausalLM InternLM3ForCausalLM
    IQuestCoderForCausalLM IQuestLoopCoderForCausalLM JAISLMHeadModel Jais2ForCausalLM
    JambaForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM LagunaForCausalLM
    LlamaForCausalLM Llama4ForCausalLM LLaMAForCausalLM LongcatFlashForCausalLM MambaForCausalLM
    Mamba2ForCausalLM MiniCPMForCausalLM MiniCPM3ForCausalLM MiniMaxForCausalLM
    MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM MiniMaxM2ForCausalLM Ministral3ForCausalLM
    MistralForCausalLM MistralLarge3ForCausalLM MixtralForCausalLM MptForCausalLM MPTForCausalLM
    MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM NemotronForCausalLM
    NemotronHForCausalLM NemotronHPuzzleForCausalLM OlmoForCausalLM Olmo2ForCausalLM
    Olmo3ForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM OPTForCausalLM OrionForCausalLM
    OuroForCausalLM PanguEmbeddedForCausalLM PanguProMoEV2ForCausalLM PanguUltraMoEForCausalLM
    Param2MoEForCausalLM PersimmonForCausalLM PhiForCausalLM Phi3ForCausalLM PhiMoEForCausalLM
    Plamo2ForCausalLM Plamo3ForCausalLM QWenLMHeadModel Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen3ForCausalLM Qwen3MoeForCausalLM RWForCausalLM SarvamMoEForCausalLM SarvamMLAForCausalLM
    SeedOssForCausalLM Step1ForCausalLM Step3TextForCausalLM Step3p5ForCausalLM
    StableLMEpochForCausalLM StableLmForCausalLM Starcoder2ForCausalLM SolarForCausalLM
    TeleChatForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM
    XverseForCausalLM Zamba2ForCausalLM
"""
NAMES = tuple(_NAMES.split())
_OWN = "transformers has no such type: "
WHY_NOT: Mapping[str, str] = {
    "ArcticForCausalLM": _OWN + "a mixture beside a dense feed-forward, with norms of their own",
    "BaiChuanForCausalLM": _OWN + "q, k and v are one tensor",
    "BaichuanForCausalLM": _OWN + "ALiBi, and a head whose rows are normalized",
    "BailingMoeForCausalLM": _OWN + "q, k and v are one tensor",
    "BailingMoeV2ForCausalLM": _OWN + "q, k and v are one tensor",
    "ChatGLMForConditionalGeneration": _OWN + "merged projections under other names",
    "ChatGLMModel": _OWN + "merged projections under other names",
    "DbrxForCausalLM": "transformers' code for it fails: its config lacks rope_theta",
    "DeciLMForCausalLM": _OWN + "layers of different sizes, some of them without attention",
    "DeepseekForCausalLM": _OWN + "DeepSeek's mixture with ordinary attention",
    "ExaoneForCausalLM": _OWN + "tensors of a Llama under other names",
    "Fairseq2LlamaForCausalLM": "files in fairseq2's layout, one for each rank",
    "Grok1ForCausalLM": _OWN + "experts beside a feed-forward, and norms after both",
    "Grok1ModelForCausalLM": _OWN + "experts with GELU, and norms after each part",
    "HCXVisionForCausalLM": _OWN + "a vision model",
    "HCXVisionV2ForCausalLM": "its vision model's config; `hyperclovax_vision_v2` is served",
    "InternLM2ForCausalLM": _OWN + "q, k and v alternate by groups of heads in one tensor",
    "InternLM2VEForCausalLM": _OWN + "a vision model",
    "IQuestLoopCoderForCausalLM": _OWN + "layers that run twice, each time with a cache",
    "JAISLMHeadModel": _OWN + "ALiBi with gated feed-forwards",
    "MiMoV2ForCausalLM": _OWN + "another layout of `mimo_v2_flash`",
    "MiniMaxM1ForCausalLM": _OWN + "`minimax` under other names of fields",
    "MiniMaxText01ForCausalLM": _OWN + "`minimax` under other names of fields",
    "MistralLarge3ForCausalLM": "files in Mistral's own layout",
    "NemotronHPuzzleForCausalLM": _OWN + "layers of different sizes",
    "OuroForCausalLM": _OWN + "layers that run several times, each time with a cache",
    "PanguProMoEV2ForCausalLM": _OWN + "experts chosen in groups, with norms after each part",
    "PanguUltraMoEForCausalLM": _OWN + "latent attention with norms after each part",
    "Param2MoEForCausalLM": _OWN + "a mixture of its own",
    "Plamo2ForCausalLM": _OWN + "Mamba2 with norms of its own",
    "Plamo3ForCausalLM": _OWN + "merged projections, and norms after each part",
    "QWenLMHeadModel": _OWN + "merged projections under other names",
    "Rnj1ForCausalLM": _OWN + "a Gemma 3 with other attention",
    "SarvamMLAForCausalLM": _OWN + "latent attention of its own",
    "SarvamMoEForCausalLM": _OWN + "q, k and v are one tensor",
    "SolarForCausalLM": _OWN + "layers that add the states of earlier ones",
    "Step1ForCausalLM": _OWN + "ALiBi by square roots of distances",
    "Step3TextForCausalLM": _OWN + "attention with factorized queries",
    "Step3p5ForCausalLM": "transformers has no causal language model for its text model",
    "TeleChat2ForCausalLM": _OWN + "K and V alternate by heads in one tensor",
    "TeleChat3ForCausalLM": _OWN + "what its config says isn't known",
    "TeleChatForCausalLM": _OWN + "K and V alternate by heads in one tensor",
}
