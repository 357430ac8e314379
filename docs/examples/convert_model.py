"""Converts a model to what fits: asks for the plan, shows it, converts, and proves that the result is that model.

    python docs/examples/convert_model.py model/ out/ 2x40GB
"""
import argparse
import sys

import qconv


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder of a Hugging Face checkpoint")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("vram", help="the devices that it is to run on, as in 2x40GB or 3090+cpu:64GB")
    parser.add_argument("--context", type=int, help="tokens of context to keep room for")
    a = parser.parse_args()
    try:
        plan = qconv.plan(a.model, to="auto", vram=a.vram, context=a.context)
        if not plan.fits:
            sys.exit("it does not fit: %s lacks %.2f GB\n%s" % (
                plan.short_device, plan.short_by_bytes / 1e9, "\n".join(plan.suggestions)))
        for device in plan.devices:
            print("%-8s %6.2f GB of weights in %d layers" % (device.name, device.weight_bytes / 1e9, device.layers))
        out = qconv.convert(a.model, a.out, to="auto", vram=a.vram, context=a.context, progress=True)
        qconv.verify(a.out, against=a.model)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues")
    except qconv.Error as error:
        sys.exit("%s: %s" % (type(error).__name__, error))
    print("%.2f bits a weight, %s" % (out.bits_per_weight, out.loads.form))


if __name__ == "__main__":
    main()
