"""The text model of Llama 3.2 Vision with images: qconv's forward pass against transformers', in float32 on the
same weights, with the states that docs/examples/image_states.py writes. Compared are the logits of every token.
"""
import importlib.util
import json
import unittest

import interop_support as s
import numpy as np
import torch
from safetensors.torch import save_file
from test_interop_llama import BOUND, FIVE, worst
from transformers import MllamaConfig, MllamaForCausalLM, MllamaForConditionalGeneration
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

IMAGE = 300  # the first row of the embedding behind the vocabulary
ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=64)
if FIVE:
    ROPE = dict(rope_parameters=dict(ROPE, rope_theta=5e5))
else:
    ROPE = dict(rope_theta=5e5, rope_scaling=ROPE)
TEXT = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            cross_attention_layers=[0, 3, 5], **ROPE)
VISION = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_global_layers=1, attention_heads=2,
              image_size=16, patch_size=4, vision_output_dim=32, intermediate_layers_indices=[0], max_num_tiles=4)

spec = importlib.util.spec_from_file_location("image_states", s.ROOT / "docs/examples/image_states.py")
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def save(model, folder, **options):
    """In bfloat16, with norms that are not 1 and gates that are not 0, and read again in float32."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.2)
            if "norm" in name and name.endswith("weight"):
                p += 1
            if "gate" in name and p.numel() == 1:
                p += 0.7
            p.data = p.data.bfloat16()
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32, **options).eval()


class Images(unittest.TestCase):
    def compare(self, folder, ids, states, theirs):
        ours = s.our_logits(folder, ids, "--images", str(states))
        error = worst(ours, np.concatenate(theirs))
        s.note(f"{folder.name}: largest relative error of a token's logits {error:.1e}")
        self.assertLess(error, BOUND)
        blind = s.our_logits(folder, [[min(i, IMAGE - 1) for i in row] for row in ids])
        self.assertGreater(worst(blind, np.concatenate(theirs)), 1e-2)

    def test_as_the_processor_makes_it(self):
        """Four tiles or fewer, so that there is padding or none, and the image's token first, second and late."""
        torch.manual_seed(3)
        folder = s.SCRATCH / "mllama-images"
        model = save(MllamaForConditionalGeneration(MllamaConfig(
            text_config=TEXT, vision_config=VISION, image_token_index=IMAGE)), folder)
        rng, inputs, theirs = np.random.default_rng(1), [], []
        for at, length, tiles in ((1, 150, 4), (1, 70, 2), (0, 33, 1), (20, 40, 3)):
            ids = [int(i) for i in rng.integers(0, 300, length)]
            ids[at] = IMAGE
            mask = torch.zeros(1, length, 1, 4, dtype=torch.long)
            mask[:, at:, :, :tiles] = 1
            pixels = torch.randn(1, 1, 4, 3, 16, 16)
            pixels[:, :, tiles:] = 0
            inputs.append(dict(
                input_ids=torch.tensor([ids]), cross_attention_mask=mask, pixel_values=pixels,
                aspect_ratio_ids=torch.tensor([[{1: 1, 2: 2, 3: 3, 4: 4}[tiles]]]),
                aspect_ratio_mask=torch.tensor([[[1] * tiles + [0] * (4 - tiles)]])))
            with torch.no_grad():
                theirs.append(model(**inputs[-1]).logits[0].numpy())
        out = s.SCRATCH / "chats"
        example.write(str(out), model, inputs)
        ids = [[int(i) for i in line.split()] for line in out.with_suffix(".ids").read_text().splitlines()]
        self.assertEqual(ids, [i["input_ids"][0].tolist() for i in inputs])
        self.compare(folder, ids, out.with_suffix(".safetensors"), theirs)
        # eval gives the perplexity of these logits; the image's token is not predicted.
        nats = np.concatenate([self.nats(row, logits) for row, logits in zip(ids, theirs)])
        got = json.loads(s.qconv("eval", folder, "--text", out.with_suffix(".ids"), "--image-states",
                                 out.with_suffix(".safetensors"), "--json", "-q"))
        self.assertEqual(got["predicted"], len(nats))
        self.assertAlmostEqual(np.log(got["perplexity"]), nats.mean(), 5)

    def nats(self, ids, logits):
        right = [(n, i) for n, i in enumerate(ids[1:]) if i < 300]
        logits = torch.log_softmax(torch.from_numpy(logits).double(), -1)
        return np.array([-float(logits[n, i]) for n, i in right])

    def test_text_model_without_image_token(self):
        """All tokens see the states, where no mask is given: with "eager". Without a mask, transformers' default takes
        this attention for causal, and token 3 sees the first 4 states."""
        torch.manual_seed(4)
        folder = s.SCRATCH / "mllama-text-images"
        model = save(MllamaForCausalLM(MllamaTextConfig(**TEXT)), folder, attn_implementation="eager")
        states = torch.randn(2, 77, 64).bfloat16()
        file = s.SCRATCH / "states.safetensors"
        save_file({"states.0": states[0].clone(), "states": states[1].clone()}, file)
        ids = [[int(i) for i in np.random.default_rng(n).integers(0, 300, n)] for n in (90, 31)]
        with torch.no_grad():
            theirs = [model(input_ids=torch.tensor([row]), cross_attention_states=x[None].float()).logits[0].numpy()
                      for row, x in zip(ids, states)]
        self.compare(folder, ids, file, theirs)


if __name__ == "__main__":
    s.main()
