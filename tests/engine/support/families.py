"""Families of models that people serve, and what a small model of each is made of."""

from dataclasses import dataclass, field
from typing import Any

from tests.engine.support.refused import MODELS, SMALL


@dataclass(frozen=True)
class Family:
    """A kind of model that people serve.

    Attributes:
        model_type: transformers' name for it.
        known_as: models that people know.
        settings: of the configuration, besides those of :func:`benchmarks.harness.models.make_model`.
        dtype: bfloat16 where vLLM's CPU build knows no other.
        tolerance: of logits, against the masked model.
        reads_images: whether its prompts have images.
        architecture: vLLM's name for it, if no small model of it is made, only a configuration: it is refused.
    """

    model_type: str
    known_as: str
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    tolerance: float = 1e-4
    reads_images: bool = False
    architecture: str | None = None


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = [
    Family("llama", "Llama 2, 3, 3.1; Yi; DeepSeek LLM"),
    Family("mistral", "Mistral 7B, Mistral Nemo", {"sliding_window": None}),
    Family("mixtral", "Mixtral"),
    Family("qwen2", "Qwen 2, 2.5"),
    Family("qwen2_moe", "Qwen 2 MoE", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    Family("qwen3", "Qwen 3"),
    Family("qwen3_moe", "Qwen 3 MoE", EXPERTS),
    Family("glm", "GLM 4 (9B)"),
    Family("glm4", "GLM 4 (0414)"),
    Family("phi3", "Phi 3, Phi 4"),
    Family("phi", "Phi 1.5, Phi 2", {"partial_rotary_factor": 0.5}),
    Family("gemma", "Gemma 1"),
    Family("granite", "Granite 3"),
    Family("granitemoe", "Granite 3 MoE", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("olmo", "OLMo 1"),
    Family("olmo2", "OLMo 2"),
    Family("olmoe", "OLMoE", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("starcoder2", "StarCoder 2", {"sliding_window": None}),
    Family("stablelm", "StableLM 2", {"partial_rotary_factor": 0.5}),
    Family("gpt2", "GPT-2", {"n_inner": 256, "num_key_value_heads": 4}),
    Family("gpt_neox", "Pythia, GPT-NeoX", {"num_key_value_heads": 4}),
    Family("opt", "OPT", {"ffn_dim": 256, "word_embed_proj_dim": 128, "num_key_value_heads": 4}),
    Family("cohere", "Command R", {"tie_word_embeddings": True, "rms_norm_eps": None, "initializer_range": 0.1}),
    Family("nemotron", "Nemotron 3, 4, Minitron", {"norm_eps": 1e-5}),
    Family("seed_oss", "Seed-OSS"),
    Family("ernie4_5", "ERNIE 4.5"),
    Family("ernie4_5_moe", "ERNIE 4.5 MoE", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64}),
    Family("hunyuan_v1_dense", "Hunyuan"),
    Family("glm4_moe", "GLM 4.5, 4.6, 4.7", {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
           "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1}),
    Family("smollm3", "SmolLM 3"),
    Family("arcee", "Arcee AFM"),
    Family("apertus", "Apertus", tolerance=1e-3),  # as far from Hugging Face's are vLLM's own
    Family("gpt_oss", "gpt-oss"),
    Family("gemma2", "Gemma 2"),
    Family("gemma3_text", "Gemma 3 (text)"),
    Family("olmo3", "OLMo 3"),
    Family("exaone4", "EXAONE 4"),
    Family("cohere2", "Command A, Command R7B"),
    Family("granitemoehybrid", "Granite 4"),
    Family("nemotron_h", "Nemotron H, Nemotron Nano 2"),
    Family("falcon_h1", "Falcon H1"),
    Family("qwen3_next", "Qwen3-Next", dtype="bfloat16"),
    Family("llava", "LLaVA, and others that put an encoder's output in place of tokens", reads_images=True),
    Family("qwen2_vl", "Qwen2-VL", reads_images=True),
    Family("qwen2_5_vl", "Qwen2.5-VL", reads_images=True),
    Family("qwen3_vl", "Qwen3-VL", reads_images=True),
    Family("gemma3", "Gemma 3 with images", {"text_config": {**SMALL, "model_type": "gemma3_text"}},
           architecture="Gemma3ForConditionalGeneration"),
    *(
        Family(MODELS[refused][0], known_as, MODELS[refused][2], architecture=MODELS[refused][1])
        for refused, known_as in (
            ("MLA", "DeepSeek V2, V3, R1; Kimi K2"),
            ("chunked attention", "Llama 4"),
            ("ALiBi", "BLOOM"),
            ("without full attention", "Mamba"),
            ("pooling", "BERT"),
        )
    ),
]  # fmt: skip
