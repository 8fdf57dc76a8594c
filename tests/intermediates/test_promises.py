"""What intermediates lean on and nobody promises: when a release of JAX or Equinox changes it, a test says what."""

# ruff: noqa: PLW0108 - a module or a jitted function is traced in another way than a lambda that calls it

import inspect
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from equikd.intermediates import _jaxpr, _mark

X = jnp.ones(3)


def equation(function, *args, kind=None):
    """The only equation of a function, or the only one of a kind."""
    equations = jax.make_jaxpr(function)(*args).eqns
    found = [one for one in equations if kind is None or _jaxpr.kind(one) == kind]
    names = [one.primitive.name for one in equations]
    assert len(found) == 1, f"JAX traces {function} to {names}; a {kind} was expected (_jaxpr.kind)"
    return found[0]


def custom_jvp(x):
    function = jax.custom_jvp(jnp.sin)
    function.defjvp(lambda primals, tangents: (jnp.sin(*primals), tangents[0]))
    return function(x)


def custom_vjp(x):
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (jnp.sin(x), None), lambda _, cotangent: (cotangent,))
    return function(x)


def scan(x):
    return jax.lax.scan(lambda c, y: (c + y * x[0], c), x[0], x, reverse=True, unroll=2)


EQUATIONS = {
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "scan": scan,
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: 2 * c, x),
    "cond": lambda x: jax.lax.switch(x[0].astype(int), [jnp.sin, jnp.cos, jnp.tan], x),
    "checkpoint": lambda x: jax.checkpoint(jnp.sin)(x),
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "custom_vmap_call": lambda x: jax.custom_batching.sequential_vmap(jnp.sin)(x),
}
PARAMETERS = {
    "jit": {"jaxpr", "name", "in_shardings", "out_shardings"},
    "scan": {"jaxpr", "length", "reverse", "unroll"},
    "while": {"cond_jaxpr", "body_jaxpr"},
    "cond": {"branches"},
    "checkpoint": {"jaxpr", "policy", "prevent_cse", "differentiated"},
    "custom_jvp_call": {"call_jaxpr"},
    "custom_vjp_call": {"call_jaxpr"},
    "custom_vmap_call": {"call"},
}


@pytest.mark.parametrize("kind", EQUATIONS)
def test_equations_have_the_parameters_that_rules_read(kind):
    eqn = equation(EQUATIONS[kind], X, kind=kind)
    missing = PARAMETERS[kind] - set(_jaxpr.params_of(eqn))
    assert not missing, (
        f"a {kind} equation ({eqn.primitive.name}) lost {missing}; it has {sorted(eqn.params)} (_rules.py)"
    )


@pytest.mark.parametrize("kind", EQUATIONS)
def test_equations_hold_jaxprs_in_their_parameters(kind):
    held = list(_jaxpr.inner(equation(EQUATIONS[kind], X, kind=kind)))
    expected = {"while": 2, "cond": 3}.get(kind, 1)
    assert len(held) == expected, f"{kind} holds {len(held)} jaxprs, not {expected} (_jaxpr.inner)"
    for jaxpr in held:
        assert all(hasattr(jaxpr, name) for name in ("eqns", "invars", "outvars", "constvars")), (
            "Jaxpr lost an attribute"
        )


