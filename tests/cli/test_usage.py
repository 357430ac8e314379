"""Every option, every way to get one wrong, help and version."""
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from qconv_case import QCONV, QconvCase, ROOT
import make_checkpoint as mk

COMMANDS = ["convert", "plan", "hardware", "inspect", "verify", "unpack", "validate"]
PYTHON_COMMANDS = ["eval", "calibrate", "importance", "plan-training", "from-torch", "report"]

TYPES = "nf4, int2, int3, int4, int5, int6, int7, int8, auto, fp16, bf16 or keep"
SORTED_TYPES = sorted(re.findall(r"\w+\d|auto|keep", TYPES))


# What earlier versions had, and what does its job: {arguments, words of the message}, a row a line.
GONE = [
    (["plan", "--mode", "train", "m"], "'--mode': 'qconv plan-training MODEL' of the Python package plans fine-tuning"),
    (["plan", "--zero", "2", "m"], "'--zero': 'qconv plan-training MODEL' of the Python package plans fine-tuning"),
    (["plan", "--apply", "f", "m"], "'--apply': 'qconv plan-training MODEL' of the Python package plans fine-tuning, and with --apply DIR writes"),
    (["mount", "out", "dir"], "'mount': qconv.load in Python reads an output as it is, 'qconv unpack OUT DIR' "),
    (["--to", "nf4", "--consume-source", "m", "o"], "'--consume-source': a conversion leaves MODEL as it is"),
    (["hardware", "--watch"], "'--watch': 'nvidia-smi dmon' and 'nvidia-smi pmon' follow GPUs"),
    (["hardware", "--csv", "m.csv"], "'--csv': 'nvidia-smi dmon' and 'nvidia-smi pmon' follow GPUs"),
    (["hardware", "--interval=2"], "'--interval': 'nvidia-smi dmon' and 'nvidia-smi pmon' follow GPUs"),
    (["hardware", "--samples", "3"], "'--samples': 'nvidia-smi dmon' and 'nvidia-smi pmon' follow GPUs"),
    (["bench", "--tune"], "'bench': the programs in bench/ time kernels, and bench/gpu_run.sh runs them all"),
    (["validate", "o", "--tuning", "t.json"], "'--tuning': the limits that a GPU showed are built in"),
]


class Help(QconvCase):
    def test_no_arguments(self):
        r = self.run_qconv()
        self.assertEqual(r.returncode, 2)
        self.assertEqual(r.stdout, b"")
        self.assertIn(b"Usage:", r.stderr)
        self.assertEqual(r.stderr.decode(), self.ok("--help"))

    def test_overview_names_every_command(self):
        text = self.ok("--help")
        for c in COMMANDS + ["help"]:
            self.assertRegex(text, r"(?m)^  %s  +\w" % c)
        self.assertEqual(self.ok("help"), text)
        self.assertEqual(self.ok("-h"), text)

    def test_help_of_commands(self):
        for c in COMMANDS:
            text = self.ok(c, "--help")
            self.assertTrue(text.startswith("Usage: qconv "), c)
            self.assertEqual(self.ok("help", c), text)
            self.assertEqual(self.ok(c, "-h", "a", "b", "c", "d"), text)
            for line in text.splitlines():
                self.assertLessEqual(len(line), 80, line)
                self.assertEqual(line, line.rstrip())

    def test_help_speaks_of_its_command_only(self):
        """No default of another command, and no exit code that it does not have."""
        for c in COMMANDS:
            text = self.ok(c, "--help")
            for other in COMMANDS:
                self.assertNotRegex(text, r"[(;] ?%s: " % other, c)
            self.assertEqual("there is no such device" in text, c not in ("unpack", "inspect"), c)
        self.assertIn("(default: nf4, or keep for what has 4 bits or bitsandbytes' form already)",
                      " ".join(self.ok("plan", "--help").split()))
        self.assertIn("become (required)", " ".join(self.ok("convert", "--help").split()))

    def test_help_of_the_command_that_is_left_out(self):
        self.assertEqual(self.ok("--to", "nf4", "--help"), self.ok("convert", "--help"))

    def test_version(self):
        # What was built for GPUs: nothing, CUDA's version and architectures, or the CPU shim.
        self.assertRegex(self.ok("--version"), r"\Aqconv \d+\.\d+\.\d+\nkernels (none|CUDA \d+\.\d+: "
                         r"\w+( \w+)*|.*CPU.*)\n\Z")
        self.assertEqual(self.ok("verify", "--version"), self.ok("--version"))

    def test_help_unknown_command(self):
        self.usage("help", "verfiy", has=["unknown command 'verfiy'", "did you mean verify?"],
                   command="")
        self.usage("help", "zzzzzz", has="unknown command 'zzzzzz'", command="")
        self.usage("help", "verify", "x", has="one argument too many: 'x'", command="")


