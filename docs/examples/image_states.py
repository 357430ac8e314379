"""Makes the files with which qconv evaluates and calibrates Llama 3.2 Vision with images.

    python docs/examples/image_states.py Llama-3.2-11B-Vision-Instruct chats photo.jpg "What is it?" cat.png "And this?"
    qconv eval out --against Llama-3.2-11B-Vision-Instruct --text chats.ids --image-states chats.safetensors

Needs torch, transformers and Pillow, and memory for the vision tower and the language model. Each image comes with
the text behind it.
"""
import argparse

import torch
from safetensors.torch import save_file


@torch.no_grad()
def states_of(model, inputs):
    """What the language model sees of one image, [tokens, hidden]: its tiles, and those that only pad it."""
    pixels = {name: inputs[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    tower = model.model.vision_model(**pixels).last_hidden_state
    states = model.model.multi_modal_projector(tower).flatten(0, -2)
    seen = int(inputs["aspect_ratio_mask"].sum()) * tower.shape[-2]
    return states[:seen].contiguous(), states[seen:].contiguous()


def write(out, model, inputs_of_all):
    """inputs_of_all: what the processor gives of one image and text each."""
    tensors, lines = {}, []
    for n, inputs in enumerate(inputs_of_all):
        tensors[f"states.{n}"], padding = states_of(model, inputs)
        if len(padding):
            tensors[f"padding.{n}"] = padding
        lines.append(" ".join(map(str, inputs["input_ids"][0].tolist())) + "\n")
    save_file(tensors, out + ".safetensors")
    with open(out + ".ids", "w", encoding="ascii") as f:
        f.writelines(lines)


def main():
    from PIL import Image
    from transformers import AutoProcessor, MllamaForConditionalGeneration
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the model, in 16 bits")
    parser.add_argument("out", help="writes OUT.safetensors and OUT.ids")
    parser.add_argument("pairs", nargs="+", help="an image and the text behind it, and so on")
    a = parser.parse_args()
    if len(a.pairs) % 2:
        parser.error("the last image has no text")
    processor = AutoProcessor.from_pretrained(a.model)
    model = MllamaForConditionalGeneration.from_pretrained(a.model, dtype=torch.bfloat16)
    write(a.out, model, (processor(Image.open(image).convert("RGB"), "<|begin_of_text|><|image|>" + text,
                                   add_special_tokens=False, return_tensors="pt")
                         for image, text in zip(a.pairs[::2], a.pairs[1::2])))


if __name__ == "__main__":
    main()
