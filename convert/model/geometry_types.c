/* Lists model types by what they keep. "Compared" means that a small model of the type was built
 * with transformers 4.57 or 5.23, and the cache that it filled for three lengths had as many bytes
 * as plan counts (tests/interop/test_interop_caches.py does it for some of them). "Worked out"
 * means that it was read from the code of transformers, because the type could not be built small,
 * is only a part of a model, or was not run. */
#include "convert/model/geometry_internal.h"

/* Types that keep something and that were compared. */
static const char compared_types[] =
    " afmoe apertus arcee aria aria_text audioflamingo3 axk1 aya_vision bamba bart beam bert "
    "bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom code_llama codegen "
    "cohere cohere2 cohere2_moe cohere2_vision cosmos3_omni ctrl cwm deepseek_v3 deepseek_v32 "
    "deepseek_vl deepseek_vl_hybrid diffllama doge ernie4_5 ernie4_5_moe evolla exaone4 "
    "exaone4_5 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fsmt fuyu gemma "
    "gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified "
    "gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text "
    "glm_moe_dsa glmasr got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese "
    "gpt_oss gptj granite granite_docling_text granite_speech granite_speech_plus granite_swa "
    "granitemoe granitemoe_swa granitemoehybrid granitemoeshared granitevision helium "
    "higgs_audio_v2 hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax "
    "hyperclovax_vision_v2 idefics2 idefics3 imagegpt internlm3 internvl iquestcoder jais2 "
    "jamba jetmoe kimi_linear kolibri1 kosmos-2.5 laguna led lfm2 lfm2_moe lfm2_vl lfm3 "
    "lfm3_vl lighton_ocr llama llama4_text llava llava_next llava_next_video llava_onevision "
    "longcat_flash longt5 m2m_100 mamba mamba2 marian mbart mellum mimo_v2_flash minicpm3 "
    "minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text "
    "ministral ministral3 mistral mistral3 mixtral mllama modernbert-decoder molmo2_text "
    "moshi moss_transcribe_diarize mpt mt5 muse_glimmer_text muse_spark_text musicflamingo "
    "mvp nanochat nemotron_h nllb-moe olmo olmo2 olmo3 olmo_hybrid olmoe open-llama opt ovis2 "
    "paligemma pegasus pegasus_x persimmon phi phi3 phi4_multimodal phimoe plbart pop2piano "
    "pp_chart2table prophetnet qianfan_ocr qwen2 qwen2_audio qwen2_moe qwen3 qwen3_5_moe_text "
    "qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe "
    "qwen3_vl_moe_text qwen3_vl_text reformer rwkv seamless_m4t seamless_m4t_v2 seed_oss "
    "shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 switch_transformers t5 "
    "t5gemma t5gemma2 trocr umt5 unlimited_ocr vaultgemma video_llama_3 video_llava vipllava "
    "voxtral whisper xglm xlm-prophetnet xlnet xlstm zamba zamba2 ";

/* Types that keep something and that were worked out. These are parts of models that were compared
 * as a whole or for a type of the same shape, and recurrent_gemma, whose attention keeps its keys
 * outside the cache (its recurrent layers were compared). */
static const char worked_out_types[] =
    " deepseek_v2 fsmt_decoder kimi_k2 kosmos_2_5_text_model mllama_text_model qwen3_5 qwen3_5_moe "
    "qwen3_omni_moe_text recurrent_gemma t5_gemma_module t5gemma2_decoder unlimited_ocr_text ";

/* Encoders, towers for images and sound, and detectors, which keep nothing. They were run, and
 * nothing was in their caches. */
static const char no_cache_types[] =
    " aimv2_vision_model albert audio-spectrogram-transformer beit bit canine "
    "chinese_clip_vision_model clip_text_model clip_vision_model convbert convnext convnextv2 "
    "cvt dac data2vec-audio data2vec-vision deberta deberta-v2 deit depth_pro dinov2 "
    "dinov2_with_registers dinov3_convnext dinov3_vit distilbert dpr efficientformer "
    "embedding_gemma2 embedding_gemma2_text encodec eurobert flaubert flava focalnet "
    "gemma3n_audio glpn gte hgnet_v2 hiera hubert ibert ijepa internvl_vision "
    "jina_embeddings_v3 layoutlm levit lightglue longformer lxmert markuplm mctct mgp-str "
    "mlcd mobilebert mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 modernbert modernvbert "
    "mpnet neomme nezha nomic_bert nystromformer openai-gpt openai_privacy_filter "
    "parakeet_ctc parakeet_encoder patchtsmixer patchtst poolformer pvt pvt_v2 "
    "qwen2_audio_encoder regnet resnet sam sam2_hiera_det_model sam2_vision_model "
    "sam3_lite_text_text_model sam_hq sam_hq_vision_model sam_vision_model segformer seggpt "
    "sew sew-d siglip2_vision_model siglip_vision_model splinter squeezebert swiftformer swin "
    "tapas textnet timesfm timesformer tipsv2 tipsv2_text_model tvlt ultrabert ultravbert "
    "unispeech unispeech-sat univnet van videomae visual_bert vit vit_mae vit_msn vitdet vits "
    "vivit vjepa2 voxtral_encoder wav2vec2-bert wav2vec2-conformer wavlm yolos yoso ";

