"""compressed-tensors as qconv writes it, in the engines it is written for.

transformers with compressed-tensors restores every weight to the bits of `qconv --to bf16`. vLLM on
the CPU, one worker and two, gives a prompt the log-probabilities that transformers computes in
float32 from those restored weights. What `--to auto --tp 2` makes of a trained model also goes on
in the same words in both. vLLM runs in the environment that vllm_environment.sh makes; where it is
not there, its checks are skipped.
"""
import fcntl
import functools
import json
import os
import subprocess
import unittest
from pathlib import Path

import interop_support as s
import torch
import transformers
from safetensors.torch import load_file, save_file

s.quiet()

ENVIRONMENT = Path(os.environ.get("QCONV_VLLM_ENV", s.ROOT / "build-interop" / "vllm"))
PYTHON = ENVIRONMENT / "bin" / "python"
COMPRESSED = ["--format", "compressed-tensors"]
FORMS = {
    "int4-128": ["--to", "int4"],
    "int4-64": ["--to", "int4", "--block-size", "64"],
    "int4-32": ["--to", "int4", "--block-size", "32"],
    "int4-channel": ["--to", "int4", "--block-size", "channel"],
    "int2-32": ["--to", "int2", "--block-size", "32"],
    "int3-64": ["--to", "int3", "--block-size", "64"],
    "int5-128": ["--to", "int5"],
    "int6-channel": ["--to", "int6", "--block-size", "channel"],
    "int7-32": ["--to", "int7", "--block-size", "32"],
    "w8a8": ["--to", "int8", *COMPRESSED],
    "w8a16": ["--to", "int8", *COMPRESSED, "--activation-bits", "16"],
    "w8a16-128": ["--to", "int8", *COMPRESSED, "--activation-bits", "16", "--block-size", "128"],
}
# For cards of 1.22 MB, as 40 GB are for a 70B model. Of four widths some of each is chosen.
CARDS = ["--to", "auto", *COMPRESSED, "--vram", "2x1224KB", "--tp", "2", "--cuda-context", "0", "--context", "128",
         "--prefill", "16", "--importance", s.ROOT / "tests" / "data" / "importance" / "kjv-llama.json"]
AUTO = {"auto": CARDS, "auto-w8a8": [*CARDS, "--activation-bits", "8"]}
FORMS |= AUTO
# How far the log-probabilities may be apart: the engine computes in bfloat16, and rounds the inputs
# of layers to 8 bits where the form says so.
APART = {form: 0.12 if form.endswith("w8a8") else 0.05 for form in FORMS}
# Without VNNI the CPU's products of 8-bit inputs are not those of W8A8: log-probabilities were 0.37 to
# 0.42 apart there, and 0.09 with it.
VNNI = "vnni" in Path("/proc/cpuinfo").read_text()
# Each form costs a start of vLLM: one of each kind, and on two workers the mixture of all of them. With
# QCONV_VLLM_ALL=1 every form.
ALL = os.environ.get("QCONV_VLLM_ALL") == "1"
ASKED = [form for form in FORMS if (ALL or form in ("int3-64", "int4-128", "int5-128", "w8a8", "w8a16", "auto"))
         and (VNNI or not form.endswith("w8a8"))]
SPLIT = ASKED if ALL else ["auto"]
VOCABULARY = 256
IDS = torch.randint(3, VOCABULARY, (48,), generator=torch.Generator().manual_seed(1)).tolist()
VICTIM = "model.layers.1.mlp.down_proj.weight"


@functools.cache
def source():
    """A tiny Llama whose groups of 128 can be split over two workers."""
    torch.manual_seed(11)
    folder = s.SCRATCH / "compressed" / "model"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=VOCABULARY,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.05)).to(torch.bfloat16).save_pretrained(folder)
    return folder


HIDDEN, INNER, HEAD, KV_HEADS = 256, 512, 32, 2


def widened(name, weight):
    """A weight of kjv-llama with zeros where the wider model has more: rows and columns behind, and a
    head behind the three of each KV head. A norm divides by the mean over more channels."""
    heads = {"q_proj": 0, "o_proj": 1}.get(name.split(".")[-2])
    if heads is not None:
        groups = weight.unflatten(heads, (KV_HEADS, -1, HEAD))
        weight = torch.cat([groups, torch.zeros_like(groups.narrow(heads + 1, 0, 1))], heads + 1)
        weight = weight.flatten(heads, heads + 2)
    size = {192: HIDDEN, 440: INNER}
    wide = torch.zeros([size.get(n, n) for n in weight.shape], dtype=weight.dtype)
    wide[tuple(map(slice, weight.shape))] = weight
    return wide * (192 / HIDDEN) ** 0.5 if weight.dim() == 1 else wide