class Wrong(QconvCase):
    def test_to(self):
        self.usage("m", "o", has=["--to is missing", TYPES])
        self.usage("convert", "m", "o", has="--to is missing")
        self.usage("--to", "nf5", "m", "o", has="--to: expected %s, got 'nf5'" % TYPES)
        for word, meant in [("4bit", "nf4"), ("8bit", "int8"), ("nf5", "nf4"),
                            ("mixed", "auto"), ("copy", "keep")]:
            self.usage("--to", word, "m", "o", has=["got '%s'" % word, "did you mean %s?" % meant])
        self.assertNotIn("mean", self.usage("--to", "gguf", "m", "o"))
        self.usage("--quantize", "nf4", "m", "o",
                   has="--to is missing; did you mean --to nf4 instead of --quantize nf4?")
        self.usage("m", "o", "nf4", has="--to is missing; did you mean --to nf4?")
        self.usage("--to=", "m", "o", has="got ''")
        self.usage("--to", has="--to needs a value: " + TYPES)
        self.usage("--to", "--force", "m", "o", has="--to needs a value")

    def test_places(self):
        self.usage("--to", "nf4", has="MODEL is missing")
        self.usage("--to", "nf4", "m", has="OUT is missing")
        self.usage("--to", "nf4", "--dry-run", has="MODEL is missing")
        self.usage("--to", "nf4", "m", "o", "x", has="one argument too many: 'x'")
        self.usage("--to", "nf4", "", "o", has="MODEL is empty")
        self.usage("--to", "nf4", "m", "", has="OUT is empty")
        for c, n in [("inspect", 1), ("verify", 1), ("unpack", 2)]:
            self.usage(c, has="is missing", command=c)
            self.usage(c, *["x"] * (n + 1), has="one argument too many", command=c)

    def test_unknown_options(self):
        self.usage("--blok-size", "64", has=["'--blok-size'", "did you mean --block-size?"])
        self.usage("--block", "64", has="did you mean --block-size?")
        self.usage("--block_size=64", has=["'--block_size'", "did you mean --block-size?"])
        self.usage("--quite", has="did you mean --quiet?")
        self.usage("-to", "nf4", has="did you mean --to?")
        self.usage("--zzz", has="unknown option '--zzz'")
        self.usage("-z", has="unknown option '-z'")
        for typed, meant in [("--load_in_4bit", "--to nf4"),
                             ("--gpus", "--device cuda"), ("-j", "--threads"),
                             ("--group-size=64", "--block-size"), ("--shard-size=5GB", "--max-shard"),
                             ("--exclude=x", "--keep"), ("--overwrite", "--force"), ("-y", "--force"),
                             ("--ctx-size=1", "--context"), ("--silent", "--quiet"),
                             ("--dtype=bf16", "--to nf4"), ("-i", "MODEL without an option"),
                             ("-o", "OUT without an option: qconv [convert] --to"),
                             ("--out=o", "OUT without"), ("--output=o", "OUT without"),
                             ("--output-dir=o", "OUT without"), ("--OUT=o", "OUT without")]:
            self.usage("--to", "nf4", "m", typed, has="did you mean " + meant)
        self.usage("plan", "m", "--gpu=24GB", has="did you mean --vram", command="plan")
        self.usage("verify", "m", "--reference=x", has="did you mean --against?", command="verify")
        self.usage("unpack", "o", "--output=d", has="did you mean DIR without", command="unpack")
        self.usage("\u2013to", "nf4", "m", "o", has=["a dash that is not '-'", "did you mean --to?"])
        self.usage("-qz", has="unknown option '-qz'")
        self.usage("verify", "--blok-size", "1", "o", has="unknown", command="verify")
        self.assertNotIn("mean", self.fails(2, "verify", "--blok-size", "1", "o"))
        self.assertNotIn("--man?", self.fails(2, "--mann"))

    def test_abbreviations_are_refused(self):
        for short in ["--t", "--dry", "--keep-non", "--comp", "--h", "--verb"]:
            self.usage(short, "x", "m", "o", has="unknown option '%s'" % short)

    def test_unknown_command(self):
        self.usage("verfy", "o", has=["unknown command 'verfy'", "did you mean verify?"],
                   command="verify")
        self.usage("unpak", "o", "d", has="did you mean unpack?", command="unpack")
        # Options of that command, and --help, are not taken for convert's.
        self.usage("verfy", "o", "--against", "m", has="did you mean verify?", command="verify")
        self.usage("verfy", "--help", has="did you mean verify?", command="verify")
        for word, meant in [("quantize", "convert"), ("decompress", "unpack"), ("check", "verify"),
                            ("show", "inspect"), ("fit", "plan"), ("gpus", "hardware")]:
            self.usage(word, "m", "o", has="unknown command '%s'; did you mean %s?" % (word, meant),
                       command=meant)
        self.usage("quantize", "--to", "nf4", "m", "o", has="did you mean convert?")

    def test_a_model_may_have_the_name_of_a_mistake(self):
        self.fails(3, "--to", "nf4", "quantize", "o", has="quantize does not exist")
        os.mkdir(self.path("quantize"))
        self.usage("quantize", "o", has="--to is missing")
        self.fails(3, "--to", "nf4", "quantize", "o", has="quantize has no .safetensors file; give the "
                   "folder that has the weights")

    def test_options_of_other_commands(self):
        for c in ["inspect", "verify", "unpack"]:
            for o in [["--to", "nf4"], ["--block-size", "64"], ["--dry-run"], ["--keep", "x"]]:
                self.usage(c, *o, "o", has="%s is not an option of 'qconv %s'" % (o[0], c), command=c)
        self.usage("verify", "--force", "o", has="--force is not an option", command="verify")
        self.usage("inspect", "--threads", "2", "o", has="--threads is not an option",
                   command="inspect")

    def test_switches_take_no_value(self):
        for o in ["force", "dry-run", "json", "quiet", "verbose", "no-double-quant"]:
            self.usage("--%s=1" % o, "--to", "nf4", "m", "o", has="--%s takes no value" % o)

    def test_missing_values(self):
        for o in ["block-size", "compress", "max-shard-size", "keep", "quantize", "recipe",
                  "threads", "rest", "compute-dtype", "progress"]:
            self.usage("--to", "nf4", "m", "o", "--" + o, has="--%s needs a value" % o)

    def test_numbers(self):
        for v in ["0", "31", "33", "48", "8192", "-64", "64x", "", " 64", "0x40", "1e2",
                  "18446744073709551616", "99999999999999999999999"]:
            self.usage("--to", "nf4", "--block-size=" + v, "m", "o",
                       has=["--block-size", "32 to 4096", "got '%s'" % v])
        self.usage("--to", "nf4", "--block-size=48", "m", "o", has="did you mean 32 or 64?")
        for v, n in [("4k", 4096), ("32K", 32768), ("8,192", 8192), ("1_000_000", 1000000), ("1m", 1 << 20)]:
            self.usage("plan", "m", "--context", v, has="did you mean %d?" % n, command="plan")
        for v in ["4kb", "k", "8,19", "1,2,3", "99999999999999k", "4k4", "1,0000"]:
            self.assertNotIn("mean", self.usage("plan", "m", "--context", v, command="plan"))
        for v in ["90%", "90", "0,9", ",9"]:
            self.usage("plan", "m", "--margin", v, has="did you mean 0.9?", command="plan")
        for v in ["0%", "101", "0,0", "9 %", "x"]:
            self.assertNotIn("mean", self.usage("plan", "m", "--margin", v, command="plan"))
        for v in ["0", "1025", "-1", "two", ""]:
            self.usage("--to", "nf4", "--threads=" + v, "m", "o", has=["--threads", "1 to 1024"])

    def test_choices(self):
        for o in ["rest", "compute-dtype", "progress"]:
            self.usage("--to", "nf4", "--%s=zz" % o, "m", "o", has=["--%s: expected" % o, "got 'zz'"])

    def test_compress(self):
        for v in ["gzip", "zstd:", "zstd:0", "zstd:20", "zstd:x", "zstd=3", "none:1", ""]:
            self.usage("--to", "nf4", "--compress=" + v, "m", "o", has="--compress")
        for v, meant in [("off", "none"), ("no", "none"), ("0", "none"), ("3", "zstd:3"),
                         ("zstd=3", "zstd:3"), ("zstd-19", "zstd:19"), ("zstd3", "zstd:3")]:
            self.usage("--to", "nf4", "--compress=" + v, "m", "o", has="did you mean %s?" % meant)

    def test_sizes(self):
        for v in ["", "GB", "5XB", "5  GB", "-1", "1.GB", ".5GB", "5GBB", "5iB", "1.5", "5Gib/s", "5GB,",
                  "1.1234567GB", "99999999999TB", "99999999999999999999999"]:
            self.usage("--to", "nf4", "--max-shard-size=" + v, "m", "o", has="--max-shard-size")
        self.usage("--to", "nf4", "--max-shard-size", "0", "m", "o", has="at least 1 byte")
        for v, meant in [("5", "5GB"), ("1", "1GB"), ("500", "500MB"), ("5000", "5000MB"), ("1,5GB", "1.5GB")]:
            self.usage("--to", "nf4", "--max-shard-size", v, "m", "o", has="did you mean %s?" % meant)
        self.usage("plan", "m", "--cuda-context", "300", has="did you mean 300MB?", command="plan")

    def test_names_of_files_for_folders(self):
        for name in ["o.safetensors", "o.gguf", "d/o.bin"]:
            stem = name.rsplit(".", 1)[0]
            self.usage("--to", "nf4", "m", name, has=[name, "OUT is a folder", "did you mean '%s'?" % stem])
        self.usage("unpack", "o", "d.safetensors", has="DIR is a folder", command="unpack")
        os.mkdir(self.path("x.bin"))
        self.fails(3, "--to", "nf4", "m", "x.bin", has="m does not exist")

    def test_combinations(self):
        for to in ["fp16", "bf16"]:
            for o in [["--block-size", "64"], ["--no-double-quant"],
                      ["--compute-dtype", "float16"], ["--quantize", "*"]]:
                self.usage("--to", to, *o, "m", "o", has=[o[0], "--to " + to])
        self.usage("--to", "int8", "--no-double-quant", "m", "o",
                   has=["--no-double-quant", "--block-size"])
        self.usage("-q", "-v", "--to", "nf4", "m", "o", has="--quiet does not go with --verbose")
        self.usage("verify", "-qv", "o", has="--quiet does not go with --verbose", command="verify")
        self.usage("--to", "nf4", "--keep", "", "m", "o", has="the glob is empty")
        self.usage("--to", "nf4", "--quantize", "*[" + "a" * 4095, "m", "o",
                   has="--quantize: expected a glob of at most 4096 bytes, found 4097")
        self.usage("--to", "nf4", "--quantize=", "m", "o", has="the glob is empty")
        self.usage("--to", "nf4", "--recipe=", "m", "o", has="--recipe: the path is empty; expected the name of a file")

    def test_what_goes_with_what(self):
        """The rules of the rows, each with its whole message; and what they let through."""
        ct = ["--format", "compressed-tensors"]
        for args, message in [
                (["--to", "int4", "--no-double-quant"], "--no-double-quant does not go with --format "
                 "compressed-tensors, whose scales are never quantized"),
                (["--to", "int8", "--no-double-quant"], "--no-double-quant with --to int8 needs --block-size: "
                 "scales of rows are never quantized"),
                (["--to", "int4", "--block-size", "256"], "--block-size 256 does not go with --format "
                 "compressed-tensors, whose readers have kernels for groups of 32, 64 and 128"),
                (["--to", "int8", "--block-size", "64", *ct], "--block-size 64 with --format compressed-tensors "
                 "needs --to int2, int3, int4, int5, int6 or int7 or --activation-bits 16: 8-bit activations go with a scale for each row"),
                (["--to", "int4", "--activation-bits", "8"], "--activation-bits does not go with --to int4, "
                 "whose activations have 16 bits always"),
                (["--to", "nf4", "--activation-bits", "8"], "--activation-bits needs --format compressed-tensors"),
                (["--to", "nf4", *ct], "--format compressed-tensors needs --to int2, int3, int4, int5, int6, int7, int8 or auto"),
                (["--to", "int4", "--format", "bitsandbytes"], "--format bitsandbytes does not go with --to int4: "
                 "it has --to nf4, of 4 bits, and --to int8"),
                (["--to", "auto"], "--to auto needs --vram or --bits: the devices that the model has to fit, or the average bits of a weight"),
                (["--to", "auto", "--vram", "8GB", "--block-size", "64"], "--block-size does not go with "
                 "--to auto, which chooses it; see --schemes"),
                (["--to", "nf4", "--hessians", "h", "--part", "2/2"], "--hessians does not go with "
                 "--part: a part has no inputs of later layers without those of the earlier"),
                (["--to", "nf4", "--damping", "1"], "--damping needs --hessians"),
                (["--to", "bf16", "--scale", "search"], "--scale does not go with --to bf16, which quantizes "
                 "nothing")]:
            line = self.usage(*args, "m", "o")
            self.assertEqual(line, "qconv: %s; try 'qconv convert --help'\n" % message)
        for args in [["--to", "int4", "--block-size", "32"], ["--to", "auto", "--vram", "8GB", *ct],
                     ["--to", "int8", "--activation-bits", "16", "--block-size", "64", *ct],
                     ["--to", "auto", "--to", "nf4"], ["--to", "int4", "--to", "nf4", "--no-double-quant"]]:
            self.fails(3, *args, "m", "o", has="m does not exist")

    def test_measuring(self):
        self.usage("validate", "o", has="--against is missing", command="validate")
        self.usage("validate", "--against=", "o", has="--against: the path is empty; expected the name of a file",
                   command="validate")
        self.usage("validate", "--against", "m", has="OUT is missing", command="validate")
        self.usage("validate", "--against", "m", "--tolerance", "0.1", "o",
                   has="--tolerance needs --baseline", command="validate")
        against = ["--against", "m", "o"]
        for m in ["", "0", "1,", ",1", "1,,2", "1 2", "-1", "1048577", "99999999999999999999"]:
            self.usage("validate", "--m=" + m, *against, has="--m: expected a whole number from 1",
                       command="validate")
        self.usage("validate", "--m", "4,1,4", *against, has="--m: 4 is there twice in '4,1,4'", command="validate")
        for v in ["0", "-1", "11", "x", "", "1e-3"]:
            self.usage("validate", "--against", "m", "--max-error=" + v, "o", has="--max-error",
                       command="validate")

    def test_devices(self):
        for c, rest in [("convert", ["--to", "nf4", "m", "o"]), ("validate", ["--against", "m", "o"])]:
            for v in ["", "gpu", "cuda:", "cuda:x", "0", "0,1", "cuda:0,", "cpu,cuda:0"]:
                self.usage(c, "--device=" + v, *rest,
                           has="--device: expected auto, cpu, cuda, cuda:0 or cuda:0,2, found '%s'"
                           % v, command=c)
            for v, meant in [("gpu", "cuda"), ("0", "cuda:0"), ("0,1", "cuda:0,1"), ("GPU:1", "cuda:1")]:
                self.usage(c, "--device", v, *rest, has="did you mean %s?" % meant, command=c)
            self.usage(c, "--device", "cuda:1,1", *rest, has="cuda:1 is there twice", command=c)
            self.fails(5, c, "--device", "cuda:99", *rest, has="--device cuda:99")

    def test_pages_that_are_built(self):
        self.usage("--man", has="has no '--man': 'man qconv' shows the page")
        for words in [("bash",), ("tcsh",), ()]:
            self.usage("--completion", *words, has="has no '--completion': installing brings")

    def test_control_characters_of_arguments_are_harmless(self):
        line = self.usage("--to", "a\nb\033[31m", "m", "o")
        self.assertNotIn("\033", line)

    def test_very_long_arguments(self):
        self.usage("--to", "x" * 100000, "m", "o")
        self.usage("--" + "y" * 100000)


