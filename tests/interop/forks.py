"""Imports what nearly every check imports, then runs each script it is told in a fork of itself.

Reads lines "SCRIPT SCRATCH LOG" and answers each with the script's exit status and the seconds of
processors that it and its programs used. stage.py starts it with the package folders of an
environment: the imports take 6 s of processor time, a fork none.
"""
import contextlib
import gc
import os
import runpy
import sys

with contextlib.suppress(ImportError):  # the script that needs it says so
    import transformers
    import torch  # noqa: F401
    import bitsandbytes  # noqa: F401
    transformers.AutoModelForCausalLM, transformers.BitsAndBytesConfig, transformers.LlamaForCausalLM
gc.freeze()

for line in sys.stdin:
    script, scratch, log = line.split()
    child = os.fork()
    if child == 0:
        break
    _, status, used = os.wait4(child, 0)
    print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
else:
    sys.exit()

os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o644), 1)
os.dup2(1, 2)
os.environ["QCONV_SCRATCH"] = scratch
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