@pytest.mark.parametrize("kind", EQUATIONS)
def test_equations_can_be_bound_as_they_stand(kind, same):
    eqn = equation(EQUATIONS[kind], X, kind=kind)
    variables = [jnp.ones(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    try:
        outs = jax.make_jaxpr(lambda *values: _jaxpr.bound(eqn, list(values)))(*variables)
    except Exception as error:
        pytest.fail(f"a {kind} equation cannot be bound again (_jaxpr.bound, get_bind_params): {error!r}")
    shapes = [(aval.shape, aval.dtype) for aval in outs.out_avals]
    assert shapes == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]


def test_primitives_are_made_and_have_their_tables():
    from jax.extend.core import Literal, Primitive
    from jax.interpreters import ad, batching, mlir

    broken = "a new primitive can no longer be made as _mark.py does: "
    needed = ("def_impl", "def_abstract_eval", "bind", "multiple_results", "get_bind_params", "name")
    assert all(hasattr(Primitive("test"), name) for name in needed), broken + f"Primitive has not all of {needed}"
    for table in (ad.primitive_jvps, ad.primitive_transposes, batching.primitive_batchers):
        assert hasattr(table, "__setitem__"), broken + "a table of jax.interpreters takes no rules"
    assert callable(mlir.register_lowering), broken + "mlir.register_lowering"
    assert hasattr(Literal, "val") or "val" in inspect.signature(Literal).parameters, (
        "Literal lost `val` (_jaxpr.value_of)"
    )


def test_the_mark_is_the_identity_under_all_transforms(same):
    name = _mark.Name(("part",))
    marked = lambda x: _mark.mark({"x": x, "text": "text"}, name)["x"]
    for transform in (
        lambda f: f,
        jax.jit,
        jax.vmap,
        lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2).sum())),
        jax.jacfwd,
        lambda f: lambda x: jax.linear_transpose(f, x)(x),
        lambda f: lambda x: jax.vmap(f, in_axes=1, out_axes=0)(jnp.stack([x, 2 * x])),
    ):
        same(transform(marked)(X), transform(lambda x: x)(X))


def test_the_newest_batch_axis_of_a_mark_comes_first():
    name = _mark.Name(("part",))
    jaxpr = jax.make_jaxpr(jax.vmap(lambda x: _mark.mark(x, name), in_axes=2, out_axes=2))(jnp.ones((2, 3, 5)))
    (mark,) = [one for one in jaxpr.eqns if one.primitive is _mark.mark_p]
    assert mark.outvars[0].aval.shape == (5, 2, 3), "batching.primitive_batchers is no longer asked (_mark.py)"


def test_literals_and_constants():
    jaxpr = jax.make_jaxpr(lambda x: x + 2.0 + jnp.arange(3.0))(X)
    operands = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
    literals = [atom for atom in operands if isinstance(atom, _jaxpr.Literal)]
    assert 2.0 in [float(atom.val) for atom in literals], "a constant is no Literal with `val` (_jaxpr.value_of)"
    closed = jax.make_jaxpr(lambda: jnp.sin(X))()
    opened, constants = _jaxpr.parts(closed)
    assert len(opened.constvars) == len(constants) == 1, "what is closed over is no constant of the jaxpr (_run.traced)"
    assert constants[0] is X, "what is closed over is copied (_run.traced)"


