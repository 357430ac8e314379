"""What calibrating gains on a model: rows, a curve over tokens, llama.cpp beside it, and
embeddings of MiniLM. For bench_accuracy.py --part calibrated.

The calibration text is qconv's own; for tinystories-656k, a model of children's stories that
nobody would calibrate with anything else, also what it samples with other seeds than the text it is
judged on. kjv-llama's own is the part of the book that it was trained on, which is not here.
"""
import json
import os
import subprocess

import numpy as np

import accuracy_models as am
import llama_numpy as lm

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT = os.path.join(am.ROOT, "convert", "calibrate", "calibration_text.zst")
SENTENCES = os.path.join(HERE, "sentences.txt")
CURVE = (1024, 4096, 16384, 65536)  # and 131072, the default
DEFAULT_TOKENS = 131072
AUTO = (4.5, 5)  # bits per weight
OWN_SEEDS = (101, 102)
OWN = (128, 256)  # windows a seed, tokens a window
SHORT = (256, 128)  # the same number of tokens in windows as long as those that judge
CONTEXT = 256
DAMPINGS = (0.01, 0.1, 0.3, 1)  # the default: 0.1, and more with few tokens
BLOCKS = (64, 128, 256, 512, 1024, 1536)  # outputs that count together; MiniLM's layers have 384 or 1536
DEFAULT_BLOCK = 1024
CAPTURE = """import sys; sys.path.insert(0, sys.argv[1]); import qconv
qconv.capture(*sys.argv[2:5], paragraphs=True, context=128, tokens=16384, output_tokens=0, device="cpu",
              block=int(sys.argv[5]))"""
PEER_WINDOWS = 64  # of the same text, evenly spread
NF4, INT8 = ["--to", "nf4"], ["--to", "int8"]


def write_text(path):
    with open(path, "wb") as f:
        subprocess.run(["zstd", "-dcq", TEXT], stdout=f, check=True)
    return path


def texts(s):
    """[(label, --calibrate's argument)], the model's own first."""
    out = [("default text", "default")]
    if s.model.label.startswith("tinystories"):
        out.insert(0, ("own text", own_text(s, OWN)))
    return out


def own_text(s, shape):
    """What the model samples: shape of OWN or SHORT."""
    path = os.path.join(s.scratch, "own%d.ids" % shape[1])
    if not os.path.exists(path):
        am.write_ids(path, np.concatenate([am.sample(s.model.config, s.model.weights, *shape, seed)
                                           for seed in OWN_SEEDS]))
    return path


def options(text, tokens=None, damping=None):
    out = ["--calibrate", text, "--calibration-context", str(CONTEXT)]
    out += ["--calibration-tokens", str(tokens)] if tokens else []
    return out + (["--damping", str(damping)] if damping else [])


def add(s, name, more):
    """A row on both texts, without the second forward pass: that has judged every other row."""
    row = s.add_qconv(name, more)
    s.rows.remove(row)
    row["options"] = [os.path.basename(o) for o in row["options"]]
    return row


def rows(s, budget):
    base = [add(s, "NF4, double, absmax", NF4 + ["--scale", "absmax"]),
            add(s, "NF4, double, search", NF4 + ["--scale", "search"])]
    for label, text in texts(s):
        base.append(add(s, "NF4, double, calibrated, %s" % label, NF4 + options(text)))
    text = texts(s)[0][1]
    base.append(add(s, "NF4, double, calibrated, one-sided", NF4 + options(text) + ["--sided", "one"]))
    if texts(s)[0][0] == "own text":
        short = NF4 + options(own_text(s, SHORT))
        base.append(add(s, "NF4, double, windows of 128, calibrated", short))
        base.append(add(s, "NF4, double, windows of 128, calibrated, one-sided", short + ["--sided", "one"]))
    base.append(add(s, "NF4, double, block 32, calibrated",
                    NF4 + ["--block-size", "32"] + options(text)))
    base += auto_rows(s, budget, base[0])
    base.append(add(s, "int8 by row, search", INT8 + ["--scale", "search"]))
    base.append(add(s, "int8 by row, calibrated, one-sided", INT8 + options(text) + ["--sided", "one"]))
    base.append(add(s, "int8 by row, calibrated", INT8 + options(text)))
    return base


