"""Built-in model architectures and weight formats."""

from __future__ import annotations

from dovetail.api.component import BundledModel, ComponentSpec, QuantizationSpec, hookimpl

_NEEDS = ("torch>=2.11", "transformers>=5")


def _model(
    name: str, target: str, architecture: str, summary: str, module: str | None = None, *more: str
) -> ComponentSpec:
    return ComponentSpec(
        kind="model",
        name=name,
        target=f"dovetail_models.{module or name}:{target}",
        api="1.1",
        suite="1.1",
        summary=summary,
        requires=_NEEDS,
        architectures=(architecture, *more),
    )


def _encoder(
    name: str, target: str, family: str, summary: str, module: str, *more: str
) -> ComponentSpec:
    heads = ("ForSequenceClassification", "ForTokenClassification")
    of_heads = [f"{family}{head}" for head in heads]
    return _model(name, target, f"{family}Model", summary, module, *of_heads, *more)


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        _model(
            "llama",
            "Llama",
            "LlamaForCausalLM",
            "Llama 2 and 3, and models with the same architecture",
        ),
        _model(
            "llama4_text",
            "Llama4",
            "Llama4ForCausalLM",
            "Llama 4, text, attention within chunks and experts",
            module="llama4",
        ),
        _model("mistral", "Mistral", "MistralForCausalLM", "Mistral, with sliding window"),
        _model("qwen2", "Qwen2", "Qwen2ForCausalLM", "Qwen2 and Qwen2.5, dense"),
        _model("qwen3", "Qwen3", "Qwen3ForCausalLM", "Qwen3, dense"),
        _model("qwen3_moe", "Qwen3Moe", "Qwen3MoeForCausalLM", "Qwen3, mixture of experts"),
        _model(
            "ministral",
            "Ministral",
            "MinistralForCausalLM",
            "Ministral, with a window in some layers",
            module="mistral",
        ),
        _model(
            "gemma2",
            "Gemma2",
            "Gemma2ForCausalLM",
            "Gemma 2, with a window in every second layer",
            module="gemma",
        ),
        _model(
            "gemma3_text",
            "Gemma3",
            "Gemma3ForCausalLM",
            "Gemma 3, text, with a window in most layers",
            module="gemma",
        ),
        _model("gemma4_text", "Gemma4", "Gemma4ForCausalLM", "Gemma 4, text", module="gemma4"),
        _model(
            "gemma4_unified_text",
            "Gemma4Unified",
            "Gemma4UnifiedForCausalLM",
            "Gemma 4 unified, text",
            module="gemma4",
        ),
        _model("gpt_oss", "GptOss", "GptOssForCausalLM", "gpt-oss, mixture of experts"),
        _model(
            "deepseek_v2",
            "DeepseekV2",
            "DeepseekV2ForCausalLM",
            "DeepSeek-V2, latent attention and experts",
            module="deepseek",
        ),
        _model(
            "deepseek_v3",
            "DeepseekV3",
            "DeepseekV3ForCausalLM",
            "DeepSeek-V3, latent attention and experts",
            module="deepseek",
        ),
        _model(
            "deepseek_v32",
            "DeepseekV32",
            "DeepseekV32ForCausalLM",
            "DeepSeek-V3.2, latent attention to tokens that an indexer selects, and experts",
            module="deepseek",
        ),
        _model(
            "glm_moe_dsa",
            "GlmMoeDsa",
            "GlmMoeDsaForCausalLM",
            "GLM-5, latent attention to tokens that an indexer selects, and experts",
            module="deepseek",
        ),
        _model("glm4", "Glm4", "Glm4ForCausalLM", "GLM-4 of 2025 and GLM-Z1, dense"),
        _model("glm4_moe", "Glm4Moe", "Glm4MoeForCausalLM", "GLM-4.5, mixture of experts"),
        _model(
            "glm4_moe_lite",
            "Glm4MoeLite",
            "Glm4MoeLiteForCausalLM",
            "GLM-4.7-Flash, latent attention and experts",
            module="deepseek",
        ),
        _model(
            "qwen3_next",
            "Qwen3Next",
            "Qwen3NextForCausalLM",
            "Qwen3-Next, recurrent layers and experts",
        ),
        _model(
            "qwen3_5_text",
            "Qwen35",
            "Qwen3_5ForCausalLM",
            "Qwen3.5, text, recurrent layers",
            module="qwen3_next",
        ),
        _model(
            "qwen3_5_moe_text",
            "Qwen35Moe",
            "Qwen3_5MoeForCausalLM",
            "Qwen3.5, text, recurrent layers and experts",
            module="qwen3_next",
        ),
        _model("nemotron_h", "NemotronH", "NemotronHForCausalLM", "Nemotron-H, recurrent layers"),
        _model(
            "granitemoehybrid",
            "GraniteMoeHybrid",
            "GraniteMoeHybridForCausalLM",
            "Granite 4, recurrent layers",
            module="granite",
        ),
        _model("bamba", "Bamba", "BambaForCausalLM", "Bamba, recurrent layers"),
        _model("lfm2", "Lfm2", "Lfm2ForCausalLM", "LFM2, gated convolutions"),
        _model(
            "lfm2_moe",
            "Lfm2Moe",
            "Lfm2MoeForCausalLM",
            "LFM2, gated convolutions and experts",
            module="lfm2",
        ),
        _encoder("bert", "Bert", "Bert", "BERT, an encoder", "bert", "HF_ColBERT"),
        _encoder("roberta", "Roberta", "Roberta", "RoBERTa, an encoder", "bert"),
        _encoder(
            "xlm_roberta",
            "XLMRoberta",
            "XLMRoberta",
            "XLM-RoBERTa, an encoder: bge-m3, multilingual e5",
            "bert",
        ),
        _encoder(
            "modernbert",
            "ModernBert",
            "ModernBert",
            "ModernBERT, an encoder with windows in most layers",
            "modernbert",
        ),
        _encoder("distilbert", "DistilBert", "DistilBert", "DistilBERT, an encoder", "distilbert"),
        _encoder("mpnet", "MPNet", "MPNet", "MPNet, an encoder: all-mpnet-base-v2", "mpnet"),
        _encoder(
            "deberta_v2", "DebertaV2", "DebertaV2", "DeBERTa V3, an encoder: rerankers", "deberta"
        ),
        _encoder(
            "jina_embeddings_v3",
            "JinaEmbeddingsV3",
            "JinaEmbeddingsV3",
            "Jina embeddings v3, an encoder with adapters for tasks",
            "jina",
        ),
        _model("eurobert", "EuroBert", "EuroBertModel", "EuroBERT, an encoder"),
        _model(
            "nomic_bert",
            "NomicBert",
            "NomicBertModel",
            "Nomic's BERT, an encoder: nomic-embed-text",
        ),
        _model(
            "transformers",
            "Transformers",
            "*",
            "all other architectures of transformers, with transformers' own code",
        ),
    ]