class Gone(QconvCase):
    def test_each_names_what_does_its_job(self):
        for args, words in GONE:
            with self.subTest(args=args):
                self.fails(2, *args, has="qconv has no " + words)

    def test_a_folder_of_the_same_name_is_converted_where_it_can_be(self):
        os.mkdir(self.path("mount"))
        self.fails(2, "mount", "out", has="qconv has no 'mount'")
        self.fails(2, "serve", "out", has="qconv has no 'serve': 'vllm serve OUT'")
        self.fails(2, "--to", "fp8", "m", "o", has="got 'fp8', which is read and not written")
        self.fails(3, "--to", "nf4", "mount", "out", has="mount has no .safetensors file")


class Recipe(QconvCase):
    def bad(self, text, has):
        self.write("r.json", text)
        line = self.fails(3, "--to", "nf4", "--recipe", "r.json", "m", "o",
                          has=["recipe 'r.json'"] + list(has))
        self.assertNotIn("--help", line)

    def test_bad_recipes(self):
        self.bad("", [])
        self.bad("{", [])
        self.bad("[]", ["array"])
        self.bad("{}", ["rules is missing"])
        self.bad('{"rules": {}}', ["not an array"])
        self.bad('{"rules": [], "extra": 1}', ["unknown member 'extra'"])
        self.bad('{"Rules": []}', ["unknown member 'Rules'"])
        self.bad('{"rules": ["x"]}', ["rules[0] is", "keep"])
        self.bad('{"rules": [{}]}', ["rules[0] must have exactly one member"])
        self.bad('{"rules": [{"keep": "a", "quantize": "b"}]}', ["rules[0] must have exactly one"])
        self.bad('{"rules": [{"keep": "a"}, {"drop": "b"}]}', ["rules[1]", "'drop'"])
        self.bad('{"rules": [{"keep": 1}]}', ["keep"])
        self.bad('{"rules": [{"keep": ""}]}', ["rules[0]: the glob is empty; expected one such as '*.q_proj.*'"])
        self.bad('{"rules": [{"keep": "a"}]} x', [])
        self.bad('{"rules": [], "rules": []}', [])
        self.bad('{"rules": [%s]}' % ",".join(['{"keep":"a"}'] * 10001),
                 ["expected at most 10000 rules, found 10001"])
        self.bad('{"rules": [{"keep": "*[%s"}]}' % ("a" * 4095),
                 ["rules[0]: expected a glob of at most 4096 bytes, found 4097"])

    def test_missing_recipe(self):
        self.fails(1, "--to", "nf4", "--recipe", "none.json", "m", "o", has="none.json")

    def test_recipe_that_quantizes_with_a_cast(self):
        self.write("r.json", '{"rules": [{"keep": "a"}, {"quantize": "b"}]}')
        self.usage("--to", "bf16", "--recipe", "r.json", "m", "o", has=["rules[1]", "--to bf16"])


