"""The Python package as people get it: `pip install .` makes a wheel, auditwheel finds that it needs the C
library only, and in a new virtual environment without compilers five lines of Python convert, verify and
inspect the bundled model. Its type hints pass mypy --strict.
"""
import os
import subprocess
import sys
import tempfile
import textwrap
import unittest
import zipfile
from pathlib import Path

import interop_support as s

MODEL = s.MODELS["kjv-llama"]
MAX_BYTES = 15_000_000  # without kernels for GPUs
WITH_TORCH = {"_calibrate_bundled.py", "_calibrate_door.py", "_calibrate_experts.py",
              "_calibrate_judge.py", "_calibrate_layers.py", "_calibrate_moments.py", "_calibrate_plan.py",
              "_calibrate_run.py", "_experts.py", "_cut.py", "_gpu.py", "_library.py", "_loading.py", "_shards.py", "_stored.py",
              "_stream_catch.py", "_stream_layers.py", "_stream_loader.py", "_text.py", "_values.py", "_weights.py",
              "ops.py", "stream.py", "torch.py"}
TOOLS = next((Path(p) for p in sys.path if (Path(p) / "scikit_build_core").is_dir()), None)


def run(*command, **more):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **more)
    if done.returncode:
        raise AssertionError(f"{command}: exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


@unittest.skipIf(TOOLS is None, "scikit-build-core is not there")
class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dir = Path(tempfile.mkdtemp(dir=s.SCRATCH))
        env = dict(os.environ, PATH=f"{TOOLS / 'bin'}:{os.environ['PATH']}", PYTHONPATH=str(TOOLS))
        run(sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation",
            "--no-deps", "--no-index", "-w", cls.dir / "built", s.ROOT, env=env)
        built = next((cls.dir / "built").iterdir())
        assert built.name.endswith("-py3-none-linux_x86_64.whl"), built
        run(sys.executable, "-m", "auditwheel", "repair", "-w", cls.dir / "repaired", built, env=env)
        cls.wheel = next((cls.dir / "repaired").iterdir())
        # No compiler, no cmake and no tools in what follows, only what the wheel brings.
        run(sys.executable, "-m", "venv", cls.dir / "venv")
        cls.bin = cls.dir / "venv" / "bin"
        cls.env = {"PATH": str(cls.bin), "HOME": str(cls.dir)}
        run(cls.bin / "pip", "install", "-q", "--disable-pip-version-check", "--no-index", cls.wheel, env=cls.env)

    def python(self, text):
        return run(self.bin / "python", "-I", "-W", "error", "-c", textwrap.dedent(text), cwd=self.dir, env=self.env)

    def test_file(self):
        size = self.wheel.stat().st_size
        s.note(f"{self.wheel.name}: {size / 1e6:.2f} MB")
        self.assertLess(size, MAX_BYTES)
        self.assertRegex(self.wheel.name, r"^qconv-[\d.]+-py3-none-manylinux_2_\d+_x86_64\.whl$")
        names = zipfile.ZipFile(self.wheel).namelist()
        self.assertLessEqual({"qconv/bin/qconv", "qconv/lib/libqconv.so", "qconv/py.typed"}, set(names))
        # auditwheel would have put any other library beside them.
        self.assertEqual([n for n in names if ".so" in n], ["qconv/lib/libqconv.so"])

    def test_five_lines(self):
        printed = self.python(f"""
            import qconv
            out = qconv.convert({str(MODEL)!r}, "out", to="nf4", vram="1GB+1GB")
            qconv.verify("out", against={str(MODEL)!r})
            print(out.to, len(qconv.inspect("out").tensors), qconv.plan("Llama-3.3-70B-Instruct", vram="2x40GB").fits)
            """)
        self.assertEqual(printed, "nf4 179 True\n")
        s.run(s.QCONV, "--to", "nf4", "--vram", "1GB+1GB", MODEL, self.dir / "same")
        shards = sorted(p.name for p in (self.dir / "same").glob("*.zst"))
        self.assertEqual(len(shards), 2)
        for name in shards:
            self.assertEqual((self.dir / "out" / name).read_bytes(), (self.dir / "same" / name).read_bytes())

    def test_load_and_generate(self):
        """Five lines more, beside torch and transformers of the environment. The shards are compressed."""
        packages = [str(TOOLS.parent / "transformers5"), *(p for p in sys.path if p.endswith("site-packages"))]
        printed = self.python(f"""
            import sys
            sys.path += {packages!r}
            import warnings
            warnings.simplefilter("ignore")
            import qconv, transformers
            qconv.convert({str(MODEL)!r}, "loaded", to="nf4")
            model = qconv.load("loaded")
            tokenizer = transformers.AutoTokenizer.from_pretrained("loaded")
            ids = tokenizer("In the beginning", return_tensors="pt").input_ids
            said = model.generate(ids, max_new_tokens=12, do_sample=False)
            print(type(model.model.layers[0].mlp.up_proj).__module__, said.shape[1] - ids.shape[1])
            print(tokenizer.decode(said[0]).replace("\\n", " "))
            """)
        module, text = printed.splitlines()[-2:]
        self.assertEqual(module, "qconv.torch 12")
        self.assertIn("In the beginning", text)
        s.note(text)

    def test_program(self):
        version = s.run(s.QCONV, "--version").decode()
        self.assertEqual(run(self.bin / "qconv", "--version", env=self.env), version)
        self.assertEqual(run(self.bin / "python", "-m", "qconv", "--version", env=self.env), version)

    def test_library_loads(self):
        self.python("""
            import ctypes, os, qconv
            library = ctypes.CDLL(os.path.join(os.path.dirname(qconv.__file__), "lib", "libqconv.so"))
            library.qc_status_exit_code.restype = ctypes.c_int
            assert library.qc_status_exit_code(5) == 2
            """)

    def test_type_hints(self):
        env = dict(self.env, PYTHONPATH=str(TOOLS), MYPYPATH=str(s.ROOT / "python"))
        mypy = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", self.dir / "mypy"]
        # What works without torch, which is what people call. torch, transformers and vLLM are not here.
        run(*mypy, "--ignore-missing-imports", "--allow-untyped-calls",
            *(f for f in (s.ROOT / "python" / "qconv").glob("*.py") if f.name not in WITH_TORCH), env=env)
        user = self.dir / "user.py"
        user.write_text("import qconv\nn: int = qconv.convert('m', 'o', to='nf4', keep=['*.a']).bytes_out\n"
                        "s: float = qconv.verify('o').seconds\nrows = qconv.verify('o', against='m').rows\n")
        run(*mypy, user, env=env)
        user.write_text("import qconv\nqconv.convert('m', 'o', tto='nf4')\n")
        with self.assertRaisesRegex(AssertionError, "tto"):
            run(*mypy, user, env=env)


if __name__ == "__main__":
    s.main()
