"""Small real models of libraries that people train with, random weights, on the CPU.

    models_job.py REPORT MODEL

Each model is a function below that is named after it. It knows nothing of graphstash, like a user's
script, and returns its losses and how often the compiler was at work.
"""

import argparse
import gc
import json
import os
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("model")
parser.add_argument("--plug-in", action="store_true", help="compile on the PJRT plug-in")
options = parser.parse_args()

STEPS = 3


def resnet18():
    """torchvision's, on small images: convolutions and batch normalization."""
    from torchvision.models import resnet18

    return on_xla(lambda: resnet18(num_classes=10))


def mobilenet_v3_small():
    """torchvision's: depthwise convolutions, squeeze and excitation, hard swish."""
    from torchvision.models import mobilenet_v3_small

    return on_xla(lambda: mobilenet_v3_small(num_classes=10, dropout=0.0))


def on_xla(make):
    """Trains an image classifier on torch_xla's device."""
    if options.plug_in:
        sys.path.insert(0, str(Path(__file__).parent))
        from pjrt_plugin import LIBRARY, widen_execute_options

        os.environ |= {"PJRT_DEVICE": "LIBRARY", "PJRT_LIBRARY_PATH": str(LIBRARY)}
        widen_execute_options()
    import torch
    import torch_xla
    import torch_xla.debug.metrics as xla_metrics

    gc.disable()  # which tensors are alive decides what a lazy step is
    torch.manual_seed(0)
    device = torch_xla.device()
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(STEPS, 4, 3, 32, 32), torch.randint(10, (STEPS, 4))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scores = model(images[step].to(device))
        loss = torch.nn.functional.cross_entropy(scores, labels[step].to(device))
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    compiles = xla_metrics.metric_data("CompileTime")
    return losses, compiles[0] if compiles else 0


def vit():
    """Hugging Face's Vision Transformer under torch.compile."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=32, patch_size=8, num_labels=10, **_sizes())
    inputs = {
        "pixel_values": lambda: torch.randn(4, 3, 32, 32),
        "labels": lambda: torch.randint(10, (4,)),
    }
    return in_inductor(lambda: ViTForImageClassification(config), inputs)


def gpt2():
    """Hugging Face's GPT-2 under torch.compile."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return in_inductor(lambda: GPT2LMHeadModel(config), _tokens())


def llama():
    """Hugging Face's Llama under torch.compile: rotary embeddings, RMS norm, grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, max_position_embeddings=32, num_key_value_heads=1, **_sizes()
    )
    return in_inductor(lambda: LlamaForCausalLM(config), _tokens())


def _sizes():
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }


def _tokens():
    import torch

    return {name: lambda: torch.arange(64).reshape(4, 16) for name in ("input_ids", "labels")}


def in_inductor(make, inputs):
    """Trains a model whose output has its loss; the work of g++ is counted outside."""
    import torch
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = make().eval()  # no dropout: it would draw other numbers than the compiled graph
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = compiled(**{name: new() for name, new in inputs.items()}).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    options.counters = {
        kind: dict(counters[kind]) for kind in ("inductor", "aot_autograd") if counters[kind]
    }
    return losses, counters["inductor"]["fxgraph_cache_miss"]


def flax_cnn():
    """Flax's linen with an Optax schedule: a convolutional classifier with batch statistics."""
    with_jax()
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (8, 16):
                x = nn.Conv(width, (3, 3))(x)
                x = nn.BatchNorm(use_running_average=False)(x)
                x = nn.avg_pool(nn.gelu(x), (2, 2), (2, 2))
            return nn.Dense(10)(x.reshape(len(x), -1))

    model = Classifier()
    images = jax.random.normal(jax.random.key(0), (4, 16, 16, 3))
    labels = jnp.arange(4)
    variables = model.init(jax.random.key(1), images)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 1, 10)),
    )

    def loss_of(parameters, statistics):
        scores, changed = model.apply(
            {"params": parameters, "batch_stats": statistics}, images, mutable="batch_stats"
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()
        return loss, changed["batch_stats"]

    @jax.jit
    def step(parameters, statistics, state):
        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            parameters, statistics
        )
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), statistics, state, loss

    parameters, statistics = variables["params"], variables["batch_stats"]
    state, losses = tx.init(parameters), []
    for _ in range(STEPS):
        parameters, statistics, state, loss = step(parameters, statistics, state)
        losses.append(float(loss))
    return losses, len(compiled_by_jax)


def equinox_transformer():
    """Equinox: a module that is a tree, its filtered transformations, and attention."""
    with_jax()
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(num_heads=2, query_size=16, key=one)
            self.norm = eqx.nn.LayerNorm(16)
            self.mlp = eqx.nn.MLP(16, 1, 32, depth=2, activation=jax.nn.silu, key=two)

        def __call__(self, x):
            x = x + self.attention(x, x, x)
            return jax.vmap(lambda row: self.mlp(self.norm(row)))(x).mean()

    model = Block(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 4, 16))
    y = x.sum((1, 2))
    tx = optax.adam(1e-3)

    @eqx.filter_jit
    def step(model, state):
        loss, gradients = eqx.filter_value_and_grad(
            lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2)
        )(model)
        updates, state = tx.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    state, losses = tx.init(eqx.filter(model, eqx.is_array)), []
    for _ in range(STEPS):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    return losses, len(compiled_by_jax)


compiled_by_jax = []


def with_jax():
    """Counts what JAX's backend compiles; on the plug-in, a hit looks to JAX like a compilation."""
    if options.plug_in:
        import xla_plugins.xla_cpu_pjrt as plugin_package

        library = Path(plugin_package.__file__).with_name("xla_cpu_pjrt.so")
        os.environ |= {
            "PJRT_NAMES_AND_LIBRARY_PATHS": f"other:{library}",
            "JAX_PLATFORMS": "other",
        }
    from jax._src import compiler

    names = ("backend_compile_and_load", "backend_compile")
    name = next(name for name in names if hasattr(compiler, name))
    original = getattr(compiler, name)

    def counting(backend, module, *arguments, **named):
        compiled_by_jax.append(str(module.operation.attributes["sym_name"]))
        return original(backend, module, *arguments, **named)

    setattr(compiler, name, counting)


options.counters = {}
losses, compiles = globals()[options.model]()
report = {"losses": losses, "compiles": compiles, "counters": options.counters}
options.report.write_text(json.dumps(report))
