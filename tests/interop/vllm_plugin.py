"""How vLLM's CPU workers are started with a plug-in of ours. Standard library only."""
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}


def install(script, folder):
    """Makes a script a package that vLLM finds on PYTHONPATH. It calls its register()."""
    name = "qconv_" + Path(script).stem
    shutil.copy(script, folder / f"{name}.py")
    shutil.copy(__file__, folder)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")


def install_qconv(folder):
    """Makes the package of this source tree, with its plug-in, one that vLLM finds on PYTHONPATH."""
    info = folder / "qconv-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qconv\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nqconv = qconv.vllm:register\n")
    os.symlink(ROOT / "python" / "qconv", folder / "qconv")


def settings(folder, workers):
    """The variables of the environment for a process that finds the package and starts workers."""
    paths = [str(folder)] + [p for p in [os.environ.get("PYTHONPATH")] if p]
    library = Path(os.environ.get("QCONV_BUILD", ROOT / "build"), "libqconv.so")
    cores = "|".join(str(i % os.cpu_count()) for i in range(workers))
    return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(paths), "QCONV_LIBRARY": str(library),
            "VLLM_CPU_OMP_THREADS_BIND": cores}