class Accepted(QconvCase):
    """A command line that parses gets as far as the model, which is not there."""

    def parses(self, *args, code=(1, 3)):
        r = self.run_qconv(*args)
        self.assertIn(r.returncode, code, (args, r.stderr))
        self.assertNotIn(b"--help", r.stderr)

    def test_values(self):
        for n in [32, 64, 128, 256, 512, 1024, 2048, 4096]:
            self.parses("--to", "nf4", "--block-size", str(n), "no-such-model", "o")
            self.parses("--to", "int8", "--block-size=%d" % n, "--no-double-quant",
                        "no-such-model", "o")
        for to in ["nf4", "int8", "fp16", "bf16", "NF4", "BF16", "bfloat16", "float16", "half"]:
            self.parses("--to", to, "no-such-model", "o")
            self.parses("convert", "--to=" + to, "no-such-model", "o")
            self.parses("no-such-model", "o", "--to", to)
            self.parses("--rest", "bf16", "--keep", "x" * 4096, "--to", to, "no-such-model", "o")
        for o in [["--rest", r] for r in ["keep", "bf16", "fp16"]] + \
                 [["--compute-dtype", d] for d in ["bfloat16", "float16", "float32", "bf16", "FP16"]] + \
                 [["--compress", c] for c in ["none", "zstd", "zstd:1", "zstd:19", "ZSTD"]] + \
                 [["--max-shard-size", s] for s in ["1B", "5GB", "512MiB", "1.5gb", "5G", "4096000", "5 GB", "5Gi",
                                                    "2TiB", "100kb", "7b"]] + \
                 [["--threads", t] for t in ["1", "1024"]] + \
                 [["--device", d] for d in ["CPU", "Auto", " cpu"]] + \
                 [["--progress", p] for p in ["auto", "always", "never", "json"]] + \
                 [["--keep", "*.x", "--quantize", "a*", "--keep=--odd"], ["--no-double-quant"],
                  ["--dry-run"], ["--force"], ["--json"], ["-q"], ["-v"],
                  ["-vv"], ["-v", "-v"], ["--quiet"], ["--verbose"]]:
            self.parses("--to", "nf4", *o, "no-such-model", "o")

    def test_dry_run_needs_no_out(self):
        self.parses("--to", "nf4", "--dry-run", "no-such-model")

    def test_double_dash(self):
        self.parses("--to", "nf4", "--", "--no-such-model", "-o")
        self.parses("--to", "nf4", "--", "verify", "o")
        self.usage("--to", "nf4", "--", "m", "o", "--force", has="one argument too many: '--force'")

    def test_last_one_counts(self):
        self.usage("--to", "nf4", "--to", "bf16", "--block-size", "64", "m", "o", has="--to bf16")

    def test_recipe(self):
        self.write("r.json", '{"rules": [{"keep": "a*"}, {"quantize": "b?"}]}')
        self.parses("--to", "nf4", "--recipe", "r.json", "no-such-model", "o")
        self.write("r.json", '{"rules": []}')
        self.parses("--to", "bf16", "--recipe=r.json", "no-such-model", "o")


