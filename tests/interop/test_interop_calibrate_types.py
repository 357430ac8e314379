"""qconv.calibrate with experts of all forms, heads, images and chosen schemes; and types of transformers by the dozen.

usage: test_interop_calibrate_types.py                    the tests; QCONV_ALL_TYPES=1: with all types
       test_interop_calibrate_types.py --table FILE       all types, and FILE.json with what was measured
"""
import json
import os
import subprocess
import sys
import unittest
import warnings
from pathlib import Path

import interop_support
import torch
from test_interop_calibrate import Folder, measured
from tiny_models import MAJOR, STREAMED
from torch import nn

from qconv._calibrate_experts import Call, Found, Intercepted, Sent
from qconv._values import Values
from qconv.stream import Catch


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Mixture(nn.Module):
    """Each token goes to one of three experts. scaled: an expert gets all tokens, times a factor that is zero for most."""

    def __init__(self, scaled):
        super().__init__()
        self.scaled, self.router = scaled, nn.Linear(8, 3)
        self.experts = nn.ModuleList([Expert() for _ in range(3)])

    def forward(self, x):
        x = x.reshape(-1, 8)
        best, numbers = self.router(x).max(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if self.scaled:
                out += expert(x * (best.sigmoid() * (numbers == e))[:, None])
            elif (numbers == e).any():
                out[numbers == e] = expert(x[numbers == e]) * best[numbers == e, None]
        return out


class Experts(unittest.TestCase):
    def check(self, scaled):
        """z's inputs of an expert are those of the tokens that x sends to it."""
        torch.manual_seed(3)
        model = nn.Module()
        model.layer = nn.Module()
        model.layer.mlp = mixture = Mixture(scaled)
        x, z = torch.randn(4, 5, 8), torch.randn(4, 5, 8)
        x[3, 4] = x[1, 2]  # two tokens with the same states
        z[3, 4] = z[1, 2]
        mask = torch.arange(20) != 7
        found = Found(model, "layer", set())
        with found.watching():
            mixture(x)
        members = ["layer.mlp.experts.%d" % e for e in range(3)]
        self.assertEqual(found.members("layer.mlp"), members)
        calls = {}

        def enter(path, own, args, kwargs):
            calls.setdefault(path, []).append(Call(own, (args, kwargs), x.reshape(-1, 8)))
            return own(*args, **kwargs)
        with Intercepted(model, members, enter):
            mixture(x)
        sent = Sent(mixture.forward, ((z,), {}), ((x,), {}), mask, calls, {id(p): n for n, p in model.named_parameters()}, {})
        best, numbers = mixture.router(x.reshape(-1, 8)).max(1)
        for e, member in enumerate(members):
            tokens = ((numbers == e) & mask).nonzero()[:, 0]
            factors = best.sigmoid()[tokens, None] if scaled else 1
            (ours, theirs, counted), = sent.inputs((member, None), [member + ".down.weight"], True)
            up = mixture.experts[e].up
            for got, states in ((ours, x), (theirs, z)):
                expected = up(states.reshape(-1, 8)[tokens] * factors).relu()
                self.assertLess((got[counted] - expected).abs().max().item(), 1e-5)

    def test_lists_whose_members_get_copies(self):
        self.check(False)

    def test_lists_whose_members_get_scaled_states(self):
        self.check(True)

    def test_lists_that_are_no_experts(self):
        model = nn.Module()
        model.layer = nn.Module()
        model.layer.mlp = nn.Sequential(nn.Linear(8, 8))
        model.layer.mlp.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        model.layer.mlp.forward = lambda x: model.layer.mlp.parts[1](model.layer.mlp.parts[0](x))
        found = Found(model, "layer", set())
        with found.watching(), torch.no_grad(), Catch({}):
            model.layer.mlp(torch.randn(6, 8))
        self.assertEqual(found.owner_of, {})

    def test_a_stack_has_the_values_of_separate_experts(self):
        with Folder("qwen3_moe") as folder:
            folder.calibrate("stacked", experts="stacked", no_double_quant=True)
            folder.calibrate("separate", no_double_quant=True)
            with Values(folder.out("stacked"), experts="separate") as one, Values(folder.out("separate")) as other:
                self.assertEqual(one.names, other.names)
                for name in other.names:
                    self.assertTrue(torch.equal(one.read(name), other.read(name)), name)


if __name__ == "__main__":
    interop_support.main()