def auto_rows(s, budget, absmax):
    made, text = [], texts(s)[0][1]
    for bits in AUTO:
        auto = budget(s, absmax, bits)
        made.append(add(s, "auto, %.1f bits, search" % bits, auto + ["--scale", "search"]))
        made.append(add(s, "auto, %.1f bits, calibrated" % bits, auto + options(text)))
    return made


def curve(s, made, key, values, default):
    """KL divergence and loss of NF4 by tokens or by damping, on the model's own text."""
    label, text = texts(s)[0]
    rows = [(v, add(s, "%s %g" % (key, v), NF4 + options(text, **{key: v}))) for v in values]
    if default:
        rows.append((default, next(r for r in made if r["name"].endswith(label))))
    return [{"text": label, key: v, "kl_mean": r["eval"]["kl_mean"],
             "difference": r["eval"]["difference"]} for v, r in sorted(rows, key=lambda r: r[0])]


def windows(s):
    """Windows of the calibration text for the others."""
    label, text = texts(s)[0]
    if label == "own text":
        ids = np.loadtxt(text, dtype=np.int64)
        return ids[np.linspace(0, len(ids) - 1, PEER_WINDOWS).astype(int)]
    return am.held_out(write_text(os.path.join(s.scratch, "default.txt")), PEER_WINDOWS, CONTEXT)


def squares(s):
    """Mean squares of every weight's inputs."""
    found = {}

    def see(names, x):
        for n in names:
            found[n] = (x.reshape(-1, x.shape[-1]).astype(np.float64) ** 2).mean(0)

    lm.logits(s.model.config, s.model.weights, windows(s), see)
    return found


def peers(s, run, versions):
    source, out = (os.path.join(s.scratch, n) for n in ("calibrated_in", "calibrated_out"))
    os.makedirs(source)
    os.makedirs(out)
    np.savez(os.path.join(source, "weights.npz"), **{n: s.model.weights[n] for n in s.names})
    np.savez(os.path.join(source, "squares.npz"), **squares(s))
    with open(os.path.join(source, "config.json"), "w") as f:
        json.dump(s.model.config, f)
    run([s.args.peers, "-B", os.path.join(HERE, "accuracy_peers.py"), source, out])
    with open(os.path.join(out, "peers.json")) as f:
        found = json.load(f)
    versions.update(found["versions"])
    made = []
    for r in found["rows"]:
        if "Q4_K_M" in r["name"] or "IQ4_NL" in r["name"]:
            values = dict(np.load(os.path.join(out, r["file"])))
            made.append(s.add(r["name"], r["program"], r["bits"], values, types=r["types"]))
            s.rows.remove(made[-1])
    return made


def capture(s, run):
    """The moments of MiniLM and the default text, and {block: a file of them}."""
    text, out = (os.path.join(s.scratch, n) for n in ("text.txt", "moments"))
    write_text(text)
    run([s.args.check, "-B", "-c", CAPTURE, os.path.join(am.ROOT, "python"), s.model.folder, text, out,
         max(BLOCKS)])
    moments = lm.read_tensors(out)
    return moments, {b: cut(moments, b, os.path.join(s.scratch, "g%d.safetensors" % b)) for b in BLOCKS}