/* The same kinds of models. These were worked out: transformers has no class of them that
 * generates, and no forward pass was run. */
static const char worked_out_no_cache_types[] =
    " aimv2 altclip audioflamingo3_encoder blip_2_qformer bridgetower bros chinese_clip clap "
    "clip clipseg cohere_compass_vision conditional_detr cosmos3_edge_vision dab-detr "
    "deformable_detr deimv2 detr dpt exaone4_5_vision fastspeech2_conformer "
    "fastspeech2_conformer_with_hifigan florence_vision fnet fun_asr_nano_encoder "
    "gemma4_audio gemma4_vision glm_image_vision glm_image_vqmodel glm_ocr_vision "
    "glmasr_encoder granite_docling_vision granite_speech5_ctc granite_speech5_encoder "
    "graphormer groupvit hunyuan_vl_vision idefics3_vision inkling2_vision kimi_k25_vision "
    "lasr_ctc lasr_encoder layoutlmv3 lfm3_vl_vision lilt lw_detr mask2former metaclip_2 "
    "mimi_encoder minicpm_ocr_vision minicpmv4_7_vision mlcd_vision_model "
    "moss_transcribe_diarize_audio mra muse_glimmer_vision muse_spark_vision "
    "nemotron3_5_transcribe_asr_audio nemotron3_diarization_audio "
    "nemotron_asr_streaming_encoder oneformer owlv2 owlvit parakeet_tdt pe_audio "
    "pe_audio_encoder pixio pixtral pocket_tts_audio_tokenizer_encoder pp_doclayout_v3 "
    "pp_doclayout_v4 pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_det "
    "pp_ocrv6_small_rec pp_ocrv6_tiny_rec qianfan_ocr_vision qwen2_5_vl_vision "
    "qwen3_5_moe_vision qwen3_5_vision qwen3_asr_encoder qwen3_vl_moe_vision qwen3_vl_vision "
    "qwen4_exp_vision radio rf_detr sam3 sam3_lite_text sam3_vision_model sam3_vit_model "
    "sapiens2 siglip siglip2 smolvlm_vision table-transformer timesfm2_5 tipsv2_vision_model "
    "uvdoc video_llama_3_vision videoprism videoprism_vision_model vilt "
    "vision-text-dual-encoder voxtral_realtime_encoder wav2vec2 xclip xcodec ";

/* Encoders that is_decoder turns into decoders. All were compared except xmod. */
static const char encoder_types[] =
    " bert roberta xlm-roberta camembert electra data2vec-text big_bird ernie megatron-bert "
    "rembert roc_bert roformer roberta-prelayernorm xlm-roberta-xl xmod bert-generation ";

int qc_geometry_type_has_no_cache(const char *type)
{
    return qc_config_word_in(type, no_cache_types) ||
           qc_config_word_in(type, worked_out_no_cache_types);
}

int qc_geometry_type_is_encoder(const char *type)
{
    return qc_config_word_in(type, encoder_types);
}

int qc_geometry_type_is_known(const char *type)
{
    return qc_config_word_in(type, compared_types) || qc_config_word_in(type, worked_out_types) ||
           qc_geometry_type_has_no_cache(type) || qc_geometry_type_is_encoder(type);
}

/* ---- fields of config.json ---- */

int qc_geometry_is(const qc_geometry_reader *r, const char *types)
{
    return qc_config_word_in(r->config.text_type, types);
}

qc_status qc_geometry_size(const qc_geometry_reader *r, uint64_t *out, const char *names,
                           uint64_t missing, qc_error *err)
{
    const qc_json_node *n = qc_config_text_field(&r->config, names);
    if (!n || qc_json_kind_of(n) != QC_JSON_ARRAY || !qc_json_first(n))
        return qc_config_count(out, n, QC_CONFIG_MAX_SIZE, missing, err);
    *out = 0;
    for (const qc_json_node *each = qc_json_first(n); each; each = qc_json_next(each)) {
        uint64_t size = 0;
        if (qc_json_kind_of(each) == QC_JSON_ARRAY)
            continue; /* these are stages of a vision tower, which a text does not pass */
        QC_TRY(qc_config_count(&size, each, QC_CONFIG_MAX_SIZE, 0, err));
        *out = size > *out ? size : *out;
    }
    return QC_OK;
}
