"""Architectures of transformers, built from tiny configs without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

from bench.sweep.steps import Entry, Factory, adam, dict_step

Batch = dict[str, torch.Tensor]
VOCABULARY, LENGTH, IMAGE = 64, 8, 16
#: What most configs of text models call their sizes.
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
UNSIZED = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 1, "head_dim": 8}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": IMAGE, "patch_size": 4, "num_labels": 3,
}  # fmt: skip
LAYERED = {"image_size": IMAGE, "num_labels": 3}
SPEECH = TEXT | {
    "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
    "layerdrop": 0.0, "ctc_loss_reduction": "mean",
}  # fmt: skip


def tokens() -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def padded() -> Batch:
    batch = tokens()
    batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    batch["attention_mask"][1, 5:] = 0
    return batch


def sentences() -> Batch:
    return {"input_ids": tokens()["input_ids"], "labels": torch.randint(2, (2,))}


def tagged() -> Batch:
    return {"input_ids": tokens()["input_ids"], "labels": torch.randint(2, (2, LENGTH))}


def spans() -> Batch:
    ends = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 5])}
    return {"input_ids": tokens()["input_ids"], **ends}


def images() -> Batch:
    return {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE), "labels": torch.randint(3, (2,))}


def pixels() -> Batch:
    return {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE)}


def segments() -> Batch:
    labels = torch.randint(3, (2, IMAGE, IMAGE))
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels.repeat(1, 2, 2)}


def spectrum() -> Batch:
    return {
        "input_features": torch.randn(2, 8, 16),
        "labels": torch.randint(3, VOCABULARY, (2, LENGTH)),
    }


def waves() -> Batch:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(2, (2,))}


def pairs() -> Batch:
    return {"input_ids": tokens()["input_ids"], "pixel_values": pixels()["pixel_values"]}


class Model(NamedTuple):
    """How to build one model and its batch; `model` is what follows the family's name."""

    family: str
    head: str
    options: dict[str, Any]
    batch: Callable[[], Batch]

    def make(self) -> Entry:
        """Return step and arguments."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.family}Config")(**self.options)
        model = getattr(transformers, f"{self.family}{self.head}")(config).train()
        return dict_step, (model, adam(model), self.batch())


LM, MLM, SEQ2SEQ = "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"
CLASSES, LABELS = "ForSequenceClassification", "ForImageClassification"
BART = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 32, "pad_token_id": 2, "bos_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": 1,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
TOWERS = {
    "text_config": TEXT, "vision_config": {k: v for k, v in VISION.items() if k != "num_labels"},
    "projection_dim": 16,
}  # fmt: skip

MODELS: dict[str, Model] = {
    # Decoders.
    "gpt2": Model("GPT2", "LMHeadModel", GPT2, tokens),
    "gpt2_padded": Model("GPT2", "LMHeadModel", GPT2, padded),
    "gpt2_classifier": Model("GPT2", CLASSES, GPT2, sentences),
    "gpt_neo": Model("GPTNeo", LM, TEXT | {
        "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
        "window_size": 4}, tokens),
    "gpt_neox": Model("GPTNeoX", LM, TEXT, tokens),
    "gptj": Model("GPTJ", LM, GPT2 | {"rotary_dim": 4}, tokens),
    "gpt_bigcode": Model("GPTBigCode", LM, GPT2, tokens),
    "codegen": Model("CodeGen", LM, GPT2 | {"n_head": 4, "rotary_dim": 4}, tokens),
    "openai_gpt": Model("OpenAIGPT", "LMHeadModel", GPT2, tokens),
    "llama": Model("Llama", LM, GROUPED, tokens),
    "llama_padded": Model("Llama", LM, GROUPED, padded),
    "llama_tied": Model("Llama", LM, GROUPED | {"tie_word_embeddings": True}, tokens),
    "llama_classifier": Model("Llama", CLASSES, GROUPED, sentences),
    "mistral": Model("Mistral", LM, GROUPED | {"sliding_window": 4}, tokens),
    "mixtral": Model("Mixtral", LM, EXPERTS, tokens),
    "qwen2": Model("Qwen2", LM, GROUPED, tokens),
    "qwen2_moe": Model("Qwen2Moe", LM, EXPERTS | {
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}, tokens),
    "qwen3": Model("Qwen3", LM, GROUPED, tokens),
    "gemma": Model("Gemma", LM, GROUPED, tokens),
    "gemma2": Model("Gemma2", LM, GROUPED | {"sliding_window": 4}, tokens),
    "phi": Model("Phi", LM, TEXT, tokens),
    "phi3": Model("Phi3", LM, GROUPED, tokens),
    "falcon": Model("Falcon", LM, TEXT, tokens),
    "falcon_alibi": Model("Falcon", LM, TEXT | {"alibi": True}, tokens),
    "opt": Model("OPT", LM, TEXT | {"ffn_dim": 32, "word_embed_proj_dim": 16}, tokens),
    "bloom": Model("Bloom", LM, TEXT | {"n_layer": 2, "n_head": 2}, tokens),
    "mpt": Model("Mpt", LM, {
        "d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": 32},
        tokens),
    "stablelm": Model("StableLm", LM, GROUPED, tokens),
    "olmo": Model("Olmo", LM, GROUPED, tokens),
    "olmo2": Model("Olmo2", LM, GROUPED, tokens),
    "cohere": Model("Cohere", LM, GROUPED, tokens),
    "granite": Model("Granite", LM, GROUPED, tokens),
    "starcoder2": Model("Starcoder2", LM, GROUPED, tokens),
    "persimmon": Model("Persimmon", LM, TEXT, tokens),
    "xglm": Model("XGLM", LM, TEXT | {
        "d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2}, tokens),
    "biogpt": Model("BioGpt", LM, TEXT, tokens),
    "mamba": Model("Mamba", LM, TEXT | {"state_size": 4}, tokens),
    "mamba2": Model("Mamba2", LM, TEXT | {
        "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}, tokens),
    "rwkv": Model("Rwkv", LM, TEXT | {"context_length": 32, "attention_hidden_size": 16}, tokens),
    # Encoders.
    "bert": Model("Bert", MLM, TEXT, tokens),
    "bert_padded": Model("Bert", MLM, TEXT, padded),
    "bert_classifier": Model("Bert", CLASSES, TEXT, sentences),
    "bert_tagger": Model("Bert", "ForTokenClassification", TEXT, tagged),
    "bert_answers": Model("Bert", "ForQuestionAnswering", TEXT, spans),
    "roberta": Model("Roberta", MLM, TEXT, tokens),
    "distilbert": Model("DistilBert", MLM, TEXT | {
        "dim": 16, "hidden_dim": 32, "n_heads": 2, "n_layers": 2}, tokens),
    "electra": Model("Electra", MLM, TEXT | {"embedding_size": 16}, tokens),
    "albert": Model("Albert", MLM, TEXT | {"embedding_size": 8}, tokens),
    "deberta": Model("Deberta", MLM, TEXT, tokens),
    "deberta_relative": Model("DebertaV2", MLM, TEXT | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}, tokens),
    "mpnet": Model("MPNet", MLM, TEXT, tokens),
    "xlm_roberta": Model("XLMRoberta", MLM, TEXT, tokens),
    "camembert": Model("Camembert", MLM, TEXT, tokens),
    "squeezebert": Model("SqueezeBert", MLM, TEXT | {"embedding_size": 16}, tokens),
    "convbert": Model("ConvBert", MLM, TEXT | {"embedding_size": 16, "head_ratio": 1}, tokens),
    "mobilebert": Model("MobileBert", MLM, TEXT | {
        "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}, tokens),
    "funnel": Model("Funnel", MLM, UNSIZED | {
        "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32}, tokens),
    "longformer": Model("Longformer", MLM, TEXT | {"attention_window": 4}, padded),
    "bigbird": Model("BigBird", MLM, TEXT | {"attention_type": "original_full"}, tokens),
    "fnet": Model("FNet", MLM, TEXT, tokens),
    "nystromformer": Model("Nystromformer", MLM, TEXT | {
        "num_landmarks": 8, "segment_means_seq_len": 8}, tokens),
    "modernbert": Model("ModernBert", MLM, TEXT | {
        "cls_token_id": 0, "sep_token_id": 1, "local_attention": 4}, tokens),
    "xlnet": Model("XLNet", "LMHeadModel", UNSIZED | {
        "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}, tokens),
    # Encoders with decoders.
    "t5": Model("T5", SEQ2SEQ, T5, tokens),
    "mt5": Model("MT5", SEQ2SEQ, T5 | {"feed_forward_proj": "gated-gelu"}, tokens),
    "bart": Model("Bart", SEQ2SEQ, BART, tokens),
    "mbart": Model("MBart", SEQ2SEQ, BART, tokens),
    "pegasus": Model("Pegasus", SEQ2SEQ, BART, tokens),
    "marian": Model("Marian", "MTModel", BART, tokens),
    "blenderbot": Model("Blenderbot", SEQ2SEQ, BART, tokens),
    "prophetnet": Model("ProphetNet", SEQ2SEQ, UNSIZED | {
        "hidden_size": 16,
        "num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2,
        "decoder_start_token_id": 0}, tokens),
    # Images.
    "vit": Model("ViT", LABELS, VISION, images),
    "deit": Model("DeiT", LABELS, VISION, images),
    "beit": Model("Beit", LABELS, VISION, images),
    "vit_mae": Model("ViTMAE", "ForPreTraining", VISION | {
        "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32}, pixels),
    "dinov2": Model("Dinov2", LABELS, VISION | {"mlp_ratio": 2}, images),
    "swin": Model("Swin", LABELS, LAYERED | {
        "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 2},
        images),
    "convnext": Model("ConvNext", LABELS, LAYERED | {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}, images),
    "convnext2": Model("ConvNextV2", LABELS, LAYERED | {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}, images),
    "resnet": Model("ResNet", LABELS, LAYERED | {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        images),
    "regnet": Model("RegNet", LABELS, LAYERED | {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8}, images),
    "mobilenet2": Model("MobileNetV2", LABELS, LAYERED | {"depth_multiplier": 0.25}, images),
    "poolformer": Model("PoolFormer", LABELS, LAYERED | {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2}, images),
    "segformer": Model("Segformer", "ForSemanticSegmentation", {
        "num_labels": 3, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16}, segments),
    "pvt": Model("Pvt", LABELS, {
        "image_size": 32, "num_labels": 3, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2]}, lambda: images() | {
        "pixel_values": torch.randn(2, 3, 32, 32)}),
    # Speech and pairs.
    "whisper": Model("Whisper", SEQ2SEQ, BART | {
        "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}, spectrum),
    "wav2vec2": Model("Wav2Vec2", CLASSES, SPEECH | {"classifier_proj_size": 8}, waves),
    "hubert": Model("Hubert", CLASSES, SPEECH | {"classifier_proj_size": 8}, waves),
    "clip": Model("CLIP", "Model", TOWERS, lambda: pairs() | {"return_loss": True}),
    "siglip": Model("Siglip", "Model", {
        "text_config": TEXT, "vision_config": TOWERS["vision_config"]},
        lambda: pairs() | {"return_loss": True}),
}  # fmt: skip

CASES: dict[str, Factory] = {name: model.make for name, model in MODELS.items()}