def test_tracers_that_are_closed_over_are_constants():
    seen = []

    def outer(x):
        closed = jax.make_jaxpr(lambda: jnp.sin(x))()
        seen.append(closed.consts[0] is x)
        return x

    for transform in (jax.jit, jax.vmap, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        transform(outer)(X)
    assert seen == [True] * 3, "a tracer of an outer transform is no longer a constant as it is (_run.traced)"


def test_equations_know_where_they_stand():
    def function(x):
        with jax.named_scope("scope"):
            return jnp.sin(x)

    eqn = equation(function, X)

    def placed(x):
        with _jaxpr.place_of(eqn):
            return jnp.sin(x)

    again = equation(placed, X)
    assert "scope" in str(again.source_info.name_stack), "name stacks are no longer kept (_jaxpr.place_of)"
    assert hasattr(eqn.source_info, "traceback"), "source_info lost `traceback` (_jaxpr.place_of)"
    assert hasattr(eqn.ctx, "manager"), "equations lost `ctx.manager` (_jaxpr.place_of)"


def test_operands_of_a_scan_are_told_by_their_ranks():
    assert _jaxpr.scan_split(equation(scan, X, kind="scan")) == (1, 1), (
        "the operands of a scan changed (_jaxpr.scan_split)"
    )


def test_operands_of_a_while_loop_are_constants_then_what_is_carried():
    limit, by = jnp.float32(9), 2 * X
    eqn = equation(lambda x, limit, by: jax.lax.while_loop(lambda c: c[0] < limit, lambda c: c + by, x), X, limit, by)
    shapes = [variable.aval.shape for variable in eqn.invars]
    assert shapes == [(), (3,), (3,)], "a while loop no longer has constants of its condition first (_rules._while)"
    counts = [len(eqn.params[name].in_avals) for name in ("cond_jaxpr", "body_jaxpr")]
    assert counts == [2, 2], "the jaxprs of a while loop changed (_rules._while)"


def test_branches_of_a_cond_take_all_operands_but_the_first():
    eqn = equation(EQUATIONS["cond"], X, kind="cond")
    counts = {len(branch.in_avals) for branch in eqn.params["branches"]}
    assert counts == {len(eqn.invars) - 1}, "the operands of a cond changed (_rules._cond)"
    order = [branch.jaxpr.eqns[0].primitive.name for branch in eqn.params["branches"]]
    assert order == ["sin", "cos", "tan"], "the order of the branches changed (_rules._cond)"


def test_shardings_that_are_not_given_are_unspecified():
    eqn = equation(EQUATIONS["jit"], X, kind="jit")
    kinds = {type(one).__name__ for name in ("in_shardings", "out_shardings") for one in eqn.params[name]}
    assert kinds == {"UnspecifiedValue"}, f"a sharding that is not given is now a {kinds} (_rules._constrained)"
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    eqn = equation(lambda x: jax.jit(jnp.sin, out_shardings=device)(x), X, kind="jit")
    assert eqn.params["out_shardings"][0] == device, "a sharding that is given is not in the equation"


def test_shapes_say_how_values_are_typed_on_a_mesh():
    seen = []

    def look(x):
        seen.append(jax.typeof(_jaxpr.typed_as(jnp.zeros(x.shape), jax.eval_shape(jnp.sin, x))) == jax.typeof(x))
        return x

    split = jax.sharding.PartitionSpec("data")
    manual = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    jax.jit(jax.shard_map(look, mesh=manual, in_specs=split, out_specs=split))(jnp.ones(8))
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))):
        jax.jit(look)(jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(jax.sharding.get_mesh(), split)))
    assert seen == [True, True], "eval_shape no longer says how a value is sharded or varies (_jaxpr.typed_as)"


def test_backward_passes_of_checkpoints_say_so():
    function = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())
    flags = [
        eqn.params["differentiated"]
        for eqn in jax.make_jaxpr(jax.grad(function))(X).eqns
        if "differentiated" in eqn.params
    ]
    assert True in flags, "the copy of a checkpoint in a backward pass is no longer marked (_jaxpr.inner)"
    policy = jax.checkpoint_policies.dots_saveable
    eqn = equation(lambda x: jax.checkpoint(jnp.sin, policy=policy, prevent_cse=False)(x), X)
    params = _jaxpr.params_of(eqn)
    assert (params["policy"], params["prevent_cse"]) == (policy, False), "policies changed (_rules._checkpoint)"


def test_modules_are_plain_objects():
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = type(type(linear))("Linear", (type(linear),), {"__call__": lambda self, x: "other"})
    copy = object.__new__(made)
    copy.__dict__.update(linear.__dict__)
    broken = "a module is no longer an object with a __dict__ (_tap.py): "
    assert copy.weight is linear.weight, broken + "its fields are elsewhere"
    assert copy(X) == "other", broken + "a subclass made by type() does not override __call__"
    assert isinstance(copy, eqx.nn.Linear), broken + "the copy is no instance of its class"
    leaves = [jax.tree.leaves(one) for one in (copy, linear)]
    assert all(one is other for one, other in zip(*leaves, strict=True)), broken + "it is another pytree"
    again = jax.tree.map(lambda leaf: leaf, copy)
    assert type(again) is made, broken + "it does not come back from a flatten"