def distances(s, run, forms):
    """Rows of forms, pairs of a name and options, with the embeddings' mean cosine distance, by the
    interpreter of --check; then the weights of each."""
    made = {}
    for name, more in forms:
        row = s.add_qconv(name, more)
        file = os.path.join(s.scratch, "e%d.npz" % len(os.listdir(s.scratch)))
        np.savez(file, **{n: s.last[n] for n in s.names})
        made[file] = row
    found = json.loads(run([s.args.check, "-B", os.path.join(HERE, "accuracy_embeddings.py"),
                            s.model.folder, SENTENCES, *made]).splitlines()[-1])
    out = [{"name": row["name"], "bits": row["bits"], "rel_mse": row["rel_mse"],
            "distance": d, "distance_error": e}
           for row, (d, e) in zip(made.values(), found)]
    for r in out:
        print("  %-34s distance %.6f +- %.6f" % (r["name"], r["distance"], r["distance_error"]))
    return out, [dict(np.load(file)) for file in made]


def embeddings(s, run, moments):
    two = ["--hessians", moments]
    one = two + ["--sided", "one"]
    return distances(s, run, (("NF4, double, absmax", NF4 + ["--scale", "absmax"]),
                              ("NF4, double, search", NF4 + ["--scale", "search"]),
                              ("NF4, double, calibrated, one-sided", NF4 + one),
                              ("NF4, double, calibrated, two-sided", NF4 + two),
                              ("int8 by row, search", INT8 + ["--scale", "search"]),
                              ("int8 by row, calibrated, one-sided", INT8 + one),
                              ("int8 by row, calibrated, two-sided", INT8 + two)))[0]


def cut(tensors, block, path):
    """The same moments with outputs that count together in blocks only."""
    out = dict(tensors)
    for name, t in tensors.items():
        if name.endswith(".output_moment") and t.shape[-1] > block:
            t, = t  # capture had room for all outputs in one block
            out[name] = np.zeros((-(-len(t) // block), block, block), np.float32)
            for i, part in enumerate(out[name]):
                here = t[i * block:(i + 1) * block, i * block:(i + 1) * block]
                part[:len(here), :len(here)] = here
    am.write_safetensors(path, out)
    return path


def costs(s, moments, values):
    """{outputs: the geometric mean of tr(G E H E^T) over weights with so many}."""
    logs = {}
    for n in s.names:
        module = n[:-len(".weight")]
        if module + ".output_moment" not in moments:
            continue  # the pooler, whose outputs are in no embedding
        same = moments.get(module + ".same_as")
        h = moments[(bytes(same).decode() if same is not None else module) + ".second_moment"]
        g = moments[module + ".output_moment"][0].astype(np.float64)
        e = values[n].astype(np.float64) - s.model.weights[n]
        logs.setdefault(len(e), []).append(np.log(((g @ e) * (e @ h)).sum()))
    return {k: float(np.exp(np.mean(v))) for k, v in logs.items()}


def blocks(s, run, moments, files):
    """What blocks of G lose where a layer has more outputs."""
    forms = [("one-sided", NF4 + ["--hessians", files[DEFAULT_BLOCK], "--sided", "one"])]
    forms += [("blocks of %d" % b, NF4 + ["--hessians", file]) for b, file in files.items()]
    rows, values = distances(s, run, forms)
    for row, v in zip(rows, values):
        row["costs"] = costs(s, moments, v)
    return rows


def measure(s, run, budget, versions, before, part):
    """part peers: what the others make of it, beside what `before` has."""
    if s.model.windows is None:
        if not s.args.check or part == "peers":
            return before
        moments, files = capture(s, run)
        return {"embeddings": embeddings(s, run, files[DEFAULT_BLOCK]),
                "blocks": blocks(s, run, moments, files)}
    out = dict(before or {})
    s.two_texts = True
    if part != "peers":
        out["rows"] = rows(s, budget)
        out["tokens"] = curve(s, out["rows"], "tokens", CURVE, DEFAULT_TOKENS)
        out["damping"] = curve(s, out["rows"], "damping", DAMPINGS, None)
    else:
        add(s, "NF4, double, absmax", NF4 + ["--scale", "absmax"])  # names of the weights
    if s.args.peers:
        out["peers"] = peers(s, run, versions)
    return out