class Paths(QconvCase):
    """What people give for the folder of a model."""
    CACHED = "hub/models--org--name"

    def cached(self, *snapshots, main=None):
        """A model in the hub's cache, where snapshots are links to blobs."""
        os.makedirs(self.path(self.CACHED, "blobs"))
        mk.write_model(self.path(self.CACHED, "blobs"), mk.load_model("Llama-3.1-8B"), layers=1,
                       scale=64, seed=1)
        for s in snapshots:
            os.makedirs(self.path(self.CACHED, "snapshots", s))
            for name in os.listdir(self.path(self.CACHED, "blobs")):
                os.symlink("../../blobs/" + name, self.path(self.CACHED, "snapshots", s, name))
        if main:
            os.makedirs(self.path(self.CACHED, "refs"))
            self.write(self.CACHED + "/refs/main", main + "\n")

    def test_the_one_snapshot_is_taken(self):
        self.cached("abc")
        snapshot = self.CACHED + "/snapshots/abc"
        self.assertIn("converted %s -> o as nf4" % snapshot, self.ok("--to", "nf4", self.CACHED, "o"))
        self.assertIn("o: is %s: " % snapshot, self.ok("verify", "o", "--against", self.CACHED))
        self.assertIn("weights in", self.ok("inspect", self.CACHED))
        self.assertIn("fits", self.ok("plan", self.CACHED, "--vram", "8GB"))

    def test_which_snapshot(self):
        self.cached("abc", "def", "ghi", main="def")
        for c in [["--to", "nf4", self.CACHED, "o"], ["inspect", self.CACHED],
                  ["plan", self.CACHED, "--vram", "8GB"]]:
            self.fails(3, *c, has=["with 3 snapshots", "did you mean %s/snapshots/def?" % self.CACHED])
        self.write(self.CACHED + "/refs/main", "../../../etc")
        self.fails(3, "inspect", self.CACHED, has="did you mean %s/snapshots/abc?" % self.CACHED)
        for s in ["abc", "def", "ghi"]:
            os.rename(self.path(self.CACHED, "snapshots", s), self.path(s))
        self.fails(3, "inspect", self.CACHED, has="and has no snapshot")
        self.fails(3, "inspect", "hub", has=["the cache of the Hugging Face hub", self.CACHED])

    def test_ids(self):
        self.cached("abc")
        home = {"HF_HUB_CACHE": self.path("hub")}
        for typed in ["org/name", "https://huggingface.co/org/name"]:
            self.fails(3, "--to", "nf4", typed, "o", env=home,
                       has="did you mean %s/snapshots/abc?" % self.path(self.CACHED))
        for variable, folder in [("HF_HUB_CACHE", "none"), ("HF_HOME", ".")]:
            self.fails(3, "--to", "nf4", "org/other", "o", env={variable: self.path(folder)},
                       has="hf download org/other --local-dir other")
        self.fails(3, "--to", "nf4", "Llama-3.1-8B", "o",
                   has="hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B")
        for typed in ["./org/name", "a/b/c", "org", "../x"]:
            self.assertNotIn("hf download", self.fails(3, "--to", "nf4", typed, "o"))

    def test_model_and_out_swapped(self):
        mk.write_model(self.path("m"), mk.load_model("Llama-3.1-8B"), layers=1, scale=64, seed=1)
        os.mkdir(self.path("empty"))
        before = sorted(os.listdir(self.path("m")))
        for out in ["none", "empty"]:
            for more in [[], ["--force"], ["--dry-run"]]:
                self.usage("--to", "nf4", *more, out, "m",
                           has=["MODEL comes first", "did you mean 'm %s'?" % out])
        self.assertEqual(sorted(os.listdir(self.path("m"))), before)
        # An output that is there is what OUT may be: then MODEL is misspelt.
        self.ok("-q", "--to", "nf4", "m", "o")
        self.fails(3, "--to", "nf4", "none", "o", has="none does not exist")


