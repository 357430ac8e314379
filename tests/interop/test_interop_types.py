"""The model types of the installed transformers that model_types.txt does not have: each is named, with what qconv makes
of a tiny model of it. A new type is no failure; `test_interop_types.py --record` writes the list anew when they were
looked at. (What transformers renames, splits and joins is compared with its conversion_mapping.py in
test_interop_load.Divided.)
"""
import shutil
import sys
import textwrap
import unittest
import warnings
from pathlib import Path

import interop_support as s
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import test_interop_zoo as zoo
import tiny_models

import qconv

RECORD = Path(__file__).with_name("model_types.txt")


def recorded():
    return set(RECORD.read_text().split())


def becomes(name):
    """What qconv makes of a type, in a line."""
    folder, out = (s.SCRATCH / "types" / kind / name for kind in ("source", "nf4"))
    try:
        kind = tiny_models.save(name, folder)
    except Exception as e:  # whatever a class of transformers raises for sizes that it was not made for
        return f"no tiny model of it can be made ({type(e).__name__}: {[*str(e).splitlines(), ''][0]:.80})"
    try:
        with warnings.catch_warnings(action="ignore"):
            made = qconv.convert(folder, out, to="nf4", compress="none")
            known = qconv.dry_run(folder, to="nf4").known_type
            said = f"{'known' if known else 'not known'}; {made.schemes['nf4'].tensors} weights become NF4, "
            qconv.load(out)
            _, trouble = zoo.load(kind, out, dtype=torch.bfloat16)
        return said + "and qconv.load takes it; from_pretrained " + (f"says {trouble}" if trouble else "too")
    except qconv.Error as e:
        return f"{type(e).__name__}: {e}"
    except Exception as e:  # of from_pretrained
        return said + f"and qconv.load takes it; from_pretrained: {type(e).__name__}: {[*str(e).splitlines(), ''][0]:.120}"
    finally:
        for made in (folder, out):
            shutil.rmtree(made, ignore_errors=True)


def new(known):
    """{type: what qconv makes of it} of those that are not known."""
    return {name: becomes(name) for name in sorted(set(CONFIG_MAPPING_NAMES) - known)}


class Types(unittest.TestCase):
    def test_new_types(self):
        found = new(recorded())
        s.note(f"{len(found)} of the {len(CONFIG_MAPPING_NAMES)} model types of transformers {transformers.__version__} are "
               f"not in {RECORD.name}")
        for name, what in found.items():
            s.note(f"new type {name}: {what}")

    def test_what_is_said(self):
        """Of types that were looked at, as if they were new."""
        found = new(set(CONFIG_MAPPING_NAMES) - {"llama", "qwen2", "timm_wrapper"})
        self.assertRegex(found["llama"], "^known; 14 weights become NF4, and qconv.load takes it; from_pretrained too$")
        self.assertEqual(found["qwen2"], found["llama"])
        self.assertRegex(found["timm_wrapper"], "^no tiny model of it can be made")
        self.assertTrue(recorded() >= {"llama", "bert"})


if __name__ == "__main__":
    if "--record" in sys.argv:
        names = " ".join(sorted(recorded() | set(CONFIG_MAPPING_NAMES)))
        RECORD.write_text("\n".join(textwrap.wrap(names, 118, break_on_hyphens=False)) + "\n")
    else:
        s.main()