@hookimpl
def dovetail_models() -> list[BundledModel]:
    return [
        BundledModel("demo", "dovetail_models", "demo"),
        BundledModel("demo-draft", "dovetail_models", "demo-draft"),
    ]


@hookimpl
def dovetail_quantizations() -> list[QuantizationSpec]:
    return [
        QuantizationSpec(
            "fp8",
            "dovetail.nn.format.fp8:Fp8",
            "FP8 weights in the format of DeepSeek and Qwen",
            quantizes=True,
        ),
        QuantizationSpec(
            "compressed-tensors",
            "dovetail.nn.format.compressed_tensors:CompressedTensors",
            "FP8, INT8, INT4, NVFP4 or MXFP4 weights of llm-compressor",
        ),
        QuantizationSpec(
            "modelopt", "dovetail.nn.format.modelopt:ModelOpt", "FP8 or NVFP4 weights of ModelOpt"
        ),
        QuantizationSpec(
            "bitsandbytes",
            "dovetail.nn.format.bitsandbytes:BitsAndBytes",
            "NF4, FP4 or INT8 weights of bitsandbytes",
        ),
        QuantizationSpec(
            "auto-round",
            "dovetail.nn.format.auto_round:AutoRound",
            "INT4 or INT8 weights of AutoRound",
        ),
        QuantizationSpec(
            "fbgemm_fp8", "dovetail.nn.format.fbgemm_fp8:FbgemmFp8", "FP8 weights of Meta"
        ),
        QuantizationSpec(
            "gptq", "dovetail.nn.format.gptq:Gptq", "weights of GPTQ in 2, 3, 4 or 8 bits"
        ),
        QuantizationSpec(
            "quark", "dovetail.nn.format.quark:Quark", "FP8 or MXFP4 weights of AMD's Quark"
        ),
        QuantizationSpec("aqlm", "dovetail.nn.format.aqlm:Aqlm", "codebooks of AQLM"),
        QuantizationSpec("awq", "dovetail.nn.format.awq:Awq", "INT4 weights of AWQ"),
        QuantizationSpec(
            "mxfp4", "dovetail.nn.format.mxfp4:Mxfp4", "MXFP4 weights of gpt-oss's experts"
        ),
    ]
