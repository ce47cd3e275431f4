"""The part of the table of families with latent attention, in all layers or in some. Torch-free."""

from __future__ import annotations

from bulkrun.models.config.delta_net import kimi_delta_of
from bulkrun.models.config.family import Family
from bulkrun.models.config.kimi_linear_file import KIMI_LINEAR_KEYS, of_kimi_linear
from bulkrun.models.config.latent_files import (
    DEEPSEEK_V2_KEYS,
    DEEPSEEK_V3_KEYS,
    GLM_LITE_KEYS,
    MINICPM3_KEYS,
    MISTRAL4_KEYS,
    MISTRAL4_ROPE,
    YOUTU_KEYS,
    of_deepseek_v2,
    of_deepseek_v3,
    of_glm_lite,
    of_minicpm3,
    of_mistral4,
    of_youtu,
)

LATENTS: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        "DeepSeek V2, V2-Lite",
        "latent attention, experts beside shared ones",
        DEEPSEEK_V2_KEYS,
        gates_shared_expert=False,
        routes_in_float32=True,
        turns_neighbours=True,
        in_common_words=of_deepseek_v2,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        "DeepSeek V3, R1; Moonlight, Kimi K2",
        "latent attention, experts chosen by sigmoid, bias and groups beside a shared one",
        DEEPSEEK_V3_KEYS,
        gates_shared_expert=False,
        routes_in_float32=True,
        expert_scores="sigmoid",
        turns_neighbours=True,
        in_common_words=of_deepseek_v3,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4_moe_lite",
        "GLM-4.7-Flash",
        "latent attention, experts chosen by sigmoid and bias beside a shared one",
        GLM_LITE_KEYS,
        gates_shared_expert=False,
        routes_in_float32=True,
        expert_scores="sigmoid",
        turns_neighbours=True,
        in_common_words=of_glm_lite,
    ),
    "Mistral4ForCausalLM": Family(
        "mistral4",
        "Mistral Small 4 (the text part)",
        "latent attention, queries that grow beyond the original context, experts beside a shared one",
        MISTRAL4_KEYS,
        gates_shared_expert=False,
        turns_neighbours=True,
        rope=MISTRAL4_ROPE,
        in_common_words=of_mistral4,
    ),
    "MiniCPM3ForCausalLM": Family(
        "minicpm3",
        "MiniCPM3",
        "latent attention, scaled embeddings, residuals and logits",
        MINICPM3_KEYS,
        in_common_words=of_minicpm3,
    ),
    "YoutuForCausalLM": Family(
        "youtu",
        "Youtu-LLM",
        "latent attention",
        YOUTU_KEYS,
        turns_neighbours=True,
        in_common_words=of_youtu,
    ),
    "KimiLinearForCausalLM": Family(
        "kimi_linear",
        "Kimi Linear (48B-A3B)",
        "delta nets that forget by channel, latent attention without positions in every fourth layer, experts beside a "
        "shared one",
        KIMI_LINEAR_KEYS,
        gates_shared_expert=False,
        routes_in_float32=True,
        expert_scores="sigmoid",
        in_common_words=of_kimi_linear,
        recurrence=kimi_delta_of,
    ),
}
