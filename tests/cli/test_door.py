#!/usr/bin/env python3
"""`--hessians fd:N`: what a program on the other side of the socket has solved is, byte for byte, what a file of
the same moments gives; its values are those of the output; a run goes on where the other side was lost; and a bad
line ends with one sentence. Stacks of experts, over the socket and from a file."""
import json
import os
import random
import re
import socket
import struct
import subprocess
import unittest

import qconv_case
from output_case import AT_CALL, OutputCase, at_call
import make_checkpoint as mk
from moments import inputs_of, moments_of

MODEL = os.path.join(qconv_case.ROOT, "tests", "data", "kjv-llama", "model")
TINY = os.path.join(qconv_case.ROOT, "tests", "data", "tiny-moe")
REPORT = {"text": "some.txt", "text_digest": "0123456789abcdef" * 2, "tokenizer": "bpe", "tokens": 4096, "windows": 8,
          "context": 512}
HELLO = {"hello": 1, "identity": "by a test", "report": REPORT}


def rounded(floats):
    """To BF16."""
    return struct.pack("<%dH" % (len(floats) // 4),
                       *(mk.to_bf16_bits(x) for x in struct.unpack("<%df" % (len(floats) // 4), floats)))


def make_gpt_oss(case):
    """Writes a small gpt-oss, whose experts are stacks in MXFP4, to the folder oss."""
    rng = random.Random(6)
    tensors = {}

    def add(name, *shape, scale=0.25, about=0.0):
        values = [about + rng.uniform(-scale, scale) for _ in range(mk.numel(shape))]
        tensors[name] = ("BF16", list(shape), mk.encode("BF16", values))

    def add_packed(name, rows, cols):
        for tail, shape, low, high in (("blocks", [4, rows, cols // 32, 16], 0, 255),
                                       ("scales", [4, rows, cols // 32], 121, 124)):
            data = bytes(rng.randint(low, high) for _ in range(mk.numel(shape)))
            tensors[f"{name}_{tail}"] = ("U8", shape, data)
        add(name + "_bias", 4, rows)

    add("model.embed_tokens.weight", 64, 64, scale=1)
    add("lm_head.weight", 64, 64)
    add("model.norm.weight", 64, about=1)
    for i in range(2):
        at = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{at}{norm}.weight", 64, about=1)
        for part, rows, cols in (("q", 32, 64), ("k", 16, 64), ("v", 16, 64), ("o", 64, 32)):
            add(f"{at}self_attn.{part}_proj.weight", rows, cols)
            add(f"{at}self_attn.{part}_proj.bias", rows)
        add(at + "self_attn.sinks", 2)
        add(at + "mlp.router.weight", 4, 64)
        add(at + "mlp.router.bias", 4)
        add_packed(at + "mlp.experts.gate_up_proj", 64, 64)
        add_packed(at + "mlp.experts.down_proj", 64, 32)
    mk.write_checkpoint(case.path("oss"), tensors, config={
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 8, "max_position_embeddings": 64,
        "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 2.0,
        "quantization_config": {"quant_method": "mxfp4"}})


class Door(OutputCase):
    def start(self, *args, out="out", model=MODEL, to="nf4", stderr=subprocess.PIPE, env=None):
        ours, theirs = socket.socketpair()
        self.addCleanup(ours.close)
        argv = [qconv_case.QCONV, "--to", to, "--compress", "none", "--hessians", f"fd:{theirs.fileno()}", *args, model]
        p = subprocess.Popen(argv + ([out] if out else []), cwd=self.dir, stdout=subprocess.PIPE, stderr=stderr,
                             pass_fds=[theirs.fileno()], env={**os.environ, **(env or {})})
        theirs.close()
        self.addCleanup(lambda: (p.kill(), p.wait(), p.stdout.close(), p.stderr and p.stderr.close()))
        self.socket, self.lines, self.process = ours, ours.makefile("r", encoding="utf-8"), p
        self.addCleanup(self.lines.close)

    def say(self, what):
        try:
            self.socket.sendall((what if isinstance(what, str) else json.dumps(what)).encode() + b"\n")
        except BrokenPipeError:
            pass  # what the program says of it counts

    def ask(self, what):
        self.say(what)
        return self.hear()

    def hear(self):
        line = self.lines.readline()
        return json.loads(line) if line else None

    def finish(self, code=0):
        """The end of the program: what it said."""
        self.socket.shutdown(socket.SHUT_WR)
        _, said = self.process.communicate(timeout=120)
        self.assertEqual(self.process.returncode, code, said)
        return said.decode()

    def sets(self, weights, **more):
        """Requests in the order of the list: the weights of one layer with the same inputs, as tensors."""
        together = {}
        for w in weights:
            together.setdefault(inputs_of(w["module"]), []).append(w)
        for ws in together.values():
            tensors = {}
            for w in ws:
                tensors |= moments_of(w, like=ws[0]["module"] if w is not ws[0] else None, **more)
            yield ws, tensors

    def solve(self, tensors, name="m.safetensors", values="v"):
        mk.write_safetensors(self.path(name), tensors)
        return self.ask({"solve": self.path(name), "values": values and self.path(values)})

    def floats(self, weight, offset, name="v"):
        with open(self.path(name), "rb") as f:
            f.seek(offset)
            return f.read(4 * weight["rows"] * weight["cols"])

    def all_tensors(self, phase, **more):
        out = {}
        for _, tensors in self.sets(phase["weights"], **more):
            out |= tensors
        return out

    def bytes_of(self, out):
        return {n: t[2] for n, t in mk.read_checkpoint(self.path(out)).items()}


class Dense(Door):
    def convert_all(self, *args, two=False, hello=HELLO, **more):
        """Over the socket: the phase, and the values of every weight by its name."""
        self.start(*args, **more)
        phase = self.ask(hello)
        self.assertEqual(phase["phase"], "calibrate")
        values = {}
        for ws, tensors in self.sets(phase["weights"], two=two):
            answer = self.solve(tensors)
            self.assertEqual((sorted(s["name"] for s in answer["solved"]), answer["left"]),
                             (sorted(w["name"] for w in ws), []))
            by = {w["name"]: w for w in ws}
            for s in answer["solved"]:
                values[s["name"]] = self.floats(by[s["name"]], s["offset"])
                self.assertGreater(s["rounded"], 0)
        self.say({"end": {}})
        return phase, values, self.finish()

    def test_a_file_of_the_same_moments(self):
        for two in (False, True):
            hello = {**HELLO, "report": {**REPORT, "sided": 1 + two}}
            phase, values, said = self.convert_all("-v", "--force", two=two, hello=hello)
            self.assertEqual(len(phase["weights"]), 28)
            self.assertEqual(set(phase["weights"][0]), {"name", "module", "rows", "cols", "turned", "made"})
            mk.write_safetensors(self.path("all.safetensors"), self.all_tensors(phase, two=two))
            self.ok("--to", "nf4", "--compress", "none", "-q", "--force", "--hessians", "all.safetensors", MODEL, "file")
            self.assertEqual(self.bytes_of("out"), self.bytes_of("file"))
            # What the other side gets is what a reader of the output gets.
            self.ok("-q", "--to", "bf16", "--force", "--compress", "none", "out", "wide")
            wide = self.bytes_of("wide")
            self.assertEqual({n: rounded(v) for n, v in values.items()}, {n: wide[n] for n in values})
            made = self.json_of("out", "qconv.json")["options"]["calibrate"]
            self.assertEqual((made["text"], made["tokens"], made["windows"], made["context"], made["tokenizer"],
                              made["sided"]), ("some.txt", 4096, 8, 512, "bpe", "two" if two else "one"))
        self.ok("verify", "out", "--against", MODEL, "-q")

    def test_lost_and_resumed(self):
        self.convert_all(out="whole")
        self.start("-q")
        phase = self.ask(HELLO)
        first = {}
        for ws, tensors in list(self.sets(phase["weights"]))[:5]:
            for s in self.solve(tensors)["solved"]:
                w = next(w for w in ws if w["name"] == s["name"])
                first[w["name"]] = self.floats(w, s["offset"])
        self.socket.shutdown(socket.SHUT_RDWR)
        said = self.process.communicate(timeout=60)[1].decode()
        self.assertEqual(self.process.returncode, 1, said)
        self.assertRegex(said, r"\Aqconv: --hessians fd:\d+: the program that calibrates closed the socket before "
                         r"it was done; %d weights are calibrated, and the same command continues from there\n\Z"
                         % len(first))
        self.start()
        phase = self.ask(HELLO)
        made = [w for w in phase["weights"] if w["made"]]
        self.assertEqual({w["name"] for w in made}, set(first))
        answer = self.ask({"values": [{"name": w["name"]} for w in made], "to": self.path("v")})["values"]
        self.assertEqual({w["name"]: self.floats(w, a["offset"]) for w, a in zip(made, answer)}, first)
        for ws, tensors in self.sets(phase["weights"]):
            if not all(w["made"] for w in ws):
                self.solve(tensors, values=None)
        self.say({"end": {}})
        self.finish()
        self.assertEqual(self.bytes_of("out"), self.bytes_of("whole"))
        # Another identity begins anew, and a finished output is not made again.
        self.start()
        self.say(HELLO)
        self.assertEqual((self.hear(), self.process.wait(60)), (None, 0))

    def test_another_identity(self):
        self.start()
        phase = self.ask(HELLO)
        self.solve(next(iter(self.sets(phase["weights"])))[1])
        self.socket.shutdown(socket.SHUT_RDWR)
        self.process.wait(60)
        self.start()
        self.say({**HELLO, "identity": "otherwise"})
        said = self.finish(2)
        self.assertIn("calibration", said)
        self.start("--restart")
        self.assertFalse(any(w["made"] for w in self.ask({**HELLO, "identity": "otherwise"})["weights"]))

    def test_what_is_left(self):
        self.start("-q")
        phase = self.ask(HELLO)
        few, other = phase["weights"][0], phase["weights"][1]
        answer = self.solve(moments_of(few, 3) | moments_of({**few, "module": "lm_head"}, 5000))
        self.assertEqual((answer["solved"], sorted((x["name"], x["why"]) for x in answer["left"])),
                         ([], sorted([(few["name"], "few tokens"), ("lm_head.weight", "not quantized")])))
        self.assertEqual(len(self.solve(moments_of(other))["solved"]), 1)
        self.assertEqual(os.path.getsize(self.path("v")), 4 * other["rows"] * other["cols"])
        self.say({"end": {"left": "as this test does not like them"}})
        self.finish()

    def test_left_ones_are_told(self):
        self.start()
        phase = self.ask(HELLO)
        self.solve(moments_of(phase["weights"][0], 3))
        self.solve(moments_of(phase["weights"][1]))
        self.say({"end": {"left": "as this test does not like them"}})
        said = self.finish()
        self.assertIn("warning: 26 weights are quantized without calibration, as this test does not like them: '", said)
        self.assertIn("warning: 1 weight is quantized without calibration, as the second moments are of fewer tokens "
                      f"than a quarter of the inputs: '{phase['weights'][0]['name']}'\n", said)

    def test_judging(self):
        """What --scale search makes of weights, made or not; the figures of other weights, also where writing was killed."""
        self.start("-q", "--scale", "search", out="o")
        hello = {**HELLO, "report": {**REPORT, "mix": 0.25, "relative_rank": 0.6}}
        phase = self.ask(hello)
        self.solve(moments_of(phase["weights"][0]))
        answer = self.ask({"values": [{"name": w["name"]} for w in phase["weights"]], "to": self.path("v"),
                           "searched": True})["values"]
        found = {w["name"]: self.floats(w, a["offset"]) for w, a in zip(phase["weights"], answer)}
        self.say({"end": {"judged": {"tokens": 77, "search": 0.5, "calibrated": 0.125}}})
        self.finish()
        self.ok("-q", "--to", "nf4", "--scale", "search", "--compress", "none", MODEL, "search")
        self.ok("-q", "--to", "bf16", "--compress", "none", "search", "wide")
        wide = self.bytes_of("wide")
        self.assertEqual({n: rounded(v) for n, v in found.items()}, {n: wide[n] for n in found})
        made = self.json_of("o", "qconv.json")["options"]["calibrate"]
        self.assertEqual([made[k] for k in ("mix", "relative_rank", "judged_tokens", "judged_search", "judged_calibrated")],
                         [0.25, 0.6, 77, 0.5, 0.125])
        self.start(out="o")  # the same is finished, and another share is another output
        self.say(hello)
        self.assertEqual((self.hear(), self.process.wait(60)), (None, 0))
        self.start(out="o")
        self.say({**hello, "report": {**hello["report"], "mix": 0.5}})
        self.assertIn("calibrated with another text, or otherwise", self.finish(2))

    def test_dry_run(self):
        for out in (None, "out"):
            self.start("--dry-run", "--json", out=out)
            phase = self.ask(HELLO)
            self.assertEqual((phase["phase"], len(phase["weights"])), ("dry-run", 28))
            for name in ("seconds", "operations", "memory", "disk"):
                self.assertGreater(phase[name], 0)
            self.assertEqual(phase["device_memory"], 0)
            self.say({"end": {}})
            r = json.loads(self.process.communicate(timeout=60)[0])
            self.assertEqual(r["calibration"]["text"], "some.txt")
            self.assertFalse(os.path.exists(self.path("out")))
        self.start("--dry-run")
        self.ask(HELLO)
        self.say({"solve": "x", "values": None})
        self.assertIn('expected no "solve" in the phase "dry-run"', self.finish(3))

    def test_auto(self):
        room = ("--margin", "1", "--cuda-context", "1KB", "--context", "16", "--vram", "1300KB")
        hello = {**HELLO, "report": {**REPORT, "sided": 2, "tokens": 5000}}
        self.start(*room, "--explain", "--json", to="auto")
        phase = self.ask(hello)
        self.assertEqual((phase["phase"], len(phase["weights"])), ("weigh", 28))
        for _, tensors in self.sets(phase["weights"], two=True):
            self.assertEqual(self.solve(tensors, values=None), {"solved": [], "left": []})
        everything = self.all_tensors(phase, two=True)
        second = self.ask({"end": {}})
        self.assertEqual(second["phase"], "calibrate")
        self.assertTrue({w["name"] for w in second["weights"]} <= {w["name"] for w in phase["weights"]})
        for _, tensors in self.sets(second["weights"], two=True):
            self.solve(tensors)
        self.say({"end": {}})
        out, said = self.process.communicate(timeout=120)
        self.assertEqual(self.process.returncode, 0, said)
        mk.write_safetensors(self.path("all.safetensors"), everything)
        want = json.loads(self.ok("--to", "auto", "--compress", "none", *room, "--explain", "--json", "-q", "--hessians",
                                  "all.safetensors", MODEL, "file"))
        got = json.loads(out)
        self.assertEqual(got["auto"]["weighed_by"], "moments")
        self.assertEqual(got["auto"]["groups"], want["auto"]["groups"])
        self.assertEqual(self.bytes_of("out"), self.bytes_of("file"))

    def test_bad_hello(self):
        for line, has in (
                ("{", "JSON"), ("[]", "expected an object"), ("{}", 'expected a first line {"hello": 1,'),
                ({**HELLO, "hello": 2}, 'a first line {"hello": 1,'), ({"hello": 1, "report": REPORT}, "a first line"),
                ({**HELLO, "identity": 5}, "a first line"), ({**HELLO, "report": 1}, "a first line"),
                ({**HELLO, "report": {}}, 'either "text" or "hessians"'),
                ({**HELLO, "report": {"text": "a"}}, 'the "tokenizer" of the text'),
                ({**HELLO, "report": {**REPORT, "text_digest": "12"}}, '"text_digest" of 32 hexadecimal digits'),
                ({**HELLO, "report": {**REPORT, "tokenizer": "a\nb"}}, "tokenizer: expected one line of text"),
                ({**HELLO, "report": {**REPORT, "tokenizer": "a" * 200}}, 'the "tokenizer" of the text'),
                ({**HELLO, "report": {**REPORT, "tokens": -1}}, "tokens"),
                ({**HELLO, "report": {**REPORT, "mix": -1}}, "mix: expected a number of 0 or more"),
                ({**HELLO, "report": {**REPORT, "relative_rank": "a"}}, "relative_rank: expected a number of 0 or more"),
                ({**HELLO, "report": {**REPORT, "sided": 3}}, '"sided" to be 1 or 2')):
            with self.subTest(line=line):
                self.start()
                self.say(line)
                said = self.finish(3)
                self.assertRegex(said, r"\Aqconv: --hessians fd:\d+: [^\n]*\n\Z")
                self.assertIn(has, said)
                self.assertFalse(os.path.exists(self.path("out")))

    def test_bad_lines(self):
        weight = {"module": "model.layers.0.self_attn.q_proj", "rows": 192, "cols": 192}
        mk.write_safetensors(self.path("two.safetensors"), moments_of(weight, two=True))
        mk.write_safetensors(self.path("strange.safetensors"), moments_of({**weight, "module": "x"}))
        mk.write_safetensors(self.path("small.safetensors"), moments_of({**weight, "cols": 3}))
        mk.write_safetensors(self.path("good.safetensors"), moments_of(weight))
        q, k = ("model.layers.0.self_attn.%s_proj.weight" % c for c in "qk")
        for line, has, code in (
                ("\x00", "JSON", 3), ("{}" + " " * (17 << 20), "a line of more than 16777216 bytes", 3),
                ({"x": 1}, 'expected a line with "solve", "values" or "end"', 3),
                ({"solve": 1, "values": None}, 'expected {"solve": PATH, "values": PATH or null}', 3),
                ({"solve": self.path("good.safetensors"), "values": 1}, 'expected {"solve": PATH', 3),
                ({"solve": self.path("nothing"), "values": None}, "nothing", 3),
                ({"solve": self.path("two.safetensors"), "values": None}, '"sided" is 1', 3),
                ({"solve": self.path("strange.safetensors"), "values": None}, "'x' among them", 3),
                ({"solve": self.path("small.safetensors"), "values": None}, "of 192 inputs for '%s', found 3" % q, 3),
                ({"solve": self.path("good.safetensors"), "values": self.path("no", "v")}, "no/v", 1),
                ({"values": {}, "to": "x"}, 'expected {"values": [{"name": NAME}, ...], "to": PATH}', 3),
                ({"values": [], "to": None}, 'expected {"values": [', 3),
                ({"values": [{"name": k}], "to": self.path("v")}, "not made: '%s'" % k, 3),
                ({"values": [{"name": "no"}], "to": self.path("v")}, "not made: 'no'", 3),
                ({"values": [7], "to": self.path("v")}, "not made: ''", 3),
                ({"end": 1}, 'expected {"end": {...}}', 3), ({"end": {"left": 5}}, "left", 3),
                ({"values": [{"name": "no"}], "to": self.path("v"), "searched": True}, "not made: 'no'", 3),
                ({"end": {"judged": {"tokens": -1}}}, "tokens", 3),
                ({"end": {"judged": {"search": "x"}}}, "search: expected a number of 0 or more", 3),
                ({"end": {"left": "a\nb"}}, "left: expected one line of text", 3)):
            with self.subTest(line=str(line)[:99]):
                self.start("-q")
                self.ask(HELLO)
                self.say(line)
                said = self.finish(code)
                self.assertRegex(said, r"\Aqconv: [^\n]*\n\Z")
                self.assertIn(has, said)

    def test_what_is_no_socket(self):
        nf4 = "--to", "nf4", "--hessians"
        for name in ("fd:", "fd:x", "fd:-1", "fd:77", "fd:1", "fd:9999999"):
            self.usage(*nf4, name, MODEL, "out", has=f"--hessians {name}: expected the number of a connected Unix stream "
                       f"socket that this process inherits; a file of that name is ./{name}")
        self.start("--sided", "two")
        self.say(HELLO)
        self.assertIn('--sided says otherwise than the hello', self.finish(2))


class Stacks(Door):
    """Stacks of tiny-moe (five experts in layers 0 and 2) have what separate experts get of the same moments."""
    def offered(self, *args, model=TINY, hello=HELLO, **more):
        self.start("--dry-run", *args, model=model, out=None, **more)
        weights = self.ask(hello)["weights"]
        self.say({"end": {}})
        self.finish()
        return weights

    @staticmethod
    def separate(module):
        """The name of a separate expert, whose moments a matrix of a stack gets."""
        m = re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj\[(\d+)(?:, (gate|up))?\]", module)
        return f"{m[1]}{m[3]}.{m[4] or m[2]}_proj" if m else module

    def moments(self, weights, few=(), without=(), two=True):
        out, first = {}, {}
        for w in sorted(weights, key=lambda w: self.separate(w["module"])):
            name = self.separate(w["module"])
            if name in without:
                continue
            like = first.setdefault(inputs_of(name), w["module"])
            tokens = 1 if any(name.startswith(f) for f in few) else 5000
            for n, t in moments_of({**w, "module": name}, tokens, two, like if like != w["module"] else None).items():
                out[n.replace(name, w["module"], 1)] = t
        return out

    def made(self, out, tensors, *args, model=TINY, code=0, **more):
        mk.write_safetensors(self.path(out + ".safetensors"), tensors)
        r = self.run_qconv("--to", *args, "--compress", "none", "--hessians", out + ".safetensors", model, out, **more)
        self.assertEqual(r.returncode, code, r.stderr)
        return r.stderr.decode()

    def assert_ranges(self, tail, beside):
        stacked, separate = self.bytes_of("stacked"), self.bytes_of("separate")
        for layer in (0, 2):
            head = f"model.layers.{layer}.mlp.experts."
            for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                for suffix, own in (("", ".weight"), (beside, tail)):
                    want = b"".join(separate[f"{head}{e}.{p}{own}"] for e in range(5) for p in parts)
                    self.assertEqual(stacked[head + stack + suffix], want, (stack, suffix))

    def test_as_separate(self):
        one, other = "model.layers.0.mlp.experts.3", "model.layers.2.mlp.experts.1.down_proj"
        for to, tail, beside in ((["nf4", "--no-double-quant"], ".weight.absmax", ".absmax"), (["int8"], ".SCB", ".SCB"),
                                 (["int8", "--block-size", "64", "--no-double-quant"], ".weight.absmax", ".absmax")):
            for few, without in (((), ()), ((one,), (other,))):
                for experts in ("stacked", "separate"):
                    weights = self.offered("--experts", experts, *to[1:], to=to[0])
                    said = self.made(experts, self.moments(weights, few, without), *to, "--experts", experts, "--force")
                    self.assertEqual("without calibration" in said, bool(few))
                self.assert_ranges(tail, beside)
        self.ok("verify", "stacked", "--against", TINY, "-q")
        self.assertIn("3 weights are quantized without calibration, as the second moments are of fewer tokens", said)

    def test_over_the_socket(self):
        """Groups of scales that experts share, a kill in the middle of a stack, and experts without tokens."""
        hello = {**HELLO, "report": {**REPORT, "sided": 2}}
        few = "model.layers.0.mlp.experts.3"
        args = "--experts", "stacked"
        weights = self.offered(*args, hello=hello)
        self.assertEqual([(w["module"], w["matrix"], w["matrices"]) for w in weights
                          if w["name"] == "model.layers.0.mlp.experts.gate_up_proj"][6:8],
                         [(few.replace("s.3", "s.gate_up_proj[3, gate]"), 6, 10),
                          (few.replace("s.3", "s.gate_up_proj[3, up]"), 7, 10)])
        everything = self.moments(weights, (few,))
        self.made("file", everything, "nf4", *args)

        def through(kill=None):
            self.start(*args, model=TINY, env=kill, stderr=subprocess.DEVNULL if kill else subprocess.PIPE)
            phase = self.ask(hello)
            layers = {}
            for w in phase["weights"]:
                layers.setdefault(w["module"].split(".")[2], []).append(w)
            for ws in layers.values():
                if self.solve(self.moments(ws, (few,))) is None:
                    self.process.wait(60)
                    return phase, None
            made = [w for w in phase["weights"] if w["made"] and not w["searched"]]
            self.assertEqual(len(self.ask({"values": made, "to": self.path("v")})["values"]), len(made))
            self.say({"end": {}})
            return phase, self.finish()

        kills = [at_call(f"sync:{n}", "journal-calibrated", run="kill -9 $PPID") for n in (12, 60)] if AT_CALL else []
        for kill in [*kills, None]:
            phase, said = through(kill)
        self.assertEqual(self.bytes_of("out"), self.bytes_of("file"))
        self.assertIn("3 weights are quantized without calibration, as the second moments are of fewer tokens than a "
                      "quarter of the inputs: 'model.layers.0.mlp.experts.down_proj[3]', ", said)
        if kills:
            made = [w for w in phase["weights"] if w["made"]]
            self.assertTrue(0 < len(made) < len(phase["weights"]))
            self.assertEqual({w["searched"] for w in made}, {False, True})

    def test_gpt_oss(self):
        """MXFP4 stacks that are quantized anew; gate and up lie row by row there, so they are one matrix."""
        make_gpt_oss(self)
        for to in (["nf4"], ["nf4", "--no-double-quant"], ["int8"]):
            weights = self.offered("--requantize", *to[1:], to=to[0], model="oss")
            self.assertEqual(len(weights), 8 + 16)
            self.assertIn("model.layers.1.mlp.experts.gate_up_proj[3]", [w["module"] for w in weights])
            said = self.made("out", self.moments(weights, ("model.layers.1.mlp.experts.2",), two=False), *to,
                             "--requantize", "--force", model="oss")
            self.assertNotIn("has no second moments", said)
            self.ok("verify", "out", "--against", "oss", "-q")
            rows = {t["name"]: t.get("calibrated") for t in self.json_of("out", "qconv.json")["tensors"]}
            for layer in (0, 1):
                for part in ("gate_up", "down"):
                    errors = rows[f"model.layers.{layer}.mlp.experts.{part}_proj"]
                    self.assertLess(errors["calibrated"], errors["rounded"])


if __name__ == "__main__":
    unittest.main()
