"""The zoo's models with their intermediates returned by hand, as a person would: the oracle of what is captured.

Each function is a model's forward pass written again, `(model, state, example, key) -> (out, {path: value})`: for a
scan the values are among its outputs, for a switch each branch returns those of all branches, zeros for those which did
not run, and a while loop carries the last ones. Nothing here knows how capturing works.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from tests.zoo import ensemble, fixed_point, gpt, gru, mlp, moe, resnet, unet, vae, vit

Captured = tuple[Any, dict[str, Any]]


def _layers(net: eqx.nn.MLP, x: jax.Array, activation: Any = jax.nn.relu) -> list[jax.Array]:
    """What each layer of a multilayer perceptron returns, before its activation; the last is the output."""
    outputs = [net.layers[0](x)]
    for layer in net.layers[1:]:
        outputs.append(layer(activation(outputs[-1])))  # it reads what it appends
    return outputs


def _kept(state: eqx.nn.State) -> eqx.nn.State:
    """A copy, since `State.set` makes the one that it is called on unusable."""
    return jax.tree.map(lambda leaf: leaf, state)


def classifier(model: mlp.Classifier, state: Any, x: jax.Array, key: jax.Array) -> Captured:
    first, second = jax.random.split(key)
    pixels = model.dropout(x.reshape(-1), key=first)
    outputs = _layers(model.body, pixels)
    body = jax.nn.relu(outputs[-1])
    features = model.dropout(body, key=second)
    out = model.head(features)
    return out, {"body.layers[1]": outputs[1], "body": body, "dropout[0]": pixels, "dropout[1]": features, "head": out}


def residual(model: resnet.ResNet, state: eqx.nn.State, x: jax.Array, key: jax.Array) -> Captured:
    features, state = model.norm(model.stem(x[None]), state)
    features = jax.nn.relu(features)
    values = {}
    for index, block in enumerate(model.blocks):
        conv1 = block.conv1(features)
        y, state = block.norm1(conv1, state)
        norm1 = y, _kept(state)
        y, state = block.norm2(block.conv2(jax.nn.relu(y)), state)
        shortcut = block.shortcut(features)
        features = jax.nn.relu(y + shortcut)
        values |= {f"blocks[{index}].conv1": conv1, f"blocks[{index}].shortcut": shortcut}
        values |= {f"blocks[{index}].norm1": norm1, f"blocks[{index}]": (features, _kept(state))}
    return (model.head(features.mean(axis=(1, 2))), state), values


def vision_transformer(model: vit.VisionTransformer, state: Any, x: jax.Array, key: jax.Array) -> Captured:
    embedded = jax.vmap(model.embedding)(model.patches(x))
    tokens = jnp.concatenate([model.class_token[None], embedded]) + model.positions
    values = {"embedding": embedded}
    for index, block in enumerate(model.blocks):
        y = jax.vmap(block.norm1)(tokens)
        attention = block.attention(y, y, y)
        tokens = tokens + attention
        outputs = jax.vmap(lambda token, net=block.mlp: _layers(net, token, jax.nn.gelu))(jax.vmap(block.norm2)(tokens))
        tokens = tokens + outputs[-1]
        values |= {f"blocks[{index}].attention": attention, f"blocks[{index}].mlp.layers[0]": outputs[0]}
        values[f"blocks[{index}]"] = tokens
    values["norm"] = model.norm(tokens[0])
    return model.head(values["norm"]), values


def language_model(model: gpt.GPT, state: Any, tokens: jax.Array, key: jax.Array) -> Captured:
    stacked, shared = eqx.partition(model.blocks, eqx.is_array)
    before = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))

    @eqx.filter_checkpoint
    def block_of(block, x, key):
        first, second = jax.random.split(key)
        y = jax.vmap(block.norm1)(x)
        attention = block.attention(y, y, y, mask=before)
        x = x + block.dropout(attention, key=first)
        computed = jax.vmap(block.mlp)(jax.vmap(block.norm2)(x))
        dropped = block.dropout(computed, key=second)
        return x + dropped, {"blocks.attention": attention, "blocks.mlp": computed, "blocks.dropout[1]": dropped}

    def layer(x, of_layer):
        arrays, key = of_layer
        x, values = block_of(eqx.combine(arrays, shared), x, key)
        return x, {**values, "blocks": x}

    x = jax.vmap(model.embedding)(tokens) + model.positions[: len(tokens)]
    x, values = jax.lax.scan(layer, x, (stacked, jax.random.split(key, model.depth)))
    values["norm"] = jax.vmap(model.norm)(x)
    return jax.vmap(model.head)(values["norm"]), values


def row_reader(model: gru.RowReader, state: Any, rows: jax.Array, key: jax.Array) -> Captured:
    def read(hidden, row):
        encoded = model.encoder(row)
        hidden = model.cell(jax.nn.relu(encoded), hidden)
        return hidden, {"encoder": encoded, "cell": hidden}

    hidden, values = jax.lax.scan(read, jnp.zeros(model.hidden), rows)
    out = model.head(hidden)
    return out, {**values, "cell[3]": values["cell"][3], "head": out}  # one call in a scan: [3] is the fourth row


def u_net(model: unet.UNet, state: Any, x: jax.Array, key: jax.Array) -> Captured:
    features, skips, values = x[None], [], {}
    for index, down in enumerate(model.downs):
        normed = down.norm(down.conv(features))
        skips.append(jax.nn.silu(normed))
        features = model.pool(skips[-1])
        values |= {f"downs[{index}].norm": normed, f"downs[{index}]": skips[-1], f"pool[{index}]": features}
    features = values["middle"] = model.middle(features)
    for index in reversed(range(len(skips))):
        lifted = model.lifts[index](features)
        features = model.ups[index](jnp.concatenate([skips[index], lifted]))
        values |= {f"lifts[{index}]": lifted, f"ups[{index}]": features}
    return model.head(features)[0], values


def mixture_of_experts(model: moe.MixtureClassifier, state: Any, x: jax.Array, key: jax.Array) -> Captured:
    features = jax.nn.relu(model.embedding(x.reshape(-1)))
    router, experts = model.mixture.router, model.mixture.experts
    scores = router(features)
    probabilities = jax.nn.softmax(scores)
    chosen = jnp.argmax(probabilities)

    def branch(index):
        def run(x):
            first, out = _layers(experts[index], x)
            values = {}
            for other in range(len(experts)):
                ran = other == index
                values[f"mixture.experts[{other}].layers[0]"] = first if ran else jnp.zeros_like(first)
                values[f"mixture.experts[{other}]"] = out if ran else jnp.zeros_like(out)
            return out, values

        return run

    out, values = jax.lax.switch(chosen, [branch(index) for index in range(len(experts))], features)
    mixed = probabilities[chosen] * out
    return model.head(features + mixed), {**values, "mixture.router": scores, "mixture": mixed}


def autoencoder(model: vae.VariationalAutoencoder, state: Any, x: jax.Array, key: jax.Array) -> Captured:
    features = model.encoder(x.reshape(-1))
    mean, log_variance = model.mean(features), model.log_variance(features)
    code = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
    first, decoded = _layers(model.decoder, code)
    values = {"encoder": features, "mean": mean, "decoder.layers[0]": first, "decoder": decoded}
    return vae.Encoded(decoded.reshape(x.shape), mean, log_variance), values


def equilibrium(model: fixed_point.Equilibrium, state: Any, x: jax.Array, key: jax.Array) -> Captured:
    x = model.embedding(x.reshape(-1))
    cell, injected = fixed_point.constant((model.cell, x))

    def iterate(carry):
        z, _, steps, _ = carry
        product = cell.weights(z)
        new = jnp.tanh(product + injected)
        return new, jnp.abs(new - z).max(), steps + 1, (product, new)

    def goes_on(carry):
        _, change, steps, _ = carry
        return (change > model.tolerance) & (steps < model.most)

    start = jnp.zeros_like(x)
    z, _, _, last = jax.lax.while_loop(goes_on, iterate, (start, jnp.inf, 0, (start, start)))
    product = model.cell.weights(z)
    after = jnp.tanh(product + x)
    values = {"cell.weights[0]": last[0], "cell[0]": last[1], "cell.weights[1]": product, "cell[1]": after}
    return model.head(after), {"embedding": x, **values}


def members(model: ensemble.Ensemble, state: Any, x: jax.Array, key: jax.Array) -> Captured:
    x = x.reshape(-1)
    first, logits = eqx.filter_vmap(_layers, in_axes=(eqx.if_array(0), None))(model.members, x)
    out = jax.nn.log_softmax(logits).mean(axis=0)
    return out, {"members.layers[0]": first, "members": logits}