class Output(QconvCase):
    def test_closed_pipe_is_no_error(self):
        read, write = os.pipe()
        os.close(read)
        try:
            r = self.run_qconv("help", "--json", stdout=write)
        finally:
            os.close(write)
        self.assertEqual((r.returncode, r.stderr), (0, b""))

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs a full device")
    def test_full_device(self):
        with open("/dev/full", "w") as full:
            r = self.run_qconv("--help", stdout=full)
        self.assertEqual(r.returncode, 1)
        self.assertRegex(r.stderr.decode(), r"\Aqconv: standard output: [^\n]+\n\Z")

    def test_colour_only_on_terminals(self):
        for env, colour in [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False),
                            ({"TERM": "xterm", "NO_COLOR": "1"}, False),
                            ({"TERM": "xterm", "NO_COLOR": ""}, True)]:
            master, slave = pty.openpty()
            full = dict(os.environ)
            full.pop("NO_COLOR", None)
            full.update(env)
            p = subprocess.Popen([QCONV, "--zzz"], stderr=slave, stdout=subprocess.DEVNULL,
                                 env=full)
            p.wait(timeout=30)
            os.close(slave)
            text = os.read(master, 4096)
            os.close(master)
            self.assertEqual(b"\033[" in text, colour, (env, text))


class Generated(QconvCase):
    """The manual page and the completions that building makes of `qconv help --json`."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.pages = tempfile.mkdtemp(prefix="qconv-pages-")
        cls.addClassCleanup(shutil.rmtree, cls.pages)
        subprocess.run([sys.executable, "-B", os.path.join(ROOT, "cmake", "make_pages.py"), QCONV, cls.pages], check=True)

    def page(self, name):
        with open(os.path.join(self.pages, name), encoding="utf-8") as f:
            return f.read()

    def test_man_page_lists_every_option(self):
        man = self.page("qconv.1").replace("\\-", "-")
        for c in COMMANDS:
            for option in re.findall(r"--[a-z-]+", self.ok(c, "--help")):
                self.assertIn("\\fB" + option, man)
        for command in PYTHON_COMMANDS:
            self.assertIn("\n.TP\n\\fB%s\\fR\n" % command, man)

    def test_man_page_is_well_formed(self):
        self.write("qconv.1", self.page("qconv.1"))
        try:
            r = subprocess.run(["groff", "-man", "-ww", "-z", "-Tutf8", self.path("qconv.1")],
                               stderr=subprocess.PIPE)
        except FileNotFoundError:
            self.skipTest("no groff")
        self.assertEqual((r.returncode, r.stderr), (0, b""))

    def checked_by(self, shell, *command):
        script = self.write("qconv." + shell, self.page("qconv." + shell))
        try:
            r = subprocess.run(list(command) + [script], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
        except FileNotFoundError:
            self.skipTest("no " + command[0])
        self.assertEqual((r.returncode, r.stdout), (0, b""))

    def test_bash_syntax(self):
        self.checked_by("bash", "bash", "-n")

    def test_bash_shellcheck(self):
        self.checked_by("bash", "shellcheck")

    def test_zsh_syntax(self):
        self.checked_by("zsh", "zsh", "-n")

    def test_fish_syntax(self):
        self.checked_by("fish", "fish", "-n")

    def complete_bash(self, *words):
        self.write("c.bash", self.page("qconv.bash"))
        script = ('source ./c.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _qconv; '
                  'printf "%s\\n" "${COMPREPLY[@]}"')
        r = subprocess.run(["bash", "-c", script, "bash"] + list(words), cwd=self.dir,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=True)
        self.assertEqual(r.stderr, b"")
        return sorted(r.stdout.decode().split())

    def test_fish_completes(self):
        self.write("c.fish", self.page("qconv.fish"))
        for line, wanted in [("qconv --to ", SORTED_TYPES),
                             ("qconv ver", ["verify"]),
                             ("qconv from", ["from-torch"]),
                             ("qconv verify --th", ["--threads"]),
                             ("qconv verify --bl", []),
                             ("qconv plan Llama-3.3", ["Llama-3.3-70B-Instruct"]),
                             ("qconv plan m --vram 3090+2xRTX409", ["3090+2xRTX4090"]),
                             ("qconv hardware --as=GB2", ["--as=GB200-186GB"]),
                             ("qconv --bl", ["--block-size"])]:
            try:
                r = subprocess.run(["fish", "--no-config", "-c",
                                    "source c.fish; complete -C '%s'" % line], cwd=self.dir,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            except FileNotFoundError:
                self.skipTest("no fish")
            found = sorted(row.split("\t")[0] for row in r.stdout.decode().splitlines())
            self.assertEqual((found, r.stderr), (wanted, b""), line)

    def typed_into_zsh(self, line, wanted):
        """What a terminal shows of the line and a tab, read until it is what is wanted, or a minute has gone."""
        pid, fd = pty.fork()
        if pid == 0:
            os.chdir(self.dir)
            os.execvpe("zsh", ["zsh", "-f", "-i"], dict(os.environ, TERM="dumb"))

        def read_until(words, seen=b"", end=time.monotonic() + 60):
            while words not in seen.replace(b"\a", b"") and time.monotonic() < end:
                if select.select([fd], [], [], 1)[0]:
                    seen += os.read(fd, 65536)
            return seen.replace(b"\a", b"")
        try:
            os.write(fd, b"PS1=; autoload -Uz compinit; compinit -u -D; source ./c.zsh; bindkey -e; print REA''DY\n")
            read_until(b"READY")
            os.write(fd, line.encode() + b"\t")
            return read_until(wanted.encode()).decode()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(fd)

    def test_zsh_completes(self):
        if not shutil.which("zsh"):
            self.skipTest("no zsh")
        self.write("c.zsh", self.page("qconv.zsh"))
        for line, wanted in {"qconv plan Llama-3.3": "qconv plan Llama-3.3-70B-Instruct ",
                             "qconv plan m --vram 3090+2xRTX409": "qconv plan m --vram 3090+2xRTX4090 ",
                             "qconv hardware --as GB2": "qconv hardware --as GB200-186GB ",
                             "qconv from": "qconv from-torch "}.items():
            self.assertIn(wanted, self.typed_into_zsh(line, wanted))

    def test_bash_completes(self):
        os.mkdir(self.path("model"))
        os.mkdir(self.path("vault"))
        self.assertEqual(self.complete_bash("qconv", "--to", ""), SORTED_TYPES)
        self.assertEqual(self.complete_bash("qconv", "--to", "=", ""),
                         SORTED_TYPES)
        self.assertEqual(self.complete_bash("qconv", "--to", "=", "n"), ["nf4"])
        self.assertEqual(self.complete_bash("qconv", "--to", "="),
                         SORTED_TYPES)
        self.assertEqual(self.complete_bash("qconv", "v"), ["validate", "vault", "verify"])
        self.assertEqual(self.complete_bash("qconv", "verify", "v"), ["vault"])
        self.assertEqual(self.complete_bash("qconv", "help", "un"), ["unpack"])
        self.assertEqual(self.complete_bash("qconv", "plan", "v"), ["vault"])
        self.assertEqual(self.complete_bash("qconv", "plan", "Llama-3.3"), ["Llama-3.3-70B-Instruct"])
        self.assertEqual(self.complete_bash("qconv", "plan", "openai/gpt-oss-1"), ["openai/gpt-oss-120b"])
        self.assertEqual(self.complete_bash("qconv", "plan", "m", "--vram", "2xRTX409"), ["2xRTX4090"])
        self.assertEqual(self.complete_bash("qconv", "hardware", "--as", "=", "GB2"), ["GB200-186GB"])
        self.assertEqual(self.complete_bash("qconv", "from"), ["from-torch"])
        self.assertEqual(self.complete_bash("qconv", "from-torch", "v"), ["vault"])
        self.assertEqual(self.complete_bash("qconv", "verify", "--th"), ["--threads"])
        self.assertEqual(self.complete_bash("qconv", "verify", "--bl"), [])
        self.assertEqual(self.complete_bash("qconv", "--bl"), ["--block-size"])
        self.assertEqual(self.complete_bash("qconv", "--keep", "m"), [])
        self.assertEqual(self.complete_bash("qconv", "--recipe", "mod"), ["model"])


if __name__ == "__main__":
    unittest.main()