@functools.cache
def trained():
    """kjv-llama in the shape of a 70B model made small: four queries to a key, rows of whole groups of
    128, and heads and groups that two cards can share."""
    small, folder = s.model_path("kjv-llama"), s.SCRATCH / "compressed" / "trained"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(small / "model.safetensors")
    save_file({name: widened(name, t).contiguous() for name, t in tensors.items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((small / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 8,
               "rms_norm_eps": config["rms_norm_eps"] * 192 / HIDDEN}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def converted(form):
    folder = s.SCRATCH / "compressed" / form
    s.qconv("-q", "--compress", "none", *FORMS[form], trained() if form in AUTO else source(), folder)
    return folder


@functools.cache
def restored(form):
    folder = s.SCRATCH / "compressed" / f"{form}-bf16"
    s.qconv("-q", "--compress", "none", "--to", "bf16", converted(form), folder)
    return folder


def unlike(folder, form):
    """The names of the tensors that transformers holds otherwise than qconv restores them. Asked to
    dequantize, transformers 5.23.0 takes all weights of a mixture for those of its first group; left
    to itself it restores each as it is used."""
    mixed = form in AUTO and transformers.__version__ >= "5"
    more = {} if mixed else {
        "quantization_config": transformers.CompressedTensorsConfig(run_compressed=False)}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **more)
    if mixed:
        model(input_ids=torch.tensor([IDS]))
    have, want = model.state_dict(), load_file(restored(form) / "model.safetensors")
    stays = [name for name in have if not name.endswith(("_scale", "_shape"))]  # beside the weights
    return [name for name in sorted({*stays, *want})
            if name not in have or name not in want or have[name].dtype != want[name].dtype
            or not torch.equal(have[name], want[name])]


class Auto(unittest.TestCase):
    def test_mixture(self):
        """int4, int5, int6 and int8 are all there, and no scheme for all that fits has less predicted error."""
        for form in AUTO:
            with self.subTest(form):
                config = json.loads((converted(form) / "config.json").read_text())["quantization_config"]
                bits = {g["weights"]["num_bits"] for g in config["config_groups"].values()}
                self.assertEqual(bits, {4, 5, 6, 8})
                self.assertEqual(config["format"],
                                 "mixed-precision" if form == "auto-w8a8" else "pack-quantized")
                plan = json.loads(s.qconv("plan", "--json", *FORMS[form], trained()))
                uniform = [u["predicted_error"] for u in plan["auto"]["uniform"].values() if u["fits"]]
                s.note(f"{form}: {plan['auto']['chosen']}; predicted error {plan['auto']['predicted_error']:.3g}, "
                       f"with one scheme for all {min(uniform):.3g}")
                self.assertLess(plan["auto"]["predicted_error"], min(uniform))


class Transformers(unittest.TestCase):
    def test_every_weight_is_equal(self):
        for form in FORMS:
            with self.subTest(form):
                self.assertEqual(unlike(converted(form), form), [])
                s.note(f"{form}: every weight is equal, bit for bit")


# Where to go on from. A trained model is sure of most of its words, and two programs that compute a
# little otherwise say the same ones. Where it is not, another word is no fault.
OPENINGS = ["And the LORD said unto Moses, ", "In the beginning God created the heaven and the earth. ",
            "The LORD is my shepherd; ", "And it came to pass in those days, that ",
            "Blessed are they that ", "Thus saith the LORD of hosts, the God of Israel; ",
            "Jesus answered and said unto them, ", "And the children of Israel "]
FOLLOW = 48  # tokens


@functools.cache
def prompts(form):
    if form not in AUTO:
        return [IDS]
    tokenizer = transformers.AutoTokenizer.from_pretrained(s.model_path("kjv-llama"))
    return [tokenizer(text)["input_ids"] for text in OPENINGS]


@functools.cache
def restored_model(form):
    return transformers.AutoModelForCausalLM.from_pretrained(restored(form), dtype=torch.float32).eval()


def logprobs(form, ids):
    with torch.no_grad():
        return torch.log_softmax(restored_model(form)(input_ids=torch.tensor([ids])).logits[0], -1)


@functools.cache
def reference(form):
    """What transformers computes in float32 from the restored weights."""
    return logprobs(form, prompts(form)[0])[:-1]


@functools.cache
def text(form, prompt):
    """How transformers goes on from there: the tokens, and how much more probable each is than any
    other."""
    ids = prompts(form)[prompt]
    made = restored_model(form).generate(
        torch.tensor([ids]), max_new_tokens=FOLLOW, min_new_tokens=FOLLOW, do_sample=False,
        output_logits=True, return_dict_in_generate=True)
    best = torch.log_softmax(torch.cat(made.logits), -1).topk(2).values
    return made.sequences[0, len(ids):].tolist(), (best[:, 0] - best[:, 1]).tolist()


def ask(workers, asked, *options):
    """folder -> what vllm_logprobs.py says of the prompts of a form. asked: [(folder, form)]"""
    script = s.ROOT / "tests" / "interop" / "vllm_logprobs.py"
    questions = s.SCRATCH / "questions.json"
    questions.write_text(json.dumps([
        {"model": str(folder), "prompts": prompts(form), "tokens": FOLLOW if form in AUTO else 1}
        for folder, form in asked]))
    for _ in range(2):  # a vLLM may die as it starts, where two bind the same processors or ports
        with open(ENVIRONMENT / "one-at-a-time", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = subprocess.run(
                [PYTHON, "-B", script, *options, str(workers), questions],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"model"')]
        if len(lines) == len(asked):
            break
        s.note(f"vLLM answered {len(lines)} of {len(asked)} questions")
    else:
        raise RuntimeError(f"vLLM answered {len(lines)} of {len(asked)}: {done.stderr[-2000:]}")
    return {Path(a["model"]): a for a in lines}


# A trained model leaves most tokens so little that bfloat16 alone moves their logarithms by 0.1
# (transformers, too). Of it those count that have at least this probability.
LIKELY = 0.1


def apart(answer, of, least=0.0):
    """The largest difference of log-probabilities, over the tokens that have at least so much; infinite
    for a NaN and for a refusal."""
    if "error" in answer:
        return float("inf")
    rows = torch.tensor([[float("nan") if x is None else x for x in row] for row in answer["logprobs"]])
    return (rows - of).abs().nan_to_num(float("inf"))[of.exp() >= least].max().item()


@unittest.skipUnless(PYTHON.exists(), f"no vLLM in {ENVIRONMENT}: tests/interop/vllm_environment.sh")
@unittest.skipIf(transformers.__version__ < "5", "vLLM is asked once, beside transformers 5")
class Vllm(unittest.TestCase):
    def compare(self, workers, forms, found):
        for form in forms:
            with self.subTest(form):
                answer = found[converted(form)]
                self.assertNotIn("error", answer)
                difference = apart(answer, reference(form), LIKELY if form in AUTO else 0.0)
                s.note(f"{form}, {workers} worker(s): log-probabilities at most {difference:.4f} apart")
                self.assertLessEqual(difference, APART[form])
                if form in AUTO:
                    self.compare_texts(workers, form, answer)

    def compare_texts(self, workers, form, answer):
        """Up to where the second word could be the first within what log-probabilities may be apart."""
        sure, whole = 0, 0
        for prompt, said in enumerate(answer["texts"]):
            tokens, margins = text(form, prompt)
            near = [i for i, margin in enumerate(margins) if margin <= 2 * APART[form]]
            end = near[0] if near else FOLLOW
            self.assertEqual(said[:end], tokens[:end], OPENINGS[prompt])
            sure += end
            whole += said == tokens
        s.note(f"{form}, {workers} worker(s): {sure} tokens that transformers is sure of are the same; "
               f"{whole} of {len(OPENINGS)} texts of {FOLLOW} tokens are the same to their end")
        self.assertGreater(sure, FOLLOW)
        ours = torch.log_softmax(torch.from_numpy(s.our_logits(converted(form), prompts(form)[:1])), -1)
        ours = ours[:-1]
        divergence = (ours.exp() * (ours - torch.tensor(answer["logprobs"]))).sum(-1).max().item()
        s.note(f"{form}, {workers} worker(s): at most {apart(answer, ours, LIKELY):.4f} from what numpy "
               f"computes, KL divergence of a token at most {divergence:.2g}")
        self.assertLessEqual(apart(answer, ours, LIKELY), APART[form])
        self.assertLessEqual(divergence, APART[form] ** 2)

    def test_one_worker(self):
        self.compare(1, ASKED, ask(1, [(converted(f), f) for f in ASKED]))

    @unittest.skipUnless(VNNI, "this processor has no VNNI, without which vLLM's W8A8 is not compared")
    def test_w8a8_is_among_them(self):
        self.assertIn("w8a8", ASKED)

    def test_two_workers(self):
        self.compare(2, SPLIT, ask(2, [(converted(f), f) for f in SPLIT]))


if __name__ == "__main__":
    s.main()
