/* Model types by what they keep. Both lists were made by building a small model of each type with
 * transformers 4.57 and 5.23 and looking at its cache (tests/interop/test_interop_caches.py). */
#include "convert/geometry_parts.h"

/* Compared: what plan counts is what transformers keeps. */
static const char known_types[] =
    " afmoe apertus arcee aria aria_text audioflamingo3 axk1 aya_vision bamba bart beam bert "
    "bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom code_llama codegen "
    "cohere cohere2 cohere2_moe cohere2_vision cosmos3_omni ctrl cwm deepseek_v2 deepseek_v3 "
    "deepseek_v32 deepseek_vl deepseek_vl_hybrid diffllama doge ernie4_5 ernie4_5_moe evolla "
    "exaone4 exaone4_5 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fsmt "
    "fsmt_decoder fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text "
    "gemma4_unified gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text "
    "glm4v_text glm_moe_dsa glmasr got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox "
    "gpt_neox_japanese gpt_oss gptj granite granite_docling_text granite_speech "
    "granite_speech_plus granite_swa granitemoe granitemoe_swa granitemoehybrid "
    "granitemoeshared granitevision helium higgs_audio_v2 hunyuan_v1_dense hunyuan_v1_moe "
    "hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 idefics2 idefics3 imagegpt internlm3 "
    "internvl iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 kosmos-2.5 "
    "kosmos_2_5_text_model laguna led lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr llama "
    "llama4_text llava llava_next llava_next_video llava_onevision longcat_flash longt5 "
    "m2m_100 mamba mamba2 marian mbart mellum mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 "
    "minicpmv4_7 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 "
    "mistral mistral3 mixtral mllama mllama_text_model modernbert-decoder molmo2_text moshi "
    "moss_transcribe_diarize mpt mt5 muse_glimmer_text muse_spark_text musicflamingo mvp "
    "nanochat nemotron_h nllb-moe olmo olmo2 olmo3 olmo_hybrid olmoe open-llama opt ovis2 "
    "paligemma pegasus pegasus_x persimmon phi phi3 phi4_multimodal phimoe plbart pop2piano "
    "pp_chart2table prophetnet qianfan_ocr qwen2 qwen2_audio qwen2_moe qwen3 qwen3_5 "
    "qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next "
    "qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text "
    "qwen3_vl_text recurrent_gemma reformer rwkv seamless_m4t seamless_m4t_v2 seed_oss "
    "shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 switch_transformers t5 "
    "t5_gemma_module t5gemma t5gemma2 t5gemma2_decoder trocr umt5 unlimited_ocr "
    "unlimited_ocr_text vaultgemma video_llama_3 video_llava vipllava voxtral whisper xglm "
    "xlm-prophetnet xlnet xlstm zamba zamba2 ";

/* Nothing is kept: encoders, towers of images and sound, detectors. */
static const char no_cache_types[] =
    " aimv2 aimv2_vision_model albert altclip audio-spectrogram-transformer "
    "audioflamingo3_encoder beit bit blip_2_qformer bridgetower bros canine chinese_clip "
    "chinese_clip_vision_model clap clip clip_text_model clip_vision_model clipseg "
    "cohere_compass_vision conditional_detr convbert convnext convnextv2 cosmos3_edge_vision "
    "cvt dab-detr dac data2vec-audio data2vec-vision deberta deberta-v2 deformable_detr "
    "deimv2 deit depth_pro detr dinov2 dinov2_with_registers dinov3_convnext dinov3_vit "
    "distilbert dpr dpt efficientformer embedding_gemma2 embedding_gemma2_text encodec "
    "eurobert exaone4_5_vision fastspeech2_conformer fastspeech2_conformer_with_hifigan "
    "flaubert flava florence_vision fnet focalnet fun_asr_nano_encoder gemma3n_audio "
    "gemma4_audio gemma4_vision glm_image_vision glm_image_vqmodel glm_ocr_vision "
    "glmasr_encoder glpn granite_docling_vision granite_speech5_ctc granite_speech5_encoder "
    "graphormer groupvit gte hgnet_v2 hiera hubert hunyuan_vl_vision ibert idefics3_vision "
    "ijepa inkling2_vision internvl_vision jina_embeddings_v3 kimi_k25_vision lasr_ctc "
    "lasr_encoder layoutlm layoutlmv3 levit lfm3_vl_vision lightglue lilt longformer lw_detr "
    "lxmert markuplm mask2former mctct metaclip_2 mgp-str mimi_encoder minicpm_ocr_vision "
    "minicpmv4_7_vision mlcd mlcd_vision_model mobilebert mobilenet_v1 mobilenet_v2 mobilevit "
    "mobilevitv2 modernbert modernvbert moss_transcribe_diarize_audio mpnet mra "
    "muse_glimmer_vision muse_spark_vision nemotron3_5_transcribe_asr_audio "
    "nemotron3_diarization_audio nemotron_asr_streaming_encoder neomme nezha nomic_bert "
    "nystromformer oneformer openai-gpt openai_privacy_filter owlv2 owlvit parakeet_ctc "
    "parakeet_encoder parakeet_tdt patchtsmixer patchtst pe_audio pe_audio_encoder pixio "
    "pixtral pocket_tts_audio_tokenizer_encoder poolformer pp_doclayout_v3 pp_doclayout_v4 "
    "pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_det pp_ocrv6_small_rec "
    "pp_ocrv6_tiny_rec pvt pvt_v2 qianfan_ocr_vision qwen2_5_vl_vision qwen2_audio_encoder "
    "qwen3_5_moe_vision qwen3_5_vision qwen3_asr_encoder qwen3_vl_moe_vision qwen3_vl_vision "
    "qwen4_exp_vision radio regnet resnet rf_detr sam sam2_hiera_det_model sam2_vision_model "
    "sam3 sam3_lite_text sam3_lite_text_text_model sam3_vision_model sam3_vit_model sam_hq "
    "sam_hq_vision_model sam_vision_model sapiens2 segformer seggpt sew sew-d siglip siglip2 "
    "siglip2_vision_model siglip_vision_model smolvlm_vision splinter squeezebert swiftformer "
    "swin table-transformer tapas textnet timesfm timesfm2_5 timesformer tipsv2 "
    "tipsv2_text_model tipsv2_vision_model tvlt ultrabert ultravbert unispeech unispeech-sat "
    "univnet uvdoc van video_llama_3_vision videomae videoprism videoprism_vision_model vilt "
    "vision-text-dual-encoder visual_bert vit vit_mae vit_msn vitdet vits vivit vjepa2 "
    "voxtral_encoder voxtral_realtime_encoder wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm "
    "xclip xcodec yolos yoso ";

/* Encoders that is_decoder turns into decoders. */
static const char encoder_types[] =
    " bert roberta xlm-roberta camembert electra data2vec-text big_bird ernie megatron-bert "
    "rembert roc_bert roformer roberta-prelayernorm xlm-roberta-xl xmod bert-generation ";

int qc_geometry_type_is_known(const char *type)
{
    return qc_config_word_in(type, known_types) || qc_config_word_in(type, no_cache_types) ||
           qc_config_word_in(type, encoder_types);
}

int qc_geometry_type_has_no_cache(const char *type)
{
    return qc_config_word_in(type, no_cache_types);
}

int qc_geometry_type_is_encoder(const char *type)
{
    return qc_config_word_in(type, encoder_types);
}
