"""What calibrating gains on a model: rows, a curve over tokens, llama.cpp beside it, and
embeddings of MiniLM. For bench_accuracy.py --part calibrated.

The calibration text is qconv's own; for tinystories-656k, a model of children's stories that
nobody would calibrate with anything else, also what it samples with other seeds than the text it is
judged on. kjv-llama's own is the part of the book that it was trained on, which is not here.
"""
import json
import lzma
import os

import numpy as np

import accuracy_models as am
import llama_numpy as lm

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT = os.path.join(am.ROOT, "python", "qconv", "calibration_text.xz")
SENTENCES = os.path.join(HERE, "sentences.txt")
CURVE = (1024, 4096, 16384, 65536)  # and 131072, the default
DEFAULT_TOKENS = 131072
AUTO = (4.5, 5)  # bits per weight
OWN_SEEDS = (101, 102)
OWN = (128, 256)  # windows a seed, tokens a window
SHORT = (256, 128)  # the same number of tokens in windows as long as those that judge
CONTEXT = 256
DAMPINGS = (0.01, 0.1, 0.3, 1)  # the default: 0.1, and more with few tokens
PARAGRAPHS = ["--calibrate", "default", "--calibration-context", "128", "--calibration-tokens", "16384"]
PEER_WINDOWS = 64  # of the same text, evenly spread
NF4, INT8 = ["--to", "nf4"], ["--to", "int8"]


def write_text(path):
    with open(path, "wb") as f, lzma.open(TEXT) as packed:
        f.write(packed.read())
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


def distances(s, run, forms):
    """Rows of forms, pairs of a name and options, with the embeddings' mean cosine distance, by the
    interpreter of --check."""
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
    return out


def embeddings(s, run):
    one = PARAGRAPHS + ["--sided", "one"]
    return distances(s, run, (("NF4, double, absmax", NF4 + ["--scale", "absmax"]),
                              ("NF4, double, search", NF4 + ["--scale", "search"]),
                              ("NF4, double, calibrated, one-sided", NF4 + one),
                              ("NF4, double, calibrated, two-sided", NF4 + PARAGRAPHS),
                              ("int8 by row, search", INT8 + ["--scale", "search"]),
                              ("int8 by row, calibrated, one-sided", INT8 + one),
                              ("int8 by row, calibrated, two-sided", INT8 + PARAGRAPHS)))


def measure(s, run, budget, versions, before, part):
    """part peers: what the others make of it, beside what `before` has."""
    if s.model.windows is None:
        if not s.args.check or part == "peers":
            return before
        return dict(before or {}, embeddings=embeddings(s, run))
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
